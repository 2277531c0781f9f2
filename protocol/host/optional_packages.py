"""Keep optional packages out of a process that does not use them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Generator[None]:
    """Make imports of `package` fail as if it were not installed, unless it is imported already.

    For libraries that import a large package wherever it is installed. Modules imported inside the context never use
    the package in this process, so use this only in a command, never in a library.
    """
    if package in sys.modules:
        yield
        return
    # Python raises ModuleNotFoundError for a None.
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]  # typeshed has no None here
    try:
        yield
    finally:
        del sys.modules[package]
