"""The headers of the scripts, which docs/reference/scripts.md shows, name the keys that these use, and no others."""

import json
import subprocess
import sys

import pytest

from tests.end_to_end.processes import ROOT
from tests.protocol.driving import Queue
from tests.protocol.failing.commands import CALLS, world_on
from tests.protocol.test_scripts import ACTS, busy
from tests.protocol.used_keys.crowd import CROWDED, Crowd
from tests.protocol.used_keys.old import MOVES, OldQueue
from tests.protocol.used_keys.watching import Use, watching
from tests.servers import RedisServer
from tools.scripts_page import NAMES, header_of


def declared() -> set[Use]:
    """What the headers say."""
    headers = {name: header_of(name) for name in NAMES}
    reads = {Use(name, False, key) for name, header in headers.items() for key in header.reads}
    return reads | {Use(name, True, key) for name, header in headers.items() for key in header.writes}


def listed(uses: set[Use]) -> str:
    return "; ".join(map(str, sorted(uses)))


def run_all(queue: Queue) -> None:
    """Call each script, on queues that reach all of it."""
    for act in CROWDED.values():
        act(Crowd(queue))
    for move in MOVES.values():
        move(OldQueue(queue.client))
    for call in CALLS.values():
        empty(queue)
        queue.run(call(world_on(queue)))
    for act in ACTS.values():
        empty(queue)
        queue.stop_clock()
        busy(queue)
        act(queue)


def empty(queue: Queue) -> None:
    queue.client.flushall()
    queue.now_ms = 0


class TestGivenTheHeadersOfTheScripts:
    def test_when_each_is_run_then_it_uses_the_keys_that_its_header_names(self, valkey: RedisServer) -> None:
        uses = set[Use]()

        with valkey.client() as client, watching(valkey, uses):
            run_all(Queue(client))

        assert listed(uses - declared()) == "", "no header names this"
        assert listed(declared() - uses) == "", "a header names this, and no call did it"

    @pytest.mark.long
    @pytest.mark.timeout(1800)
    def test_when_all_tests_of_the_protocol_are_run_then_none_uses_another(self) -> None:
        tests = ["tests/protocol", "tests/migration", "tests/worker/audit"]
        command = [sys.executable, "-m", "tests.protocol.used_keys.watching", *tests, "-q", "-m", "not long"]

        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stdout[-4000:]
        uses = {Use(*use) for use in json.loads(done.stdout.splitlines()[-1])}
        assert listed(uses - declared()) == ""
