"""The drivers of routines: one blocks, one runs on asyncio. Used by producers and workers.

A routine is a generator that decides, without I/O, what to send, repeat and raise. It yields actions, is sent the
result of each, or has what the action raised thrown in, and returns its result. `perform` carries out one action.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

Action = TypeVar("Action")
Result = TypeVar("Result")


def drive(
    routine: Generator[Action, Any, Result],  # Any: each action has its own result
    perform: Callable[[Action], Any],
    result: Any = None,  # noqa: ANN401  # as above
) -> Result:
    """Run a routine to its result; `result` is that of the action at which it stopped, if it has been started."""
    try:
        action = routine.send(result)
        while True:
            try:
                result = perform(action)
            except BaseException as error:  # noqa: BLE001  # the routine decides, and releases its connection
                action = routine.throw(error)
            else:
                action = routine.send(result)
    except StopIteration as stop:
        return stop.value


async def drive_async(
    routine: Generator[Action, Any, Result],  # Any: as above
    perform: Callable[[Action], Awaitable[Any]],
    result: Any = None,  # noqa: ANN401  # as above
) -> Result:
    """Run a routine to its result, as `drive` does, awaiting each action."""
    try:
        action = routine.send(result)
        while True:
            try:
                result = await perform(action)
            except BaseException as error:  # noqa: BLE001  # as above
                action = routine.throw(error)
            else:
                action = routine.send(result)
    except StopIteration as stop:
        return stop.value
