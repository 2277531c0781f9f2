"""Find a model's folder: the bundled one, one on this host, or a Hugging Face name to download."""

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import cast

from sluice.engine.errors import ModelFolderError
from sluice.worker.config import ModelConfig
from sluice.worker.errors import ConfigError

NULL = "null"
"""Name of the model that computes nothing. Options follow, as in `null?step_s=0.01&mean_output_tokens=50`.

For tests, `obey_prompts=1` lets prompts request faults, as in `[[kill@7]]` (`fault_injection.faults_in`).
"""

SMALL_MODEL = Path(__file__).parents[1] / "small_model"
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")


def is_null(model: ModelConfig) -> bool:
    """Return whether the settings name the null model."""
    return model.path is not None and model.path.partition("?")[0] == NULL


def find_folder(path: str | None, *, setting: str = "SLUICE_MODEL") -> Path:
    """Return a model's folder: the shipped one, one on this host, or a snapshot of a Hugging Face repository.

    Args:
        path: the folder or the name; None for the shipped one.
        setting: which errors name.

    Raises:
        ConfigError: the folder does not exist, or the model cannot be downloaded.
    """
    if path is None:
        if not (SMALL_MODEL / "config.json").is_file():
            raise ConfigError([f"SLUICE_MODEL: not set, and the small model is missing at {SMALL_MODEL}"])
        return SMALL_MODEL
    folder = Path(path).expanduser()
    if not is_name(path):
        if _has_gguf(folder):
            return folder
        if not (folder / "config.json").is_file():
            why = "has no config.json" if folder.is_dir() else "is not a folder"
            raise ConfigError(
                [f"{setting}: {path} {why}: give a model folder, a GGUF file or a Hugging Face name (owner/name)"]
            )
        return folder
    return _download(path, setting)


def _has_gguf(path: Path) -> bool:
    """Return whether `path` is a GGUF, or a folder with one and no config.json."""
    # Imported here because a check of settings reads no model.
    from sluice.engine.gguf.file import find_gguf

    try:
        return find_gguf(path) is not None
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MODEL: {error}"]) from error


def is_name(path: str | None) -> bool:
    """Return whether `path` is a Hugging Face name (owner/name) and not a folder on this host."""
    return (
        path is not None
        and path.count("/") == 1
        and not path.startswith((".", "~", "/"))
        and not path.endswith(".gguf")
        and not Path(path).exists()
    )


def name_of(path: str | None, folder: Path) -> str:
    """Return the name by which producers request a model: its Hugging Face name, or that of its folder or link."""
    if path is not None and is_name(path):
        return path
    if folder.suffix == ".gguf":
        return folder.stem
    # A link keeps its name; dots are not a name.
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def model_name(model: ModelConfig) -> str:
    """Return the name by which producers request the model of some settings.

    Raises:
        ConfigError: the folder does not exist.
    """
    if is_null(model):
        return NULL
    # Of a Hugging Face name the files need not be here.
    return model.path if model.path and is_name(model.path) else name_of(model.path, find_folder(model.path))


def must_download(path: str | None) -> bool:
    """Return whether `path` is a Hugging Face name whose files are not on this host yet."""
    if path is None or not is_name(path):
        return False
    with _downloading(path):
        from huggingface_hub import try_to_load_from_cache

        return not isinstance(try_to_load_from_cache(path, "config.json"), str)


def check_name(name: str) -> None:
    """Check that a model of this name can be downloaded.

    Raises:
        ConfigError: there is no such model, or the network is unreachable.
    """
    with _downloading(name):
        from huggingface_hub import model_info

        model_info(name)


def _download(name: str, setting: str) -> Path:
    """Download the files at the top of a repository that a model consists of, and of its weights one form.

    Many repositories have the weights again: for other programs (`consolidated.safetensors`, `original/`), or in other
    formats (`onnx/`).
    """
    with _downloading(name, setting):
        # Imported here because only names need it and it is slow to import.
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # partial types

        def download(patterns: Iterable[str], revision: str | None = None) -> Path:
            return Path(
                snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"])
            )

        folder = download(_SMALL_FILES)
        # The folder has the name of the commit.
        _download_weights(folder, lambda patterns: download(patterns, folder.name))
        return folder


def _download_weights(folder: Path, download: Callable[[Iterable[str]], object]) -> None:
    # Imported here because it imports torch.
    from sluice.engine.models.safetensors_weights import INDEX, WHOLE

    if (folder / INDEX).is_file():
        download(map(escape, _indexed(folder / INDEX)))
        return
    download([WHOLE])
    if not (folder / WHOLE).is_file():
        download(["*.safetensors"])


def _indexed(index: Path) -> set[str]:
    """Return the files that an index names; none if it is damaged, which loading reports."""
    try:
        names = cast("dict[str, dict[str, str]]", json.loads(index.read_text(encoding="utf-8")))["weight_map"].values()
        return {str(name) for name in names}
    except (ValueError, TypeError, KeyError, AttributeError):
        return set()


@contextmanager
def _downloading(name: str, setting: str = "SLUICE_MODEL") -> Generator[None]:
    try:
        yield
    except Exception as error:  # it passes on errors of its network stack
        absent = f"{setting}: {name} is not a folder on this host"
        if isinstance(error, ImportError):
            raise ConfigError([f"{absent}; `pip install huggingface_hub` to download it"]) from error
        why = f"could not be downloaded ({type(error).__name__})"
        raise ConfigError([f"{absent} and {why}: check the name and the network, or give a folder"]) from error
