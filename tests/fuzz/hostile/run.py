"""One run: two workers, a recorder, an honest user, a hostile one, and an operator. Read `run` first."""

import threading
import traceback
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa

from sluice.history.tables import jobs
from sluice.worker.audit.auditor import AuditReport
from sluice.worker.audit.command import AuditOptions, run_audit
from sluice.worker.config import load_config
from tests.chaos.catalogue import catalogue
from tests.end_to_end.processes import WorkerProcess, worker_pool
from tests.fuzz.hostile.attack import KEYS, Attacker, attack
from tests.fuzz.hostile.honest import TENANT, Honest, Ledger
from tests.integration.jobs import wait_until
from tests.security.acl import PASSWORD, QUEUE, set_users, url_of
from tests.servers import Flavor, RedisServer, redis_server

LATE_S = 30.0
"""The bound: an honest job has its output this long after the first try to submit it. Alone it takes 0.3 s."""

REPAIR_EVERY_S = 60.0
"""How often the operator runs `worker audit --repair`."""

DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Load and duration."""

    seed: int
    folder: Path
    seconds: float
    jobs_per_s: float = 8.0
    rounds_per_s: float = 8.0
    """Rounds of hostile writes; each has 20 writes and two submits."""

    flavor: Flavor = "valkey"

    @property
    def database_url(self) -> str:
        """Of the history."""
        return f"sqlite:///{self.folder}/history.db"


@dataclass(slots=True, eq=False)
class Report:
    """The figures of a run, and its faults. Changes during the run."""

    ledger: Ledger
    num_taken: int = 0
    num_refused: int = 0
    num_repaired: int = 0
    """Findings that the operator's audits repaired."""

    faults: list[str] = field(default_factory=list[str])

    @property
    def all_faults(self) -> list[str]:
        """What must not be."""
        late = [f"an honest job took {took_s:.1f} s" for took_s in self.ledger.times_s if took_s > LATE_S]
        return [*self.ledger.faults, *late, *self.faults]

    def text(self) -> str:
        """Return a readable report."""
        times_s = sorted(self.ledger.times_s) or [0.0]
        p50_s, p99_s = (times_s[int(share * (len(times_s) - 1))] for share in (0.5, 0.99))
        return "\n".join(
            [
                f"hostile writes: {self.num_taken} taken, {self.num_refused} refused",
                f"honest jobs: {len(self.ledger.ids)}, with the expected output {len(self.ledger.times_s)}; "
                f"p50 {p50_s:.2f} s, p99 {p99_s:.2f} s, longest {times_s[-1]:.2f} s (bound {LATE_S:.0f} s); "
                f"{self.ledger.num_refused} submits refused as full and tried again",
                f"findings repaired by the operator's audits: {self.num_repaired}",
                *(f"FAULT {one}" for one in self.all_faults[:20]),
                f"{len(self.all_faults)} faults",
            ]
        )


def run(settings: Settings) -> Report:
    """Run it, and compare everything at the end."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    with redis_server(settings.flavor) as server:
        set_users(server)
        with worker_pool(url_of(server, "chat-worker"), settings.folder) as pool:
            own = {
                "QUEUE": QUEUE,
                "DATABASE_URL": settings.database_url,
                "KEEP_PROMPTS": "full",
                "TOOL_FORMAT": "hermes",
            }
            workers = [pool.start(RECORDER="true", **own), pool.start(**own)]
            for worker in workers:
                worker.wait_until_started()
            workers[0].wait_for_line("recorder started")
            honest = Honest(server.url, catalogue(settings.seed, 30, max_tokens=30), patience_s=4 * LATE_S)
            honest.learn()
            report = Report(honest.ledger)
            pids = _pids(workers)
            with _hostile(server, settings, report), _operator(server, settings, report):
                honest.submit_for(settings.seconds, jobs_per_s=settings.jobs_per_s)
            if _pids(workers) != pids:
                report.faults.append("a worker or the recorder was restarted")
            _compare(server, settings, report)
    return report


def _pids(workers: list[WorkerProcess]) -> list[list[int]]:
    return [one.pids_of(kind) for one in workers for kind in ("worker", "recorder")]


@contextmanager
def _thread(target: Any, *args: object) -> Generator[None]:  # Any: a function that gets an event and the arguments
    over = threading.Event()
    thread = threading.Thread(target=target, args=(over, *args))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _hostile(server: RedisServer, settings: Settings, report: Report) -> Generator[None]:
    """Write at random meanwhile."""
    attacker = Attacker(settings.seed)

    def loop(over: threading.Event) -> None:
        path = str(server.socket_path)
        with redis.Redis(unix_socket_path=path, username="acme-submit", password=PASSWORD) as client:
            while not over.wait(1 / settings.rounds_per_s):
                taken, refused = attack(client, attacker)
                report.num_taken += taken
                report.num_refused += refused

    with _thread(loop):
        yield


@contextmanager
def _operator(server: RedisServer, settings: Settings, report: Report) -> Generator[None]:
    """Audit and repair from time to time, as the security page says."""

    def loop(over: threading.Event) -> None:
        while not over.wait(REPAIR_EVERY_S):
            audit = pool.submit(_audit, server, settings, repair=True)
            if (error := audit.exception()) is not None:
                report.faults.append(f"the audit failed: {''.join(traceback.format_exception(error)[-3:])}")
            else:
                report.num_repaired += len(audit.result().done)

    with ThreadPoolExecutor(1) as pool, _thread(loop):
        yield


def _audit(server: RedisServer, settings: Settings, *, repair: bool) -> AuditReport:
    flags = {"redis.url": server.url, "history.database_url": settings.database_url, "queue.name": QUEUE}
    return run_audit(load_config({}, flags=flags), {}, AuditOptions(pause_s=0.5, history_s=10.0, repair=repair))


def _compare(server: RedisServer, settings: Settings, report: Report) -> None:
    """After the attack: the queue runs empty, one repair, then queue and history agree on every honest job."""
    with server.client() as client:
        wait_until(lambda: not client.xlen(KEYS.outbox), "everything is recorded", patience_s=DRAIN_S)
        report.num_repaired += len(_audit(server, settings, repair=True).done)
        wait_until(lambda: not client.xlen(KEYS.outbox), "everything is recorded", patience_s=DRAIN_S)
    findings = _audit(server, settings, repair=False).findings
    report.faults += [
        f"{one.kind} {one.subject}: queue {one.queue}, history {one.history}"
        for one in findings
        if one.job_id is None or one.job_id in report.ledger.ids
    ]
    report.faults += _wrong_in_history(settings, report.ledger.ids)


def _wrong_in_history(settings: Settings, job_ids: list[str]) -> list[str]:
    engine = sa.create_engine(settings.database_url)
    with engine.connect() as connection:
        asked = sa.select(jobs.c.id, jobs.c.state).where(jobs.c.tenant == TENANT)
        rows = {row.id: row.state for row in connection.execute(asked)}
    engine.dispose()
    return [f"{one} is {rows.get(one, 'unknown')} in the history" for one in job_ids if rows.get(one) != "done"]
