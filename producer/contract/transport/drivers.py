"""The drivers of routines: one blocks, one runs on asyncio. Used by producers and workers.

A routine is a generator that decides, without I/O, what to send, repeat and raise. It yields actions, is sent the
result of each, or has what the action raised thrown in, and returns its result. `perform` carries out one action;
`RunAll` is carried out by the driver.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Action = TypeVar("Action")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RunAll:
    """Routines to run, on asyncio at the same time; the result is a list of theirs, or the first exception."""

    routines: Sequence[Generator[Any, Any, Any]]  # Any: as in `drive`


def drive(
    routine: Generator[Action | RunAll, Any, Result],  # Any: each action has its own result
    perform: Callable[[Action], Any],
    result: Any = None,  # noqa: ANN401  # as above
) -> Result:
    """Run a routine to its result; `result` is that of the action at which it stopped, if it has been started."""
    try:
        action = routine.send(result)
        while True:
            try:
                result = _run_all(action, perform) if isinstance(action, RunAll) else perform(action)
            except BaseException as error:  # noqa: BLE001  # the routine decides, and releases its connection
                action = routine.throw(error)
            else:
                action = routine.send(result)
    except StopIteration as stop:
        return stop.value


def _run_all(all_of: RunAll, perform: Callable[[Any], Any]) -> list[Any]:  # Any: as above
    return [drive(routine, perform) for routine in all_of.routines]


async def drive_async(
    routine: Generator[Action | RunAll, Any, Result],  # Any: as above
    perform: Callable[[Action], Awaitable[Any]],
    result: Any = None,  # noqa: ANN401  # as above
) -> Result:
    """Run a routine to its result, as `drive` does, awaiting each action."""
    try:
        action = routine.send(result)
        while True:
            try:
                result = await (_gather(action, perform) if isinstance(action, RunAll) else perform(action))
            except BaseException as error:  # noqa: BLE001  # as above
                action = routine.throw(error)
            else:
                action = routine.send(result)
    except StopIteration as stop:
        return stop.value


async def _gather(all_of: RunAll, perform: Callable[[Any], Awaitable[Any]]) -> list[Any]:  # Any: as above
    return await asyncio.gather(*(drive_async(routine, perform) for routine in all_of.routines))
