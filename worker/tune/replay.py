"""Send arrivals through the real engine when they are due, in real or virtual time, and record their times.

In virtual time nothing is computed: a clock advances by the duration of each step, as it was measured.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed, Executor
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig
from sluice.engine.request import NO_TARGETS, LatencyTargets, Request, Sampling
from sluice.engine.scheduling.timing.step_time import StepTime, StepWork, work_of
from sluice.engine.watching import Watcher

_END_ROW = Sampled((255,))
_OTHER_ROW = Sampled((254,))
_LEAST_PAUSE_S = 1e-6
"""A shorter pause might not advance a clock that stands at a large number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A future request. It generates exactly this many tokens, whatever the model samples."""

    at_s: float
    """Seconds after the start of the replay."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int = 0
    """Limit of its output that the scheduler knows; 0: `num_output_tokens`."""

    targets: LatencyTargets = NO_TARGETS
    """The latency that its queue asks for."""


class _Silent:
    """A decoder that returns no text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return no text."""
        return ""


class Clock(Protocol):
    """Real or virtual time."""

    def now_s(self) -> float: ...
    def pass_s(self, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class VirtualClock:
    """Virtual time in seconds, which advances only by calls."""

    at_s: float = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return self.at_s

    def pass_s(self, seconds: float) -> None:
        """Advance the time."""
        self.at_s += seconds


class ComputeClock:
    """The machine's clock, without pauses: time in which nothing computes is skipped. Changes with each pause."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return time.perf_counter() + self._skipped_s

    def pass_s(self, seconds: float) -> None:
        """Skip a pause."""
        self._skipped_s += seconds


class SimulatedExecutor(NullModel):
    """A null model whose steps take as long as `step_time` says. It ends no sequence itself."""

    def __init__(self, step_time: StepTime, clock: VirtualClock, cache: NullModelConfig) -> None:
        super().__init__(cache)
        self._step_time = step_time
        self._clock = clock

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        self._clock.pass_s(self._step_time.of(work_of(batch)))
        return super().launch(batch)


@dataclass(slots=True, eq=False)
class CompletedRequest:
    """A replayed arrival and its times, from the start of the replay."""

    arrival: Arrival
    scheduled_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list[float])
    token_ids: list[int] = field(default_factory=list[int])

    @property
    def end_s(self) -> float:
        """Time of the last token."""
        return self.token_times_s[-1]

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.end_s - self.arrival.at_s

    @property
    def queue_s(self) -> float:
        """Arrival to first scheduled."""
        return self.scheduled_s - self.arrival.at_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.token_times_s[0] - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Each gap between two of its tokens."""
        return [later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class StepRecord(NamedTuple):
    """One step."""

    taken_s: float
    work: StepWork


class RecordingExecutor:
    """An executor that records each step of another, and ends each sequence at its arrival's length. Mutable.

    It runs at lag 0, so that it times one step at a time.
    """

    lag = 0

    def __init__(self, executor: Executor, clock: Clock, arrivals: Sequence[Arrival]) -> None:
        self._executor = executor
        self._clock = clock
        self._lengths = {str(index): arrival.num_output_tokens for index, arrival in enumerate(arrivals)}
        self.steps: list[StepRecord] = []
        self.limits = executor.limits
        self.fingerprint = executor.fingerprint
        self._admitted: dict[int, Admission] = {}
        """By slot."""

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        begin_s = self._clock.now_s()
        sampled = self._executor.launch(batch).collect()
        self.steps.append(StepRecord(self._clock.now_s() - begin_s, work_of(batch)))
        self._admitted |= {admission.slot: admission for admission in batch.admissions}
        drawn = [row for row in batch.rows if row.samples]
        return Computed([self._steer(row, result) for row, result in zip(drawn, sampled, strict=True)])

    def _steer(self, row: ScheduledRow, result: Sampled) -> Sampled:
        admission = self._admitted[row.slot]
        num_output_tokens = row.start + row.num_tokens - admission.num_prompt_tokens
        is_last = num_output_tokens + 1 == self._lengths.get(admission.request_id)
        if is_last:
            return _END_ROW
        return result if result.token_ids != _END_ROW.token_ids else _OTHER_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of a replay."""

    config: EngineConfig
    kv_tokens_total: int
    completed: list[CompletedRequest]
    steps: list[StepRecord]
    num_preemptions: int


def simulate(
    arrivals: Sequence[Arrival],
    step_time: StepTime,
    config: EngineConfig,
    cache: NullModelConfig,
    *,
    watcher: Watcher | None = None,
) -> Replay:
    """Replay `arrivals` in virtual time: the real engine, over steps that take as long as `step_time` says."""
    clock = VirtualClock()
    return replay(arrivals, SimulatedExecutor(step_time, clock, cache), config, clock, watcher=watcher)


def replay(
    arrivals: Sequence[Arrival],
    executor: Executor,
    config: EngineConfig,
    clock: Clock,
    *,
    watcher: Watcher | None = None,
) -> Replay:
    """Send `arrivals` through a new engine over `executor`, and wait until all have ended.

    All arrivals wait in the engine: time that a real job would spend in the queue counts as waiting here.

    Raises:
        RuntimeError: the engine rejected or failed one.
    """
    began_s = clock.now_s()
    recording = RecordingExecutor(executor, clock, arrivals)
    engine = LLMEngine(recording, _Silent(), config, clock=clock.now_s)
    engine.watch(watcher)
    coming = deque(sorted(enumerate(arrivals), key=lambda numbered: numbered[1].at_s))
    completed = [CompletedRequest(arrival) for arrival in arrivals]
    while coming or not engine.is_idle:
        now_s = clock.now_s() - began_s
        while coming and coming[0][1].at_s <= now_s:
            engine.add([_request(*coming.popleft())])
        _note(engine, completed, clock, began_s)
        # Read the clock as above: rounding could otherwise leave a request that is not due and no time to wait.
        next_s = coming[0][1].at_s - (clock.now_s() - began_s) if coming else float("inf")
        pause_s = min(engine.idle_s, next_s)
        if 0 < pause_s < float("inf"):
            clock.pass_s(max(pause_s, _LEAST_PAUSE_S))
    return Replay(
        config=config,
        kv_tokens_total=engine.stats.kv_tokens_total,
        completed=completed,
        steps=recording.steps,
        num_preemptions=engine.stats.num_preemptions,
    )


def _note(engine: LLMEngine, completed: list[CompletedRequest], clock: Clock, began_s: float) -> None:
    """Take a step, and record when its tokens arrived."""
    deltas = engine.advance()
    now_s = clock.now_s() - began_s
    for delta in deltas:
        if delta.finish is not None and delta.finish.error is not None:
            raise RuntimeError(f"request {delta.request_id} failed: {delta.finish.error}")
        request = completed[int(delta.request_id)]
        if not request.token_times_s:
            request.scheduled_s = (delta.stats.first_scheduled_s or 0.0) - began_s
        request.token_times_s += [now_s] * len(delta.token_ids)
        request.token_ids += delta.token_ids


def _request(index: int, arrival: Arrival) -> Request:
    # A unique prompt, of bytes, which every vocabulary has.
    prompt = tuple((index * 31 + position * 7 + position // 251) % 256 for position in range(arrival.num_prompt_tokens))
    return Request(
        id=str(index),
        prompt_token_ids=prompt,
        sampling=Sampling(
            temperature=0,
            max_tokens=max(arrival.max_tokens, arrival.num_output_tokens),
            ignore_eos=True,
            stop_token_ids=_END_ROW.token_ids,
        ),
        targets=arrival.targets,
    )
