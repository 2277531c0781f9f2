"""Compile the C sources of every kernel into one library: for this machine, or for a variant that wheels carry.

Imports nothing that must be installed: the build of a wheel runs it (hatch_build.py).
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent
FLAGS = ("-O2", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-Werror=switch")
COMPILERS = ("cc", "gcc", "clang")

_ERROR = re.compile(r"^(?!collect2:|clang: ).*\berror: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An instruction set that wheels carry a library for."""

    name: str
    options: tuple[str, ...]
    """Options of gcc."""

    needs: frozenset[str]
    """Features of the processor, as /proc/cpuinfo names them."""


def _variants() -> tuple[Variant, ...]:
    """Return the variants, the fastest first. Each has the instructions of the next one and more."""
    steps = (
        ("avx2", ("-march=x86-64-v3",), "avx avx2 bmi1 bmi2 f16c fma abm movbe"),
        ("avx512", ("-march=x86-64-v4",), "avx512f avx512bw avx512cd avx512dq avx512vl"),
        ("avx512_vnni", ("-mavx512vnni",), "avx512_vnni"),
        ("avx512_bf16", ("-mavx512bf16",), "avx512_bf16"),
        ("amx", ("-mamx-tile", "-mamx-bf16", "-mamx-int8"), "amx_tile amx_bf16 amx_int8"),
    )
    made: list[Variant] = []
    options, needs = tuple[str, ...](), frozenset[str]()
    for name, more, features in steps:
        options, needs = options + more, needs | frozenset(features.split())
        made.append(Variant(name=name, options=options, needs=needs))
    return tuple(reversed(made))


VARIANTS = _variants()


def runnable_variants(features: Collection[str]) -> list[Variant]:
    """Return the variants that a processor with these features can run, the fastest first."""
    return [variant for variant in VARIANTS if variant.needs <= frozenset(features)]


def sources() -> list[Path]:
    """Return the sources of the library."""
    return sorted(ROOT.glob("*/native*.c"))


def find_compiler(names: Iterable[str] = COMPILERS) -> str:
    """Return the path of the first of these compilers that is installed.

    Raises:
        FileNotFoundError: none is.
    """
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(names)})")
    return compiler


def compile_library(
    path: Path, files: Sequence[Path], *, compiler: str, options: Sequence[str], link: Sequence[str]
) -> None:
    """Compile each source in its own process, link, and rename into place atomically.

    Raises:
        OSError: the folder of `path` is not writable.
        subprocess.SubprocessError: the compiler failed.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [Path(scratch) / f"{source.parent.name}_{source.stem}.o" for source in files]
        _run_all(
            [compiler, *FLAGS, *options, "-c", str(source), "-o", str(made)]
            for source, made in zip(files, objects, strict=True)
        )
        linked = Path(scratch) / path.name
        _run_all([[compiler, "-shared", *map(str, objects), *link, "-lm", "-o", str(linked)]])
        linked.chmod(0o700)
        os.replace(linked, path)


def _run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run compiler commands in parallel.

    Raises:
        subprocess.SubprocessError: one failed; the message has its output from the first error on.
    """
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    failed: str | None = None
    for process in running:
        _, said = process.communicate()
        if process.returncode:
            failed = _from_first_error(said)[:2000]
    if failed is not None:
        raise subprocess.SubprocessError(f"the C compiler failed: {failed}")


def _from_first_error(said: str) -> str:
    """Return a compiler's output from its first error on: there may be any number of warnings before.

    A linker has no such line of its own; only the compiler that calls it says that it failed.
    """
    lines = said.strip().splitlines()
    of_compiler = (number for number, line in enumerate(lines) if _ERROR.search(line))
    return "\n".join(lines[next(of_compiler, 0) :])
