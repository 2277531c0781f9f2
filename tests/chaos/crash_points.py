"""The tables of the crash-point tests: points where a process may die or lose its connection, and kinds of jobs.

A new feature adds its row: a round trip to `TRIPS`, a stage to `STAGES`, a kind of job to `KINDS_OF_JOBS`.
The last kind of job calls a function.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from sluice.protocol.scripts import load
from sluice.protocol.wire import JobOptions
from tests.chaos.faults.fault_proxy import Command, Fault, Matches, Moment
from tests.integration.jobs import Ask

NUM_JOBS = 50


class Scene(StrEnum):
    """The situation in which the fault occurs."""

    SERVING = "serving"
    """The victim and another worker serve."""

    RESUMING = "resuming"
    """The victim takes jobs that another worker began and gave back."""

    LEAVING = "leaving"
    """The victim was asked to hand over its jobs."""

    RECORDING = "recording"
    """The victim is the recorder."""

    MOVING = "moving"
    """The victim moves callbacks to rq."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A round trip of a process, recognised by its commands."""

    name: str
    matches: Matches
    scene: Scene = Scene.SERVING
    max_nth: int = 3
    """The fault occurs at one of the first so many."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of work inside a process: a name in `victim.STAGES`."""

    name: str
    scene: Scene = Scene.SERVING
    max_nth: int = 30


Point = Trip | Stage


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one point."""

    point: Point
    moment: Moment
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault}-{self.moment}-{self.point.name.replace(' ', '_')}"


# ---------------------------------------------------------------- what travels


def _script(name: str) -> Matches:
    sha = load(name).sha1.encode()
    return lambda command: command[0] == b"EVALSHA" and command[1] == sha


def _arguments(command: Command) -> Command:
    """Return a script's arguments."""
    return command[3 + int(command[2]) :]


def _advance_with_end(command: Command) -> bool:
    return _script("advance")(command) and _has_end(_arguments(command)[1])


def _has_end(progress: bytes) -> bool:
    """Whether one of the packed choices has an end (docs/reference/wire-format.md#advance)."""
    at = 0
    while at < len(progress):
        parts, num_letters = progress[at : at + 2]
        if parts > 1:
            return True
        at += 2 + num_letters + _NUMBERS.size
        num_bytes: int = _NUMBERS.unpack_from(progress, at - _NUMBERS.size)[-1]
        at += num_bytes
        if parts:
            at += _MEASUREMENTS
            at += 1 + progress[at]
            at += 4 + int.from_bytes(progress[at : at + 4], "little")
    return False


_NUMBERS = struct.Struct("<IBIII")
_MEASUREMENTS = 4 * 6
"""Bytes of the extras before their texts."""


def _give_back(*, deregister: bool) -> Matches:
    flag = b"1" if deregister else b"0"
    return lambda command: _script("give_back")(command) and _arguments(command)[1] == flag


def _command(name: bytes, about: bytes) -> Matches:
    return lambda command: command[0].startswith(name) and any(about in part for part in command[1:])


TRIPS: tuple[Trip, ...] = (
    Trip("pull", _script("pull")),
    # On a busy machine one call carries what many would.
    Trip("advance", _script("advance"), max_nth=5),
    Trip("advance with end", _advance_with_end, max_nth=3),
    Trip("put result", _script("put_result"), max_nth=8),
    Trip("beat", _script("beat"), max_nth=2),
    Trip("notification", _command(b"XREAD", b":bell"), max_nth=1),
    Trip("read channel", _command(b"XRANGE", b":channel:"), Scene.RESUMING, max_nth=6),
    Trip("give back", _give_back(deregister=False), Scene.LEAVING, max_nth=1),
    Trip("deregistration", _give_back(deregister=True), Scene.LEAVING, max_nth=1),
    Trip("recorder reads", _command(b"XREADGROUP", b":outbox"), Scene.RECORDING),
    Trip("recorder acknowledges", _command(b"EVAL", b"XACK"), Scene.RECORDING, max_nth=2),
    Trip("mover reads", _command(b"XREADGROUP", b":callbacks"), Scene.MOVING),
    Trip("mover gives to rq", _command(b"EVAL", b"rq:job:evt_"), Scene.MOVING, max_nth=8),
    Trip("mover acknowledges", _command(b"EVAL", b"XACK"), Scene.MOVING, max_nth=2),
)

STAGES: tuple[Stage, ...] = (
    Stage("add"),
    Stage("translate", max_nth=10),
    Stage("schedule"),
    Stage("execute"),
    Stage("commit"),
    Stage("release blocks", max_nth=10),
    Stage("publish"),
    Stage("sql transaction", Scene.RECORDING, max_nth=3),
)


def all_cases() -> Iterator[Case]:
    """Yield every case of the matrix."""
    for point in (*TRIPS, *STAGES):
        for moment in Moment:
            for fault in Fault:
                yield Case(point, moment, fault)


# ---------------------------------------------------------------- what is asked

KINDS_OF_JOBS: tuple[JobOptions, ...] = (
    JobOptions(temperature=0.0),
    JobOptions(temperature=0.8, top_p=0.9, top_k=40),
    JobOptions(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    JobOptions(stop=("e t", "qu")),
    JobOptions(stop=("a", "th"), min_tokens=15),
    JobOptions(logprobs=2),
    JobOptions(n=3),
    JobOptions(n=2, stop=("e ", "\n"), min_tokens=5),
    JobOptions(ignore_eos=True, logit_bias={101: 5.0}),
    JobOptions(structured={"regex": "The (cat|dog|bird) (sat|slept|sang) on a (mat|tree)[!?]{1,9}"}),
    JobOptions(embed=True),
    JobOptions(max_tokens=0, prompt_logprobs=2),
    JobOptions(echo=True, logprobs=1),
    JobOptions(temperature=0.9),
)
"""Null-model tokens depend on seed, prompt, choice and position only; masks, stops and ends on the tokens."""


TOOL = json.dumps({"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}})


def asks_of(seed: int) -> list[Ask]:
    """Return fifty jobs of all kinds: streamed or not, of two tenants, of several lengths."""
    return [
        Ask(
            prompt=f"tell me {number}" * (1 + number % 4),
            options=_options(number),
            tools=(TOOL,) if number % len(KINDS_OF_JOBS) == len(KINDS_OF_JOBS) - 1 else (),
            seed=seed * NUM_JOBS + number,
            stream=number % 5 != 0,
            priority=number % 3,
            tenant=("ant", "bee")[number % 2],
        )
        for number in range(NUM_JOBS)
    ]


def _options(number: int) -> JobOptions:
    kind = KINDS_OF_JOBS[number % len(KINDS_OF_JOBS)]
    is_read = kind.embed or kind.max_tokens == 0
    return kind if is_read else replace(kind, max_tokens=20 + number)
