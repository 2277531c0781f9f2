"""The KV cache of a whole model: one `KVCache` per layer, and the number of blocks that memory holds."""

import torch

from sluice.engine.errors import NotEnoughMemory
from sluice.engine.models.config import DecoderConfig
from sluice.kernels.paged_attention import KVCache, allocate_kv_cache, kv_block_bytes


def make_caches(
    config: DecoderConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Allocate every layer's cache, zeroed, with one extra block, which padding writes to.

    Raises:
        NotEnoughMemory: the machine lacks the memory.
    """
    sizes = (num_blocks + 1, block_size, config.num_kv_heads, config.head_size)
    try:
        return [allocate_kv_cache(*sizes, dtype=dtype, device=device) for _ in range(config.num_layers)]
    except (OSError, RuntimeError) as error:
        raise NotEnoughMemory(
            f"the KV cache of {num_blocks} blocks of {block_size} tokens cannot be allocated: {error}. "
            f"Use fewer blocks."
        ) from error


def block_bytes(config: DecoderConfig, *, block_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the memory of one block over all layers, in the layout of the device."""
    one = kv_block_bytes(block_size, config.num_kv_heads, config.head_size, dtype=dtype, device=device)
    return config.num_layers * one


def blocks_that_fit(available_bytes: int, bytes_per_block: int, block_size: int, max_tokens: int) -> int:
    """Return the number of blocks that the allowed memory holds, no more than `max_tokens` can use.

    Raises:
        NotEnoughMemory: it holds none.
    """
    num_blocks = min(available_bytes // bytes_per_block, -(-max_tokens // block_size))
    if num_blocks < 1:
        raise NotEnoughMemory(
            f"the KV cache may take {_mib(available_bytes)} MiB, but one block of {block_size} tokens takes "
            f"{_mib(bytes_per_block)} MiB. Allow more memory, or use a smaller model."
        )
    return num_blocks


def check_one_sequence_fits(num_blocks: int, block_size: int, max_model_len: int, bytes_per_block: int) -> None:
    """Check that a sequence of `max_model_len` tokens fits the cache.

    Raises:
        NotEnoughMemory: it does not; the message gives both sizes.
    """
    if num_blocks * block_size < max_model_len:
        raise NotEnoughMemory(
            f"one sequence of {max_model_len} tokens needs {-(-max_model_len // block_size)} blocks of {block_size} "
            f"tokens ({_mib(-(-max_model_len // block_size) * bytes_per_block)} MiB), but the KV cache has "
            f"{num_blocks} ({_mib(num_blocks * bytes_per_block)} MiB). Allow more memory, or lower max_model_len."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
