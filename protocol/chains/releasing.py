"""Release the chains of a queue. No I/O: generators yield the commands of a round trip, and get replies.

Any number of processes may do this at once, and each may die at any step:

1. The ends of jobs for which chains wait are read, a slice at a time. An end that does not decide is noted (`HSETNX`),
   so that it still counts once the job's row has expired.
2. What is decided, with the outputs that prompts use, is written once (`HSETNX`): later looks follow it.
3. The jobs are submitted under the ids that they have had since their submit. A repetition is answered that they are
   duplicates. Jobs that must not run are flagged (`ChainKeys.cancelled`), submitted delayed and cancelled at once, so
   that they end as others do.
4. A job that was submitted is no longer blocked (`HDEL`); a chain without blocked jobs is removed.

A blocked job that was cancelled is flagged too, and a look ends it, or cancels it if it was
released meanwhile.
"""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from sluice.protocol import limits
from sluice.protocol.calls import AGAIN, FULL, PASSING, Conflict, FromNow, NewJob, Refused, SubmitReply, cancel, submit
from sluice.protocol.chains.chain import (
    DONE,
    ENDS,
    GONE,
    Chain,
    ChainKeys,
    blocked_of,
    read_blocked,
    read_chain,
    read_jobs,
    submitted_ms,
)
from sluice.protocol.chains.outputs import rendered
from sluice.protocol.errors import InvalidJob, WireError
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import UNREADABLE, pack, unpack
from sluice.protocol.redis.error_kinds import ErrorKind, classify
from sluice.protocol.redis.execution import Command, Reply, command_of
from sluice.protocol.rows import LETTERS, read_state, state_command
from sluice.protocol.wire import JobId, decode_result

SLICE = 256
"""Entries of `ChainKeys.after`, and cancelled jobs, that one look reads."""

MAX_OUTPUTS_BYTES = 16 * 1024 * 1024
"""Most bytes of the outputs that one chain uses."""

ABANDONED_MS = 600_000
"""Time after which the parts of a chain whose submit has not completed are removed."""

_NEVER = FromNow(10 * 365 * 86_400_000)

Result = TypeVar("Result")
Steps: TypeAlias = Generator[tuple[Command, ...], Sequence[Reply], Result]


class Released(NamedTuple):
    """Jobs of one chain that were submitted, here or by another process at the same moment."""

    chain_id: str
    num_jobs: int
    reason: str | None
    """Why they were cancelled; None if they may run."""


@dataclass(slots=True, eq=False)
class ChainLook:
    """What one look at the chains did. Changes during the look."""

    released: list[Released] = field(default_factory=list[Released])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """A chain, and why it, or one of its jobs, was not released; or a released job, and why it was not cancelled."""

    full: set[tuple[int, str | None]] = field(default_factory=set[tuple[int, str | None]])
    """Partitions that take no more jobs of a tenant, or of all (None): these are left to the next look."""

    away: dict[int, Exception] = field(default_factory=dict[int, Exception])
    """Partitions that do not answer, each with its error: they are asked once, as each time may take a timeout."""

    def is_full(self, job_id: JobId) -> bool:
        """Return whether a job is left to the next look."""
        partition, tenant, _ = split_job_id(job_id)
        return not self.full.isdisjoint({(partition, None), (partition, tenant)})

    def note_full(self, job_id: JobId, refused: Refused) -> None:
        """Note that a job was refused, if it was for lack of room."""
        partition, tenant, _ = split_job_id(job_id)
        if refused.reason in FULL:
            self.full.add((partition, tenant if refused.reason == "tenant_full" else None))


def ends_of(queue: QueueKeys, job_ids: Sequence[JobId]) -> Steps[dict[JobId, str]]:
    """Return the letter of the end of each job that has ended: `GONE` if the queue has neither a row nor a blocked job.

    Jobs whose partition does not answer are left out.
    """
    rows = tuple(state_command(_keys_of(queue, job_id).job(job_id)) for job_id in job_ids)
    letters = dict(zip(job_ids, (yield rows) if rows else (), strict=True))
    absent = [job_id for job_id, letter in letters.items() if letter == b""]
    if absent:
        # First whether it is blocked, then its row: a released job is there before it is no longer blocked.
        [values] = yield (("HMGET", ChainKeys(queue).blocked, *absent),)
        blocked = dict.fromkeys(absent) if isinstance(values, Exception) else read_blocked(absent, values)
        again = [job_id for job_id in absent if job_id not in blocked]
        rows = tuple(state_command(_keys_of(queue, job_id).job(job_id)) for job_id in again)
        letters.update(dict.fromkeys(blocked))
        letters.update(zip(again, (yield rows) if rows else (), strict=True))
    found = {job_id: _letter(reply) for job_id, reply in letters.items()}
    return {job_id: letter for job_id, letter in found.items() if letter in ENDS}


def _letter(reply: Reply) -> str:
    state = read_state(reply)
    return GONE if reply == b"" else LETTERS[state] if state is not None else ""


def _keys_of(queue: QueueKeys, job_id: str) -> QueueKeys:
    return QueueKeys(queue.queue, split_job_id(job_id)[0])


@dataclass(slots=True, eq=False)
class ChainWatch:
    """One process's look at the chains of a queue. Changes with each look."""

    queue: QueueKeys
    """Partition 0 of the queue."""

    _place: str = field(default="-", init=False)
    """Where the next slice of `ChainKeys.after` begins."""

    def release(self, look: ChainLook, ended: Collection[str] = ()) -> Steps[None]:
        """End cancelled jobs, and release the chains that wait for `ended`; without these, those of the next slice.

        Raises:
            Exception: a reply that is an error.
        """
        keys = ChainKeys(self.queue)
        if ended and not _sound((yield (("EXISTS", keys.after),)))[0]:
            return
        flagged, *found = _sound((yield (("HRANDFIELD", keys.cancelled, SLICE), *self._reads(ended))))
        members = [_member(member) for part in found for member in part]
        by_chain = yield from self._flagged(look, [JobId(name) for name in map(_text, flagged) if _is_job_id(name)])
        for chain_id, job_ids in by_chain.items():
            yield from self._guarded(look, chain_id, _cancel_blocked(keys, look, chain_id, job_ids))
        parents = [parent for parent in dict.fromkeys(parent for parent, _ in members) if _is_job_id(parent)]
        ends = yield from ends_of(self.queue, parents)
        if not ended:
            self._move_on(members, ends)
        for parent, chain_id in members:
            if parent in ends:
                yield from self._guarded(look, chain_id, _advance(keys, look, chain_id, parent, ends[parent]))

    def _reads(self, ended: Collection[str]) -> Iterator[Command]:
        after = ChainKeys(self.queue).after
        for job_id in ended:
            yield ("ZRANGEBYLEX", after, f"[{job_id} ", f"({job_id}!", "LIMIT", 0, SLICE)
        if not ended:
            yield ("ZRANGEBYLEX", after, self._place, "+", "LIMIT", 0, SLICE)

    def _move_on(self, members: Sequence[tuple[JobId, str]], ends: Mapping[JobId, str]) -> None:
        """Set where the next slice begins: after this one, and after all chains of a last job that has not ended."""
        self._place = "-"
        if len(members) == SLICE:
            parent, chain_id = members[-1]
            self._place = f"({parent} {chain_id}" if parent in ends else f"({parent}!"

    def _flagged(self, look: ChainLook, job_ids: Sequence[JobId]) -> Steps[dict[str, list[JobId]]]:
        """Cancel the flagged jobs that are not blocked any more; return the others by chain."""
        keys = ChainKeys(self.queue)
        if not job_ids:
            return {}
        values, reasons = _sound((yield (("HMGET", keys.blocked, *job_ids), ("HMGET", keys.cancelled, *job_ids))))
        blocked, by_chain = read_blocked(job_ids, values), dict[str, list[JobId]]()
        for job_id, (chain_id, _) in blocked.items():
            by_chain.setdefault(chain_id, []).append(job_id)
        rest = {job_id: _text(reason) for job_id, reason in zip(job_ids, reasons, strict=True) if job_id not in blocked}
        by_partition: dict[QueueKeys, dict[JobId, str]] = {}
        for job_id, reason in rest.items():
            by_partition.setdefault(_keys_of(self.queue, job_id), {})[job_id] = reason
        for there in by_partition.values():
            yield from self._guarded(look, next(iter(there)), _cancel_released(keys, look, there))
        return by_chain

    def _guarded(self, look: ChainLook, chain_id: str, steps: Steps[None]) -> Steps[None]:
        try:
            yield from steps
        except (*UNREADABLE, _NoReplyError) as error:  # WireError and InvalidJob are ValueErrors
            look.problems.append((chain_id, str(error)))


def _sound(replies: Sequence[Reply]) -> list[Any]:  # Any: replies of different commands
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return list(replies)


class _NoReplyError(Exception):
    """The partition of a job replies with an error: a problem of its chain, unlike one of the keys of all chains."""


def _ask(look: ChainLook, keys: QueueKeys, what: str, command: Command) -> Steps[Any]:  # Any: a reply to any command
    """Send a command to the partition of a job, unless that does not answer in this look.

    Raises:
        _NoReplyError: the reply is an error.
    """
    error = look.away.get(keys.partition)
    if error is None:
        [reply] = yield (command,)
        if not isinstance(reply, Exception):
            return reply
        error = reply
        if classify(error) is ErrorKind.UNAVAILABLE:
            look.away[keys.partition] = error
    raise _NoReplyError(f"{what}: {error}") from error


def _member(data: object) -> tuple[JobId, str]:
    parent, _, chain_id = _text(data).partition(" ")
    return JobId(parent), chain_id


def _is_job_id(text: str) -> bool:
    try:
        split_job_id(text)
    except WireError:
        return False
    return True


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


# ---------------------------------------------------------------- what is decided


def _advance(keys: ChainKeys, look: ChainLook, chain_id: str, parent: str, letter: str) -> Steps[None]:
    """Note that a job for which a chain waits has ended; release or cancel the chain if that decides."""
    note = ("HSETNX", keys.ends, f"{chain_id} {parent}", letter)
    data, decision, _ = _sound((yield (("HGET", keys.chains, chain_id), ("HGET", keys.ends, chain_id), note)))
    if data is None:
        return (yield from _remove_rest(keys, chain_id, parent, decision))
    chain = read_chain(chain_id, data)
    if decision is None:
        [noted] = _sound((yield (("HMGET", keys.ends, *map(chain.end_of, chain.after.ids)),)))
        ends = {job_id: _text(letter) for job_id, letter in zip(chain.after.ids, noted, strict=True) if letter}
        decided = chain.after.decided(ends)
        if decided is None:
            yield (("ZREM", keys.after, f"{parent} {chain_id}"),)
            return
        if decided and all(map(look.is_full, chain.job_ids)):
            return  # before the server holds their outputs twice
        decision = yield from _decide(keys, look, chain, ends, None if decided else _why_not(ends))
    reason, outputs, _ = unpack(decision)
    yield from _carry_out(keys, look, chain, reason, outputs)


def _decide(
    keys: ChainKeys, look: ChainLook, chain: Chain, ends: Mapping[JobId, str], reason: str | None
) -> Steps[bytes]:
    """Write what is decided, once; return what counts: why to cancel, outputs, the jobs waited for."""
    outputs = dict[int, str]()
    if reason is None and chain.outputs:
        outputs, reason = yield from _outputs(keys, look, chain, ends)
    write = ("HSETNX", keys.ends, chain.id, pack([reason, outputs, chain.after.ids]))
    return _sound((yield (write, ("HGET", keys.ends, chain.id))))[1]


def _why_not(ends: Mapping[JobId, str]) -> str:
    job_id, letter = next((job_id, letter) for job_id, letter in ends.items() if ENDS.get(letter) != "done")
    how = "has gone from the queue" if letter == GONE else f"has ended as {ENDS.get(letter, letter)}"
    return f"Job {job_id}, for which it waited, {how}."


def _outputs(
    keys: ChainKeys, look: ChainLook, chain: Chain, ends: Mapping[JobId, str]
) -> Steps[tuple[dict[int, str], str | None]]:
    """Return the outputs that a chain's prompts use, or why there are none."""
    ids, on_failure = chain.after.ids, chain.after.on_failure
    # With `any`, those that have not ended have no output yet.
    wanted = {place: ids[place] for place in chain.outputs if on_failure == "release" or ends.get(ids[place]) == DONE}
    outputs = dict[int, str]()
    for place, job_id in wanted.items():
        there = _keys_of(keys.queue, job_id)
        data = yield from _ask(look, there, f"output of job {job_id}", ("GET", there.result(job_id)))
        if data is None and chain.after.on_failure == "cancel":
            return {}, f"The output of job {job_id}, for which it waited, has expired."
        outputs[place] = "" if data is None else decode_result(data).text
    num_bytes = sum(len(text.encode()) for text in outputs.values())
    if num_bytes > MAX_OUTPUTS_BYTES:
        return {}, f"The outputs that its prompt uses take {num_bytes} bytes; at most {MAX_OUTPUTS_BYTES} are taken."
    return outputs, None


# ---------------------------------------------------------------- what is done


def _carry_out(
    keys: ChainKeys, look: ChainLook, chain: Chain, reason: str | None, outputs: Mapping[int, str]
) -> Steps[None]:
    """Submit the jobs of a chain that are still blocked and not flagged; then remove the chain if none is blocked."""
    ids = chain.job_ids
    reads = ("HGET", keys.jobs, chain.id), ("HMGET", keys.blocked, *ids), ("HMGET", keys.cancelled, *ids)
    data, values, flags = _sound((yield reads))
    flagged = {job_id for job_id, flag in zip(ids, flags, strict=True) if flag is not None}
    blocked = blocked_of(chain.id, ids, values)
    if data is None and blocked:
        raise WireError("the server has lost its jobs")
    stored = read_jobs(data) if data is not None else {}
    jobs = [stored[job_id] for job_id in blocked if job_id not in flagged and job_id in stored]
    if reason is None:
        to_end = yield from _submit(keys, look, chain.id, jobs, outputs=outputs)
    else:
        to_end = {job.id: reason for job in jobs}
    yield from _end(keys, look, chain.id, stored, to_end)
    yield from _remove_if_done(keys, chain)


def _submit(
    keys: ChainKeys,
    look: ChainLook,
    chain_id: str,
    jobs: Sequence[NewJob],
    reason: str | None = None,
    outputs: Mapping[int, str] | None = None,
) -> Steps[dict[JobId, str]]:
    """Submit jobs, with these outputs in their prompts, and cancel them if there is a reason.

    Return those that cannot be submitted, or that the queue refuses for good, and why.
    """
    refused = dict[JobId, str]()
    for there, ready in _calls(keys.queue, jobs, outputs, refused):
        call, ids = submit(there, ready, is_to_end=reason is not None), [job.id for job in ready]
        if reason is None and look.is_full(ids[0]):
            continue
        if reason is not None:  # a process that dies before the cancel leaves the flag, and the next look cancels
            _sound((yield (("HSET", keys.cancelled, *(part for job_id in ids for part in (job_id, reason))),)))
        try:
            reply = yield from _ask(look, there, f"submit of job {ids[0]}", command_of(call))
        except _NoReplyError as error:
            look.problems.append((chain_id, str(error)))
            continue
        answers = dict(zip(ids, call.parse(reply), strict=True))
        refused |= _refused(look, chain_id, answers)
        if taken := [job_id for job_id, answer in answers.items() if not isinstance(answer, Refused)]:
            others = {job_id for job_id in taken if isinstance(answers[job_id], Conflict)}
            look.problems += [
                (chain_id, f"another job was submitted as {job_id} while it was blocked") for job_id in others
            ]
            mine = [job_id for job_id in taken if job_id not in others]
            if reason is not None:
                yield from _cancel(keys, look, dict.fromkeys(mine, reason))
            yield (*([("HDEL", keys.cancelled, *taken)] if reason is not None else ()), ("HDEL", keys.blocked, *taken))
            look.released += [Released(chain_id, len(mine), reason)] if mine else []
    return refused


def _refused(look: ChainLook, chain_id: str, answers: Mapping[JobId, SubmitReply]) -> dict[JobId, str]:
    """Return the jobs that the queue refuses for good, and why; note why it refuses others now."""
    no = {job_id: answer for job_id, answer in answers.items() if isinstance(answer, Refused)}
    for job_id, answer in no.items():
        look.note_full(job_id, answer)
    passing = dict.fromkeys(answer.message for answer in no.values() if answer.reason in PASSING)
    look.problems += [(chain_id, message) for message in passing]
    return {job_id: answer.message for job_id, answer in no.items() if answer.reason not in PASSING}


def _end(
    keys: ChainKeys, look: ChainLook, chain_id: str, jobs: Mapping[JobId, NewJob], reasons: Mapping[JobId, str]
) -> Steps[None]:
    """Submit jobs that must not run, delayed, and cancel them: what the queue would refuse of them is left out.

    They do so at once, also while the queue is full: they take no place of others.
    """
    for reason in dict.fromkeys(reasons.values()):
        ending = [
            replace(jobs[job_id], not_before_ms=_NEVER, features=(), prompt_tokens=None)
            for job_id, why in reasons.items()
            if why == reason
        ]
        refused = yield from _submit(keys, look, chain_id, ending, reason)
        without_batch = [replace(job, batch=None) for job in ending if job.id in refused]
        yield from _submit(keys, look, chain_id, without_batch, reason)


def _cancel_blocked(keys: ChainKeys, look: ChainLook, chain_id: str, job_ids: Sequence[JobId]) -> Steps[None]:
    """End flagged jobs of a chain, and remove the chain if none of its jobs is blocked."""
    reads = ("HGET", keys.chains, chain_id), ("HGET", keys.jobs, chain_id), ("HMGET", keys.cancelled, *job_ids)
    data, packed_jobs, reasons = _sound((yield reads))
    if data is None or packed_jobs is None:
        return
    flags = {job_id: _text(reason) for job_id, reason in zip(job_ids, reasons, strict=True) if reason is not None}
    yield from _end(keys, look, chain_id, read_jobs(packed_jobs), flags)
    yield from _remove_if_done(keys, read_chain(chain_id, data))


def _cancel_released(keys: ChainKeys, look: ChainLook, reasons: Mapping[JobId, str]) -> Steps[None]:
    """Cancel flagged jobs that are not blocked any more."""
    yield from _cancel(keys, look, reasons)
    yield (("HDEL", keys.cancelled, *reasons),)


def _cancel(keys: ChainKeys, look: ChainLook, reasons: Mapping[JobId, str]) -> Steps[None]:
    """Cancel jobs that the queue has."""
    groups: dict[tuple[QueueKeys, str], list[JobId]] = {}
    for job_id, reason in reasons.items():
        groups.setdefault((_keys_of(keys.queue, job_id), reason), []).append(job_id)
    for (there, reason), job_ids in groups.items():
        left = job_ids
        while left:
            call = cancel(there, left[: limits.SLICE_JOBS], reason=reason)
            reply = yield from _ask(look, there, f"cancel of job {left[0]}", command_of(call))
            states = zip(left[: limits.SLICE_JOBS], call.parse(reply), strict=True)
            left = [job_id for job_id, state in states if state == AGAIN] + left[limits.SLICE_JOBS :]


def _remove_if_done(keys: ChainKeys, chain: Chain) -> Steps[None]:
    """Remove a chain none of whose jobs is blocked; `_remove_rest` removes what a process that dies here leaves."""
    [values] = _sound((yield (("HMGET", keys.blocked, *chain.job_ids),)))
    if blocked_of(chain.id, chain.job_ids, values):
        return
    [_, num_removed, _, _, num_blocked] = yield (
        ("HDEL", keys.chains, chain.id),
        ("HDEL", keys.jobs, chain.id),
        ("HDEL", keys.ends, chain.id, *map(chain.end_of, chain.after.ids)),
        ("ZREM", keys.after, *chain.members),
        ("HLEN", keys.blocked),
    )
    # A process that dies here leaves too large a count, until the last chain is removed.
    if num_blocked == 0:
        yield (("DEL", keys.num_bytes),)
    elif num_removed == 1:
        yield (("DECRBY", keys.num_bytes, chain.num_bytes),)


def _remove_rest(keys: ChainKeys, chain_id: str, parent: str, decision: bytes | None) -> Steps[None]:
    """Remove what a chain without a record has left: its submit has not completed, or its removal."""
    [clock, data] = _sound((yield (("TIME",), ("HGET", keys.jobs, chain_id))))
    if data is not None and decision is None and int(clock[0]) * 1000 - submitted_ms(chain_id) < ABANDONED_MS:
        return
    job_ids = list(read_jobs(data)) if data is not None else []
    reads = (("HMGET", keys.blocked, *job_ids),) if job_ids else ()
    replies = _sound((yield reads)) if reads else [()]
    if mine := blocked_of(chain_id, job_ids, replies[0]):
        yield (("HDEL", keys.blocked, *mine),)
    waited_for = unpack(decision)[2] if decision is not None else ()
    [num_removed, *_] = yield (
        ("HDEL", keys.jobs, chain_id),
        ("HDEL", keys.ends, chain_id, *(f"{chain_id} {one}" for one in {parent, *waited_for})),
        ("ZREM", keys.after, f"{parent} {chain_id}"),
    )
    if num_removed == 1 and data is not None:
        yield (("DECRBY", keys.num_bytes, len(data)),)


def _calls(
    queue: QueueKeys, jobs: Sequence[NewJob], outputs: Mapping[int, str] | None, refused: dict[JobId, str]
) -> Iterator[tuple[QueueKeys, list[NewJob]]]:
    """Yield the jobs of one call after the other, with their partition: each within the limits of a call.

    Prompts get their outputs when their call is made, for their size; jobs that cannot be are added to `refused`.
    """
    by_partition: dict[QueueKeys, list[NewJob]] = {}
    for job in jobs:
        by_partition.setdefault(_keys_of(queue, job.id), []).append(job)
    for keys, there in by_partition.items():
        current, num_bytes = list[NewJob](), 0
        for waiting in there:
            try:
                job = waiting if outputs is None else rendered(waiting, outputs)
            except InvalidJob as error:
                refused[waiting.id] = f"With the outputs, {error}."
                continue
            size = len(job.payload) + len(job.spec)
            if current and (len(current) == limits.MAX_JOBS_PER_CALL or num_bytes + size > limits.MAX_CALL_BYTES):
                yield keys, current
                current, num_bytes = [], 0
            current.append(job)
            num_bytes += size
        if current:
            yield keys, current
