"""Measure the time from a death to the next owner and to the next token, from history and channels.

Each job of a dead worker is in one class: what else stood in its way.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from tests.chaos.checker.reading import read_jobs
from tests.chaos.soak.nemesis import Death, Nemesis

QUIET_S = 8.0
"""A fault of Redis disturbs what happens within this long before and after it."""

SEEN, UNSEEN = "killed, and its parent reported it", "killed with its parent"
ALL = "all jobs"
DISTURBED = "Redis, or the link of its worker, was disturbed"
SUSPECT = "it waited to run apart, after two deaths"
OWNER_LOST = "its next owner died or stopped before a token"
NO_ROOM = "the other workers had no room for all"
ROOM = "the other workers had room"
CLASSES = (ALL, ROOM, NO_ROOM, OWNER_LOST, SUSPECT, DISTURBED)


class Claim(NamedTuple):
    """The claim of a job after the one that ended with a death."""

    job_id: str
    why: str
    """Why the job was returned: `death` or `suspect`."""

    owner: str
    leased_ms: int
    lost_ms: int | None
    """When this owner lost the job by its own death."""


@dataclass(slots=True, eq=False)
class Takeovers:
    """Seconds from each death to the lease and to the next token, by job, under (title, class)."""

    leased: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    token: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    num_deaths: int = 0
    rows: list[str] = field(default_factory=list[str])
    """One line of JSON per job."""

    def add(self, other: "Takeovers") -> None:
        """Sum up."""
        for mine, others in ((self.leased, other.leased), (self.token, other.token)):
            for line, values in others.items():
                mine[line] += values
        self.num_deaths += other.num_deaths
        self.rows += other.rows

    def note(self, death: Death, claim: Claim, token_ms: int | None, title: str, kind: str) -> None:
        """Add one job."""
        facts = {"title": title, "class": kind, "token_ms": token_ms, **asdict(death), **claim._asdict()}
        self.rows.append(json.dumps(facts))
        for line in ((title, ALL), (title, kind)):
            self.leased[line].append((claim.leased_ms - death.at_ms) / 1000)
            if token_ms is not None:
                self.token[line].append((token_ms - death.at_ms) / 1000)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.num_deaths} workers died holding jobs that another took over"
        for title in (SEEN, UNSEEN):
            yield f"worker {title}; seconds to the lease and to the next token:"
            for kind in CLASSES:
                leased, token = _quantiles(self.leased[title, kind]), _quantiles(self.token[title, kind])
                yield f"  {kind}: {len(self.leased[title, kind])} jobs; leased {leased}; token {token}"


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "none"
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(len(ranked) * share))] for share in (0.5, 0.99))
    return f"p50 {p50:.2f}, p99 {p99:.2f}, longest {ranked[-1]:.2f}"


def measure(client: Any, prefix: str, database_url: str, nemesis: Nemesis) -> Takeovers:  # Any: a redis-py client
    """Compare every claim that ended with a death with the claim after it."""
    found = Takeovers()
    engine = sa.create_engine(database_url)
    for death in nemesis.deaths:
        claims = _claims_after(engine, death)
        found.num_deaths += bool(claims)
        title = SEEN if nemesis.is_seen(death) else UNSEEN
        for claim, token_ms in zip(claims, _next_tokens_ms(client, prefix, claims), strict=True):
            found.note(death, claim, token_ms, title, _class_of(death, claim, token_ms, nemesis))
    engine.dispose()
    return found


def _claims_after(engine: sa.Engine, death: Death) -> list[Claim]:
    """Return the next claim of each job that the worker held when it died: if it was stopped, it had lost some."""
    query = sa.text(
        "SELECT mine.job_id, mine.why, next.incarnation, next.started_ms,"
        " CASE WHEN next.why IN ('death', 'suspect') THEN next.ended_ms END"
        " FROM attempts mine JOIN attempts next ON next.job_id = mine.job_id AND next.epoch = mine.epoch + 1"
        " WHERE mine.incarnation = :dead AND mine.why IN ('death', 'suspect') AND next.started_ms >= :at_ms"
    )
    with engine.connect() as connection:
        return [Claim(*row) for row in connection.execute(query, {"dead": death.incarnation, "at_ms": death.at_ms})]


def _next_tokens_ms(client: Any, prefix: str, claims: Sequence[Claim]) -> Iterator[int | None]:
    """Return when each job had its next token; None if it had none."""
    jobs = read_jobs(client, prefix, [claim.job_id for claim in claims])
    for claim, job in zip(claims, jobs, strict=True):
        times = [e.time_ms for entries in job.channels for e in entries or () if e.ids and e.time_ms >= claim.leased_ms]
        yield min(times, default=None)


# ---------------------------------------------------------------- what else stood in the way


def _class_of(death: Death, claim: Claim, token_ms: int | None, nemesis: Nemesis) -> str:
    until_ms = claim.leased_ms if token_ms is None else token_ms
    if _is_near(death.at_ms, nemesis.outages) or _had_bad_link(death, claim, until_ms, nemesis):
        return DISTURBED
    if claim.why == "suspect":
        return SUSPECT
    was_stopped = any(who == claim.owner and death.at_ms <= at_ms <= until_ms for at_ms, who in nemesis.stops)
    if was_stopped or (claim.lost_ms is not None and claim.lost_ms <= until_ms):
        return OWNER_LOST
    return ROOM if death.has_room else NO_ROOM


def _is_near(at_ms: int, outages: Sequence[tuple[int, str]]) -> bool:
    harmed_ms = sorted(harmed_ms for harmed_ms, _ in outages)
    near = bisect.bisect_left(harmed_ms, at_ms - QUIET_S * 1000)
    return near < len(harmed_ms) and harmed_ms[near] <= at_ms + QUIET_S * 1000


def _had_bad_link(death: Death, claim: Claim, until_ms: int, nemesis: Nemesis) -> bool:
    if not nemesis.linked & {death.incarnation, claim.owner}:
        return False
    return any(begin_ms <= until_ms and death.at_ms <= end_ms for begin_ms, end_ms in nemesis.weather)
