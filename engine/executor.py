"""Interface between the engine and the executor: a model on a device, or the null model. Knows no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from sluice.engine.batch import Batch, Masks, Sampled


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def window_entries(sliding_window: int, step_tokens: int, block_size: int) -> int:
    """Return the most entries of a block table that the tokens of a step attend to, wherever in a block they begin."""
    return blocks_needed(max(0, sliding_window + step_tokens - 2), block_size) + 1


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

    sliding_window: int = 0
    """Tokens that a token attends to, itself included, in every layer or in those of window groups; 0: all."""

    window_groups: int = 0
    """Groups of layers with the sliding window that have a block table each, besides the table of those that attend to
    all tokens; 0: all layers have one table.
    """

    num_host_blocks: int = 0
    """Blocks of the host tier of the prefix cache."""

    hidden_size: int = 0
    """Dimensions of the vector of a prompt; 0 if there is none."""

    num_classes: int = 0
    """Classes whose scores a prompt has; 0 if there are none."""

    block_bytes: int = 0
    """Memory of a block; 0 if nothing is stored."""

    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The adapters that requests may name, each with the fingerprint of the model with it."""

    max_adapters: int = 0
    """Adapters that running sequences can use at once: places for loaded ones."""

    @property
    def blocks_per_entry(self) -> int:
        """Blocks that hold the tokens of an entry of the block tables in all layers."""
        return 1 + self.window_groups

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache holds for all layers. With a sliding window, longer sequences take less."""
        return self.num_blocks // self.blocks_per_entry * self.block_size

    def blocks_of(self, num_tokens: int, step_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` needs when steps compute up to `step_tokens` of it."""
        num_entries = blocks_needed(num_tokens, self.block_size)
        if not self.sliding_window:
            return num_entries
        num_windowed = min(num_entries, self._most_windowed(step_tokens))
        return num_entries + self.window_groups * num_windowed if self.window_groups else num_windowed

    def longest_sequence(self, num_blocks: int, step_tokens: int) -> int:
        """Return the tokens of the longest sequence that needs no more than `num_blocks`; see `blocks_of`."""
        if self.sliding_window and not self.window_groups and num_blocks >= self._most_windowed(step_tokens):
            # Blocks before the window are given back, so that only the context bounds it.
            return blocks_needed(self.max_model_len, self.block_size) * self.block_size
        num_entries = num_blocks // self.blocks_per_entry
        if self.window_groups and num_entries >= (num_windowed := self._most_windowed(step_tokens)):
            num_entries = num_blocks - self.window_groups * num_windowed
        return num_entries * self.block_size

    def longest_request(self, step_tokens: int) -> int:
        """Return the most tokens of prompt and output together, when steps compute up to `step_tokens` of them."""
        return min(self.max_model_len, self.longest_sequence(self.num_blocks, step_tokens))

    def most_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the most tokens of a sequence, prompt and output, that generates up to `max_tokens`."""
        return min(num_prompt_tokens + max_tokens, self.max_model_len)

    def most_cached_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return of how many of these there are keys and values: of all but the last output, which no token follows."""
        return max(num_prompt_tokens, self.most_tokens(num_prompt_tokens, max_tokens) - 1)

    def most_offered_tokens(self, step_tokens: int) -> int:
        """Return the cache tokens of the largest request that an idle engine has room for.

        With a sliding window, one long sequence takes less memory than its tokens would in many short ones.
        """
        return max(self.num_cache_tokens, self.longest_request(step_tokens))

    def _most_windowed(self, step_tokens: int) -> int:
        """Return the most entries that a sequence holds of a table whose layers have the window.

        One of them is for a cached block that it continues in: the window of its first token begins in the next one.
        """
        return window_entries(self.sliding_window, step_tokens, self.block_size) + 1


class Launched(Protocol):
    """A step that has been launched."""

    def collect(self) -> list[Sampled]:
        """Wait for the step's rows: one `Sampled` per scheduled sequence that samples, in batch order.

        Raises:
            Exception: any error that the device reports for the step.
        """
        ...


@runtime_checkable
class DrawnLater(Launched, Protocol):
    """A launched step with `Batch.draws_later`."""

    def draw(self, masks: Masks) -> None:
        """Draw its tokens: once, before the next step is launched and before `collect`."""
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
        """Hash of what tokens depend on besides the job: weights (of large files, samples), tokenizer, dtype, noise."""
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

        The writes of `batch` come first, then its saves, loads and copies. Saves with a number that a call has made
        already are skipped. The cache has one block more than `limits` reports, which
        nothing reads, and there is one slot more than sequences use, the last. The batch's padding is computed too, and
        its results are discarded. With lag 1, the rows of a batch may be drawn later: the result is `DrawnLater` then.

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
