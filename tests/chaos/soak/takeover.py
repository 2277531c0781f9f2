"""Measure the time from a death to the next owner and to the next token, from history and channels."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tests.chaos.checker.reading import read_jobs
from tests.chaos.soak.nemesis import Death

QUIET_S = 8.0
"""A death counts if Redis had no fault within this long before and after it."""


@dataclass(slots=True, eq=False)
class Takeovers:
    """Seconds from each death, by job."""

    to_lease_s: list[float] = field(default_factory=list[float])
    to_token_s: list[float] = field(default_factory=list[float])
    undisturbed_to_lease_s: list[float] = field(default_factory=list[float])
    suspect_to_lease_s: list[float] = field(default_factory=list[float])
    """Of jobs that had died before without progress: they wait until a worker can run them apart."""

    num_deaths: int = 0

    def add(self, other: "Takeovers") -> None:
        """Sum up."""
        self.to_lease_s += other.to_lease_s
        self.to_token_s += other.to_token_s
        self.undisturbed_to_lease_s += other.undisturbed_to_lease_s
        self.suspect_to_lease_s += other.suspect_to_lease_s
        self.num_deaths += other.num_deaths

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.num_deaths} workers died holding jobs that another took over"
        yield f"death to leased by another: {_quantiles(self.to_lease_s)}"
        yield f"  where Redis was not disturbed near it: {_quantiles(self.undisturbed_to_lease_s)}"
        yield f"  of suspects, which wait to run apart: {_quantiles(self.suspect_to_lease_s)}"
        yield f"death to next token: {_quantiles(self.to_token_s)}"


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "none"
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(len(ranked) * share))] for share in (0.5, 0.99))
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s, longest {ranked[-1]:.2f} s, of {len(ranked)} jobs"


def measure(
    client: Any,  # a redis-py client
    prefix: str,
    database_url: str,
    deaths: Sequence[Death],
    outages: Sequence[tuple[int, str]],
) -> Takeovers:
    """Compare every claim that ended with a death with the claim after it."""
    found = Takeovers()
    engine = sa.create_engine(database_url)
    harmed_ms = sorted(at_ms for at_ms, _ in outages)
    moved: list[tuple[str, int, int]] = []
    for death in deaths:
        claims = _claims_after(engine, death)
        found.num_deaths += bool(claims)
        is_undisturbed = _is_quiet(death.at_ms, harmed_ms)
        for job_id, why, next_ms in claims:
            passed_s = (next_ms - death.at_ms) / 1000
            (found.suspect_to_lease_s if why == "suspect" else found.to_lease_s).append(passed_s)
            if is_undisturbed and why != "suspect":
                found.undisturbed_to_lease_s.append(passed_s)
            moved.append((job_id, death.at_ms, next_ms))
    engine.dispose()
    found.to_token_s += _tokens_after(client, prefix, moved)
    return found


def _claims_after(engine: sa.Engine, death: Death) -> list[tuple[str, str, int]]:
    """Return (job, reason of its return, start of the next claim) of each job of the dead worker."""
    query = sa.text(
        "SELECT mine.job_id, mine.why, next.started_ms FROM attempts mine JOIN attempts next"
        " ON next.job_id = mine.job_id AND next.epoch = mine.epoch + 1"
        " WHERE mine.incarnation = :dead AND mine.why IN ('death', 'suspect')"
    )
    with engine.connect() as connection:
        return [(row[0], row[1], row[2]) for row in connection.execute(query, {"dead": death.incarnation})]


def _is_quiet(at_ms: int, harmed_ms: Sequence[int]) -> bool:
    near = bisect.bisect_left(harmed_ms, at_ms - QUIET_S * 1000)
    return near == len(harmed_ms) or harmed_ms[near] > at_ms + QUIET_S * 1000


def _tokens_after(client: Any, prefix: str, moved: Sequence[tuple[str, int, int]]) -> Iterator[float]:
    jobs = read_jobs(client, prefix, [job_id for job_id, _, _ in moved])
    for (_, died_ms, leased_ms), job in zip(moved, jobs, strict=True):
        times = [e.time_ms for entries in job.channels for e in entries or () if e.ids and e.time_ms >= leased_ms]
        if times:
            yield (min(times) - died_ms) / 1000
