"""Running requests through an engine over a real model, with the disturbances that it should not be able to notice."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from sluice.engine.batch import Batch, Sampled
from sluice.engine.config import EngineConfig, Quantization
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.executor import Executor, Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import PromptRead, Request, SampledLogprobs, TokenDelta
from sluice.engine.speculation.source import DraftSource
from sluice.engine.speculation.suffix_drafts import SuffixDrafts
from tests.engine.lagging import on_late_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the engine batches, and what happens around the requests."""

    block_size: int = 16
    num_blocks: int = 256
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    discipline: str = "continuous"
    arrivals: int = 1
    """Requests come over this many steps, at random."""

    abort: frozenset[str] = frozenset()
    """Requests that are aborted after a random number of steps."""

    seed: int = 0
    host_cache_bytes: int = 0
    lag: Literal[0, 1] = 0
    """Steps launched ahead: input ids come from the step before, as they would on a device."""

    graphs: bool | None = None
    """Whether decodes are recorded and replayed, as on a GPU."""

    speculates: bool = False
    """Whether tokens are drafted from the text so far."""

    is_late: bool = False
    """The device itself lags: see `LaggingExecutor`."""

    fails: bool = False
    """Every third step of several rows fails, when it is launched or once it is computed, and is divided."""


CALM = Setting()
DISTURBED: Mapping[str, Setting] = {
    "together": Setting(),
    "one by one": Setting(max_num_seqs=1, enable_prefix_caching=False),
    "tiny blocks": Setting(block_size=1, num_blocks=600, arrivals=9),
    "chunks of three": Setting(block_size=4, max_num_batched_tokens=3, max_num_seqs=3, arrivals=20),
    "short prefills": Setting(long_prefill_token_threshold=7, max_num_batched_tokens=24, arrivals=15, block_size=5),
    "preemption": Setting(block_size=4, num_blocks=18, max_num_batched_tokens=40, arrivals=3),
    "preemption, host tier": Setting(
        block_size=4, num_blocks=18, max_num_batched_tokens=40, arrivals=3, host_cache_bytes=2**20
    ),
    "preemption, no prefix cache": Setting(
        block_size=2, num_blocks=36, max_num_batched_tokens=16, enable_prefix_caching=False
    ),
    "prompts first": Setting(discipline="prefill-first", block_size=4, num_blocks=40, arrivals=10),
    "slots": Setting(discipline="slots", block_size=4, num_blocks=80, arrivals=10),
    "whole prompts": Setting(discipline="orca", block_size=4, num_blocks=60, max_num_batched_tokens=48, arrivals=10),
    "padded batches": Setting(discipline="static", block_size=4, max_num_seqs=4, arrivals=5),
    "overlapped": Setting(lag=1, block_size=4, arrivals=9),
    "overlapped, chunks of three": Setting(lag=1, block_size=4, max_num_batched_tokens=3, max_num_seqs=3, arrivals=20),
    "overlapped, a late device": Setting(lag=1, is_late=True, block_size=4, num_blocks=18, arrivals=9),
    "overlapped, a late device, host tier": Setting(
        lag=1, is_late=True, block_size=4, num_blocks=18, arrivals=9, host_cache_bytes=2**20
    ),
    "overlapped, a late device, aborts": Setting(
        lag=1, is_late=True, block_size=2, num_blocks=40, arrivals=10, abort=frozenset({"1", "4", "5"})
    ),
    "drafts": Setting(speculates=True, block_size=4, num_blocks=40, arrivals=9),
    "aborts": Setting(block_size=4, num_blocks=40, arrivals=10, abort=frozenset({"1", "4", "5"})),
}


FAILING: Mapping[str, Setting] = {
    "failing": Setting(fails=True, block_size=4, num_blocks=60, arrivals=9),
    "overlapped, failing": Setting(fails=True, lag=1, block_size=4, num_blocks=60, arrivals=9),
}


class FailingExecutor:
    """Fails every third step of several rows: see `Setting.fails`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_steps = 0
        self.limits, self.lag, self.fingerprint = executor.limits, executor.lag, executor.fingerprint

    def launch(self, batch: Batch) -> Launched:
        self._num_steps += len(batch.rows) > 1
        if len(batch.rows) == 1 or self._num_steps % 3:
            return self._executor.launch(batch)
        if self._num_steps % 2:
            raise RuntimeError("injected at the launch")
        return _Lost(self._executor.launch(batch))


@dataclass(frozen=True, slots=True)
class _Lost:
    """A step whose results are lost."""

    launched: Launched

    def collect(self) -> list[Sampled]:
        self.launched.collect()
        raise RuntimeError("injected when it is over")


@dataclass(slots=True, eq=False)
class EngineRun:
    """What a run said, by (request, choice)."""

    token_ids: dict[tuple[str, int], list[int]] = field(default_factory=dict[tuple[str, int], list[int]])
    logprobs: dict[tuple[str, int], list[SampledLogprobs]] = field(
        default_factory=dict[tuple[str, int], list[SampledLogprobs]]
    )
    prompts: dict[str, PromptRead] = field(default_factory=dict[str, PromptRead])
    """What was read of prompts, by request."""

    errors: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_loaded_tokens: int = 0

    def note(self, delta: TokenDelta) -> None:
        key = (delta.request_id, delta.choice)
        tokens = self.token_ids.setdefault(key, [])
        tokens += delta.token_ids
        self.logprobs.setdefault(key, []).extend(delta.logprobs or ())
        if delta.prompt is not None:
            assert delta.request_id not in self.prompts, "a prompt was read twice"
            self.prompts[delta.request_id] = delta.prompt
        if delta.finish is not None and delta.finish.error is not None:
            self.errors[key] = delta.finish.error


def run(
    folder: Path,
    requests: Sequence[Request],
    setting: Setting = CALM,
    *,
    dtype: str = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto",
    draft_source: DraftSource | None = None,
    adapters: Path | None = None,
    max_loaded_adapters: int = 2,
) -> EngineRun:
    """Run `requests` to their ends, checking the engine's books after every step."""
    options = ModelOptions(
        path=folder,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=setting.block_size,
        num_blocks=setting.num_blocks,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        lag=setting.lag,
        graphs=setting.graphs,
        host_cache_bytes=setting.host_cache_bytes,
        adapters=adapters,
        max_loaded_adapters=max_loaded_adapters,
    )
    config = EngineConfig(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        long_prefill_token_threshold=setting.long_prefill_token_threshold,
        enable_prefix_caching=setting.enable_prefix_caching,
        discipline=setting.discipline,
        batch_window_s=0.0,
        max_step_retries=0 if setting.fails else 2,
    )
    runner = load_model_runner(options)
    executor = on_late_device(runner) if setting.is_late else FailingExecutor(runner) if setting.fails else runner
    draft_source = SuffixDrafts() if setting.speculates and draft_source is None else draft_source
    # Whether drafts pay is measured. With this clock the answer does not depend on how busy the machine is.
    ticks = itertools.count()
    engine = LLMEngine(executor, NullTokenizer(), config, clock=lambda: next(ticks) * 1e-3, draft_source=draft_source)
    return _run(engine, requests, setting)


def _run(engine: LLMEngine, requests: Sequence[Request], setting: Setting) -> EngineRun:
    random = Random(setting.seed)
    arrivals = {request.id: random.randrange(setting.arrivals) for request in requests}
    aborts = {request_id: arrivals[request_id] + random.randrange(1, 12) for request_id in sorted(setting.abort)}
    outcome, step = EngineRun(), 0
    while step <= max(arrivals.values(), default=0) or not engine.is_idle:
        engine.add([request for request in requests if arrivals[request.id] == step])
        engine.abort([request_id for request_id, when in aborts.items() if when == step])
        for delta in engine.advance():
            outcome.note(delta)
        engine.check_invariants()
        step += 1
    outcome.num_preemptions = engine.stats.num_preemptions
    outcome.num_cached_tokens = engine.stats.num_cached_tokens
    outcome.num_drafted_tokens = engine.stats.num_drafted_tokens
    outcome.num_accepted_tokens = engine.stats.num_accepted_tokens
    outcome.num_loaded_tokens = engine.stats.num_loaded_tokens
    return outcome
