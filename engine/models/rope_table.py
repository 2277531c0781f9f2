"""The angles of rotary position embedding, for all supported context extensions.

Default (Su et al., 2021), linear (Chen et al., 2023), dynamic NTK, YaRN (Peng et al., 2023), LongRoPE (Ding et al.,
2024), and Llama 3.1's. Dynamic and LongRoPE depend on the sequence length: here they are fixed by the longest allowed
sequence, since keys written with one set of angles cannot be read with another.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config import RopeConfig
from sluice.engine.models.config_fields import is_number


def rope_table(config: RopeConfig, max_model_len: int) -> Tensor:
    """Return cosines and sines of positions below `max_model_len`, `[max_model_len, R]` float32: R/2 cos, R/2 sin.

    Raises:
        ModelFolderError: the type is unknown, or one of its parameters is missing.
    """
    compute = _TYPES.get(config.type)
    if compute is None:
        raise ModelFolderError(f"config.json: rope type {config.type!r} is not one of {', '.join(sorted(_TYPES))}.")
    try:
        frequencies, magnitude = compute(config, max_model_len)  # [R / 2]
    except (ArithmeticError, ValueError) as error:
        raise ModelFolderError(
            f"config.json: the parameters of rope type {config.type!r} give no angles ({error})."
        ) from error
    if not (frequencies.isfinite().all() and math.isfinite(magnitude)):
        raise ModelFolderError(
            f"config.json: the parameters of rope type {config.type!r} give angles that are not finite."
        )
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], dim=1)


def _frequencies(config: RopeConfig, theta: float | None = None) -> Tensor:
    """Return radians per position of each pair, `[R / 2]`."""
    exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float32) / config.rotary_size
    return 1.0 / ((config.theta if theta is None else theta) ** exponents)


def _default(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _frequencies(config), 1.0


def _linear(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _frequencies(config) / _required(config, "factor"), 1.0


def _dynamic(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Raise theta so that the longest sequence stays within the angles of the pretraining."""
    factor = _required(config, "factor")
    stretch = max(max_model_len, config.max_position_embeddings) / config.max_position_embeddings
    exponent = config.rotary_size / (config.rotary_size - 2)
    return _frequencies(config, config.theta * (factor * stretch - (factor - 1)) ** exponent), 1.0


def _llama3(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Slow low frequencies down by the factor, keep high ones, interpolate between."""
    factor, low, high = (_required(config, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _frequencies(config)
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def _yarn(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Blend like `_llama3`, with the ramp over pair numbers; the magnitude compensates for the flatter softmax."""
    original = config.original_max_position_embeddings
    factor = _optional(config, "factor") or config.max_position_embeddings / original
    fast = _pair_of_turns(config, _optional(config, "beta_fast") or 32)
    slow = _pair_of_turns(config, _optional(config, "beta_slow") or 1)
    if config.parameters.get("truncate") is not False:
        fast, slow = math.floor(fast), math.ceil(slow)
    low, high = max(fast, 0), min(slow, config.rotary_size - 1)
    pairs = torch.arange(config.rotary_size // 2, dtype=torch.float32)
    slowed = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies = _frequencies(config)
    return frequencies / factor * slowed + frequencies * (1 - slowed), _yarn_magnitude(config, factor)


def _pair_of_turns(config: RopeConfig, turns: float) -> float:
    """Return the number of the pair that makes this many turns over the pretraining's context."""
    wavelengths = config.original_max_position_embeddings / (turns * 2 * math.pi)
    return config.rotary_size * math.log(wavelengths) / (2 * math.log(config.theta))


def _yarn_magnitude(config: RopeConfig, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = _optional(config, "attention_factor")
    scale, scale_all = (_optional(config, name, may_be_zero=True) for name in ("mscale", "mscale_all_dim"))
    if given is not None:
        return given
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _longrope(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Scale each pair by its own factor: one set for short contexts, one for long ones."""
    original = config.original_max_position_embeddings
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = _listed(config, name)
    factor = _optional(config, "factor") or config.max_position_embeddings / original
    magnitude = _optional(config, "attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _frequencies(config) / factors, magnitude


def _divided(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own number: what a GGUF holds of Llama 3.1's embedding."""
    return _frequencies(config) / _listed(config, "divisors"), 1.0


_TYPES: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "divided": _divided,
}


def _listed(config: RopeConfig, name: str) -> Tensor:
    """Return a number for each pair, `[R / 2]`."""
    factors, num_pairs = config.parameters.get(name), config.rotary_size // 2
    given = cast("list[object]", factors) if isinstance(factors, list) else []
    if len(given) != num_pairs or not all(is_number(factor) and factor > 0 for factor in given):
        raise ModelFolderError(f"config.json: rope {name} must be a list of {num_pairs} numbers above 0.")
    return torch.tensor(given, dtype=torch.float32)


def _required(config: RopeConfig, name: str) -> float:
    value = _optional(config, name)
    if value is None:
        raise ModelFolderError(f"config.json: rope type {config.type!r} needs {name}.")
    return value


def _optional(config: RopeConfig, name: str, *, may_be_zero: bool = False) -> float | None:
    value = config.parameters.get(name)
    if value is None:
        return None
    if not is_number(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ModelFolderError(f"config.json: rope {name} must be a number above 0, got {value!r}.")
    return float(value)
