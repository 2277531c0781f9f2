"""Local names in the scripts: Lua compiles no function in which more than 200 are in use at once."""

import re
from collections.abc import Generator
from typing import Any

import pytest
import redis

from sluice.protocol.scripts import load
from tests.servers import RedisServer
from tools.scripts_page import NAMES

SPARE = 5
"""Names that may still be added to each function. `close_format_1` and `submit` are the nearest to the limit."""

HEAD = re.compile(r"\bfunction\b[^()\n]*\([^)\n]*\)\n")
"""The head of a function of several lines."""


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: a redis-py client
    with valkey.client() as client:
        yield client


def with_names(source: str, count: int) -> str:
    """A script with more names in use in each of its functions, from their first line on."""
    names = f"local {', '.join(f'spare_{i}' for i in range(count))}\n"
    return names + HEAD.sub(lambda head: head[0] + names, source)


class TestGivenEveryScript:
    @pytest.mark.parametrize("name", NAMES)
    def test_when_names_are_added_to_each_function_then_it_compiles(self, client: Any, name: str) -> None:
        client.script_load(with_names(load(name).source, SPARE))


class TestGivenAFunctionOf200Names:
    def test_when_one_is_added_then_it_does_not_compile(self, client: Any) -> None:
        source = with_names("return (function()\nend)()", 200)
        client.script_load(source)

        with pytest.raises(redis.ResponseError, match="200 local variables"):
            client.script_load(source.replace("()\n", "()\nlocal one_more\n"))
