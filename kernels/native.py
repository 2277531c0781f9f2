"""The native part of the CPU kernels: every native.c (and native_*.c) next to a cpu.py, in one library.

Wheels for x86-64 Linux carry a library for each of several instruction sets; the best one for the processor is loaded.
Elsewhere the C compiler of the machine builds it for that machine (`-march=native`) at first use: tens of seconds of
processor time. Processes that need it at the same time wait for the one that builds. It is kept in a folder of the
user's own in the cache (`$XDG_CACHE_HOME/sluice`, usually `~/.cache/sluice`) under a name derived from sources, flags
and instruction set, so another machine or version builds its own. Without either there is no library, and the torch
paths are used. Imports no torch, so that `build_ahead` runs beside its import.

`SLUICE_INSTRUCTION_SET` names the best variant that may be used, such as `avx2`, to measure or test what another
processor would run.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from sluice.kernels.compiler import (
    FLAGS,
    ROOT,
    VARIANTS,
    Variant,
    compile_library,
    find_compiler,
    runnable_variants,
    sources,
)

INSTRUCTION_SET = "SLUICE_INSTRUCTION_SET"
SLOWER = "Generation on the CPU is about seven times slower without them."
ADVICE = "Install a C compiler (gcc), or a wheel of sluice-llm that has them for this processor."

_C_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float}

log = logging.getLogger(__name__)


@cache
def native_function(name: str, arguments: str) -> Callable[..., None] | None:
    """Return a function of the library; None without the library.

    Args:
        name: its name in native.c.
        arguments: one letter each: i int, l int64_t, p pointer, f float.
    """
    loaded = library()
    return None if loaded is None else declare(loaded, name, arguments)


def declare(loaded: ctypes.CDLL, name: str, arguments: str) -> Callable[..., None]:
    """Return a function of `loaded` with its argument types set."""
    function = getattr(loaded, name)
    function.argtypes = [_C_TYPES[letter] for letter in arguments]
    function.restype = None
    # ctypes does not know the signature.
    return cast("Callable[..., None]", function)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library for this machine: the wheel's, else one that is built if necessary; None without either."""
    try:
        return load_best()
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no native kernels: %s. %s %s", error, SLOWER, ADVICE, extra={"error": str(error)})
        return None


def load_best() -> ctypes.CDLL:
    """Load the library for this machine, as `library` returns it.

    Raises:
        OSError, subprocess.SubprocessError: as in `load_library`.
    """
    return _load_packaged() or ctypes.CDLL(str(_built(_own_options(), _cache_folder())))


def packaged_library() -> Path | None:
    """Return the best library for this processor that the installed wheel carries."""
    paths = (ROOT / "compiled" / f"{variant.name}.so" for variant in _usable_variants())
    return next((path for path in paths if path.is_file()), None)


def _usable_variants() -> list[Variant]:
    """Return the variants that this processor runs, and that the environment permits, the fastest first.

    Raises:
        OSError: the environment names none of them.
    """
    variants, most = runnable_variants(_instruction_set().split()), os.environ.get(INSTRUCTION_SET)
    if not most:
        return variants
    names = [variant.name for variant in variants]
    if most not in names:
        known = ", ".join(variant.name for variant in VARIANTS)
        raise OSError(f"{INSTRUCTION_SET}={most} is not one of {known}, or this processor lacks it")
    return variants[names.index(most) :]


def _own_options() -> tuple[str, ...]:
    """Return the compiler's options for this machine's own library."""
    return _usable_variants()[0].options if os.environ.get(INSTRUCTION_SET) else ("-march=native",)


def _load_packaged() -> ctypes.CDLL | None:
    path = packaged_library()
    if path is None:
        return None
    try:
        # It is linked with no OpenMP, and finds the symbols of the one that torch uses.
        ctypes.CDLL(_torch_openmp() or "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the packaged kernels cannot be loaded: %s", error)
        return None


def load_library(march: str, folder: Path | None = None) -> ctypes.CDLL:
    """Build the library for an instruction set unless it exists, and load it.

    Args:
        march: value of the compiler's option `-march`.
        folder: where it is kept. None: the user's cache.

    Raises:
        OSError: there is no compiler or no writable folder of the user's own, or the library cannot be loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    return ctypes.CDLL(str(_built((f"-march={march}",), _cache_folder() if folder is None else folder)))


def build_ahead() -> None:
    """Build the library that `library` will load, if it will have to. Fails silently: `library` reports the failure."""
    with suppress(OSError, subprocess.SubprocessError):
        if packaged_library() is None:
            _built(_own_options(), _cache_folder())


def _built(options: tuple[str, ...], folder: Path) -> Path:
    """Return the path of the library, after building it unless it exists."""
    path = folder / f"kernels-{_key(options)}.so"
    if not is_private(path):
        with _one_at_a_time(folder):
            # Another process may have built it while this one waited.
            if not is_private(path):
                _build(path, options)
    return path


@contextmanager
def _one_at_a_time(folder: Path) -> Generator[None]:
    """Let one process at a time build in `folder`. The lock ends with its process, however that ends."""
    with (folder / "build.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sources() -> list[Path]:
    return sources()


def _key(options: tuple[str, ...]) -> str:
    """Return a name derived from everything the library depends on."""
    digest = hashlib.sha256(repr((options, FLAGS, platform.machine(), _instruction_set())).encode())
    for path in [*sorted(ROOT.glob("**/*.h")), *_sources()]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _instruction_set() -> str:
    """Return the processor's features as listed by the kernel, or its name if there is no list."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # `processor` runs a command.
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") or platform.processor()


def _cache_folder() -> Path:
    """Return a folder that only the user can write to; a temporary one if the home is missing or not writable.

    Raises:
        OSError: there is none, or another user made it.
    """
    uid = os.getuid()
    try:
        # The XDG Base Directory Specification ignores relative paths.
        stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
        above = (stated if stated.is_absolute() else Path.home() / ".cache") / "sluice"
        folder = above / f"native-{uid}"
        above.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):
        above, folder = None, Path(tempfile.gettempdir()) / f"sluice-{uid}"
        folder.mkdir(mode=0o700, exist_ok=True)
    if above is not None:
        _check_owner(above, uid, 0)  # a mounted volume is root's
    _check_owner(folder, uid)
    folder.chmod(0o700)
    return folder


def _check_owner(folder: Path, *uids: int) -> None:
    """Raise PermissionError unless it is a folder of one of these users."""
    if folder.is_symlink() or folder.lstat().st_uid not in uids:
        raise PermissionError(f"{folder} is a link or belongs to another user")


def is_private(path: Path) -> bool:
    """Return whether it is a file that only the user can write to. Its code will run as the user."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _build(path: Path, options: tuple[str, ...]) -> None:
    compiler, openmp = find_compiler(), _torch_openmp() or "-fopenmp"
    # A warning, since it is shown without any configuration of logs: it takes longer than anything else at start.
    log.warning("compiling the CPU kernels for this processor, once: some tens of seconds of processor time")
    began_s = time.monotonic()
    compile_library(path, _sources(), compiler=compiler, options=options, link=[openmp])
    log.warning("compiled the CPU kernels in %.0f s", time.monotonic() - began_s)


def _torch_openmp() -> str | None:
    """Return the path of torch's OpenMP, so that both share one thread pool."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    torch_root = Path(torch.origin).parent
    libraries = [*torch_root.glob("lib/libgomp*.so*"), *torch_root.parent.glob("torch.libs/libgomp*.so*")]
    return str(libraries[0]) if libraries else None
