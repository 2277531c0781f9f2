"""The names in the scripts: a global that no server has is a local's name misspelt, and nil until its line runs."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.protocol.scripts import load
from tests.protocol.lua_globals import globals_of
from tests.servers import RedisServer
from tools.scripts_page import NAMES

KNOWN = {
    "ARGV", "KEYS", "cjson", "cmsgpack", "error", "ipairs", "math", "next", "pairs", "pcall", "rawset", "redis",
    "select", "setmetatable", "string", "struct", "table", "tonumber", "tostring", "type", "unpack",
}  # fmt: skip
"""Globals of every server since Redis 6.2 that scripts may use."""


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: a redis-py client
    with valkey.client() as client:
        yield client


class TestGivenEveryScript:
    @pytest.mark.parametrize("name", NAMES)
    def test_when_it_is_compiled_then_it_names_no_unknown_global(self, client: Any, name: str) -> None:  # Any: as above
        read, written = globals_of(client, load(name).source)

        assert read - KNOWN == set()
        assert written == set()


class TestGivenALocalWhoseNameIsMisspelt:
    """In a function that no call reaches."""

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("return lesae", ({"lesae"}, set[str]())),
            ("lesae = 1", (set[str](), {"lesae"})),
            ("return function(lease) return function() return lesae or lease end end", ({"lesae"}, set[str]())),
            ("local t = { 1, 2.5, true, 'a', lease = nil }; return t.lesae", (set[str](), set[str]())),
        ],
        ids=["read", "written", "in a closure", "a field is no global"],
    )
    def test_when_it_is_compiled_then_it_is_found(
        self,
        client: Any,
        line: str,
        expected: tuple[set[str], set[str]],  # Any: as above
    ) -> None:
        assert globals_of(client, f"local lease\nlocal function unused() {line} end") == expected
