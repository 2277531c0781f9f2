"""What held jobs say to the queue in one round trip: news of their choices as `Progress`, cut into calls that fit.

Pure: no I/O, no clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from producer.contract.calls import EndCall, Progress
from producer.contract.limits import MAX_CALL_BYTES, MAX_JOBS_PER_CALL, MAX_RESULT_BYTES
from producer.contract.states import JobState
from producer.contract.wire import End, encode_entry, encode_record
from worker.channel import ChannelOutput
from worker.leases import HeldJob
from worker.results import Origin, record_of, result_of
from worker.retries import retry_in_ms

PART_BYTES = MAX_CALL_BYTES // 2
"""A result longer than this is written in parts of this length."""

_OVERHEAD_BYTES = 200
"""What a Progress takes beside its opaque parts, at most."""


# A named tuple, not a frozen dataclass, because one is made per sequence and step.
class Said(NamedTuple):
    """One Progress and what it was made of, to understand its answer."""

    job: HeldJob
    choice: int
    progress: Progress
    announces: bool
    large_result: bytes | None = None
    """To be written in parts before the end, which names its length."""

    @property
    def num_bytes(self) -> int:
        """About how much of a call it takes."""
        end = self.progress.end
        of_end = len(end.record) + len(end.result or b"") + len(end.entry or b"") if end else 0
        return _OVERHEAD_BYTES + len(self.progress.entry) + of_end


def news_of(job: HeldJob, origin: Origin) -> Iterator[Said]:
    """What the job's channels lack, one Progress for each choice that has news."""
    for index, choice in enumerate(job.choices):
        if choice.has_news:
            yield _say(job, index, origin)


def _say(job: HeldJob, index: int, origin: Origin) -> Said:
    choice = job.choices[index]
    entry = choice.entry()
    end, large_result = (None, None)
    if choice.end is not None and choice.fits_an_entry:
        end, large_result = _without_large_result(_end_call(job, choice, origin))
    progress = Progress(
        job_id=job.id,
        epoch=job.leased.epoch,
        choice=index,
        start=entry.start,
        num_tokens=len(entry.token_ids),
        entry=encode_entry(entry) if entry.token_ids else b"",
        end=end,
    )
    if job.is_announced:
        return Said(job, index, progress, False, large_result)
    return Said(job, index, _announced(progress, job, origin), job.measures.first_token_ms is not None, large_result)


def _announced(progress: Progress, job: HeldJob, origin: Origin) -> Progress:
    """With what the queue hears of a job once."""
    return progress._replace(
        first_scheduled_ms=job.measures.first_scheduled_ms,
        first_token_ms=job.measures.first_token_ms,
        prompt_tokens=job.measures.prompt_tokens,
        fingerprint=origin.fingerprint if job.is_admitted else None,
    )


def _without_large_result(end: EndCall) -> tuple[EndCall, bytes | None]:
    """The end as it travels, and a result that is too large to travel in it."""
    if end.result is None or len(end.result) <= PART_BYTES:
        return end, None
    return replace(end, result=None, result_bytes=len(end.result)), end.result


def parts_of(result: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, part) of a large result."""
    for offset in range(0, len(result), PART_BYTES):
        yield offset, result[offset : offset + PART_BYTES]


def _end_call(job: HeldJob, choice: ChannelOutput, origin: Origin) -> EndCall:
    # While another choice still runs this is not the job's end, and the queue does not look at result and state.
    # Once all have ended each end carries the result, whichever of them the queue happens to take last.
    ends = [one.end for one in (job.choices if job.has_ended else [choice]) if one.end]
    decisive, own_end = _worst(ends), choice.end_entry()
    result = result_of(origin, job.measures, job.choices) if job.has_ended else None
    if job.has_ended and result is None and decisive.state is JobState.DONE:
        decisive = _too_large(decisive)
        own_end = own_end._replace(end=decisive)
    return EndCall(
        state=decisive.state,
        reason=decisive.finish_reason,
        error=decisive.error,
        error_code=decisive.error_code,
        result=result,
        record=encode_record(record_of(origin, job.measures, job.choices, finish_reason=decisive.finish_reason)),
        output_tokens=sum(len(one.token_ids) for one in job.choices),
        # A choice that ended well says so: only the one that failed asks for another try.
        retry_in_ms=_retry_in_ms(job, own_end.end),
        entry=encode_entry(own_end),
    )


def _retry_in_ms(job: HeldJob, end: End | None) -> int | None:
    if end is None or end.state is not JobState.FAILED:
        return None
    leased = job.leased
    return retry_in_ms(end.error_code, leased.failures, which=f"{leased.id} {leased.epoch}")


def _too_large(end: End) -> End:
    message = f"its result is larger than the {MAX_RESULT_BYTES} bytes that are kept: ask for fewer tokens or choices"
    return End(state=JobState.FAILED, error=message, error_code="result_too_large", usage=end.usage)


_WORST_FIRST = (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.DONE)


def _worst(ends: list[End]) -> End:
    """The end that decides the job's: one failed choice makes a failed job."""
    return min(ends, key=lambda end: _WORST_FIRST.index(end.state))


def calls_of(said: Iterable[Said]) -> Iterator[list[Said]]:
    """Cut what is said into calls within the contract's bounds; a single larger Progress travels alone."""
    call: list[Said] = []
    num_bytes = 0
    for one in said:
        own_bytes = one.num_bytes
        if call and (len(call) >= MAX_JOBS_PER_CALL or num_bytes + own_bytes > MAX_CALL_BYTES):
            yield call
            call, num_bytes = [], 0
        call.append(one)
        num_bytes += own_bytes
    if call:
        yield call
