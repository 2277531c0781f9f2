"""In-batch prefix sharing: a sequence waits while another one computes the prefix that they share.

So the choices of a request, or a burst of requests with one system prompt, compute their prompt once (Zheng et al.,
SGLang, NeurIPS 2024). The wait lasts as long as the other sequence's prefill. Others may join meanwhile, up to a bound.
"""

from collections.abc import Iterable

from sluice.engine.scheduling.blocks.manager import CachedPrefix
from sluice.engine.sequence import Sequence

_LEAST_SHARED_TOKENS = 32
"""Sharing fewer tokens is not worth a step of waiting."""

_MOST_HELD_BACK = 16
"""Sequences that one step skips because another computes their prefix. Each costs a look into the prefix index."""

_MOST_OVERTAKEN = 64
"""Sequences that may join past one that is held back."""


class PrefixSharing:
    """Prefixes that are being computed while one step is planned, and the sequences that wait for them. Mutable."""

    def __init__(self, block_size: int, computing: Iterable[Sequence]) -> None:
        """Note the sequences of which this step, or one in flight, computes a part of the prompt."""
        self._block_size = block_size
        self._coming: dict[int, Sequence] = {}
        """By the next hash that it will publish."""

        self.held_back: list[Sequence] = []
        for sequence in computing:
            self._note(sequence)

    @property
    def may_overtake(self) -> bool:
        """Whether one more sequence may join past those that are held back."""
        return not self.held_back or (
            len(self.held_back) < _MOST_HELD_BACK
            and all(other.num_overtaken < _MOST_OVERTAKEN for other in self.held_back)
        )

    def is_better_held_back(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Whether another sequence is computing at least half of what `sequence` would compute, to be shared."""
        key = self._next_hash(sequence, prefix.num_blocks) if self._coming else None
        other = self._coming.get(key) if key is not None else None
        if other is None or sequence.needs_all:
            return False
        num_coming = self._num_common_tokens(sequence, prefix.num_blocks, other)
        return num_coming >= max(_LEAST_SHARED_TOKENS, (sequence.num_tokens - prefix.num_tokens) / 2)

    def hold_back(self, sequence: Sequence) -> None:
        """Skip `sequence` in this step."""
        self.held_back.append(sequence)

    def note_joined(self, sequence: Sequence) -> None:
        """Note that `sequence` has joined past those that are held back, and computes its prompt in this step."""
        self._note(sequence)
        for other in self.held_back:
            other.note_overtaken()

    def _next_hash(self, sequence: Sequence, num_cached: int) -> int | None:
        """Return the hash of the full block of `sequence` after its first `num_cached`; None if there is none.

        For a waiting sequence it is the first block that it lacks; for one that holds blocks, the first that it will
        publish.
        """
        num_full = min(len(sequence.block_hashes), (sequence.num_tokens - 1) // self._block_size)
        return sequence.block_hashes[num_cached] if num_cached < num_full else None

    def _num_common_tokens(self, sequence: Sequence, num_cached: int, other: Sequence) -> int:
        """Return how many more tokens of `sequence`, with `num_cached` blocks, are cached once `other` is computed.

        Both have the same `_next_hash`.
        """
        lacking = sequence.block_hashes[num_cached:]
        coming = other.block_hashes[other.num_published_blocks :]
        # Hashes are chained: equal hashes mean equal prefixes.
        return sum(mine == theirs for mine, theirs in zip(lacking, coming, strict=False)) * self._block_size

    def _note(self, sequence: Sequence) -> None:
        key = self._next_hash(sequence, sequence.num_published_blocks)
        if key is not None:
            self._coming[key] = sequence
