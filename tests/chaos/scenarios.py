"""The scenes in which a crash point is tried: processes, jobs and the moment of the fault. See `crash_points.py`.

Each ends with a queue in which every job has ended; `test_crash_points.py` then checks consistency.
"""

import os
import random
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sluice.protocol.calls import Accepted, NewJob, submit
from sluice.protocol.limits import MAX_JOBS_PER_CALL
from sluice.protocol.redis.execution import run
from sluice.protocol.scripts import load
from sluice.protocol.wire import JobId, encode_spec
from tests.chaos.crash_points import NUM_JOBS, Case, Scene, Stage, Trip, asks_of
from tests.chaos.faults.fault_proxy import CLIENT_TIMEOUT_S, FaultProxy, Trap, fault_proxy
from tests.chaos.victim import STAGE_DEADLINE_S, Order
from tests.forks import Fork
from tests.integration.jobs import KEYS, Ask, new_job, num_on_channel, wait_for_ends, wait_until
from tests.integration.workers import RunningWorker, running_worker
from tests.servers import RedisServer

SLOW = "null?step_s=0.003"
CALLBACK_URL = "https://receiver.example/hook"
SCRIPTS = ("pull", "advance", "beat", "put_result", "give_back", "maintain", "configure", "inspect")
FIRST_HALF = NUM_JOBS // 2
PATIENCE_S = 60.0


@dataclass(slots=True, eq=False)
class Stand:
    """One case on a server, with its processes and jobs. Mutable."""

    server: RedisServer
    client: Any  # a redis-py client
    proxy: FaultProxy
    case: Case
    nth: int
    folder: Path
    database_url: str
    asks: list[Ask]
    submitted: dict[JobId, Ask] = field(default_factory=dict[JobId, Ask])
    victim: Fork | None = None

    # ------------------------------------------------------------ jobs

    def submit(self, count: int) -> list[JobId]:
        """Submit the next jobs; each wants a callback."""
        asks = self.asks[len(self.submitted) :][:count]
        jobs = [_with_callback(ask) for ask in asks]
        for at in range(0, len(jobs), MAX_JOBS_PER_CALL):
            for answer in run(self.client, submit(KEYS, jobs[at : at + MAX_JOBS_PER_CALL])):
                assert isinstance(answer, Accepted), answer
        self.submitted.update((job.id, ask) for job, ask in zip(jobs, asks, strict=True))
        return [job.id for job in jobs]

    def wait_for_ends(self) -> None:
        """Until all that was submitted has ended."""
        wait_for_ends(self.client, list(self.submitted), patience_s=PATIENCE_S)

    # ------------------------------------------------------------ the victim

    @property
    def _sprung_file(self) -> Path:
        return self.folder / "sprung"

    @property
    def has_sprung(self) -> bool:
        """Whether it went wrong."""
        trap = self.proxy.trap
        return self._sprung_file.exists() or (trap is not None and trap.sprung.is_set())

    def start_victim(self, **flags: object) -> None:
        """Start the process under test, with its failpoint if the fault is inside it."""
        point = self.case.point
        order = Order(
            redis_url=self.proxy.url,
            real_redis_url=self.server.url,
            sprung=str(self._sprung_file),
            database_url=self.database_url,
            flags={**_VICTIM, **flags},
            part_bytes=60 if point.name == "put result" else 0,
            stage=point.name if isinstance(point, Stage) else None,
            moment=self.case.moment,
            fault=self.case.fault,
            nth=self.nth,
        )
        role = {Scene.RECORDING: "recorder", Scene.MOVING: "mover"}.get(point.scene, "worker")
        self.victim = Fork(("tests.chaos.victim", role, str(order)), {**os.environ, "OMP_NUM_THREADS": "1"}, self.log)

    @property
    def log(self) -> Path:
        """The victim's log."""
        return self.folder / "victim.log"

    def wait_until_started(self) -> None:
        """Wait until the victim logs it."""
        wait_until(
            lambda: "started" in self.log.read_text() or self._is_dead(),
            "the victim has started",
            patience_s=PATIENCE_S,
        )

    def _is_dead(self) -> bool:
        return self.victim is not None and self.victim.poll() is not None

    def arm(self) -> None:
        """From now on the round trip may go wrong."""
        if isinstance(self.case.point, Trip):
            self.proxy.trap = Trap(self.case.point.matches, self.case.moment, self.case.fault, self.kill, self.nth)

    def wait_until_sprung(self) -> None:
        """Until it went wrong."""
        wait_until(lambda: self.has_sprung, f"it goes wrong: {self.case}", patience_s=PATIENCE_S)

    def kill(self) -> None:
        """End the victim as a crash would."""
        if self.victim is not None:
            self.victim.kill()
            self.victim.wait()

    def ask_to_leave(self) -> None:
        """Tell the victim to drain."""
        if self.victim is not None:
            self.victim.send_signal(signal.SIGTERM)

    def see_off(self) -> int:
        """Let the victim drain, if it lives; its exit code."""
        assert self.victim is not None
        self.ask_to_leave()
        try:
            return self.victim.wait(PATIENCE_S)
        finally:
            self.kill()

    def wait_until_alone(self, mate: RunningWorker) -> None:
        """Wait until the idle mate has removed the dead incarnation: it may have died with no job to reclaim."""
        wait_until(
            lambda: self.client.zrange(KEYS.key("alive"), 0, -1) == [mate.incarnation.encode()],
            "only the mate is alive",
        )


_VICTIM: Mapping[str, object] = {
    "model.path": SLOW,
    "model.tool_format": "hermes",
    "batching.max_num_seqs": 12,
    "history.recorder": False,
    "metrics.enabled": False,
    "beat.every_s": 0.2,
    "beat.life_s": 0.8,
    "beat.step_deadline_s": STAGE_DEADLINE_S,
    "redis.timeout_s": CLIENT_TIMEOUT_S,
    "drain.timeout_s": 10,
    "log.format": "json",
}
# Any: as the fixture's flags
_MATE: dict[str, Any] = {
    "model__path": SLOW,
    "model__tool_format": "hermes",
    "batching__max_num_seqs": 8,
    "beat__every_s": 0.2,
    "beat__life_s": 0.8,
}


def _with_callback(ask: Ask) -> NewJob:
    spec = encode_spec(replace(ask.spec, callback_url=CALLBACK_URL))
    return replace(new_job(ask), spec=spec, wants_callback=True)


@contextmanager
def stand(
    server: RedisServer, case: Case, *, seed: int, folder: Path, socket: Path, database_url: str
) -> Generator[Stand]:
    """A server, a proxy before it, and fifty jobs to ask for."""
    nth = random.Random(f"{seed} {case}").randint(1, case.point.max_nth)
    with server.client() as client, fault_proxy(socket, server.socket_path) as proxy:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        for name in SCRIPTS:
            client.script_load(load(name).source)
        made = Stand(server, client, proxy, case, nth, folder, database_url, asks_of(seed))
        try:
            yield made
        finally:
            made.kill()


# ---------------------------------------------------------------- the scenes


def serve(it: Stand) -> None:
    """The victim and a mate serve; half of the jobs comes after it went wrong."""
    it.start_victim()
    it.wait_until_started()
    with running_worker(it.server.url, **_MATE) as mate:
        it.arm()
        it.submit(FIRST_HALF)
        it.wait_until_sprung()
        it.submit(FIRST_HALF)
        it.wait_for_ends()
        it.see_off()
        it.wait_until_alone(mate)


def resume(it: Stand) -> None:
    """Let a worker start the jobs and hand them over; the victim resumes them."""
    # Slow enough that, on a busy machine too, it holds as many jobs as a fault waits for.
    settings: dict[str, Any] = {**_MATE, "model__path": "null?step_s=0.15", "drain__mode": "hand-over"}
    with running_worker(it.server.url, **settings):
        first, *_ = it.submit(FIRST_HALF)
        wait_until(lambda: num_on_channel(it.client, first) >= 3, "it speaks")
    it.arm()
    it.start_victim()
    it.wait_until_sprung()
    with running_worker(it.server.url, **_MATE) as mate:
        it.submit(FIRST_HALF)
        it.wait_for_ends()
        it.see_off()
        it.wait_until_alone(mate)


def leave(it: Stand) -> None:
    """Let the victim run all jobs, then ask it to hand them over."""
    # Slow enough that more than one slice is still held when the drain begins.
    it.start_victim(**{"model.path": "null?step_s=0.05", "batching.max_num_seqs": 200, "drain.mode": "hand-over"})
    it.wait_until_started()
    *_, last = it.submit(NUM_JOBS)
    wait_until(lambda: num_on_channel(it.client, last) >= 3, "it speaks")
    it.arm()
    it.ask_to_leave()
    it.wait_until_sprung()
    with running_worker(it.server.url, **_MATE) as mate:
        it.wait_for_ends()
        it.see_off()
        it.wait_until_alone(mate)


def look_after(it: Stand) -> None:
    """A worker serves; the victim records what ends, or moves the callbacks."""
    it.arm()
    it.start_victim()
    it.wait_until_started()
    with running_worker(it.server.url, **_MATE) as mate:
        it.submit(FIRST_HALF)
        it.wait_for_ends()
        it.submit(FIRST_HALF)
        it.wait_until_sprung()
        it.wait_for_ends()
        it.see_off()
        it.wait_until_alone(mate)


SCENES: Mapping[Scene, Callable[[Stand], None]] = {
    Scene.SERVING: serve,
    Scene.RESUMING: resume,
    Scene.LEAVING: leave,
    Scene.RECORDING: look_after,
    Scene.MOVING: look_after,
}
