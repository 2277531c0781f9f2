"""The deadline of the round trip that a thread makes, for the sockets under it: redis-py has one time-out for all."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from sluice.producer.operations.operation import try_s

_deadline_s: ContextVar[float | None] = ContextVar("deadline of a round trip", default=None)


@contextmanager
def bounded(deadline_s: float | None) -> Generator[None]:
    """Bound what this thread connects to and reads from by a deadline, as in `Ask`."""
    before_s = _deadline_s.get()
    try:
        _deadline_s.set(deadline_s)  # inside, so that a signal handler that raises leaves no deadline behind
        yield
    finally:
        _deadline_s.set(before_s)


def left_s() -> float | None:
    """Return how long this thread may wait now; None: as long as the socket's own time-out."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else try_s(deadline_s)


@cache
def bounded_class(connection_class: Any) -> Any:  # noqa: ANN401  # redis-py's connections share no typed base
    """Return a class of connections which connect within the deadline of the thread."""

    def connect(connection: Any) -> None:  # noqa: ANN401  # as above
        """Connect, unless it is connected."""
        bound_s = left_s()
        if bound_s is None or connection.is_connected:
            connection_class.connect(connection)
            return
        usual_s, usual_connect_s = connection.socket_timeout, connection.socket_connect_timeout
        connection.socket_timeout = min(usual_s or bound_s, bound_s)
        connection.socket_connect_timeout = min(usual_connect_s or bound_s, bound_s)
        try:
            connection_class.connect(connection)
        finally:
            connection.socket_timeout, connection.socket_connect_timeout = usual_s, usual_connect_s
        # The socket and the parser have copied the shorter one; -1 is the connection's own.
        connection.update_current_socket_timeout(-1)

    return type(f"Bounded{connection_class.__name__}", (connection_class,), {"connect": connect})
