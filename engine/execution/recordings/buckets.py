"""Select the recorded step for a batch, and pad the batch to it. Knows no tensors.

A recording has fixed sizes: tokens, rows, and the longest context that its kernels are laid out for. A batch is padded
with rows (`Batch.padding`) that read any block and write to the block after the cache's last.

Decodes use many sizes, since most steps are decodes. Mixed steps use a few token counts.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from sluice.engine.batch import Batch, PaddingRow

MIXED_TOKENS = (*range(256, 1024, 128), *range(1024, 2049, 256))
"""Token counts of recorded mixed steps, near enough to each other that little is padding.

A longer step keeps the device busy for longer than its launches take: 4,096 tokens of a model of 0.6 B take 10 ms or
more, 8,192 of one of 8 B take 160 ms, and their launches 10 ms of the host.
"""

CONTEXTS = (2048, 8192, 32768)
"""Context lengths that attention is laid out for, besides the model's longest; beyond a row's end it does little
work.
"""

FIRST_DECODES = 256
"""The largest decode that is recorded at start, in sequences, besides the most that may run."""


class Bucket(NamedTuple):
    """Sizes of one recording."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    max_context_len: int


class Buckets:
    """The buckets of one model and its limits."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        most = min(max_num_seqs, max_num_batched_tokens)
        self._decodes = sorted({size for size in _decode_sizes() if size < most} | {most})
        self._mixed = [size for size in MIXED_TOKENS if size <= max_num_batched_tokens]
        self._max_num_seqs = max_num_seqs
        self._contexts = sorted({context for context in CONTEXTS if context < max_model_len} | {max_model_len})

    def of(self, batch: Batch) -> Bucket | None:
        """Return the smallest bucket that holds `batch`; None if there is none.

        A recording has one row of logits a sequence, so a step with drafts or reads has none, nor one that is padded.
        """
        if batch.is_empty or batch.padding or batch.drafts or batch.reads:
            return None
        longest = max(row.start + row.num_tokens for row in batch.rows)
        context = _next(self._contexts, longest)
        if context is None:
            return None
        if batch.num_tokens == len(batch.rows):
            size = _next(self._decodes, batch.num_tokens)
            return None if size is None else Bucket(size, size, 1, context)
        size = _next(self._mixed, batch.num_tokens)
        if size is None:
            return None
        num_rows = self._mixed_of(size, context).num_rows
        if size - batch.num_tokens > (num_rows - len(batch.rows)) * self._contexts[-1]:
            return None
        # A row of padding attends only to itself: its tokens are its context.
        longest = max(longest, min(size - batch.num_tokens, self._contexts[-1]))
        return self._mixed_of(size, self._contexts[bisect_left(self._contexts, longest)])

    def _mixed_of(self, num_tokens: int, max_context_len: int) -> Bucket:
        """Return the bucket of mixed steps of `num_tokens`.

        One row more than sequences holds the padding tokens; there are never more rows than tokens to give logits of.
        """
        return Bucket(num_tokens, min(self._max_num_seqs + 1, num_tokens), num_tokens, max_context_len)

    @property
    def first(self) -> list[Bucket]:
        """Buckets recorded at start, for the shortest contexts; of each kind the largest first, which others fit into.

        Others are recorded once a step needed them.
        """
        sizes = {size for size in self._decodes if size <= FIRST_DECODES} | {self._decodes[-1]}
        context = self._contexts[0]
        decodes = [Bucket(size, size, 1, context) for size in sorted(sizes, reverse=True)]
        mixed = [self._mixed_of(size, context) for size in reversed(self._mixed)]
        return [bucket for bucket in mixed if bucket.num_tokens <= bucket.num_rows * context] + decodes

    @property
    def most_tokens(self) -> int:
        """Of a bucket."""
        return max(self._decodes[-1], *self._mixed) if self._mixed else self._decodes[-1]


def pad(batch: Batch, bucket: Bucket) -> Batch:
    """Pad `batch` to the sizes of `bucket`, which holds it."""
    num_rows = bucket.num_rows - len(batch.rows)
    num_tokens = bucket.num_tokens - batch.num_tokens
    if bucket.max_query_len == 1:
        rows = [PaddingRow(1, 1)] * num_rows
    else:
        full, rest = divmod(num_tokens, bucket.max_context_len)
        sizes = [bucket.max_context_len] * full + [rest] + [0] * num_rows
        rows = [PaddingRow(size, size) for size in sizes[:num_rows]]
    return replace(batch, padding=tuple(rows))


def nothing(bucket: Bucket) -> Batch:
    """Return a batch of padding only."""
    return pad(Batch(()), bucket)


def _decode_sizes() -> Iterable[int]:
    return (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, 4097, 32))


def _next(sizes: list[int], smallest: int) -> int | None:
    at = bisect_left(sizes, smallest)
    return sizes[at] if at < len(sizes) else None
