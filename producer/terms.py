"""How durable the submits of one client are: asked for by the caller, else by the client, else by the queue's settings,
which also say how many partitions it has.

A server that cannot promise it is refused before anything is sent. What it says is remembered for a while.
"""

from dataclasses import dataclass, field
from time import monotonic

from producer.commands import Ask, Operation, Queue, Reply
from producer.contract import errors as contract_errors
from producer.contract.durability import (
    FACTS,
    MEMORY,
    NOTHING_ASKED,
    Assurance,
    Durability,
    keeping_in,
    read_durability,
)
from producer.errors import DurabilityRefused, InvalidJob, InvalidSetting

KEPT_S = 10.0
"""A queue's default, and what its server can promise, are asked for again after this long."""

TIMEOUT_S = 5.0
"""Longest wait for a disk or for replicas, far below the time after which a silent connection counts as dead."""


@dataclass(slots=True, eq=False)
class Terms:
    """What one client asks for. Changes: it remembers what the queue's server said."""

    default: Durability | None = None
    """Of calls that do not say it; None: as the queue says."""

    timeout_s: float = TIMEOUT_S
    _known: dict[Durability | None, tuple[Assurance, float]] = field(
        default_factory=dict[Durability | None, tuple[Assurance, float]]
    )

    def agree(self, queue: Queue, asked: str | None) -> Operation[Assurance]:
        """What is to be asked of the server behind the jobs of a submit.

        Raises:
            InvalidJob: `asked` is no durability.
            DurabilityRefused: this server cannot promise it.
        """
        wanted = self.default if asked is None else read(asked)
        if wanted == MEMORY:
            return NOTHING_ASKED
        found, since_s = self._known.get(wanted, (None, 0.0))
        if found is None or monotonic() - since_s > KEPT_S:
            found = yield from self._ask(queue, wanted)
            self._known[wanted] = found, monotonic()
        return found

    def _ask(self, queue: Queue, wanted: Durability | None) -> Operation[Assurance]:
        if wanted is None:
            config = queue.keys(0).key("config")
            durability, partitions = yield Ask((("HGET", config, "durability"), ("HGET", config, "partitions")))
            _check_partitions(queue, partitions)
            wanted = _default(queue, durability)
        if wanted == MEMORY:
            return NOTHING_ASKED
        keeping = keeping_in((yield Ask(FACTS, is_lenient=True)))
        objection = "this user may not ask: allow it INFO." if keeping is None else keeping.objection(wanted)
        if keeping is None or objection is not None:
            raise DurabilityRefused(f"this server does not promise {wanted}: {objection} Nothing was submitted.")
        return Assurance(wanted, round(self.timeout_s * 1000), keeping.has_waitaof)


def read(text: str) -> Durability:
    """The durability that a text names.

    Raises:
        InvalidJob: it names none.
    """
    try:
        return read_durability(text)
    except contract_errors.InvalidJob as error:
        raise InvalidJob(str(error)) from error


def _check_partitions(queue: Queue, stated: Reply) -> None:
    """Refuse to submit where no worker would look; before its first worker a queue states nothing."""
    num_served = int(stated) if isinstance(stated, bytes) and stated.isdigit() else queue.partitions
    if num_served != queue.partitions:
        raise InvalidSetting(
            f"the workers of queue {queue.name!r} serve {num_served} partitions, and this client was made for "
            f"{queue.partitions}: set SLUICE_PARTITIONS={num_served}"
        )


def _default(queue: Queue, reply: Reply) -> Durability:
    if not isinstance(reply, bytes):
        return MEMORY
    try:
        return read_durability(reply.decode(errors="replace"))
    except contract_errors.InvalidJob as error:
        raise InvalidSetting(f"the settings of queue {queue.name!r} are wrong: {error}") from error
