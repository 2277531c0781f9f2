# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Device functions of paged attention that its kernels share: softmax in parts, what is written, who computes what."""

import triton
import triton.language as tl

from sluice.kernels.paged_attention.call import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_LARGEST_SINK = tl.constexpr(1e30)


@triton.jit
def join_sinks(row_max, row_sum, sinks):
    """Include each row's sink in the softmax of its keys.

    Returns the factor on the rows' sums and the resulting sum of weights; 0 for a row without keys, as before.
    `row_max` is in log2 units, `sinks` are logits.
    """
    # A sink this large leaves no weight to the keys; a larger one would be infinite in log2 units.
    log2_sinks = tl.where(sinks > _LARGEST_SINK, _LARGEST_SINK, sinks) * _LOG2_E
    new_max = tl.maximum(row_max, log2_sinks)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    total = row_sum * rescale + tl.exp2(log2_sinks - shift)
    return rescale, tl.where(row_sum == 0.0, 0.0, total)


@triton.jit
def joined(total, total_max, total_sum, acc, row_max, row_sum):
    """Join the next segment, `acc` `[R, BLOCK_D]`, `row_max` and `row_sum` `[R]`, with those before it.

    A segment without a visible key changes nothing; the first one with any is taken as it is.
    """
    new_max = tl.maximum(total_max, row_max)
    # Before any key: compute exp2(-inf - x) = 0 instead of -inf - (-inf).
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(total_max - shift)
    weight = tl.exp2(row_max - shift)
    return total * rescale[:, None] + acc * weight[:, None], new_max, total_sum * rescale + row_sum * weight


@triton.jit
def store_rows(
    out_ptrs,  # [R, BLOCK_D]
    mask,  # [R, BLOCK_D]
    acc,  # [R, BLOCK_D]: sums of values
    row_max,  # [R], in log2 units
    row_sum,  # [R]: sums of weights
    sinks_ptr,  # [H] float32, or None
    heads,  # [R]
    inside,  # [R]
):
    """Write the rows' results, with their sinks."""
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=inside, other=0.0)
        rescale, row_sum = join_sinks(row_max, row_sum, sinks)
        acc *= rescale[:, None]
    # A row without a visible key (padding) has sum 0 and becomes 0.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def is_short_chunk(query_len, num_keys, min_query_len, min_keys):
    """Whether `short_chunks` computes a sequence: a chunk that sees many keys, in a step of few new tokens."""
    return (query_len >= min_query_len) & (num_keys >= min_keys)


@triton.jit
def visible_keys(query_len, context_len, window, HAS_WINDOW: tl.constexpr):
    """Return how many keys the new tokens of a sequence see, together."""
    if HAS_WINDOW:
        return tl.minimum(context_len, query_len + window - 1)
    else:
        return context_len


@triton.jit
def zero_padding(
    out_ptr,  # [T, H, D]
    first,
    step,
    T,
    out_stride_token,
    out_stride_head,
    heads,  # [BLOCK_ROWS]
    is_head,  # [BLOCK_ROWS]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write zeros to row `first` and every `step`-th after it: padding is never left stale."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    padding = first.to(tl.int64)
    while padding < T:
        padding_ptrs = out_ptr + padding * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
        zeros = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=out_ptr.dtype.element_ty)
        tl.store(padding_ptrs, zeros, mask=is_head[:, None] & (dims < D)[None, :])
        padding += step


@triton.jit
def sequence_of(part, segments_end, S):
    """Return the sequence of a segment, and the segment's number in it; `segments_end` `[BLOCK_S]` are the sums."""
    before = segments_end <= part
    sequence = tl.sum(before.to(tl.int32), axis=0)
    return tl.minimum(sequence, S - 1), part - tl.max(tl.where(before, segments_end, 0), axis=0)
