"""How a model's vectors are made: by sentence-transformers' files in its folder, if there are any, or a setting.

Without either it is the last token's state, scaled to length 1: what models need that were trained to continue text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.request import Embed, Pooling
from sluice.engine.text.json_files import read_json

MODULES = "modules.json"
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_LEGACY = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
"""Older files have a truth value for each mode."""


def read_pooling(folder: Path, stated: Pooling | None) -> Embed | str:
    """Return how vectors are made, or a sentence why this engine cannot make those of the folder.

    Args:
        folder: The model's.
        stated: The pooling that the operator has set, which takes precedence.

    Raises:
        ModelFolderError: a file of sentence-transformers cannot be read.
    """
    modules = _modules(folder)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        return f"{MODULES} of the folder has {unknown[0]}, which this engine does not compute"
    is_normalised = not modules or "Normalize" in kinds
    if stated is not None:
        return Embed(pooling=stated, is_normalised=is_normalised)
    if "Pooling" not in kinds:
        return Embed(is_normalised=is_normalised)
    path = folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json"
    mode = _mode(read_json(path))
    if mode not in _POOLINGS:
        return f"the folder's vectors are pooled by {mode}; this engine has {' and '.join(_POOLINGS)}"
    return Embed(pooling=_POOLINGS[mode], is_normalised=is_normalised)


def _modules(folder: Path) -> list[Mapping[str, Any]]:  # Any: JSON
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        modules = cast("object", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}.") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in cast("list[object]", modules)):
        raise ModelFolderError(f"{path} is not a list of modules.")
    return cast("list[Mapping[str, Any]]", modules)


def _mode(config: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the name of a pooling, as sentence-transformers has it; several are joined."""
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return mode
    if isinstance(mode, list):
        return "+".join(map(str, cast("list[object]", mode)))
    legacy = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True]
    return "+".join(_LEGACY.get(name, name.removeprefix("pooling_mode_")) for name in legacy) or "mean"
