"""Which published format a config.json states, by its `quantization_config`."""

from collections.abc import Callable, Mapping

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.awq import awq_of
from sluice.engine.quantized.compressed_tensors import compressed_tensors_of
from sluice.engine.quantized.fields import optional
from sluice.engine.quantized.float8 import float8_of
from sluice.engine.quantized.gptq import gptq_of
from sluice.engine.quantized.mxfp4 import mxfp4_of
from sluice.engine.quantized.source import Format
from sluice.engine.text.json_files import Json

FORMATS: Mapping[str, Callable[[Json], Format]] = {
    "awq": awq_of,
    "compressed-tensors": compressed_tensors_of,
    "fp8": float8_of,
    "gptq": gptq_of,
    "mxfp4": mxfp4_of,
}
"""By their `quant_method`."""


def format_of(config: Json) -> Format | None:
    """Return the format of a model's quantized weights; None if it states none.

    Raises:
        ModelFolderError: it is not supported.
    """
    stated = optional(config, "quantization_config") or optional(config, "compression_config")
    if not stated:
        return None
    method = str(stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else None))
    if method not in FORMATS:
        raise ModelFolderError(
            f"config.json: quantized weights of quant_method {method!r} are not read; {', '.join(FORMATS)} are. vLLM "
            f"may serve them: start the worker with --engine vllm."
        )
    return FORMATS[method](stated)
