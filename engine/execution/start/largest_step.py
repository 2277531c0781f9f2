"""The largest steps that a model may be given, to measure the memory that a step takes."""

from dataclasses import replace

from sluice.engine.batch import Batch
from sluice.engine.request import Sampling
from sluice.engine.sampling import MAX_LOGPROBS
from sluice.engine.sequence import Sequence, batch_of

FILTERED = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=MAX_LOGPROBS)
COSTLIEST = replace(FILTERED, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={0: 1.0})


def largest_batches(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, max_drafts: int = 0
) -> list[Batch]:
    """Return a step of prompts with all sampling options, and one of decodes with the longest contexts.

    Both have `max_drafts` drafts, if there are tokens for them: a draft has a row of logits of its own. All sequences
    use block 0: the results are meaningless, but the work is the same.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    num_drafts = [
        min(count, max_model_len - 1) for count in _shares(min(max_drafts, max_num_batched_tokens - num_seqs), num_seqs)
    ]
    # Reversed: those with a draft more are not those with a token more.
    shares = _shares(max_num_batched_tokens - sum(num_drafts), num_seqs)[::-1]
    prompts = [
        (meaningless_sequence(index, share, block_size, COSTLIEST), 0, share, True)
        for index, share in enumerate(
            min(share, max_model_len - count) for share, count in zip(shares, num_drafts, strict=True)
        )
    ]
    # One list of tokens and one of blocks for all: contexts may be long. Penalties would count each token of each.
    longest = meaningless_sequence(num_seqs, max_model_len, block_size, FILTERED)
    decodes = [
        (replace(longest, id=longest.id - index), max_model_len - 1 - count, 1, True)
        for index, count in enumerate(num_drafts)
    ]
    return [_with_drafts(batch_of(parts), num_drafts) for parts in (prompts, decodes)]


def _shares(total: int, num_parts: int) -> list[int]:
    """Divide `total` into parts that differ by one at most."""
    return [total // num_parts + (index < total % num_parts) for index in range(num_parts)]


def _with_drafts(batch: Batch, num_drafts: list[int]) -> Batch:
    drafts = {row.sequence_id: (0,) * count for row, count in zip(batch.rows, num_drafts, strict=True) if count}
    return replace(batch, drafts=drafts)


def meaningless_sequence(index: int, length: int, block_size: int, sampling: Sampling) -> Sequence:
    """Return a sequence of zeros that has the first block everywhere."""
    return Sequence(
        id=-2 - index,
        request_id="",
        choice=0,
        sampling=sampling,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        tables=[[0] * -(-length // block_size)],
    )
