"""What the channels of held jobs lack, as `Progress` values, cut into calls that fit. No I/O, no clock."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sluice.producer.contract.calls import EndCall, Progress
from sluice.producer.contract.limits import MAX_CALL_BYTES, MAX_JOBS_PER_CALL, MAX_RESULT_BYTES
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import End, encode_record, encode_resolved
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.results import Origin, longest_gap_ms, record_of, result_of
from sluice.worker.jobs.retries import retry_in_ms

PART_BYTES = MAX_CALL_BYTES // 2
"""A result longer than this is written in parts of this length."""

_OVERHEAD_BYTES = 200
"""Upper bound of a Progress without its encoded fields."""


Update = tuple[HeldJob, Progress]
"""A job, and what one of its channels lacks."""


def pending_updates(job: HeldJob, origin: Origin, *, now_s: float) -> Iterator[Progress]:
    """Yield what the job's channels lack: one Progress for each choice that lacks something."""
    for index, choice in enumerate(job.choices):
        if choice.has_updates:
            yield _progress(job, index, choice, origin, now_s)


def _progress(job: HeldJob, index: int, choice: ChannelOutput, origin: Origin, now_s: float) -> Progress:
    end = _end_call(job, choice, choice.end, origin, now_s) if choice.end is not None and choice.fits_an_entry else None
    num_tokens = choice.num_next_tokens
    entry = choice.encode_next() if num_tokens else b""
    # Positional arguments take half the time of keywords.
    progress = Progress(
        job.id, job.leased.epoch, index, choice.published, num_tokens, entry, None, None, None, None, None, None, end
    )
    return progress if job.is_announced else _announced(progress, job, origin, now_s)


def _announced(progress: Progress, job: HeldJob, origin: Origin, now_s: float) -> Progress:
    """Add what the queue learns once per attempt, and again after a long gap."""
    gap_ms, resolved = longest_gap_ms(job.choices, now_s), job.measures.resolved
    return progress._replace(
        first_scheduled_ms=job.measures.first_scheduled_ms,
        first_token_ms=job.measures.first_token_ms,
        prompt_tokens=job.measures.prompt_tokens,
        fingerprint=origin.fingerprint if job.was_admitted else None,
        gap_ms=None if gap_ms is None else round(gap_ms),
        resolved=None if resolved is None else encode_resolved(resolved),
    )


def move_large_results(updates: Iterable[Update]) -> tuple[list[Update], list[tuple[HeldJob, bytes]]]:
    """Take out the results that are too large to be sent with their end.

    Returns:
        The updates, with the length of such a result in its place; and each such job with its result, once.
    """
    moved: list[Update] = []
    results: dict[str, tuple[HeldJob, bytes]] = {}
    for job, progress in updates:
        end, kept = progress.end, progress
        if end is not None and end.result is not None and len(end.result) > PART_BYTES:
            kept = progress._replace(end=replace(end, result=None, result_bytes=len(end.result)))
            results[job.request_id] = (job, end.result)
        moved.append((job, kept))
    return moved, list(results.values())


def parts_of(result: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a large result, each with its offset in bytes."""
    for offset in range(0, len(result), PART_BYTES):
        yield offset, result[offset : offset + PART_BYTES]


def _end_call(job: HeldJob, choice: ChannelOutput, own_end: End, origin: Origin, now_s: float) -> EndCall:
    # The queue reads state and result with the last choice's end only. All ends carry them once all choices have
    # ended, because any of them may be the last that the queue takes.
    decisive = _worst([one.end for one in job.choices if one.end]) if job.has_ended else own_end
    result = result_of(origin, job.measures, job.choices) if job.has_ended else None
    if job.has_ended and result is None and decisive.state is JobState.DONE:
        decisive = own_end = _too_large(decisive)
    record = record_of(origin, job.measures, job.choices, finish_reason=decisive.finish_reason, now_s=now_s)
    return EndCall(
        state=decisive.state,
        reason=decisive.finish_reason,
        error=decisive.error,
        error_code=decisive.error_code,
        result=result,
        record=encode_record(record),
        output_tokens=sum(len(one.token_ids) for one in job.choices),
        # Only a choice that failed asks for a retry.
        retry_in_ms=_retry_in_ms(job, own_end),
        entry=choice.encode_end(own_end),
    )


def _retry_in_ms(job: HeldJob, end: End) -> int | None:
    if end.state is not JobState.FAILED:
        return None
    leased = job.leased
    return retry_in_ms(end.error_code, leased.failures, which=f"{leased.id} {leased.epoch}")


def _too_large(end: End) -> End:
    message = f"its result is larger than the {MAX_RESULT_BYTES} bytes that are kept: ask for fewer tokens or choices"
    return End(state=JobState.FAILED, error=message, error_code="result_too_large", usage=end.usage)


_WORST_FIRST = (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.DONE)


def _worst(ends: list[End]) -> End:
    """Return the end that decides the job's state: one failed choice fails the job."""
    return min(ends, key=lambda end: _WORST_FIRST.index(end.state))


def batches_of(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Cut updates into calls within the contract's bounds; a single larger Progress is a separate call."""
    batch: list[Update] = []
    num_bytes = 0
    for update in updates:
        own_bytes = _bytes_of(update[1])
        if batch and (len(batch) >= MAX_JOBS_PER_CALL or num_bytes + own_bytes > MAX_CALL_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(update)
        num_bytes += own_bytes
    if batch:
        yield batch


def _bytes_of(progress: Progress) -> int:
    """Return about how many bytes of a call a Progress takes."""
    end = progress.end
    of_end = len(end.record) + len(end.result or b"") + len(end.entry) if end else 0
    return _OVERHEAD_BYTES + len(progress.entry) + of_end
