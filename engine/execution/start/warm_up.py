"""Steps that use every variant of every kernel, to be run before the first job: a first use compiles for a second.

A launcher may choose by tokens of a sequence, by context, by rows and by sampling options, so powers of two of the
first three and every kind of option are run. Everything is computed in one block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sluice.engine.batch import Batch
from sluice.engine.execution.start.largest_step import COSTLIEST, FILTERED, meaningless_sequence
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence, batch_of

_GREEDY = Sampling(temperature=0.0)
_LEAST_CONTEXT = 256
_PREFIX = 2048
"""Tokens before a prompt that continues: as many keys as a short chunk over a long context sees."""

_Part = tuple[Sequence, int, int, bool]
"""See `batch_of`."""


def warm_up_batches(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> Iterator[Batch]:
    """Yield the steps: prompts of every length, alone, continued and beside a decode, then decodes of every context."""
    ids = iter(range(10**9))

    def row(num_tokens: int, context: int, sampling: Sampling) -> _Part:
        sequence = meaningless_sequence(next(ids), context, block_size, sampling)
        return sequence, context - num_tokens, num_tokens, True

    for num_tokens in _doubled(1, min(max_num_batched_tokens, max_model_len)):
        continued = min(num_tokens + _PREFIX, max_model_len)
        yield batch_of([row(num_tokens, num_tokens, _GREEDY)])
        yield batch_of([row(num_tokens, continued, FILTERED)])
        if num_tokens < max_num_batched_tokens and max_num_seqs > 1:
            yield batch_of([row(num_tokens, continued, COSTLIEST), row(1, min(_PREFIX, max_model_len), _GREEDY)])
    for context in _doubled(_LEAST_CONTEXT, max_model_len):
        yield batch_of([row(1, context, FILTERED)])
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    for num_rows in _doubled(1, most_rows):
        yield batch_of(_copies(row(1, min(_PREFIX, max_model_len), FILTERED), num_rows, ids))
    for context in (1, max_model_len):
        yield batch_of(_copies(row(1, context, FILTERED), most_rows, ids))


def _copies(part: _Part, num_rows: int, ids: Iterator[int]) -> Iterable[_Part]:
    """Repeat a row with fresh ids."""
    return ((replace(part[0], id=-2 - next(ids)), *part[1:]) for _ in range(num_rows))


def _doubled(first: int, last: int) -> list[int]:
    """Return `first`, its doubles below `last`, and `last`."""
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return sorted({*(size for size in sizes if size < last), last})
