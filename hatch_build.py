"""Compile the CPU kernels when a wheel is built on x86-64 Linux, once per instruction set.

Without gcc, on another platform and for an editable installation the wheel has no libraries; the worker then compiles
the kernels at first use.
"""

import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):  # Any: hatchling's configuration
    """The build hook. Its temporary folder holds the libraries until the wheel is written."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, add them to the wheel, and set its platform tag."""
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        self._folder = tempfile.TemporaryDirectory()
        libraries = self._compile(_compiler_module(Path(self.root)), Path(self._folder.name))
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries)}"
            build_data["force_include"].update(
                {str(path): f"sluice/kernels/compiled/{path.name}" for path in libraries}
            )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _compile(self, kernels: ModuleType, folder: Path) -> list[Path]:
        """Compile every variant that the compiler knows."""
        libraries: list[Path] = []
        for variant in kernels.VARIANTS:
            path = folder / f"{variant.name}.so"
            try:
                # OpenMP is not linked: the symbols are found in the runtime that torch has loaded. clang's are others.
                kernels.compile_library(
                    path, kernels.sources(), compiler=kernels.find_compiler(["gcc"]), options=variant.options, link=[]
                )
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"the wheel has no kernels for {variant.name}: {error}")
            else:
                libraries.append(path)
        return libraries


def platform_tag(libraries: list[Path]) -> str:
    """Return the platform tag for the newest glibc that the libraries need; without glibc, the plain one."""
    found = [re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes()) for path in libraries]
    versions = [(int(major), int(minor)) for one in found for major, minor in one]
    return "manylinux_{}_{}_x86_64".format(*max(versions)) if versions else "linux_x86_64"


def _compiler_module(root: Path) -> ModuleType:
    """Import kernels/compiler.py alone: its package needs torch, which a build does not have."""
    spec = importlib.util.spec_from_file_location("sluice_kernels_compiler", root / "kernels/compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
