"""Each command of each script fails once: `worker audit --repair` restores whatever is left, and nothing is lost."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from sluice.history.tables import attempts, batches, jobs, results
from sluice.protocol import scripts
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, ending
from tests.protocol.failing.commands import CALLS, run_failing, world_on
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene

pytestmark = pytest.mark.every_server

FOLDER = Path(scripts.__path__[0])
FAST = [("submit", 0.7), ("pull", 0.3), ("advance", 0.5), ("requeue", 0.6), ("repair_jobs", 0.9)]
"""Scripts, and at which share of its commands one fails."""

OF_MIGRATIONS = {
    *("close_format_1", "migrate_lanes", "migrate_jobs", "migrate_batches", "migrate_streams", "finish_format_1"),
}
"""Their commands fail in tests/migration."""

FINAL = {"done", "failed", "cancelled", "expired"}


def restore(scene: Scene) -> None:
    """What an operator does: record, repair, record."""
    scene.record()
    scene.repair()
    scene.record()
    found = scene.found()
    assert found == {}, found


def run_all(queue: Queue) -> None:
    """Another worker runs everything that waits, now and later."""
    for round_ in range(4):
        queue.pass_time(61_000)
        worker = queue.worker(f"R{round_}")
        while jobs := worker.pull(is_empty=True).jobs:
            worker.beat(*(job.id for job in jobs))
            worker.advance(*(ending(job, job.published[0], 1) for job in jobs if not job.ended[0]))


def wrong(queue: Queue, known: set[str]) -> list[str]:
    """What must not be once everything has run."""
    names = [name.removeprefix("job:") for name in queue.names("job:*")]
    jobs = {name: queue.fields(*name.split(":")) for name in names}
    found = [f"{name} is lost" for name in known - jobs.keys()]
    found += [f"{name} is {job['state']}" for name, job in jobs.items() if job["state"] not in FINAL]
    counters = queue.hash_of("counters")
    found += [f"{name} is {counters[name]}" for name in ("waiting_jobs", "running_jobs") if counters[name] != "0"]
    batch = queue.hash_of("batch", "b")
    ended = sum(int(batch.get(state, 0)) for state in FINAL)
    found += [f"batch {batch}"] if int(batch["total"]) != ended else []
    found += [f"member {one}" for one in queue.client.zrange(queue.keys.key("members", "b"), 0, -1)]
    for name in jobs:
        entries = queue.channel(JobId("0." + name.replace(":", ".")))
        # One without tokens is as one that has expired: its readers ask for the job's state.
        if entries and entries[-1][1].end is None:
            found.append(f"the channel of {name} has no end")
    return found


def empty(scene: Scene) -> None:
    """Begin again."""
    scene.queue.client.flushall()
    scene.queue.now_ms = 0
    with scene.history.begin() as connection:
        for table in (attempts, results, batches, jobs):
            connection.execute(table.delete())


def count_commands(scene: Scene, script: str) -> int:
    """Return how many commands its call runs when none fails."""
    empty(scene)
    return run_failing(scene.queue, CALLS[script](world_on(scene.queue)), 0)


def try_one(scene: Scene, script: str, number: int) -> list[str]:
    """Fail one command, restore, repeat the call, and run everything; return what is wrong."""
    empty(scene)
    queue, world = scene.queue, world_on(scene.queue)
    known = {name.removeprefix("job:") for name in queue.names("job:*")} - {"t:done", "t:failed"}
    call = CALLS[script](world)
    run_failing(queue, call, number)
    restore(scene)
    queue.run(call)
    scene.record()
    run_all(queue)
    restore(scene)
    return wrong(queue, known)


@pytest.fixture
def scene(valkey: RedisServer, sqlite_history: Engine) -> Generator[Scene]:
    """A queue and its history."""
    with valkey.client() as client:
        yield Scene(valkey, Queue(client), sqlite_history)


class TestGivenACommandThatFails:
    @pytest.mark.parametrize(("script", "share"), FAST)
    def test_when_an_operator_repairs_then_nothing_is_lost(self, scene: Scene, script: str, share: float) -> None:
        number = round(share * count_commands(scene, script))

        assert try_one(scene, script, number) == []

    @pytest.mark.long
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("script", CALLS)
    def test_when_it_is_any_of_them_then_an_operator_repairs_it(self, scene: Scene, script: str) -> None:
        num_commands = count_commands(scene, script)

        found = {number: try_one(scene, script, number) for number in range(1, num_commands + 1)}

        assert num_commands > 15
        assert {number: faults for number, faults in found.items() if faults} == {}


class TestGivenTheScripts:
    def test_when_one_writes_then_its_commands_are_tried(self) -> None:
        scripts = [path for path in FOLDER.glob("*.lua") if not path.stem.startswith("lib")]
        writing = {
            path.stem for path in scripts if re.search(r"^finish\(\)|^write_even", path.read_text(), re.MULTILINE)
        }

        assert writing == set(CALLS) | OF_MIGRATIONS
