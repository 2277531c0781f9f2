"""Workers that take turns, in virtual time: arrivals in, times of first tokens and seconds of switches out.

A worker computes prompts one after the other and all outputs at once, as many as it has places. A job that is handed
back keeps its tokens, and computes prompt and tokens again before the next one. A policy sees each second what the
fleet's process sees.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.worker.processes.turns.policy import Card, Credit, Demand, TurnRules, weight_of

TICK_S = 0.1
LOOK_EVERY_TICKS = 10

Policy = Callable[[Sequence[Demand], Card, TurnRules], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A model: what it costs to bring it to the device, and how it computes."""

    switch_s: float
    step_s: float
    places: int = 16
    prefill_tokens_per_s: float = 2000.0


@dataclass(slots=True, eq=False)
class Job:
    """A job. Changes as it is computed."""

    model: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    num_tokens: int = 0
    """Output tokens so far."""

    prefill_s: float = 0.0
    """What is left to compute before the next token."""

    first_s: float | None = None
    end_s: float | None = None


@dataclass(slots=True, eq=False)
class Model:
    """A model's queue, and what its worker runs. Changes with the time."""

    load: ModelLoad
    waiting: deque[Job] = field(default_factory=deque[Job])
    running: list[Job] = field(default_factory=list[Job])
    left_s: float = 0.0

    @property
    def has_work(self) -> bool:
        """Whether jobs wait or run."""
        return bool(self.waiting or self.running)

    def admit(self) -> None:
        """Start the jobs that fit."""
        while self.waiting and len(self.running) < self.load.places:
            job = self.waiting.popleft()
            job.prefill_s = (job.prompt_tokens + job.num_tokens) / self.load.prefill_tokens_per_s
            self.running.append(job)

    def compute(self, now_s: float, for_s: float) -> None:
        """Compute for a while: prompts first, one after the other."""
        rest_s = for_s
        for job in self.running:
            used_s = min(job.prefill_s, rest_s)
            job.prefill_s, rest_s = job.prefill_s - used_s, rest_s - used_s
        steps = rest_s / self.load.step_s
        for job in self.running:
            if job.prefill_s <= 0:
                job.first_s = now_s if job.first_s is None else job.first_s
                job.num_tokens = min(job.output_tokens, job.num_tokens + round(steps))
                job.end_s = now_s if job.num_tokens == job.output_tokens else None
        self.running = [job for job in self.running if job.end_s is None]

    def hand_back(self) -> None:
        """Return the running jobs to the head of the queue."""
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    @property
    def work_s(self) -> float:
        """How long it needs for all that it has, when its places are full."""
        tokens = sum(job.output_tokens - job.num_tokens for job in (*self.waiting, *self.running))
        return tokens * self.load.step_s / self.load.places

    def demand(self, name: str, now_s: float, *, is_present: bool) -> Demand:
        """Return what the fleet's process sees of it."""
        away_s = 0.0 if is_present else now_s - self.left_s
        waits_s = [(min(now_s - job.at_s, away_s), weight_of(job.priority)) for job in self.waiting]
        return Demand(
            name=name,
            waiting_jobs=len(self.waiting),
            running_jobs=len(self.running),
            waits_s=max((wait_s for wait_s, _ in waits_s), default=0.0),
            weighted_wait_s=max((wait_s * weight for wait_s, weight in waits_s), default=0.0),
            weight=max((weight for _, weight in waits_s), default=1.0),
            work_s=self.work_s,
        )


@dataclass(slots=True, eq=False)
class Outcome:
    """What happened. Changes while it is simulated."""

    jobs: list[Job] = field(default_factory=list[Job])
    num_switches: int = 0
    switch_s: float = 0.0
    """Seconds in which the device was between two models."""

    lost_s: float = 0.0
    """Those of switches away from a model that had work."""

    longest_wait_s: float = 0.0
    """The longest time that a queue with jobs was without the device."""

    span_s: float = 0.0


class Simulation:
    """One device and its models. Changes with each tick."""

    def __init__(self, loads: Mapping[str, ModelLoad], policy: Policy, rules: TurnRules) -> None:
        self._models = {name: Model(load) for name, load in loads.items()}
        self._costs = {name: load.switch_s for name, load in loads.items()}
        self._policy = policy
        self._rules = rules
        self._credit = Credit.full(self._costs, rules)
        self._present: str = next(iter(loads))
        self._ready_s = 0.0
        self._weight = 1.0
        self._outcome = Outcome()

    def run(self, jobs: Sequence[Job], *, until_s: float) -> Outcome:
        """Run until all jobs have ended, or a time has come."""
        coming, tick = deque(sorted(jobs, key=lambda job: job.at_s)), 0
        self._outcome.jobs = list(jobs)
        while tick * TICK_S < until_s and (coming or any(model.has_work for model in self._models.values())):
            now_s = tick * TICK_S
            while coming and coming[0].at_s <= now_s:
                self._models[coming[0].model].waiting.append(coming.popleft())
            if tick % LOOK_EVERY_TICKS == 0:
                self._look(now_s)
            self._compute(now_s)
            self._credit = self._credit.grown(TICK_S, self._costs, self._rules)
            tick += 1
        self._outcome.span_s = tick * TICK_S
        return self._outcome

    def _compute(self, now_s: float) -> None:
        if now_s >= self._ready_s:
            model = self._models[self._present]
            model.admit()
            model.compute(now_s + TICK_S, TICK_S)

    def _look(self, now_s: float) -> None:
        self._note_waits(now_s)
        if now_s >= self._ready_s:
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        demands = [model.demand(name, now_s, is_present=name == self._present) for name, model in self._models.items()]
        own = next(one for one in demands if one.name == self._present)
        self._weight = max(self._weight, own.weight)
        card = Card(
            present=self._present,
            costs=self._costs,
            credit_s=self._credit.seconds,
            weight=self._weight,
            turn_s=now_s - self._ready_s,
        )
        chosen = self._policy(demands, card, self._rules)
        if chosen is not None and chosen != self._present:
            self._switch(next(one for one in demands if one.name == chosen), now_s)

    def _switch(self, chosen: Demand, now_s: float) -> None:
        leaving, cost_s = self._models[self._present], self._costs[chosen.name]
        self._outcome.num_switches += 1
        self._outcome.switch_s += cost_s
        self._outcome.lost_s += cost_s if leaving.has_work else 0.0
        leaving.hand_back()
        leaving.left_s = now_s
        self._credit = self._credit.spent(cost_s, self._costs)
        self._present, self._ready_s, self._weight = chosen.name, now_s + cost_s, chosen.weight

    def _note_waits(self, now_s: float) -> None:
        for name, model in self._models.items():
            if name != self._present and model.waiting:
                wait_s = max(min(now_s - job.at_s, now_s - model.left_s) for job in model.waiting)
                self._outcome.longest_wait_s = max(self._outcome.longest_wait_s, wait_s)
