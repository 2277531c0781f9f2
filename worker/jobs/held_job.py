"""One job that this worker holds, from its pull to its release: a state machine that owns its fields.

| from | method | to | called by |
|---|---|---|---|
| | `Leases.new_job` | preparing | the pull thread, for each leased job |
| preparing | `admit` | admitted | the pull or the preparation thread, as it delivers the request to the engine |
| admitted | `add_output` | generating | the exchange thread, with the engine's first output |
| preparing, admitted | `give_back` | returning | the pull thread, at a graceful shutdown |
| admitted, generating | `give_back` | returning | the pull thread, for a preempted job and an idle worker |
| all of these | `release` | released | `Leases.remove`: its end or return is acknowledged, or its lease is lost |

No other transition exists. Each holds one lock, that of `Leases`. Two facts do not depend on the state: `stop`, the
final state that the queue asks for, is set at most once by `flag`; `was_admitted` stays true after `admit`.

`add_output` takes the lock only with the first output, and reads `generating` without it afterwards. Another thread may
return or release the job meanwhile. The output is then dropped later: only active jobs are published.

One thread at a time writes outputs and the record: the one that prepares the job before `admit`, the exchange thread
after it. Other modules call methods and read attributes; none of them assigns one, but `progress.py` completes the
record as it makes an end. No I/O, no clock.
"""

import threading
from enum import Enum
from itertools import count
from operator import attrgetter

from sluice.engine.request import MAX_PREEMPTIONS, Finish, FinishReason, PromptRead, Request, SequenceStats, TokenDelta
from sluice.protocol.calls import LeasedJob, Progress
from sluice.protocol.keys import QueueKeys
from sluice.protocol.sampling import ResolvedOptions
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId, JobRecord, JobSpec
from sluice.worker.errors import INVALID_REQUEST
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.reader_waits import ReaderWaits
from sluice.worker.jobs.results import usage_of

_numbers = count(1)
_has_updates, _has_end = attrgetter("has_updates"), attrgetter("has_end")

REPORT_GAP_S = 0.5
"""A wait of readers that exceeds what the queue knows by this is reported at once; others with the end."""

FORGET_PROMPT_BYTES = 16 * 1024
"""Prompts up to this length stay in memory: releasing one costs more than it frees."""


class HoldState(Enum):
    """The state of a job inside a worker. Not `JobState`, which is the job's state in the queue."""

    PREPARING = "preparing"
    """Leased; its channels are read and its request is made."""

    ADMITTED = "admitted"
    """The engine has its request, or is about to take it."""

    GENERATING = "generating"
    """The engine has yielded output."""

    RETURNING = "returning"
    """It goes back to the queue; nothing further is published."""

    RELEASED = "released"
    """The worker no longer holds it. Final."""


_GENERATING = HoldState.GENERATING
_UNSTARTED = frozenset({HoldState.PREPARING, HoldState.ADMITTED})
_ACTIVE = _UNSTARTED | {_GENERATING}


class HeldJob:
    """One leased job with its outputs and its record. Changes only by its own methods."""

    __slots__ = (
        "_is_streamed",
        "_lock",
        "_reported_gap_s",
        "choices",
        "id",
        "is_announced",
        "keys",
        "leased",
        "num_prompt_tokens",
        "prompt",
        "record",
        "request_id",
        "spec",
        "state",
        "stop",
        "was_admitted",
    )

    def __init__(self, *, leased: LeasedJob, keys: QueueKeys, spec: JobSpec | None, lock: threading.RLock) -> None:
        """Start to hold a job.

        Args:
            leased: The lease, as a pull returned it.
            keys: The partition of the job.
            spec: The producer's options; None if they cannot be read.
            lock: The lock of the `Leases` that hold the job.
        """
        self._lock = lock
        self.id: JobId = leased.id
        self.keys = keys
        self.spec = spec
        self.leased = leased
        """The lease; without its payload once a long prompt is translated."""

        # A Redis that lost its last second may grant the same epoch twice, so the epoch alone is not unique.
        self.request_id = f"{leased.id}#{leased.epoch}.{next(_numbers)}"
        """The engine's id for it, unique per lease."""

        self.state = HoldState.PREPARING
        """As of now: another thread may change it unless you hold the lock of `Leases`."""

        self.stop: JobState | None = None
        """The final state that the queue asks for, if it asks for one."""

        self.was_admitted = False
        """Whether the engine was given its request at any time."""

        self.is_announced = False
        """Whether the queue has its first times, its prompt tokens, its fingerprint and its longest gap."""

        self.num_prompt_tokens = leased.prompt_tokens
        """Tokens of its prompt; before its translation, the estimate of its submit."""

        self.prompt: PromptRead | None = None
        """What the engine has read of its prompt, if it asks for that."""

        self._is_streamed = spec is not None and spec.stream
        self.choices = [
            ChannelOutput(published=offset, has_end=ended, waits=ReaderWaits(is_streamed=self._is_streamed))
            for offset, ended in zip(leased.published, leased.ended, strict=True)
        ]
        self._reported_gap_s = 0.0
        self.record = JobRecord(
            cached_tokens=0, first_scheduled_ms=leased.first_scheduled_ms, first_token_ms=leased.first_token_ms
        )
        self._count_prompt()

    # ------------------------------------------------------------ state

    @property
    def is_active(self) -> bool:
        """Whether its output is still published: it is neither returning nor released."""
        return self.state in _ACTIVE

    @property
    def is_held(self) -> bool:
        """Whether it is not released."""
        return self.state is not HoldState.RELEASED

    @property
    def may_be_silent(self) -> bool:
        """Whether it needs no channel if it is done before its first checkpoint: nobody follows it, or waits there."""
        spec = self.spec
        return spec is not None and not (spec.stream or spec.awaited) and len(self.choices) == 1

    def admit(self) -> None:
        """Enter `admitted`. The caller holds the lock of `Leases` until it has delivered the request."""
        with self._lock:
            assert self.state is HoldState.PREPARING, f"admitted while {self.state.value}"
            assert self.stop is None, "admitted after it was flagged"
            self.state = HoldState.ADMITTED
            self.was_admitted = True

    def flag(self, state: JobState) -> bool:
        """Store the final state that the queue asks for; False if one is stored already or the job is released."""
        with self._lock:
            if self.stop is not None or self.state is HoldState.RELEASED:
                return False
            self.stop = state
            return True

    def give_back(self, *, with_output: bool = False) -> bool:
        """Enter `returning`; False if it has an end, is not active, or the engine has yielded output.

        `with_output`: also with output, if all of it is published.
        """
        with self._lock:
            if self.state not in (_ACTIVE if with_output else _UNSTARTED) or self.has_ended:
                return False
            if with_output and self.has_updates:
                return False
            self.state = HoldState.RETURNING
            return True

    def release(self) -> None:
        """Enter `released`, from any state. Called by `Leases.remove` alone."""
        with self._lock:
            self.state = HoldState.RELEASED

    # ------------------------------------------------------------ preparation

    def restore(self, choice: int, output: ChannelOutput) -> None:
        """Set the output of one choice to that published by earlier attempts."""
        self.choices[choice] = output

    def record_resumption(self, exactness: str) -> None:
        """Store how exactly the output continues, and how many of its tokens earlier attempts generated."""
        self.record.resumed_tokens, self.record.exactness = self.num_published, exactness

    @property
    def format(self) -> str | None:
        """The format that an earlier attempt has published; None if none has published tokens."""
        return next((choice.format for choice in self.choices if choice.published), None)

    def record_translation(self, request: Request, resolved: ResolvedOptions, output_format: str = "") -> None:
        """Store the engine's request, and release the bytes of a long prompt: the engine has its tokens."""
        for choice in self.choices:
            choice.format = output_format
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._count_prompt()
        self.record.resolved = resolved
        if len(self.leased.payload) > FORGET_PROMPT_BYTES:
            self.leased = self.leased._replace(payload=b"")

    def end_all(self, end: End, *, now_ms: int) -> None:
        """End every choice that has not ended, without the engine."""
        for choice in self.choices:
            if not choice.has_end:
                choice.close(end, now_ms=now_ms)

    # ------------------------------------------------------------ output

    def add_output(self, delta: TokenDelta, *, now_s: float, now_ms: int) -> bool:
        """Append what a step yielded for one choice; dropped if the job is not active.

        Args:
            delta: The step's output.
            now_s: When the step ended, on the monotonic clock.
            now_ms: The same, on the server's clock.

        Returns:
            Whether the choice should be published: it is streamed, has ended, or reached a checkpoint.
        """
        is_first = self.record.first_token_ms is None
        if self.state is not _GENERATING:
            if not self._begin():
                return False
            is_first = True
        choice = self.choices[delta.choice]
        choice.extend(delta, now_s=now_s, now_ms=now_ms)
        if delta.prompt is not None:
            self.prompt = delta.prompt
        if delta.finish is not None:
            self._measure(delta, now_s, now_ms)
            choice.finish(self._end_of(delta.finish), now_ms=now_ms)
        elif is_first and delta.token_ids:
            self._measure(delta, now_s, now_ms)
        return self._is_streamed or choice.reach_checkpoint(now_s)

    def _begin(self) -> bool:
        with self._lock:
            if self.state is HoldState.ADMITTED:
                self.state = _GENERATING
            assert self.state is not HoldState.PREPARING, "output before it was admitted"
            return self.state is _GENERATING

    def _measure(self, delta: TokenDelta, now_s: float, now_ms: int) -> None:
        record, stats = self.record, delta.stats
        if delta.token_ids:
            record.last_token_ms = now_ms
            if record.first_token_ms is None:
                record.first_token_ms = now_ms
        if record.first_scheduled_ms is None and stats.first_scheduled_s is not None:
            record.first_scheduled_ms = now_ms - int((now_s - stats.first_scheduled_s) * 1000)
        if delta.finish is not None:
            if stats.num_preemptions:
                self._add_preemptions(stats, now_s, now_ms)
            record.cached_tokens = max(record.cached_tokens or 0, stats.num_cached_tokens)
        self._count_prompt()

    def _count_prompt(self) -> None:
        """Record the tokens of the prompt once the job was scheduled: before, it cost nothing."""
        record = self.record
        if record.first_scheduled_ms is not None or record.first_token_ms is not None:
            record.prompt_tokens = self.num_prompt_tokens

    def _add_preemptions(self, stats: SequenceStats, now_s: float, now_ms: int) -> None:
        """Add those of a choice that has ended. Their times are from the start of this attempt."""
        record, preemptions = self.record, stats.preemptions
        now_ms -= self.leased.pulled_ms
        times: list[tuple[int, int | None]] = list(record.preemption_times)
        for begin_s, end_s in preemptions.ended:
            times.append((now_ms - _ms(now_s - begin_s), _ms(end_s - begin_s)))
        if preemptions.since_s is not None:
            times.append((now_ms - _ms(now_s - preemptions.since_s), None))
        record.preemptions += stats.num_preemptions
        record.preempted_ms += _ms(preemptions.waited_s)
        record.preemption_times = tuple(sorted(times, key=lambda pair: pair[0])[:MAX_PREEMPTIONS])

    def _end_of(self, finish: Finish) -> End:
        usage = usage_of(self.record, self.choices)
        match finish.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return End(state=JobState.DONE, finish_reason=finish.reason.value, usage=usage)
            case FinishReason.ABORTED:
                return End(state=self.stop or JobState.CANCELLED, usage=usage)
            case FinishReason.ERROR:
                code = INVALID_REQUEST if finish.is_rejection else finish.failure.value
                return End(state=JobState.FAILED, error=finish.error, error_code=code, usage=usage)

    # ------------------------------------------------------------ publication

    def acknowledge(self, progress: Progress, *, now_s: float) -> None:
        """Record that the queue has all that `progress` carried; `now_s` is when it answered."""
        choice = self.choices[progress.choice]
        choice.acknowledge(progress.start + progress.num_tokens, has_end=progress.end is not None, now_s=now_s)
        if progress.first_token_ms is not None:
            self.is_announced = True
            self._reported_gap_s = (progress.gap_ms or 0) / 1000
        longest_s = choice.waits.longest_s
        if longest_s is not None and longest_s > self._reported_gap_s + REPORT_GAP_S:
            self.is_announced = False

    def resend_from(self, choice: int, offset: int) -> None:
        """Set where the next entry of a choice starts: the queue's channel ends at `offset`.

        A channel that is shorter than was acknowledged means that Redis lost its last writes. The ends that it
        acknowledged may be lost too, so all choices send theirs again.
        """
        if offset < self.choices[choice].published:
            for other in self.choices:
                other.doubt_end()
        self.choices[choice].resend_from(offset)

    @property
    def num_published(self) -> int:
        """Tokens on its channels, all choices."""
        return sum([choice.published for choice in self.choices])

    @property
    def used_tokens(self) -> int:
        """Tokens of its reservation that are used up: the prompt and the output, once there is any output."""
        output = sum(len(choice.token_ids) for choice in self.choices)
        return min(self.leased.cost, self.num_prompt_tokens + output) if output else 0

    @property
    def has_ended(self) -> bool:
        """Whether every choice has its end, published or not."""
        return all(choice.end is not None or choice.has_end for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        """Whether the queue has acknowledged every end."""
        return all(map(_has_end, self.choices))

    @property
    def has_updates(self) -> bool:
        """Whether its channels lack tokens or ends."""
        return any(map(_has_updates, self.choices))


def _ms(duration_s: float) -> int:
    return round(duration_s * 1000)
