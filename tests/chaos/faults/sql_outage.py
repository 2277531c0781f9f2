"""An SQL outage under load: the outbox grows to its bound, then submits are refused.

`python -m tests.chaos.overload --minutes 60 --without-sql` runs it: a worker with its recorder, and a PostgreSQL which
is killed after a minute. Producers keep offering the worker's capacity. Read `WithoutSql.run` first.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import sqlalchemy as sa

from sluice.history.database import open_database
from sluice.worker.recorder.migrate import migrate
from tests.chaos.overload import (
    MAX_WAITING_JOBS,
    MEMORY,
    PROMPT,
    SEQUENCES,
    TOKENS,
    Overload,
    Sample,
    is_flat,
    overloaded,
    say,
)
from tests.postgres import PostgresServer, postgres_server

STEP_S = 0.05
"""A slow worker, so that hours are light: 16 jobs a second at best."""

ENTRIES_PER_JOB = 1.1
"""About: its submit, and its start and end, of which most share an entry with others that start or end in one call."""

MAX_UNENDED_JOBS = MAX_WAITING_JOBS + 2 * SEQUENCES
CAUGHT_UP_ENTRIES = 200
"""Entries in the outbox of a recorder that keeps up."""

_ROWS = sa.text(
    "SELECT id, state, prompt, output_tokens, record_error, submitted_ms <= pulled_ms AND pulled_ms <= finished_ms,"
    " (SELECT count(*) FROM attempts WHERE job_id = jobs.id AND outcome = 'done'),"
    " (SELECT count(*) FROM results WHERE job_id = jobs.id) FROM jobs"
)
_WHOLE = ("done", PROMPT, TOKENS, None, True, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """How long SQL is there, and away; how much the outbox may hold; how often is looked."""

    before_s: float
    away_s: float
    max_outbox_entries: int
    every_s: float


@dataclass(slots=True, eq=False)
class WithoutSql:
    """A load, and the server that is stopped under it. Mutable."""

    load: Overload
    postgres: PostgresServer
    absence: Absence
    say: Callable[[str], object]
    before: list[Sample] = field(default_factory=list[Sample])
    away: list[Sample] = field(default_factory=list[Sample])
    after: list[Sample] = field(default_factory=list[Sample])
    caught_up_s: float = 0.0
    """From the server's return until the outbox was empty but for what load puts there."""

    has_same_processes: bool = False
    """Whether worker and recorder survived."""

    def run(self) -> None:
        """Run with SQL up, down and up again, with a constant load."""
        load, absence = self.load, self.absence
        with load.flooding():
            self.before = load.watch(absence.before_s, absence.every_s, self.say)
            pids = self._pids()
            self.postgres.kill()
            self.say("SQL is away")
            self.away = load.watch(absence.away_s, absence.every_s, self.say)
            self.postgres.start()
            self.say("SQL is back")
            began_s = time.monotonic()
            self.after = load.watch(600, 0.2, self.say, until=lambda one: one.outbox <= CAUGHT_UP_ENTRIES)
            self.caught_up_s = time.monotonic() - began_s
            self.after += load.watch(absence.before_s, absence.every_s, self.say)
        load.wait_until_idle()
        self.has_same_processes = pids == self._pids()

    def _pids(self) -> list[int]:
        worker = psutil.Process(self.load.worker.process.pid)
        return [worker.pid, *(child.pid for child in worker.children())]

    @property
    def full(self) -> list[Sample]:
        """The samples while the outbox was at its bound."""
        return [sample for sample in self.away if sample.outbox >= self.absence.max_outbox_entries]

    @property
    def num_most_entries(self) -> int:
        """The largest sampled length of the outbox."""
        return max(sample.outbox for sample in self.load.samples)

    def rows(self) -> Mapping[str, tuple[object, ...]]:
        """Return the history's state of each job."""
        engine = open_database(self.load.database_url)
        with engine.connect() as connection:
            rows = {str(row[0]): tuple(row[1:]) for row in connection.execute(_ROWS)}
        engine.dispose()
        return rows

    def findings(self) -> list[str]:
        """Return the violated bounds."""
        accepted, rows = set(self.load.flood.accepted_ids), self.rows()
        bound = self.absence.max_outbox_entries + 3 * MAX_UNENDED_JOBS
        reasons = self.load.flood.counts.keys()
        promises = {
            f"{len(accepted - rows.keys())} accepted jobs have no row": accepted <= rows.keys(),
            f"{len(rows.keys() - accepted)} rows of jobs that were not accepted": rows.keys() <= accepted,
            f"rows that are not whole: {self._torn(rows)}": not self._torn(rows),
            f"the outbox held {self.num_most_entries} entries of at most {bound}": self.num_most_entries <= bound,
            "the outbox did not fill in the first three quarters": len(self.full) > len(self.away) / 4,
            f"submits were refused otherwise than by a full outbox: {reasons}": "refused (outbox_full)" in reasons,
            "worker or recorder died": self.has_same_processes,
            "Redis grew while the outbox was full": len(self.full) >= 4 and is_flat(self.full, MEMORY["Redis"]),
            "the worker grew": is_flat(self.away, MEMORY["worker"]),
            "the recorder grew while SQL was away": is_flat(self.away, MEMORY["recorder"]),
        }
        return [promise for promise, is_kept in promises.items() if not is_kept]

    def _torn(self, rows: Mapping[str, tuple[object, ...]]) -> list[str]:
        return [f"{job_id} {row}" for job_id, row in rows.items() if row != _WHOLE][:5]

    def lines(self) -> list[str]:
        """A table for people."""
        moments = {
            "SQL still there": self.before[-1],
            "away for a quarter": self.away[len(self.away) // 4],
            "half": self.away[len(self.away) // 2],
            "three quarters": self.away[len(self.away) * 3 // 4],
            "the whole time": self.away[-1],
            "caught up": next(one for one in self.after if one.outbox <= CAUGHT_UP_ENTRIES),
            "a while later": self.after[-1],
        }
        return [
            f"SQL away for {self.absence.away_s:.0f} s; the outbox may hold {self.absence.max_outbox_entries} entries",
            _row("", "s", "accepted", "refused", "outbox", *(f"{name} MiB" for name in MEMORY)),
            *(_row_of(name, sample) for name, sample in moments.items()),
            f"most entries {self.num_most_entries}, most memory {_most_memory(self.load.samples)}; "
            f"full {self.full[0].at_s - self.before[-1].at_s if self.full else float('nan'):.0f} s after it went",
            f"caught up {self.caught_up_s:.1f} s after it came back",
            f"{len(self.load.flood.accepted_ids)} jobs accepted, {len(self.rows())} rows; "
            f"{dict(self.load.flood.counts)}; slowest call {self.load.flood.slowest_call_s:.2f} s",
        ]


def _row_of(name: str, sample: Sample) -> str:
    memory = [f"{of(sample) / 2**20:.1f}" for of in MEMORY.values()]
    return _row(name, f"{sample.at_s:.0f}", str(sample.accepted), str(sample.refused), str(sample.outbox), *memory)


def _row(first: str, *rest: str) -> str:
    return f"{first:20}" + "".join(f"{one:>14}" for one in rest)


def _most_memory(samples: Sequence[Sample]) -> str:
    return ", ".join(f"{name} {max(map(of, samples)) / 2**20:.1f} MiB" for name, of in MEMORY.items())


@contextmanager
def away_for(seconds: float, *, before_s: float, say: Callable[[str], object], folder: Path) -> Generator[WithoutSql]:
    """Run it with a separate PostgreSQL, and an outbox that is full when about half of the time has passed."""
    jobs_per_s = SEQUENCES / STEP_S / TOKENS
    entries = round(jobs_per_s * seconds / 2 * ENTRIES_PER_JOB)
    every_s = min(10.0, max(seconds / 60, 0.2))
    absence = Absence(before_s=before_s, away_s=seconds, max_outbox_entries=entries, every_s=every_s)
    with postgres_server() as postgres:
        url = postgres.url(postgres.create_database())
        engine = open_database(url, is_writer=True)
        migrate(engine)
        engine.dispose()
        with overloaded(
            folder, database_url=url, max_outbox_entries=entries, step_s=STEP_S, factor=1.0, KEEP_PROMPTS="full"
        ) as load:
            made = WithoutSql(load, postgres, absence, say)
            made.run()
            yield made


def without_sql(seconds: float) -> tuple[list[str], bool]:
    """Return a readable report, and whether every bound held."""
    with (
        tempfile.TemporaryDirectory(prefix="sluice-") as folder,
        away_for(seconds, before_s=60.0, say=say, folder=Path(folder)) as made,
    ):
        return [*made.lines(), *made.findings()], not made.findings()
