"""Run this folder's tests of kernels on the CPU: in a process where Triton interprets, one per test process.

A test with `device="cuda"` runs here, compiled; so do the tests of a module that says `RUNS_COMPILED = True`.
"""

import inspect
from collections.abc import Iterator

import pytest

from tests.kernels_triton.interpreter import Interpreter

_interpreters: list[Interpreter] = []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Hand a test that is to be interpreted to the interpreter's process; true: it has been run."""
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if getattr(pyfuncitem.module, "RUNS_COMPILED", False) or arguments.get("device") == "cuda":
        return None
    if not _interpreters:
        _interpreters.append(Interpreter())
    name = pyfuncitem.originalname if pyfuncitem.cls is None else f"{pyfuncitem.cls.__name__}.{pyfuncitem.originalname}"
    failure = _interpreters[0].run(pyfuncitem.path, name, arguments)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def _end_of_the_interpreter() -> Iterator[None]:
    yield
    while _interpreters:
        _interpreters.pop().close()
