"""Submit jobs that wait for others; list, cancel and release them. No I/O."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import cast

from sluice.producer.errors import (
    ChainNotFound,
    IdempotencyConflict,
    InvalidJob,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
)
from sluice.producer.operations.operation import Ask, Operation, Reply, driven
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import for_jobs
from sluice.producer.operations.submission import Receipt, SubmitAnswer, doubted, receipt_of
from sluice.protocol import calls
from sluice.protocol.bounds import BLOCKED_JOBS, BLOCKED_MIB
from sluice.protocol.calls import JobView, NewJob
from sluice.protocol.chains.chain import (
    After,
    Chain,
    ChainKeys,
    blocked_of,
    blocked_value,
    pack_chain,
    pack_jobs,
    read_blocked,
    read_chain,
    read_jobs,
    submitted_ms,
)
from sluice.protocol.chains.outputs import used_outputs
from sluice.protocol.chains.releasing import GONE, ChainLook, ChainWatch, ends_of
from sluice.protocol.durability import NOTHING_ASKED, DurabilityCheck
from sluice.protocol.errors import WireError
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.jobs import Prepared
from sluice.protocol.packing import packed
from sluice.protocol.rows import read_row
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

FULL_BLOCKED = "full_blocked"
"""Reason of a refusal: too many jobs wait for others."""

# ---------------------------------------------------------------- submit


def submit_after(
    queue: Queue, job: NewJob, after: After, durability_check: DurabilityCheck, *, is_chosen: bool
) -> Operation[Receipt]:
    """Submit one job that waits for others.

    Raises:
        ProducerError: as `submission.submit`; InvalidJob if a job to wait for is unknown.
    """
    try:
        answers = yield from submit_all_after(queue, [(job, is_chosen)], after, durability_check)
    except QueueUnreachable as error:
        error.job_id = job.id
        raise
    return receipt_of(answers[0])


def submit_all_after(
    queue: Queue, jobs: Sequence[Prepared], after: After, durability_check: DurabilityCheck = NOTHING_ASKED
) -> Operation[list[SubmitAnswer]]:
    """Submit the jobs of one round trip of `JobPacker` as a chain; return the result of each, in order."""
    keys = ChainKeys(queue.keys(0))
    # The first step is a round trip in any case: `run_ahead` sends it ahead.
    clock, *held = yield Ask((("TIME",), ("HLEN", keys.blocked), ("GET", keys.num_bytes)))
    wrong, new, repeated = dict[int, SubmitAnswer](), dict[JobId, NewJob](), set[int]()
    for place, (job, _) in enumerate(jobs):
        try:
            if not isinstance(job, NewJob):
                raise job
            _check(job, after)
            mine = replace(job, digest=_digest(job, after))
            first = new.setdefault(job.id, mine)
            if first.digest != mine.digest:
                wrong[place] = IdempotencyConflict(job.id)
            elif first is not mine:
                repeated.add(place)
        except InvalidJob as error:
            wrong[place] = error
    chosen = {job.id for job, is_chosen in jobs if is_chosen and isinstance(job, NewJob)}
    answers = yield from _duplicates(queue, keys, [job for job in new.values() if job.id in chosen])
    if fresh := {job_id: job for job_id, job in new.items() if job_id not in answers}:
        refusal = (yield from _unknown(queue, after)) or _fullness(held, fresh)
        if refusal is not None:
            answers |= dict.fromkeys(fresh, refusal)
        else:
            answers |= yield from _hold(queue, fresh, after, _chain_id(clock), durability_check)
    found = [wrong.get(place) or answers[cast("NewJob", job).id] for place, (job, _) in enumerate(jobs)]
    return [
        replace(answer, is_duplicate=True) if place in repeated and isinstance(answer, Receipt) else answer
        for place, answer in enumerate(found)
    ]


def _check(job: NewJob, after: After) -> None:
    if job.idempotency_key is not None:
        raise InvalidJob("a job with `after` has no idempotency_key: give a job_id, which a repeated submit shares")
    after.check(job.id)
    used_outputs(job, len(after.ids))


def _chain_id(clock: Reply) -> str:
    seconds, micros = map(int, cast("list[bytes]", clock))
    return f"{seconds * 1000 + micros // 1000}-{secrets.token_hex(8)}"


def _hold(
    queue: Queue, jobs: Mapping[JobId, NewJob], after: After, chain_id: str, durability_check: DurabilityCheck
) -> Operation[dict[JobId, SubmitAnswer]]:
    """Write jobs as a chain; return the answer for each."""
    outputs = {place for job in jobs.values() for place in used_outputs(job, len(after.ids))}
    chain = Chain(chain_id, after, tuple(jobs), tuple(sorted(outputs)), 0)
    doubt = yield from _write(queue, chain, list(jobs.values()), durability_check)
    receipts = [Receipt(job_id, state=JobState.BLOCKED) for job_id in jobs]
    if doubt is None:
        return {receipt.id: receipt for receipt in receipts}
    return {receipt.id: doubted(receipt, durability_check.asked, doubt) for receipt in receipts}


def _digest(job: NewJob, after: After) -> bytes:
    return blake2b(job.digest + packed([after.ids, after.when, after.on_failure]), digest_size=16).digest()


def _duplicates(queue: Queue, keys: ChainKeys, jobs: Sequence[NewJob]) -> Operation[dict[JobId, SubmitAnswer]]:
    """Return the answer for each job whose id the queue has already."""
    if not jobs:
        return {}
    ids = [job.id for job in jobs]
    [values, *rows] = yield Ask(
        (("HMGET", keys.blocked, *ids), *(("GET", queue.keys_of(job_id).job(job_id)) for job_id in ids))
    )
    blocked = read_blocked(ids, values)
    chain_ids = list({chain_id for chain_id, _ in blocked.values()})
    stored = dict[JobId, NewJob]()
    for chain_id in chain_ids:
        is_chain, data = yield Ask((("HEXISTS", keys.chains, chain_id), ("HGET", keys.jobs, chain_id)))
        if is_chain and isinstance(data, bytes):  # otherwise its submit has not completed: this one takes its place
            stored |= read_jobs(data)
    found = dict[JobId, SubmitAnswer]()
    for job, data in zip(jobs, rows, strict=True):
        if isinstance(data, bytes):
            row = read_row(data)
            found[job.id] = _duplicate(job, row.digest, row.state)
        elif job.id in blocked and job.id in stored:
            found[job.id] = _duplicate(job, stored[job.id].digest, JobState.BLOCKED)
    return found


def _duplicate(job: NewJob, digest: bytes, state: JobState) -> SubmitAnswer:
    return Receipt(job.id, is_duplicate=True, state=state) if digest == job.digest else IdempotencyConflict(job.id)


def _unknown(queue: Queue, after: After) -> Operation[InvalidJob | None]:
    """Return the error if a job to wait for is unknown. So a chain cannot be a circle: its jobs are not known yet."""
    ends = yield from driven(ends_of(queue.keys(0), after.ids))
    unknown = next((job_id for job_id, letter in ends.items() if letter == GONE), None)
    if unknown is None:
        return None
    how = "a job can wait for one that was submitted before it, while the queue keeps it"
    return InvalidJob(f"after names job {unknown}, which queue {queue.name!r} does not have: {how}")


def _fullness(held: Sequence[Reply], jobs: Mapping[JobId, NewJob]) -> QueueFull | None:
    """Return the error if the queue does not take more blocked jobs. `held`: how many it has, and their bytes."""
    num_jobs, num_bytes = cast("int", held[0]), int(cast("bytes | None", held[1]) or 0) if held[0] else 0
    more_bytes = sum(len(job.payload) + len(job.spec) for job in jobs.values())
    max_bytes = BLOCKED_MIB.most * 1024 * 1024
    bounds = ("jobs", num_jobs, len(jobs), BLOCKED_JOBS.most), ("bytes", num_bytes, more_bytes, max_bytes)
    for what, now, more, most in bounds:
        if now + more > most:
            message = f"the queue has {now} {what} of blocked jobs and takes {most}"
            return QueueFull(message, reason=FULL_BLOCKED, waiting=(num_jobs, 0, num_bytes), bound=most)
    return None


def _write(
    queue: Queue, chain: Chain, jobs: Sequence[NewJob], durability_check: DurabilityCheck
) -> Operation[str | None]:
    """Write a chain: its record last, which makes it one. Return why its durability is in doubt, if it is.

    Raises:
        QueueFull: the server has no memory for it; nothing is left.
        QueueRefused: the submit stood still for so long that a worker has removed its parts.
    """
    keys, data = ChainKeys(queue.keys(0)), pack_jobs(jobs)
    chain = replace(chain, num_bytes=len(data))
    try:
        yield Ask(
            (
                ("INCRBY", keys.num_bytes, chain.num_bytes),
                # Then the jobs: an entry of `after` without them is one of a chain that was removed.
                ("HSET", keys.jobs, chain.id, data),
                ("ZADD", keys.after, *(part for member in chain.members for part in (0, member))),
                (
                    "HSET",
                    keys.blocked,
                    *(part for job in jobs for part in (job.id, blocked_value(chain.id, job.choices))),
                ),
            )
        )
        record = (("HEXISTS", keys.jobs, chain.id), ("HSET", keys.chains, chain.id, pack_chain(chain)))
        replies = yield Ask((*record, *durability_check.commands([keys.queue])), is_lenient=True)
        if isinstance(replies[1], ProducerError):
            raise replies[1]
    except QueueFull:
        yield from _remove(keys, chain)
        raise
    if not replies[0]:
        yield from _remove(keys, chain)
        # Repeated after a lost connection, it may have been released before.
        [is_there] = yield Ask((("EXISTS", queue.keys_of(chain.job_ids[0]).job(chain.job_ids[0])),))
        if not is_there:
            raise QueueRefused("the submit stood still for over ten minutes, and nothing was submitted: submit again")
    return durability_check.doubt(replies[2:])


def _remove(keys: ChainKeys, chain: Chain) -> Operation[None]:
    [values] = yield Ask((("HMGET", keys.blocked, *chain.job_ids),))
    mine = blocked_of(chain.id, chain.job_ids, values)
    *_, num_removed, _ = yield Ask(
        (
            ("HDEL", keys.chains, chain.id),
            *([("HDEL", keys.blocked, *mine)] if mine else ()),
            ("HDEL", keys.jobs, chain.id),
            ("ZREM", keys.after, *chain.members),
        )
    )
    if num_removed == 1:
        yield Ask((("DECRBY", keys.num_bytes, chain.num_bytes),))


# ---------------------------------------------------------------- blocked jobs


def blocked_jobs(queue: Queue, job_ids: Sequence[JobId]) -> Operation[dict[JobId, tuple[str, int]] | None]:
    """Return the chain's id and the choices of each job that is blocked; None if this user may not read that."""
    [values] = yield Ask((("HMGET", ChainKeys(queue.keys(0)).blocked, *job_ids),), is_lenient=True)
    return None if isinstance(values, Exception) else read_blocked(job_ids, values)


def with_blocked(
    queue: Queue, job_ids: Sequence[JobId], views: Sequence[JobView | None]
) -> Operation[list[JobView | None]]:
    """Return the views of jobs with those of blocked ones, which have no row."""
    found = list(views)
    missing = [job_id for job_id, view in zip(job_ids, views, strict=True) if view is None]
    blocked = (yield from blocked_jobs(queue, missing)) if missing else None
    if blocked is None:
        return found
    others = dict[JobId, JobView | None]((job_id, _view(job_id, *chain)) for job_id, chain in blocked.items())
    # A job that is not blocked any more was released before, so its row is there by now.
    again = [job_id for job_id in missing if job_id not in blocked]
    rows = yield from for_jobs(queue, again, calls.status)
    others |= zip(again, rows, strict=True)
    return [others.get(job_id) if view is None else view for job_id, view in zip(job_ids, found, strict=True)]


def _view(job_id: JobId, chain_id: str, choices: int) -> JobView:
    nothing = ("started_ms", "ended_ms", "owner", "error", "error_code", "finish_reason", "batch", "spec")
    return JobView(
        id=job_id, state=JobState.BLOCKED, version=0, priority=0, submitted_ms=submitted_ms(chain_id), attempt=0,
        prompt_tokens=0, cost=0, choices=choices, published=(), seed=0, ahead_jobs=None, ahead_tokens=None,
        has_result=False, **dict.fromkeys(nothing),
    )  # fmt: skip


def waits_for(queue: Queue, job_id: JobId) -> Operation[str]:
    """Return the reason for which a blocked job waits."""
    keys, blocked = ChainKeys(queue.keys(0)), (yield from blocked_jobs(queue, [job_id]))
    for chain_id, _ in (blocked or {}).values():
        [data] = yield Ask((("HGET", keys.chains, chain_id),))
        if isinstance(data, bytes):
            return f"job {job_id} is blocked: it waits for {read_chain(chain_id, data).after.text}"
    return f"job {job_id} is blocked: it waits for other jobs to end"


def flag_blocked(queue: Queue, job_ids: Sequence[JobId], reason: str | None) -> Operation[list[JobId] | None]:
    """Ask to cancel those of the jobs that are blocked; return them, or None if this user may not read that.

    A look ends them. One that is released meanwhile has a row by now, and must be cancelled there.
    """
    blocked = yield from blocked_jobs(queue, job_ids)
    if blocked:
        pairs = [part for job_id in blocked for part in (job_id, reason or "")]
        yield Ask((("HSET", ChainKeys(queue.keys(0)).cancelled, *pairs),))
    return None if blocked is None else list(blocked)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """The blocked jobs of one chain."""

    id: str
    after: After
    job_ids: tuple[JobId, ...]
    """In the order of their submit."""

    submitted_ms: int


def chains(queue: Queue, *, tenant: str | None = None, limit: int = 1000) -> Operation[list[ChainView]]:
    """Return the blocked jobs of a queue (of one tenant) by chain and age: of more than `limit` chains, any.

    Chains that cannot be read are left out.
    """
    keys, cursor, found = ChainKeys(queue.keys(0)), b"0", dict[str, ChainView]()
    while True:
        [reply] = yield Ask((("HSCAN", keys.chains, cursor, "COUNT", 100),))
        cursor, entries = cast("tuple[bytes, list[bytes]]", reply)
        page = [chain for chain in _readable(entries) if tenant in (None, split_job_id(chain.job_ids[0])[1])]
        replies = (yield Ask(tuple(("HMGET", keys.blocked, *chain.job_ids) for chain in page))) if page else []
        for chain, values in zip(page, replies, strict=True):
            if blocked := blocked_of(chain.id, chain.job_ids, values):
                found[chain.id] = ChainView(
                    id=chain.id, after=chain.after, job_ids=tuple(blocked), submitted_ms=submitted_ms(chain.id)
                )
        if cursor == b"0" or len(found) >= limit:
            return sorted(found.values(), key=lambda chain: (chain.submitted_ms, chain.id))[:limit]


def _readable(entries: Sequence[bytes]) -> Iterator[Chain]:
    """Yield the chains among the names and values of a hash that can be read and have jobs."""
    for name, data in zip(entries[::2], entries[1::2], strict=True):
        with suppress(WireError, InvalidJob):
            chain = read_chain(name.decode(errors="replace"), data)
            if chain.job_ids:
                yield chain


def jobs_of_chain(queue: Queue, chain_id: str) -> Operation[tuple[JobId, ...]]:
    """Return the jobs of a chain, those that were released or cancelled included.

    Raises:
        ChainNotFound: it has no blocked jobs, or cannot be read.
    """
    [data] = yield Ask((("HGET", ChainKeys(queue.keys(0)).chains, chain_id),))
    for chain in _readable([chain_id.encode(), data] if isinstance(data, bytes) else []):
        return chain.job_ids
    raise ChainNotFound(chain_id)


def release(watch: ChainWatch) -> Operation[ChainLook]:
    """Release what is due of the next slice, as each worker does once a second."""
    look = ChainLook()
    yield from driven(watch.release(look))
    return look


def watch_of(queue: Queue) -> ChainWatch:
    """Return a watch over the chains of a queue."""
    return ChainWatch(queue.keys(0))
