"""The drivers of routines: some block, their twins run on asyncio. Used by producers and workers.

A routine is a generator that decides, without I/O, what to send, repeat and raise. It yields actions, is sent the
result of each, or has what the action raised thrown in, and returns its result. `perform` carries out one action;
`RunAll` is carried out by the driver. Some routines yield events, for the caller, between their actions.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
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


def drive_events(
    routine: Generator[Any, Any, None],  # Any: no type says which of its values are actions
    perform: Callable[[Any], Any],
    actions: tuple[type[Any], ...],
) -> Generator[Any]:
    """Run a routine that yields events too: what is none of `actions`. Yield them, and None before each action."""
    try:
        found = next(routine)
        while True:
            if not isinstance(found, actions):
                yield found
                found = next(routine)
                continue
            yield None
            try:
                result = perform(found)
            except BaseException as error:  # noqa: BLE001  # as above
                found = routine.throw(error)
            else:
                found = routine.send(result)
    except StopIteration:
        return


async def drive_events_async(
    routine: Generator[Any, Any, None],  # Any: as above
    perform: Callable[[Any], Awaitable[Any]],
    actions: tuple[type[Any], ...],
) -> AsyncGenerator[Any]:
    """Run a routine that yields events too, as `drive_events` does, awaiting each action."""
    try:
        found = next(routine)
        while True:
            if not isinstance(found, actions):
                yield found
                found = next(routine)
                continue
            yield None
            try:
                result = await perform(found)
            except BaseException as error:  # noqa: BLE001  # as above
                found = routine.throw(error)
            else:
                found = routine.send(result)
    except StopIteration:
        return
