"""Keep optional packages out of a process that does not use them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Generator[None]:
    """Let imports of `package` fail as if it were not installed, unless it is imported already.

    For libraries that import a large package wherever it is installed. What is imported inside the context does
    without the package for as long as the process lives, so use it only in a command's process, never in a library.
    """
    if package in sys.modules:
        yield
        return
    # Python raises ModuleNotFoundError for it.
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]  # typeshed has no None here
    try:
        yield
    finally:
        del sys.modules[package]
