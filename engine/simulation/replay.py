"""Send arrivals through an engine when they are due, and record the result of each request and step."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed, Executor
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import Request, SamplingParams
from sluice.engine.scheduling.timing.step_time import StepTime, StepWork, work_of
from sluice.engine.simulation.arrivals import Arrival
from sluice.engine.simulation.executor import SimulatedExecutor, VirtualClock
from sluice.engine.watching import Watcher

_END_ROW = Sampled((255,))
_OTHER_ROW = Sampled((254,))
_LEAST_PAUSE_S = 1e-6
"""A shorter pause might not advance a clock that stands at a large number."""


class _Silent:
    """A decoder that returns no text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return no text."""
        return ""


class Clock(Protocol):
    """Real or virtual time."""

    def now_s(self) -> float: ...
    def pass_s(self, seconds: float) -> None: ...


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

    begin_s: float
    taken_s: float
    work: StepWork
    num_rows: int
    """Sequences that computed."""

    num_padding_rows: int
    num_padding_tokens: int
    num_held_tokens: int
    """Slots of the blocks that these sequences hold."""

    num_filled_tokens: int
    """Held slots with keys and values after the step."""


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
        self._num_blocks: dict[int, int] = {}
        """Both by slot."""

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        begin_s = self._clock.now_s()
        sampled = self._executor.launch(batch).collect()
        rows = batch.rows
        self._note_writes(batch)
        self.steps.append(
            StepRecord(
                begin_s=begin_s,
                taken_s=self._clock.now_s() - begin_s,
                work=work_of(batch),
                num_rows=len(rows),
                num_padding_rows=len(batch.padding),
                num_padding_tokens=batch.num_padding_tokens,
                num_held_tokens=sum(self._num_blocks[row.slot] for row in rows) * self.limits.block_size,
                num_filled_tokens=sum(row.start + row.num_tokens for row in rows),
            )
        )
        drawn = [row for row in rows if row.samples]
        return Computed([self._steer(row, result) for row, result in zip(drawn, sampled, strict=True)])

    def _note_writes(self, batch: Batch) -> None:
        for admission in batch.admissions:
            self._admitted[admission.slot] = admission
            self._num_blocks[admission.slot] = len(admission.block_ids)
        for slot, _, first, block_ids, _ in batch.table_writes:
            self._num_blocks[slot] = first + len(block_ids)

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
    """Times count from the start of the replay."""

    num_preemptions: int
    cpu_s: float
    """Real duration of the replay: for a simulation, its cost."""


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
    began_s, cpu_began_s = clock.now_s(), time.perf_counter()
    recording = RecordingExecutor(executor, clock, arrivals)
    engine = LLMEngine(recording, _Silent(), config, clock=clock.now_s)
    engine.watch(watcher)
    coming = deque(sorted(enumerate(arrivals), key=lambda one: one[1].at_s))
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
        steps=[step._replace(begin_s=step.begin_s - began_s) for step in recording.steps],
        num_preemptions=engine.stats.num_preemptions,
        cpu_s=time.perf_counter() - cpu_began_s,
    )


def _note(engine: LLMEngine, completed: list[CompletedRequest], clock: Clock, began_s: float) -> None:
    """Take a step, and record when its tokens arrived."""
    deltas = engine.advance()
    now_s = clock.now_s() - began_s
    for delta in deltas:
        if delta.finish is not None and delta.finish.error is not None:
            raise RuntimeError(f"request {delta.request_id} failed: {delta.finish.error}")
        one = completed[int(delta.request_id)]
        if not one.token_times_s:
            one.scheduled_s = (delta.stats.first_scheduled_s or 0.0) - began_s
        one.token_times_s += [now_s] * len(delta.token_ids)
        one.token_ids += delta.token_ids


def _request(index: int, arrival: Arrival) -> Request:
    # A unique prompt, of bytes, which every vocabulary has.
    prompt = tuple((index * 31 + position * 7 + position // 251) % 256 for position in range(arrival.num_prompt_tokens))
    return Request(
        id=str(index),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            temperature=0,
            max_tokens=max(arrival.max_tokens, arrival.num_output_tokens),
            ignore_eos=True,
            stop_token_ids=_END_ROW.token_ids,
        ),
        arrival_s=arrival.at_s,
        targets=arrival.targets,
    )
