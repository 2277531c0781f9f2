"""Interface between the engine and what computes: a model on a device, or the null model. Knows no tensors."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from sluice.engine.batch import Batch, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model and its KV cache that the scheduler needs."""

    max_model_len: int
    """Maximum tokens of one sequence, prompt and output."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    block_size: int
    """Token slots in a block."""


class Launched(Protocol):
    """A step that has been launched."""

    def collect(self) -> list[Sampled]:
        """Wait for the step's rows: one `Sampled` per scheduled sequence that samples, in batch order.

        Raises:
            Exception: any error that the device reports for the step.
        """
        ...


class Computed(NamedTuple):
    """A step that was complete when `launch` returned."""

    rows: list[Sampled]

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        return self.rows


class Executor(Protocol):
    """What computes steps: a torch model (`execution.model_runner.ModelRunner`) or `null_model.NullModel`."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def fingerprint(self) -> str:
        """Identifier of weights, tokenizer, generation defaults, dtype and noise: equal means equal tokens."""
        ...

    @property
    def lag(self) -> int:
        """Number of steps that may be launched ahead of the one being collected: 0 or 1.

        At 1, a batch may contain sequences whose last token is sampled by the previous step; its id is read on the
        device from their row in that step.
        """
        ...

    def launch(self, batch: Batch) -> Launched:
        """Start computing every scheduled token, writing its keys and values through its slot's block table.

        The writes of `batch` come first, then its copies. The cache has one block more than `limits` reports, which
        nothing reads, and there is one slot more than sequences use, the last. The batch's padding is computed too, and
        its results are discarded.

        The call may be repeated for the same batch, or for a part of it, after it, or its `collect`, raised. The tokens
        that a step samples are in their slots, and follow those that the step computed, once it is collected.

        Raises:
            Exception: any error of the device; the engine rolls the step back, retries it without the newest sequences
                and fails only the sequence that causes the error.
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """An executor that can use idle time to make later steps faster."""

    @property
    def has_preparations(self) -> bool:
        """Whether there is anything to prepare."""
        ...

    def prepare(self) -> None:
        """Prepare one item, which takes as long as a few steps.

        Raises:
            EngineBroken: the device is lost.
        """
        ...


class TextDecoder(Protocol):
    """Conversion of token ids to text: a `tokenizers` tokenizer, or the null model's."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
