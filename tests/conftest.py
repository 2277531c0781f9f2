"""What all tests share. Needs pytest and hypothesis alone, for the tests that run where there is a card."""

from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.examples import LONG

# No deadline: a shared machine is slow at times, and a hanging test ends by its timeout.
settings.register_profile("fast", deadline=None)
settings.register_profile(LONG, deadline=None)
settings.load_profile("fast")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures of servers where there is a client for them."""
    if find_spec("redis") is not None:
        config.pluginmanager.import_plugin("tests.server_fixtures")
