"""What the engine needs of whatever computes: a model on a device, or the null model. Knows no tensors."""

from dataclasses import dataclass
from typing import Protocol

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


class Executor(Protocol):
    """Computes a step: a torch model (`engine.model_runner.ModelRunner`) or `engine.null_model.NullModel`."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def fingerprint(self) -> str:
        """Names weights, tokenizer, generation defaults, dtype and noise version: equal means equal tokens."""
        ...

    def execute(self, batch: Batch) -> list[Sampled]:
        """Compute every scheduled token, writing its keys and values through the sequence's block table.

        Does the work of the batch's padding too, and keeps nothing of it.

        Returns one `Sampled` for each scheduled sequence that samples, in batch order. Must not change any sequence.
        May be called again for the same batch after it raised.

        Raises:
            Exception: whatever the device says; the engine rolls the step back, retries without the newest sequences
                and fails only the culprit.
        """
        ...

    def forget(self, sequence_ids: list[int]) -> None:
        """Drop whatever is kept for sequences that ended (penalty counts, slots)."""
        ...


class TextDecoder(Protocol):
    """Token ids to text: a `tokenizers` tokenizer, or the null model's."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
