"""A folder of an adapter as PEFT writes it: what its config says, and the hash of its files. Reads no weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite, sqrt
from pathlib import Path
from typing import TypeVar, cast

from sluice.engine.errors import AdapterError, ModelFolderError
from sluice.engine.models.config_fields import object_of
from sluice.engine.text.json_files import Json, read_json

T = TypeVar("T")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
MAX_RANK = 1024

_REFUSED: Mapping[str, str] = {
    "use_dora": "it is a DoRA, which scales each column of the model's weights too",
    "fan_in_fan_out": "its matrices are transposed (fan_in_fan_out)",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "lora_bias": "it has biases of its own (lora_bias)",
    "trainable_token_indices": "it has embeddings of its own (trainable_token_indices)",
    "target_parameters": "it changes parameters that are no linear layers (target_parameters)",
    "layer_replication": "it repeats layers of the model (layer_replication)",
    "use_qalora": "it pools the rows that it multiplies (use_qalora)",
    "use_bdlora": "its matrices are diagonal blocks (use_bdlora)",
    "alora_invocation_tokens": "it acts only after certain tokens (alora_invocation_tokens)",
    "arrow_config": "it routes between adapters (arrow_config)",
    "monteclora_config": "it draws its matrices at random (monteclora_config)",
}
"""Switches of PEFT that add something else than `x @ down.T @ up.T`, each with what that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """An adapter on disk."""

    name: str
    path: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool
    """Whether alpha is divided by the root of the rank (arXiv 2312.03732)."""

    target: str | tuple[str, ...]
    """The modules that it changes: their names' ends, a pattern of whole names, or `ALL_LINEAR`."""

    is_whole: bool
    """Whether `target` alone says which modules these are."""

    ranks: Mapping[str, int]
    """By the ends of modules' names, as patterns: their ranks, if they differ."""

    alphas: Mapping[str, float]

    def targets(self, module: str) -> bool:
        """Return whether it changes a module, by PEFT's rule."""
        if isinstance(self.target, str):
            return self.target == ALL_LINEAR or re.fullmatch(self.target, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.target)

    def rank_of(self, module: str) -> int:
        """Return the rank of its pair for a module."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of its pair for a module."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (sqrt(rank) if self.is_rank_stabilised else rank)

    @property
    def max_rank(self) -> int:
        """The largest rank of its pairs."""
        return max(self.rank, *self.ranks.values(), 1)

    def hash(self) -> str:
        """Hash its files.

        Raises:
            AdapterError: one cannot be read.
        """
        digest = sha256()
        try:
            for name in (CONFIG, WEIGHTS):
                digest.update(f"\0{name}\0".encode())
                with (self.path / name).open("rb") as file:
                    while chunk := file.read(2**22):
                        digest.update(chunk)
        except OSError as error:
            raise AdapterError(f"the adapter {self.name!r} cannot be read: {error}.") from error
        return digest.hexdigest()[:32]


def open_adapter(path: Path) -> AdapterFolder:
    """Read the config of an adapter's folder, whose name is the adapter's.

    Raises:
        AdapterError: it is missing or damaged, or asks for what is not supported.
    """
    name = path.name
    try:
        config = read_json(path / CONFIG)
    except ModelFolderError as error:
        raise AdapterError(f"the adapter {name!r} cannot be read: {error}") from error
    if not config:
        raise AdapterError(f"the adapter {name!r} has no {CONFIG}: it is not a folder that PEFT has written.")
    if not (path / WEIGHTS).is_file():
        raise AdapterError(f"the adapter {name!r} has no {WEIGHTS}: only weights in that format are read.")
    if problem := next(_problems(config), None):
        raise AdapterError(f"the adapter {name!r} is not supported: {problem}.")
    return _parsed(path, config)


def _problems(config: Json) -> Iterator[str]:
    if (kind := config.get("peft_type")) != "LORA":
        yield f"its peft_type is {kind!r}, and only LORA is"
    yield from (reason for switch, reason in _REFUSED.items() if config.get(switch))
    if (bias := config.get("bias", "none")) != "none":
        yield f"it has biases of its own (bias is {bias!r})"
    if not _is_rank(config.get("r")):
        yield f"r must be a whole number from 1 to {MAX_RANK}, got {config.get('r')!r}"
    if not _is_factor(config.get("lora_alpha")):
        yield f"lora_alpha must be a number, got {config.get('lora_alpha')!r}"
    yield from _pattern_problems(config)
    target = config.get("target_modules")
    is_list = isinstance(target, list) and all(isinstance(name, str) for name in cast("list[object]", target))
    if not is_list and not (isinstance(target, str) and _is_pattern(target)):
        yield f"target_modules must be a list of names or a pattern, got {target!r}"


def _pattern_problems(config: Json) -> Iterator[str]:
    for name, is_right in (("rank_pattern", _is_rank), ("alpha_pattern", _is_factor)):
        stated, pattern = config.get(name), object_of(config.get(name))
        if not (stated is None or isinstance(stated, dict)) or not all(map(is_right, pattern.values())):
            yield f"{name} must be an object of numbers, got {stated!r}"
        elif not all(map(_is_pattern, pattern)):
            yield f"{name} has a name that is no pattern"


def _parsed(path: Path, config: Json) -> AdapterFolder:
    target = config["target_modules"]
    limiting = ("exclude_modules", "layers_to_transform")
    return AdapterFolder(
        name=path.name,
        path=path,
        rank=cast("int", config["r"]),
        alpha=float(cast("float", config["lora_alpha"])),
        is_rank_stabilised=bool(config.get("use_rslora")),
        target=target if isinstance(target, str) else tuple(cast("list[str]", target)),
        is_whole=not any(config.get(name) for name in limiting),
        ranks=cast("Mapping[str, int]", config.get("rank_pattern") or {}),
        alphas=cast("Mapping[str, float]", config.get("alpha_pattern") or {}),
    )


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6 and isfinite(value)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError):
        return False
    return True


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that a module's name ends with, as PEFT finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
