"""The adapters of a folder: each of its folders is one, by its name. They are read once, when the model is loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from sluice.engine.adapters.folder import AdapterFolder, open_adapter
from sluice.engine.errors import AdapterError
from sluice.engine.executor import ModelLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter that a model can be used with."""

    folder: AdapterFolder
    hash: str
    """Of its files, as they were when the catalogue was read."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The adapters of a folder, by name."""

    adapters: Mapping[str, Adapter] = field(default_factory=dict[str, Adapter])

    @property
    def description(self) -> str:
        """What it has, for people; empty without adapters."""
        if not self.adapters:
            return ""
        return f"{len(self.adapters)} adapters of rank {self.max_rank} or less: {', '.join(self.adapters)}"

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 without adapters."""
        return max((adapter.folder.max_rank for adapter in self.adapters.values()), default=0)

    def limits_with(self, limits: ModelLimits, *, of_model: str, max_loaded: int) -> ModelLimits:
        """Return the limits of a model that has these adapters, with the fingerprint of the model with each.

        Args:
            limits: those of the model alone.
            of_model: its fingerprint.
            max_loaded: adapters that may be loaded at once.
        """
        return replace(
            limits,
            adapters={name: _adapted_fingerprint(of_model, adapter.hash) for name, adapter in self.adapters.items()},
            max_adapters=min(max_loaded, len(self.adapters)),
        )


NO_ADAPTERS = Catalogue()


def read_catalogue(path: Path) -> Catalogue:
    """Read the folders of adapters in a folder. Files, and folders whose names begin with a dot, are left out.

    Raises:
        AdapterError: there is no such folder, it has none, or one of them cannot be used.
    """
    if not path.is_dir():
        raise AdapterError(f"{path} is not a folder: give one whose folders are adapters.")
    folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not folders:
        raise AdapterError(f"{path} has no folders: each adapter is one, as PEFT's save_pretrained writes it.")
    return Catalogue({each.name: _read(each) for each in folders})


def _adapted_fingerprint(of_model: str, adapter_hash: str) -> str:
    """Return the fingerprint of a model with an adapter: a request resumes only where both are the same."""
    return sha256(f"{of_model} adapter {adapter_hash}".encode()).hexdigest()[:32]


def _read(path: Path) -> Adapter:
    if _NAME.fullmatch(path.name) is None:
        raise AdapterError(
            f"the adapter {path.name!r} needs another name: up to 100 letters, digits, dots, hyphens and underscores, "
            f"of which the first is a letter or a digit."
        )
    folder = open_adapter(path)
    return Adapter(folder=folder, hash=folder.hash())
