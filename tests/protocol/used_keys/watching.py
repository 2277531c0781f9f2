"""The keys that scripts read and write on a real server, as its MONITOR shows each of their commands.

    python -m tests.protocol.used_keys.watching tests/protocol …

runs tests and prints, in a last line of JSON, what scripts used on Valkey meanwhile.
"""

import codecs
import hashlib
import json
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import redis

from sluice.protocol.keys import FORMAT
from sluice.protocol.scripts import load
from tests.servers import RedisServer
from tools.scripts_page import NAMES

ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
KEY = re.compile(r"\{[^}]*\}:(\d+:)?(\w+)")
END = b"all keys have been used"


class Use(NamedTuple):
    """A key that a script reads or writes."""

    script: str
    is_write: bool
    key: str
    """The part of its name before the first colon: `job` of `{q:0}:2:job:t:a`, and `1:job` of a key of format 1."""

    def __str__(self) -> str:
        return f"{self.script} {'writes' if self.is_write else 'reads'} {self.key}"


OF_ALL = {Use(name, False, "config") for name in NAMES} | {Use(name, True, "nothing") for name in NAMES}
"""What docs/reference/scripts.md does not list of each script."""


@contextmanager
def watching(server: RedisServer, uses: set[Use]) -> Generator[None]:
    """Note what scripts use on a server until the block ends."""
    with server.client() as client, client.monitor() as monitor:
        yield
        client.execute_command("ECHO", END)
        watch = _Watch(client)
        while END not in (line := monitor.connection.read_response()):
            uses.update(watch.uses_of(line))
    uses -= OF_ALL


class _Watch:
    """Reads lines of MONITOR. Changes: it remembers whose commands the next lines are."""

    def __init__(self, client: Any) -> None:  # Any: a redis-py client
        self._client = client
        self._script: str | None = None
        self._names = {load(name).sha1: name for name in NAMES}
        self._places: dict[tuple[bytes, int], list[tuple[int, bool]]] = {}

    def uses_of(self, line: bytes) -> Iterator[Use]:
        """What the command of a line uses, if it is one of a script of ours."""
        caller, _, rest = line.partition(b"] ")
        command = ARGUMENT.findall(rest)
        match command[0].upper():
            case b"TYPE":
                pass
            case _ if caller.endswith(b" lua"):
                if self._script:
                    yield from self._of_command(self._script, command)
            case b"EVALSHA":
                self._script = self._names.get(command[1].decode())
            case b"EVAL":
                source = codecs.escape_decode(command[1])[0]
                self._script = self._names.get(hashlib.sha1(source, usedforsecurity=False).hexdigest())
            case _:
                pass

    def _of_command(self, script: str, command: list[bytes]) -> Iterator[Use]:
        shape = (command[0], len(command))
        if shape not in self._places:
            self._places[shape] = list(self._places_in(command))
        for place, is_write in self._places[shape]:
            match = KEY.match(command[place].decode(errors="replace"))
            assert match, command
            yield Use(script, is_write, match[2] if match[1] == f"{FORMAT}:" else f"1:{match[2]}")

    def _places_in(self, command: list[bytes]) -> Iterator[tuple[int, bool]]:
        """Where a command has keys, and whether it may change them, as the server says."""
        try:
            keys = self._client.execute_command("COMMAND GETKEYSANDFLAGS", *command)
        except redis.ResponseError:  # it has none
            return
        place = 0
        for key, flags in keys:
            place = command.index(key, place + 1)
            yield place, b"RO" not in flags


class Plugin:
    """Watches the Valkey of each test that has one."""

    def __init__(self) -> None:
        self.uses = set[Use]()

    @pytest.fixture(autouse=True)
    def _watched(self, request: pytest.FixtureRequest) -> Generator[None]:
        name = next((name for name in ("valkey", "any_redis") if name in request.fixturenames), None)
        server: RedisServer | None = request.getfixturevalue(name) if name else None
        if server is None or server.flavor != "valkey":
            yield
        else:
            with watching(server, self.uses):
                yield


def main() -> int:
    """Run pytest with these arguments."""
    plugin = Plugin()
    status = pytest.main(sys.argv[1:], plugins=[plugin])
    sys.stdout.write(json.dumps(sorted(plugin.uses)) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
