"""Threads for blocking calls: a server that hangs blocks neither the event loop, nor calls to others, nor the exit.

`asyncio.to_thread` would share a few threads between all calls, wait without a limit, and join its threads at exit.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Condition, Thread
from typing import Any, ParamSpec, TypeVar

from sluice.gateway.faults import StorageUnavailable
from sluice.producer.errors import HistoryUnavailable, ProducerError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
SQL_LIMIT_S = 5.0
"""How long a request waits for the database, in seconds."""


class Threads:
    """Threads for calls to one server. They start on demand, and end with the process. Changes with calls.

    Args:
        name: The name of the server, for errors and thread names.
        failure: The error of calls that take too long or are too many.
        num_threads: Calls that run at a time. A call that takes too long keeps its thread until it ends.
        max_waiting: Most calls that wait for a thread.
        limit_s: Time limit of a call, including its wait.
    """

    def __init__(
        self, name: str, failure: type[ProducerError], *, num_threads: int, max_waiting: int, limit_s: float
    ) -> None:
        self._name, self._failure = name, failure
        self._num_threads, self._max_waiting, self._limit_s = num_threads, max_waiting, limit_s
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}  # Any: calls return anything
        self._num_started, self._num_idle = 0, 0
        self._changed = Condition()

    async def run(
        self, call: Callable[Parameters, Result], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """Run a call on a thread. A call that takes too long may still complete, and its changes may be stored.

        Raises:
            ProducerError: the `failure`, if it takes too long or too many wait; and any error of the call.
        """
        future: Future[Result] = Future()
        self._add(future, partial(copy_context().run, call, *args, **options))
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._failure(f"{self._name}: no answer within {self._limit_s:g} s; try again later") from error
        finally:
            with self._changed:
                self._waiting.pop(future, None)

    def _add(self, future: Future[Result], call: Callable[[], Result]) -> None:
        with self._changed:
            if len(self._waiting) >= self._max_waiting:
                raise self._failure(f"{self._name}: {self._max_waiting} requests wait already; try again later")
            self._waiting[future] = call
            if self._num_started < self._num_threads and self._num_idle < len(self._waiting):
                self._num_started += 1
                # A daemon, so that a thread that hangs does not prevent the exit.
                Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            future, call = self._next()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                future.set_exception(error)
            del future, call  # they hold the request

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:  # Any: as in `_waiting`
        with self._changed:
            self._num_idle += 1
            while not self._waiting:
                self._changed.wait()
            self._num_idle -= 1
            future = next(iter(self._waiting))
            return future, self._waiting.pop(future)


SQL = Threads("the database", HistoryUnavailable, num_threads=8, max_waiting=200, limit_s=SQL_LIMIT_S)
"""Threads for the gateway's tables."""

HISTORY = Threads("the job history", HistoryUnavailable, num_threads=4, max_waiting=100, limit_s=SQL_LIMIT_S)
"""Threads for the job history, whose queries may be slow."""

FILES = Threads("the files", StorageUnavailable, num_threads=8, max_waiting=200, limit_s=30.0)
"""Threads for the contents of files. A call sends or reads up to 8 MiB."""

IDENTITY = Threads("the files", StorageUnavailable, num_threads=1, max_waiting=20, limit_s=2.0)
"""A thread for the storage's identity, which `/readyz` reads without waiting for other requests."""
