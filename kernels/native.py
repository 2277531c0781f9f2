"""The native part of the CPU kernels: every native.c next to a cpu.py, built into one library at first use.

The C compiler of the machine builds it for that machine (`-march=native`) in about a second. It is kept in the user's
cache under a name derived from sources, flags and instruction set, so another machine or version builds its own.
Without a compiler there is no library, and the torch paths are used.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch

_ROOT = Path(__file__).parent
_FLAGS = ("-O2", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_COMPILERS = ("cc", "gcc", "clang")

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of native kernels, numbered as in native.h."""

_C_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float}

log = logging.getLogger(__name__)


@cache
def native_function(name: str, arguments: str) -> Callable[..., None] | None:
    """Return a function of the library; None without the library.

    Args:
        name: its name in native.c.
        arguments: one letter each: i int, l int64_t, p pointer, f float.
    """
    found = library()
    return None if found is None else declare(found, name, arguments)


def declare(found: ctypes.CDLL, name: str, arguments: str) -> Callable[..., None]:
    """Return a function of `found` with its argument types set."""
    function = getattr(found, name)
    function.argtypes = [_C_TYPES[letter] for letter in arguments]
    function.restype = None
    # ctypes does not know the signature.
    return cast("Callable[..., None]", function)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library for this machine, built if necessary; None if it cannot be built."""
    try:
        return load_library("native")
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native kernels cannot be built; the slower torch paths are used", extra={"error": str(error)})
        return None


def load_library(march: str, folder: Path | None = None) -> ctypes.CDLL:
    """Build the library for an instruction set unless it exists, and load it.

    Args:
        march: value of the compiler's option `-march`.
        folder: where it is kept. None: the user's cache.

    Raises:
        OSError: there is no compiler or no writable folder, or the library cannot be loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    folder = _cache_folder() if folder is None else folder
    path = folder / f"kernels-{_key(march)}.so"
    if not path.is_file():
        _build(path, march)
    return ctypes.CDLL(str(path))


def _sources() -> list[Path]:
    return sorted(_ROOT.glob("*/native.c"))


def _key(march: str) -> str:
    """Return a name derived from everything the library depends on."""
    digest = hashlib.sha256(repr((march, _FLAGS, platform.machine(), _instruction_set())).encode())
    for path in [*sorted(_ROOT.glob("*.h")), *_sources()]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _instruction_set() -> str:
    """Return the processor's features as listed by the kernel, or its name if there is no list."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _cache_folder() -> Path:
    """Return a folder owned by the user; a temporary one if the home is not writable."""
    folder = Path.home() / ".cache" / "sluice"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user") from None
    return folder


def _build(path: Path, march: str) -> None:
    """Compile each source in its own process, link, and rename into place atomically."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(_COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [Path(scratch) / f"{source.parent.name}.o" for source in _sources()]
        _run_all(
            [compiler, *_FLAGS, f"-march={march}", "-c", str(source), "-o", str(made)]
            for source, made in zip(_sources(), objects, strict=True)
        )
        linked = Path(scratch) / path.name
        _run_all([[compiler, "-shared", *map(str, objects), *_openmp(), "-lm", "-o", str(linked)]])
        os.replace(linked, path)


def _openmp() -> list[str]:
    """Link torch's OpenMP, so that both share one thread pool; otherwise the compiler's own."""
    torch_root = Path(torch.__file__).parent
    found = [*torch_root.glob("lib/libgomp*.so*"), *torch_root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(found[0])] if found else ["-fopenmp"]


def _run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run compiler commands in parallel.

    Raises:
        subprocess.SubprocessError: one failed; the message has its first lines.
    """
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    failed: str | None = None
    for process in running:
        _, said = process.communicate()
        if process.returncode:
            failed = said.strip()[:2000]
    if failed is not None:
        raise subprocess.SubprocessError(f"the C compiler failed: {failed}")
