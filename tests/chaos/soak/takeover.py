"""Measure the time from a death to the next owner and to the next token, from history and channels."""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tests.chaos.checker.reading import read_jobs
from tests.chaos.soak.nemesis import Death

QUIET_S = 8.0
"""A death counts if Redis had no fault within this long before and after it."""


SEEN, UNSEEN = "death seen by the parent", "death with the parent"
LEASED, TOKEN = "to leased by another", "to next token"
QUIET, SUSPECT = "  where Redis was not disturbed near it", "  of suspects, which wait to run apart"


@dataclass(slots=True, eq=False)
class Takeovers:
    """Seconds from each death, by job, under the line of the report that has them."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_deaths: int = 0

    def add(self, other: "Takeovers") -> None:
        """Sum up."""
        for line, values in other.seconds.items():
            self.seconds[line] += values
        self.num_deaths += other.num_deaths

    def note(self, death: Death, until: str, why: str, passed_s: float, *, is_quiet: bool) -> None:
        """Add one job's time from a death until it was leased, or until its next token."""
        title = f"{SEEN if death.is_seen else UNSEEN}, {until}"
        if why == "suspect":
            self.seconds[f"{title},{SUSPECT}"].append(passed_s)
            return
        self.seconds[title].append(passed_s)
        if is_quiet:
            self.seconds[f"{title},{QUIET}"].append(passed_s)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.num_deaths} workers died holding jobs that another took over"
        for seen in (SEEN, UNSEEN):
            for until in (LEASED, TOKEN):
                title = f"{seen}, {until}"
                yield f"{title}: {_quantiles(self.seconds[title])}"
                for part in (QUIET, SUSPECT):
                    yield f"{part}: {_quantiles(self.seconds[f'{title},{part}'])}"


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
    for death in deaths:
        claims = _claims_after(engine, death)
        found.num_deaths += bool(claims)
        is_quiet = _is_quiet(death.at_ms, harmed_ms)
        tokens_ms = _next_tokens_ms(client, prefix, claims)
        for (_, why, leased_ms), token_ms in zip(claims, tokens_ms, strict=True):
            found.note(death, LEASED, why, (leased_ms - death.at_ms) / 1000, is_quiet=is_quiet)
            if token_ms is not None:
                found.note(death, TOKEN, why, (token_ms - death.at_ms) / 1000, is_quiet=is_quiet)
    engine.dispose()
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


def _next_tokens_ms(client: Any, prefix: str, claims: Sequence[tuple[str, str, int]]) -> Iterator[int | None]:
    """Return when each job had its next token; None if it had none."""
    jobs = read_jobs(client, prefix, [job_id for job_id, _, _ in claims])
    for (_, _, leased_ms), job in zip(claims, jobs, strict=True):
        times = [e.time_ms for entries in job.channels for e in entries or () if e.ids and e.time_ms >= leased_ms]
        yield min(times, default=None)
