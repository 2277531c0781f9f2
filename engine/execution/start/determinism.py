"""Whether a model can be computed so that no result depends on what else is in a step; knows no weights."""

import torch

from sluice.engine.errors import DeterminismUnavailable
from sluice.engine.execution.options import ModelOptions
from sluice.engine.models.config import DecoderConfig
from sluice.kernels.linear.cpu import multiplies_bfloat16
from sluice.kernels.linear.native import can_multiply
from sluice.kernels.native import library
from sluice.kernels.paged_attention.cpu import MAX_HEAD_SIZE


def check_deterministic(config: DecoderConfig, dtype: torch.dtype, options: ModelOptions) -> None:
    """Check that each operation has such an implementation on the device.

    On a GPU each has a Triton kernel. On the CPU the native kernels are needed, which multiply bfloat16 and int8:
    torch's products choose their order of summation by the number of rows.

    Raises:
        DeterminismUnavailable: one has none.
    """
    if torch.device(options.device).type == "cuda":
        if options.kernels == "torch":
            raise DeterminismUnavailable("torch's operators depend on the batch: set kernels to auto or triton.")
        return
    if problem := _problem_on_cpu(config, dtype, options):
        raise DeterminismUnavailable(f"on the CPU {problem}.")


def is_bitwise(config: DecoderConfig, dtype: torch.dtype, options: ModelOptions) -> bool:
    """Return whether no result depends on what else is in a step, whether or not that was asked for."""
    if options.is_deterministic:
        return True
    is_native = options.quantization in ("int8", "int4") or multiplies_bfloat16()
    is_on_cpu = torch.device(options.device).type == "cpu"
    return is_on_cpu and is_native and _problem_on_cpu(config, dtype, options) is None


def _problem_on_cpu(config: DecoderConfig, dtype: torch.dtype, options: ModelOptions) -> str | None:
    heads, is_int8 = config.num_heads * config.head_size, options.quantization == "int8"
    if dtype != torch.bfloat16:
        return f"it needs a model in bfloat16, and this one is in {str(dtype).removeprefix('torch.')}: set dtype"
    if options.kv_cache_dtype == "fp8":
        return "it needs a KV cache in the model's dtype: set kv_cache_dtype to auto"
    if library() is None:
        return "it needs the native kernels: install a C compiler"
    widths = (config.hidden_size, config.intermediate_size, heads)
    if not all(can_multiply(width, is_int8=is_int8) for width in widths) or config.intermediate_size % 16:
        return f"the native kernels cannot multiply rows of {', '.join(map(str, widths))}"
    if config.head_size > MAX_HEAD_SIZE:
        return f"it needs heads of at most {MAX_HEAD_SIZE}, and this model's have {config.head_size}"
    return None
