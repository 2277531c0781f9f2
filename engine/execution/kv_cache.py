"""The KV cache of a whole model: one `KVCache` per layer, and the number of blocks that memory holds."""

from collections.abc import Callable
from dataclasses import replace

import torch

from sluice.engine.errors import NotEnoughMemory, QuantizationUnavailable
from sluice.engine.execution.block_groups import BlockGroups, block_groups
from sluice.engine.execution.memory import free_memory_bytes
from sluice.engine.execution.options import ModelOptions
from sluice.engine.executor import ModelLimits
from sluice.engine.models.config import DecoderConfig
from sluice.kernels.paged_attention import FP8, INT8, KVCache, Layout, allocate_kv_cache, kv_block_bytes
from sluice.kernels.paged_attention.layout import PACKED_LANES

_FP8_CAPABILITY = (8, 9)


def cache_dtype(options: ModelOptions, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values for a model in `dtype`.

    Raises:
        QuantizationUnavailable: this GPU has no 8-bit floats, or nothing here attends to int8.
    """
    if options.kv_cache_dtype == "auto":
        return dtype
    device = torch.device(options.device)
    if options.kv_cache_dtype == "int8":
        probe = allocate_kv_cache(1, options.block_size, 1, PACKED_LANES, dtype=INT8, device=torch.device("cpu"))
        if device.type != "cpu" or dtype != torch.bfloat16 or probe.layout is not Layout.PACKED:
            raise QuantizationUnavailable(
                "a KV cache in int8 needs a model in bfloat16 on a CPU, and the native kernels (a C compiler)."
            )
        return INT8
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise QuantizationUnavailable(
            f"a KV cache in fp8 needs a GPU of compute capability 8.9 or more, this is {options.device}: "
            f"{torch.cuda.get_device_name(device)}."
        )
    return FP8


def make_caches(
    config: DecoderConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_parts: int | None = None,
) -> list[KVCache]:
    """Allocate every layer's cache, or `num_parts`, zeroed, with one extra block, which padding writes to.

    Raises:
        NotEnoughMemory: the machine lacks the memory.
    """
    sizes = (num_blocks + 1, block_size, config.num_kv_heads, config.head_size)
    try:
        num_parts = config.num_layers if num_parts is None else num_parts
        return [allocate_kv_cache(*sizes, dtype=dtype, device=device) for _ in range(num_parts)]
    except (OSError, RuntimeError) as error:
        raise NotEnoughMemory(
            f"the KV cache of {num_blocks} blocks of {block_size} tokens cannot be allocated: {error}. "
            f"Use fewer blocks."
        ) from error


def make_grouped_caches(
    config: DecoderConfig, limits: ModelLimits, *, dtype: torch.dtype, device: torch.device
) -> tuple[list[KVCache], list[KVCache]]:
    """Allocate the parts of blocks; return these, and the cache of each layer, which is one of them.

    Raises:
        NotEnoughMemory: as `make_caches`.
    """
    groups = block_groups(config.sliding_windows if limits.window_groups else (0,) * config.num_layers)
    parts = make_caches(
        config,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        dtype=dtype,
        device=device,
        num_parts=groups.layers_per_block,
    )
    return parts, [replace(parts[place.part], table=place.table) for place in groups.places]


def block_bytes(
    config: DecoderConfig, groups: BlockGroups, *, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the memory of one block, in the layout of the device."""
    part_bytes = kv_block_bytes(block_size, config.num_kv_heads, config.head_size, dtype=dtype, device=device)
    return groups.layers_per_block * part_bytes


def blocks_to_allocate(limits: ModelLimits, options: ModelOptions, step_bytes: Callable[[], int]) -> int:
    """Return the number of cache blocks; a given `max_model_len` must fit them.

    Args:
        limits: with the blocks that the options state.
        options: as they are.
        step_bytes: measures the memory that the largest steps take beyond weights and cache.

    Raises:
        NotEnoughMemory: it does not fit, or the memory does not hold a token.
    """
    step_tokens, device = options.max_num_batched_tokens, torch.device(options.device)
    if options.num_blocks is None:
        available = options.kv_cache_bytes
        if available is None:
            available = int(free_memory_bytes(device) * options.memory_fraction)
            available = max(0, available - step_bytes())
            if device.type == "cpu" and options.cpu_cache_bytes is not None:
                num_filled = limits.blocks_of(limits.max_model_len, step_tokens) * options.max_num_seqs
                available = min(available, max(num_filled * limits.block_bytes, options.cpu_cache_bytes))
        limits = replace(limits, num_blocks=blocks_that_fit(available, limits))
    if options.max_model_len is not None:
        check_one_sequence_fits(limits, step_tokens)
    return limits.num_blocks


def blocks_that_fit(available_bytes: int, limits: ModelLimits) -> int:
    """Return the number of blocks that the allowed memory holds.

    Raises:
        NotEnoughMemory: it does not hold a token of all layers.
    """
    num_blocks = available_bytes // limits.block_bytes
    if num_blocks < limits.blocks_per_entry:
        raise NotEnoughMemory(
            f"the KV cache may take {_mib(available_bytes)} MiB, but one block of {limits.block_size} tokens takes "
            f"{_mib(limits.blocks_per_entry * limits.block_bytes)} MiB. Allow more memory, or use a smaller model."
        )
    return num_blocks


def check_one_sequence_fits(limits: ModelLimits, step_tokens: int) -> None:
    """Check that a sequence of `max_model_len` tokens fits the cache when a step computes up to `step_tokens`.

    Raises:
        NotEnoughMemory: it does not; the message gives both sizes.
    """
    num_blocks, num_needed = limits.num_blocks, limits.blocks_of(limits.max_model_len, step_tokens)
    if num_needed > num_blocks:
        raise NotEnoughMemory(
            f"one sequence of {limits.max_model_len} tokens needs {num_needed} blocks of {limits.block_size} "
            f"tokens ({_mib(num_needed * limits.block_bytes)} MiB), but the KV cache has "
            f"{num_blocks} ({_mib(num_blocks * limits.block_bytes)} MiB). Allow more memory, or lower max_model_len."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
