"""Arrivals to tune for, from a file or from the history."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from sys import float_info
from typing import cast

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from sluice.history import tables
from sluice.history.database import HistoryError, opened_database, why
from sluice.worker.errors import ConfigError, NotReady
from sluice.worker.tune.replay import Arrival

_FIELDS = ("at_s", "prompt", "prompt_tokens", "output_tokens", "max_tokens")
_MAX_PROBLEMS = 5


def read_traffic(path: Path, count_tokens: Callable[[str], int], *, rate: float) -> list[Arrival]:
    """Read a file of JSON lines: `{"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 60, "max_tokens": 256}`.

    `prompt` may replace `prompt_tokens`, and `max_tokens` may replace `output_tokens`. Lines without `at_s` arrive as a
    Poisson process of `rate` per second.

    Raises:
        ConfigError: lines are wrong. Each kind of problem is one sentence, with its first line and their number.
    """
    arrivals: list[Arrival] = []
    lines_by_problem: dict[str, list[int]] = {}
    num_timed = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            read = json.loads(line)
            arrivals.append(_arrival(read, count_tokens))
            num_timed += "at_s" in read
        except (ValueError, KeyError) as error:
            lines_by_problem.setdefault(_sentence(error), []).append(number)
    problems = _summary(path, lines_by_problem)
    if not problems and num_timed not in (0, len(arrivals)):
        problems.append(f"{path}: at_s is on {num_timed} of {len(arrivals)} lines: give it on all or on none")
    if not (problems or arrivals):
        problems.append(f"{path}: there are no lines")
    if problems:
        raise ConfigError(problems)
    return _from_zero(arrivals) if num_timed else _spread(arrivals, rate)


def read_history(url: str, queues: Sequence[str], *, hours: float, most: int) -> list[Arrival]:
    """Read the arrivals of the newest done jobs of `queues`: at most `most`, within `hours` before the newest.

    Raises:
        NotReady: the history cannot be read.
        ConfigError: the history has no such job.
    """
    jobs = tables.jobs.c
    newest = (
        sa.select(sa.func.max(jobs.submitted_ms)).where(jobs.queue.in_(queues), jobs.state == "done").scalar_subquery()
    )
    query = (
        sa.select(jobs.submitted_ms, jobs.prompt_tokens, jobs.output_tokens, jobs.choices)
        .where(jobs.queue.in_(queues), jobs.state == "done", jobs.submitted_ms >= newest - hours * 3_600_000)
        .where(jobs.prompt_tokens > 0, jobs.output_tokens > 0)
        .order_by(jobs.submitted_ms.desc())
        .limit(most)
    )
    try:
        with opened_database(url) as engine, engine.connect() as connection:
            rows = connection.execute(query).all()
    except (HistoryError, SQLAlchemyError) as error:
        reason = why(error) if isinstance(error, SQLAlchemyError) else str(error)
        raise NotReady(f"the history cannot be read: {reason}") from error
    if not rows:
        named = ", ".join(map(repr, queues))
        raise ConfigError([f"SLUICE_DATABASE_URL: the history has no job of {named} that is done: give a file"])
    return _from_zero(
        [
            Arrival(at_s=row[0] / 1000, num_prompt_tokens=row[1], num_output_tokens=max(1, row[2] // (row[3] or 1)))
            for row in rows
        ]
    )


def _summary(path: Path, lines_by_problem: Mapping[str, Sequence[int]]) -> list[str]:
    """Return one sentence for each of the first kinds of problem, and one for the others."""
    kinds = list(lines_by_problem.items())
    shown = [
        f"{path}:{numbers[0]}{f' and {len(numbers) - 1} more lines' if numbers[1:] else ''}: {problem}"
        for problem, numbers in kinds[:_MAX_PROBLEMS]
    ]
    num_left = sum(len(numbers) for _, numbers in kinds[_MAX_PROBLEMS:])
    return [*shown, *([f"{path}: {num_left} more lines are wrong in other ways"] if num_left else [])]


def _arrival(line: object, count_tokens: Callable[[str], int]) -> Arrival:
    if not isinstance(line, dict):
        raise ValueError(f"must be an object, got {json.dumps(line)}")  # noqa: TRY004 - a line that is wrong, like the others
    return _arrival_of(cast("dict[str, object]", line), count_tokens)  # keys in JSON are text


def _arrival_of(line: dict[str, object], count_tokens: Callable[[str], int]) -> Arrival:
    if "custom_id" in line or "body" in line:
        raise ValueError(f"is a job of a batch file; a line of traffic has {', '.join(_FIELDS)}")
    unknown = sorted(set(line) - set(_FIELDS))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not one of {', '.join(_FIELDS)}")
    prompt = line.get("prompt")
    num_prompt_tokens = count_tokens(prompt) if isinstance(prompt, str) else _whole(line, "prompt_tokens")
    most = _whole(line, "max_tokens") if "max_tokens" in line else 0
    num_output_tokens = _whole(line, "output_tokens") if "output_tokens" in line or not most else most
    at_s = line.get("at_s", 0.0)
    if not isinstance(at_s, int | float) or not abs(at_s) <= float_info.max:  # JSON in Python has NaN and Infinity
        raise ValueError(f"at_s must be seconds, got {at_s!r}")
    return Arrival(
        at_s=float(at_s), num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, max_tokens=most
    )


def _whole(line: dict[str, object], name: str) -> int:
    value = line[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be 1 or more, got {value!r}")
    return value


def _sentence(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _from_zero(arrivals: Sequence[Arrival]) -> list[Arrival]:
    first_s = min(arrival.at_s for arrival in arrivals)
    moved = [replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals]
    return sorted(moved, key=lambda arrival: arrival.at_s)


def _spread(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Let `arrivals` come as a Poisson process, the same in each call: its gaps take `len(arrivals) / rate` seconds."""
    random = Random(0)
    gaps = [random.expovariate(1.0) for _ in arrivals]
    scale = len(arrivals) / rate / sum(gaps)
    times = accumulate((gap * scale for gap in gaps[:-1]), initial=0.0)
    return [replace(arrival, at_s=at_s) for arrival, at_s in zip(arrivals, times, strict=True)]
