"""What the engine needs of whatever computes: a model on a device, or the null model. Knows no tensors."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from engine.batch import Batch, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the scheduler must know of the model and its cache."""

    max_model_len: int
    """Most tokens of one sequence, prompt and output."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    block_size: int
    """Token slots in a block."""


class Launched(Protocol):
    """A step that has begun."""

    def collect(self) -> list[Sampled]:
        """Wait for its rows: one `Sampled` for each scheduled sequence that samples, in batch order.

        Raises:
            Exception: whatever the device says of the step.
        """
        ...


class Computed(NamedTuple):
    """A step that was over when its launch returned."""

    rows: list[Sampled]

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        return self.rows


class Executor(Protocol):
    """Computes a step: a torch model (`engine.model_runner.ModelRunner`) or `engine.null_model.NullModel`."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def fingerprint(self) -> str:
        """Names weights, tokenizer, generation defaults, dtype and noise version: equal means equal tokens."""
        ...

    @property
    def lag(self) -> int:
        """How many steps may be launched before the oldest is collected, beyond that one: 0, or 1.

        At 1 a batch may have sequences whose last token the step before draws (`Sequence.num_drawn_tokens`): its id is
        that of their row there.
        """
        ...

    def launch(self, batch: Batch) -> Launched:
        """Begin to compute every scheduled token, writing its keys and values through the sequence's block table.

        Before that, blocks are copied as `batch.copies` says. The cache has one block more than `limits` says: what is
        written there nobody reads.

        Does the work of the batch's padding too, and keeps nothing of it. Reads all that it needs of the sequences
        before it returns, and changes none. May be called again for the same batch after it, or its `collect`, raised.

        Raises:
            Exception: whatever the device says; the engine rolls the step back, retries without the newest sequences
                and fails only the culprit.
        """
        ...

    def forget(self, sequence_ids: list[int]) -> None:
        """Drop whatever is kept for sequences that ended (penalty counts). A step in flight may have rows of theirs."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """An executor that can use a pause, so that later steps are quicker."""

    @property
    def has_preparations(self) -> bool:
        """Whether there is something to prepare."""
        ...

    def prepare(self) -> None:
        """Prepare one thing; as long as some steps.

        Raises:
            EngineBroken: the device is lost.
        """
        ...


class TextDecoder(Protocol):
    """Token ids to text: a `tokenizers` tokenizer, or the null model's."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
