"""The arguments of a call of paged attention, as its kernels take them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sluice.kernels.paged_attention.layout import KVCache

LOG2_E = 1.4426950408889634


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """One call; see `kernels.paged_attention.paged_attention`.

    Never changed, but not frozen: one is made for each layer, and that would take three times as long.
    """

    query: Tensor
    kv_cache: KVCache
    block_tables: Tensor
    query_start_locs: Tensor
    context_lens: Tensor
    scale: float
    max_query_len: int
    max_context_len: int
    sliding_window: int
    soft_cap: float
    sinks: Tensor | None
    out: Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of `query`, padding included."""
        return self.query.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.kv_cache.num_kv_heads

    @property
    def num_sequences(self) -> int:
        """Sequences, including those without new tokens."""
        return self.context_lens.shape[0]

    def arguments(self) -> dict[str, Any]:  # of any type, as Triton's launch takes them
        """Return the arguments that every Triton kernel of attention has, without the strides of the cache."""
        cache = self.kv_cache
        unused = self.context_lens.view(-1, 1, 1)
        return {
            "out_ptr": self.out,
            "query_ptr": self.query,
            "key_cache_ptr": cache.keys,
            "value_cache_ptr": cache.values,
            "block_tables_ptr": self.block_tables,
            "query_start_locs_ptr": self.query_start_locs,
            "context_lens_ptr": self.context_lens,
            "key_scales_ptr": unused if cache.key_scales is None else cache.key_scales,
            "value_scales_ptr": unused if cache.value_scales is None else cache.value_scales,
            "sinks_ptr": self.sinks,
            "score_scale": self.scale / self.soft_cap if self.soft_cap else self.scale * LOG2_E,
            "T": self.num_tokens,
            "S": self.num_sequences,
            "window": self.sliding_window,
            "out_stride_token": self.out.stride(0),
            "out_stride_head": self.out.stride(1),
            "query_stride_token": self.query.stride(0),
            "query_stride_head": self.query.stride(1),
            "table_stride_sequence": self.block_tables.stride(0),
            "HAS_WINDOW": self.sliding_window > 0,
            "SOFT_CAP": float(self.soft_cap),
            "IS_FP8": cache.is_fp8,
            "H": self.num_heads,
            "GROUP": self.group,
            "D": cache.head_size,
            "BLOCK_D": max(16, 1 << (cache.head_size - 1).bit_length()),
            "BLOCK_SIZE": cache.block_size,
        }

    def cache_strides(self) -> dict[str, int]:
        """Return the strides of the cache, as arguments of a kernel."""
        keys, values, scales = self.kv_cache.keys, self.kv_cache.values, self.kv_cache.key_scales
        return {
            "key_stride_block": keys.stride(0),
            "key_stride_head": keys.stride(2),
            "key_stride_slot": keys.stride(1),
            "value_stride_block": values.stride(0),
            "value_stride_head": values.stride(2),
            "value_stride_slot": values.stride(1),
            "scale_stride_block": 0 if scales is None else scales.stride(0),
            "scale_stride_head": 0 if scales is None else scales.stride(2),
            "scale_stride_slot": 0 if scales is None else scales.stride(1),
        }


NO_KEYS = 2**31 - 1
"""More keys than any sequence has."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which sequences have a prefill chunk, and which of the chunks are short ones over long contexts.

    Where a step has so few blocks of queries that they occupy only some of the processors, those that see many keys are
    split over them: else each would walk its whole context beside idle processors.
    """

    min_query_len: int
    """New tokens of a chunk; a sequence with fewer is a decode."""

    min_keys: int = NO_KEYS
    """Fewest keys that a short chunk sees."""

    def arguments(self) -> dict[str, int]:
        """Return the fields, as arguments of a kernel."""
        return {"min_query_len": self.min_query_len, "min_keys": self.min_keys}

    def may_be_short(self, call: AttentionCall) -> bool:
        """Whether some sequence of a call may be a short chunk, judged by the call's maxima."""
        max_keys = call.max_context_len
        if call.sliding_window:
            max_keys = min(max_keys, call.max_query_len + call.sliding_window - 1)
        return call.max_query_len >= self.min_query_len and max_keys >= self.min_keys
