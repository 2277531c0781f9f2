"""The updates that channels of held jobs lack, as `Progress` values, cut into calls that fit. No I/O, no clock."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sluice.protocol.calls import EndCall, Progress
from sluice.protocol.limits import MAX_CALL_BYTES, MAX_JOBS_PER_CALL, MAX_RESULT_BYTES, MAX_UPDATES_PER_CALL
from sluice.protocol.states import REJECTIONS, JobState
from sluice.protocol.wire import End, JobRecord, encode_entry, encode_record, encode_resolved
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.results import Origin, complete_record, longest_gap_ms, result_of
from sluice.worker.jobs.retries import retry_in_ms

PART_BYTES = MAX_CALL_BYTES // 2
"""A result longer than this is written in parts of this length."""

_OVERHEAD_BYTES = 200
"""Upper bound of a Progress without its encoded fields."""


MAX_ERROR_CHARS = 500

Update = tuple[HeldJob, Progress]
"""A job, and what one of its channels lacks."""


def pending_updates(job: HeldJob, origin: Origin, *, now_s: float) -> Iterator[Progress]:
    """Yield the updates that the job's channels lack: one Progress for each choice that lacks something."""
    summary: _Summary | None = None
    for index, choice in enumerate(job.choices):
        if not choice.has_updates:
            continue
        end = None
        if choice.end is not None and choice.fits_an_entry:
            summary = summary or _summary_of(job, origin, now_s)
            end = _end_call(job, index, choice.end, summary)
        yield _progress(job, index, choice, end, origin, now_s)


def failed_updates(job: HeldJob, origin: Origin, error: Exception) -> Iterator[Progress]:
    """Yield the ends of a job whose updates cannot be encoded: without output, measurements and result."""
    # The text of such an error may hold the whole output.
    message = f"its output cannot be encoded: {error!a}"[:MAX_ERROR_CHARS]
    end = End(state=JobState.FAILED, error=message, error_code="output_not_encoded")
    record = encode_record(JobRecord(model=origin.model, fingerprint=origin.fingerprint, worker=origin.worker))
    for index, choice in enumerate(job.choices):
        if choice.has_end:
            continue
        start = choice.published
        call = EndCall(
            state=end.state,
            reason=None,
            error=end.error,
            error_code=end.error_code,
            result=None,
            record=record,
            output_tokens=job.num_published,
            entry=encode_entry(start=start, token_ids=(), text="", time_ms=choice.last_ms, end=end),
        )
        yield Progress(job.id, job.leased.epoch, index, start, 0, b"", end=call)


def _progress(
    job: HeldJob, index: int, choice: ChannelOutput, end: EndCall | None, origin: Origin, now_s: float
) -> Progress:
    num_tokens = choice.num_next_tokens
    is_silent = end is not None and not end.entry
    entry = choice.encode_next() if num_tokens and not is_silent else b""
    extras = _NO_EXTRAS if job.is_announced else _extras(job, end, origin, now_s)
    # Positional arguments take half the time of keywords.
    return Progress(job.id, job.leased.epoch, index, choice.published, num_tokens, entry, *extras, end)


_Extras = tuple[int | None, int | None, int | None, str | None, int | None, bytes | None]
_NO_EXTRAS: _Extras = (None, None, None, None, None, None)


def _extras(job: HeldJob, end: EndCall | None, origin: Origin, now_s: float) -> _Extras:
    """Return what the queue learns once per attempt, and again after a long gap, in the order of `Progress`."""
    record = job.record
    # The record of an end has the gap already.
    gap_ms = longest_gap_ms(job.choices, now_s) if end is None else record.gap_ms
    return (
        record.first_scheduled_ms,
        record.first_token_ms,
        job.num_prompt_tokens,
        origin.fingerprint if job.was_admitted else None,
        None if gap_ms is None else round(gap_ms),
        None if record.resolved is None else encode_resolved(record.resolved),
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
            kept = progress._replace(end=end._replace(result=None, result_bytes=len(end.result)))
            results[job.request_id] = (job, end.result)
        moved.append((job, kept))
    return moved, list(results.values())


def parts_of(result: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a large result, each with its offset in bytes."""
    for offset in range(0, len(result), PART_BYTES):
        yield offset, result[offset : offset + PART_BYTES]


class _Summary(NamedTuple):
    """Facts about all choices in the ends of a job: made once, however many end together."""

    decisive: End | None = None
    """The end that decides the job's state; None while a choice has none."""

    replacement: End | None = None
    """The end of every choice, if the result is too large."""

    result: bytes | None = None
    first_carrier: int = 0
    """The first choice whose end carries the result."""


def _summary_of(job: HeldJob, origin: Origin, now_s: float) -> _Summary:
    complete_record(job.record, origin, job.choices, now_s=now_s)
    if not job.has_ended:
        return _Summary()
    decisive = _worst([choice.end for choice in job.choices if choice.end])
    result = result_of(origin, job.record, job.choices, job.prompt, job.spec and job.spec.options)
    is_too_large = result is None and decisive.state is JobState.DONE
    replacement = _too_large(decisive) if is_too_large else None
    return _Summary(replacement or decisive, replacement, result, _first_carrier(job.choices))


def _first_carrier(choices: Sequence[ChannelOutput]) -> int:
    """Return the last choice whose end the queue lacks for certain; the first one if there is none.

    The queue reads the result with the last end that it takes. That is the end of this choice, or of a later one that
    it may have, and may lack too, because an answer was lost.
    """
    return max((n for n, choice in enumerate(choices) if not (choice.has_end or choice.may_have_end)), default=0)


def _end_call(job: HeldJob, index: int, own_end: End, summary: _Summary) -> EndCall:
    # The queue reads state and record with the last choice's end only. All ends carry them once all choices have ended.
    own_end = summary.replacement or own_end
    decisive = summary.decisive or own_end
    # Only a choice that failed asks for a retry. If it failed too often, its end is the job's.
    retry_in_ms = _retry_in_ms(job, own_end)
    carries_result = index >= summary.first_carrier or retry_in_ms is not None
    job.choices[index].doubt_end()
    job.record.finish_reason = decisive.finish_reason
    return EndCall(
        state=decisive.state,
        reason=decisive.finish_reason,
        error=decisive.error,
        error_code=decisive.error_code,
        result=summary.result if carries_result else None,
        record=encode_record(job.record),
        output_tokens=job.record.output_tokens or 0,
        retry_in_ms=retry_in_ms,
        entry=b"" if _is_silent(job, index, decisive) else job.choices[index].encode_end(own_end),
        is_rejected=_is_rejected(job, decisive),
    )


def _is_silent(job: HeldJob, index: int, end: End) -> bool:
    """Return whether the queue needs nothing on the channel, because the result has all and nobody follows."""
    return job.may_be_silent and not job.choices[index].published and end.state is JobState.DONE


def _is_rejected(job: HeldJob, end: End) -> bool:
    """Return whether a requeue would fail too. A job with output was accepted before, and may be again."""
    return end.error_code in REJECTIONS and not any(choice.published for choice in job.choices)


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
    if len(ends) == 1:
        return ends[0]
    return min(ends, key=lambda end: _WORST_FIRST.index(end.state))


def batches_of(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Cut updates into calls within the contract's bounds; a single larger Progress is a separate call."""
    batch: list[Update] = []
    num_bytes = num_with_more = 0
    for update in updates:
        own_bytes, has_more = _bytes_of(update[1]), update[1].has_more_than_tokens
        is_full = len(batch) >= MAX_UPDATES_PER_CALL or (has_more and num_with_more >= MAX_JOBS_PER_CALL)
        if batch and (is_full or num_bytes + own_bytes > MAX_CALL_BYTES):
            yield batch
            batch, num_bytes, num_with_more = [], 0, 0
        batch.append(update)
        num_bytes += own_bytes
        num_with_more += has_more
    if batch:
        yield batch


def _bytes_of(progress: Progress) -> int:
    """Return about how many bytes of a call a Progress takes."""
    end = progress.end
    of_end = len(end.record) + len(end.result or b"") + len(end.entry) if end else 0
    return _OVERHEAD_BYTES + len(progress.entry) + of_end
