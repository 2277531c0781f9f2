"""Access of requests to the job history."""

import threading
from collections.abc import Callable
from typing import TypeVar

from sluice.gateway.errors import SERVER, HttpError
from sluice.gateway.threads import HISTORY, SQL_LIMIT_S
from sluice.history.queries import History
from sluice.producer.errors import HistoryUnavailable

Result = TypeVar("Result")


class Records:
    """The history of one database, opened at its first use. Changes as it is opened.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._history: History | None = None
        self._opening = threading.Lock()

    async def read(self, query: Callable[[History], Result]) -> Result:
        """Run a query on a thread.

        Raises:
            HttpError: 503, the history cannot be read in time, or too many requests wait for it.
        """
        try:
            return await HISTORY.run(self._read, query)
        except HistoryUnavailable as error:
            raise _unavailable(
                "the job history cannot be read"
            ) from error  # its own message contains the database's address

    async def read_if_possible(self, query: Callable[[History], Result]) -> Result | None:
        """Run a query as `read` does; return None if the history cannot be read."""
        try:
            return await self.read(query)
        except HttpError:
            return None

    def close(self) -> None:
        """Close the connections."""
        if self._history is not None:
            self._history.__exit__(None, None, None)

    def _read(self, query: Callable[[History], Result]) -> Result:
        with self._opening:
            if self._history is None:
                self._history = History(self._url, patience_s=SQL_LIMIT_S).__enter__()
        return query(self._history)


def _unavailable(message: str) -> HttpError:
    return HttpError(503, SERVER, message, "history_unavailable", headers={"retry-after": "1"})
