"""A process in which Triton interprets its kernels on the CPU, and runs single test functions for its parent.

Whether Triton compiles or interprets is decided once, when it is first imported. A test process may have imported it
already, or may need it to compile; so the interpreted tests run here, where TRITON_INTERPRET is set from the start.

Speaks pickles: (file, function name, arguments) in, None or the text of a traceback out.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

ROOT = Path(__file__).parent.parent.parent


class Interpreter:
    """The parent's end: starts the process, sends it tests, ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def run(self, file: Path, name: str, arguments: Mapping[str, object]) -> str | None:
        """Run one test function; returns its traceback if it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((str(file), name, dict(arguments)), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _load(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    if file not in modules:
        spec = importlib.util.spec_from_file_location(f"interpreted_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[file]


def _function(module: ModuleType, name: str) -> Callable[..., None]:
    """`name` of `module`: a function, or a method of a class, as `Class.method`."""
    owner, _, method = name.rpartition(".")
    return getattr(getattr(module, owner)() if owner else module, method)


def _patch_once_per_launch() -> None:
    """Replace Triton's language once per launch and module, not at each call of a device function.

    That took a third of the time of these tests. A launch replaces it for its kernel, and takes it back.
    """
    from triton.runtime import interpreter  # pyright: ignore[reportMissingTypeStubs]

    triton: Any = interpreter  # it has no types
    patch = triton._patch_lang
    patched = set[int]()

    def patch_for_launch(kernel: FunctionType) -> object:
        patched.clear()
        patched.add(id(kernel.__globals__))
        return patch(kernel)

    def call(function: Any, *args: object, **options: object) -> object:  # Any: Triton's interpreted function
        module = id(function.fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function.fn)
        return function.rewrite()(*args, **options)

    triton._patch_lang = patch_for_launch
    triton.InterpretedFunction.__call__ = call


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            file, name, arguments = pickle.load(requests)
        except EOFError:
            return
        failure = None
        try:
            _function(_load(file, modules), name)(**arguments)
        except BaseException:  # noqa: BLE001 - whatever a test raises is its result, which the parent shows
            failure = traceback.format_exc()
        pickle.dump(failure, replies)
        replies.flush()


if __name__ == "__main__":
    # What a test prints must not get between the replies.
    _replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _patch_once_per_launch()
    _serve(sys.stdin.buffer, _replies)
