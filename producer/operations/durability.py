"""Resolve the durability of a submit: the caller's, else the client's, else the queue's setting.

A server that cannot guarantee it is refused before any job is sent. Facts about the server are cached for a while.
"""

from dataclasses import dataclass, field
from time import monotonic

from sluice.producer.errors import DurabilityRefused, InvalidJob, InvalidSetting
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import KEPT_S, Queue
from sluice.protocol.durability import (
    FACTS,
    MEMORY,
    NOTHING_ASKED,
    Durability,
    DurabilityCheck,
    persistence_in,
    read_durability,
)

TIMEOUT_S = 5.0
"""Longest wait for a disk or for replicas, in seconds; far below the timeout of a silent connection."""


@dataclass(slots=True, eq=False)
class DurabilityPolicy:
    """The durability of the submits of one client. Caches the facts of the server."""

    default: Durability | None = None
    """The durability of calls without one; None: the queue's setting."""

    timeout_s: float = TIMEOUT_S
    _known: dict[Durability, tuple[DurabilityCheck, float]] = field(
        default_factory=dict[Durability, tuple[DurabilityCheck, float]]
    )

    def resolve(self, queue: Queue, asked: str | None, partition: int = 0) -> Operation[DurabilityCheck]:
        """Return the check that confirms the durability of a submit.

        Args:
            queue: The queue of the jobs.
            asked: The caller's durability, if any.
            partition: A partition of the jobs, which is read if partition 0 does not answer.

        Raises:
            InvalidJob: `asked` is not a durability.
            InvalidSetting: the workers serve another number of partitions, or the queue's setting is wrong.
            DurabilityRefused: this server cannot guarantee the durability.
        """
        level = self.default if asked is None else read_durability(asked)
        default = yield from queue.read(partition)
        if level is None:
            level = _default(queue, default)
        if level == MEMORY:
            return NOTHING_ASKED
        check, since_s = self._known.get(level, (None, 0.0))
        if check is None or monotonic() - since_s > KEPT_S:
            check = yield from self._ask(level)
            self._known[level] = check, monotonic()
        return check

    def _ask(self, level: Durability) -> Operation[DurabilityCheck]:
        persistence = persistence_in((yield Ask(FACTS, is_lenient=True)))
        objection = "this user may not ask: allow it INFO." if persistence is None else persistence.objection(level)
        if persistence is None or objection is not None:
            raise DurabilityRefused(f"this server cannot guarantee {level}: {objection} Nothing was submitted.")
        # At least 1, because 0 means no limit for WAIT and WAITAOF.
        return DurabilityCheck(level, max(1, round(self.timeout_s * 1000)), persistence.has_waitaof)


def _default(queue: Queue, reply: Reply) -> Durability:
    if not isinstance(reply, bytes):
        return MEMORY
    try:
        return read_durability(reply.decode(errors="replace"))
    except InvalidJob as error:
        raise InvalidSetting(f"the settings of queue {queue.name!r} are wrong: {error}") from error
