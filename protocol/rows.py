"""Read what scripts store of a job: its row and its lease, as docs/reference/keys.md describes them."""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from sluice.protocol.errors import WireError
from sluice.protocol.packing import unpack_from_script
from sluice.protocol.states import RECORDED, JobState

_HEAD = struct.Struct("<ccBBBIIIIII" + 11 * "IH")
"""The fields before the entry. A number of six bytes is read as its lower four and its upper two."""

_VERSION = b"1"
_LEASE, _CHOICE = struct.Struct("<IIHBccB"), struct.Struct("<IB")

LETTERS: Mapping[JobState, str] = {state: state[0] for state in RECORDED}
"""The letter of each state, which is the second byte of a row."""

_STATES = {letter.encode(): state for state, letter in LETTERS.items()}


def state_command(row_key: str) -> tuple[str, str, int, int]:
    """Return the command that reads the state of a row alone; its reply is empty if there is no row."""
    return ("GETRANGE", row_key, 1, 1)


def read_state(reply: object) -> JobState | None:
    """Return the state from the reply to `state_command`; None if there is no row, or it cannot be read."""
    return _STATES.get(reply) if isinstance(reply, bytes) else None


class Row(NamedTuple):
    """A job as a script stored it. A named tuple, as is a lease: one is made per job."""

    state: JobState
    priority: int
    choices: int
    attempt: int
    epoch: int
    failures: int
    prompt_tokens: int
    cost: int
    submitted_ms: int
    started_ms: int
    first_scheduled_ms: int | None
    first_token_ms: int | None
    digest: bytes
    seed: bytes
    spec: bytes
    rare: dict[bytes, Any]  # Any: numbers and texts
    """Fields that only some jobs have."""


def read_row(row: bytes) -> Row:
    """Read a row that a script has checked.

    Raises:
        WireError: it is none.
    """
    try:
        return _read_row(row)
    except (struct.error, ValueError, LookupError) as error:
        raise WireError(f"not a job's row: {error}") from error


def _read_row(row: bytes) -> Row:
    head = _HEAD.unpack_from(row)
    if head[0] != _VERSION:
        raise WireError(f"a job's row of version {head[0]!r}")
    long = [low | high << 32 for low, high in zip(head[11::2], head[12::2], strict=True)]
    at = row.index(b"\0", row.index(b"\0", _HEAD.size) + 1) + 1
    digest_from, at = at + 2, at + 2 + int.from_bytes(row[at : at + 2], "little")
    digest = row[digest_from:at]
    seed_from, at = at + 1, at + 1 + row[at]
    rare_from = at + 4
    rare_to = rare_from + int.from_bytes(row[at:rare_from], "little")
    return Row(
        state=_STATES[head[1]],
        priority=head[2],
        choices=head[3],
        attempt=head[6],
        epoch=head[7],
        failures=head[8],
        prompt_tokens=long[0],
        cost=long[1],
        submitted_ms=long[3],
        started_ms=long[4],
        first_scheduled_ms=long[8] or None,
        first_token_ms=long[9] or None,
        digest=digest,
        seed=row[seed_from:at],
        spec=row[rare_to:],
        rare=unpack_from_script(row[rare_from:rare_to]) if rare_to > rare_from else {},
    )


class Lease(NamedTuple):
    """What the list of a worker says of one job."""

    epoch: int
    number: int
    """Of the pull that leased it."""

    mark: bytes
    """`h`: held though it does not fit; `r`: taken over from a dead worker; `b`: both; a space: neither."""

    offsets: tuple[int, ...]
    """Tokens on the channel of each choice."""

    ended: tuple[bool, ...]


def read_lease(packed: bytes) -> Lease:
    """Read a lease that a script has written."""
    epoch, low, high, _, _, mark, _ = _LEASE.unpack_from(packed)
    choices = list(_CHOICE.iter_unpack(packed[_LEASE.size :]))
    return Lease(
        epoch, low | high << 32, mark, tuple([at for at, _ in choices]), tuple([end != 0 for _, end in choices])
    )
