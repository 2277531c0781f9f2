"""`worker tune`: the model that is named, the traffic that is given or remembered, and what was found, for people."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from engine.executor import Executor
from engine.simulation.arrivals import Arrival
from engine.simulation.figures import Figures, Target
from engine.simulation.replay import RealClock
from engine.simulation.step_time import Fit
from worker.config import DEFAULT_BLOCK_SIZE, SETTINGS, WorkerConfig
from worker.errors import ConfigError
from worker.places import database_url_of
from worker.serving import engine_config, load
from worker.settings_search import BLOCK_SIZES, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Choice, Found, Model, search
from worker.traffic import read_history, read_traffic
from worker.translate import Encoder

_LARGE_ERROR = 0.2
_TOLD_OTHERWISE = {"device", "enable_prefix_caching", *(field.name for field in fields(Choice))}
"""By flags of their own, or, as prefix caching, not at all: nothing was measured with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was told beside the worker's settings."""

    traffic: Path | None
    ttft_s: float
    tpot_ms: float
    rate: float
    requests: int
    hours: float

    @property
    def target(self) -> Target:
        """How fast answers have to be."""
        return Target(ttft_s=self.ttft_s, tpot_s=self.tpot_ms / 1e3)


def run_tune(config: WorkerConfig, environ: Mapping[str, str], asked: Asked) -> str:
    """Tune for a model and a traffic; the report, and the command that starts what was found.

    Raises:
        ConfigError: the model, the traffic or a number is wrong.
        NotReady: the history cannot be read.
    """
    batching = engine_config(config)
    first = load(_widest(config, BLOCK_SIZES[0]))
    arrivals = _arrivals(config, environ, asked, first.encode)
    _check_lengths(arrivals, first.max_job_tokens)
    loaded: list[Executor] = [first.executor]
    del first

    def load_with(block_size: int) -> Executor:
        return loaded.pop() if loaded and block_size == BLOCK_SIZES[0] else load(_widest(config, block_size)).executor

    found = search(Model(load_with, RealClock(), batching), arrivals, asked.target, current_choice(config))
    report = report_of(found, batching.discipline, asked.target)
    return f"{report}\n\n{start_command(config, found.best.choice)}"


def current_choice(config: WorkerConfig) -> Choice:
    """What a worker with these settings does."""
    batching = config.batching
    return Choice(
        max_num_seqs=batching.max_num_seqs,
        max_num_batched_tokens=batching.max_num_batched_tokens,
        long_prefill_token_threshold=batching.long_prefill_token_threshold,
        block_size=config.model.block_size or DEFAULT_BLOCK_SIZE,
    )


def start_command(config: WorkerConfig, choice: Choice) -> str:
    """The command that starts what was tuned, whatever the environment says there: the queue, the device and all that
    was measured with, then the choice. Not where Redis and the history are: their addresses may hold passwords."""
    model = _widest(config, choice.block_size).model
    kind, _, index = model.device.partition(":")
    flags = [f"--queue {shlex.quote(config.queue.name)}", "--cpu" if kind == "cpu" else f"--gpu {index or 0}"]
    sections = {"model": model, "batching": config.batching}
    for leaf in SETTINGS:
        if leaf.section not in sections or leaf.name in _TOLD_OTHERWISE:
            continue
        if (value := getattr(sections[leaf.section], leaf.name)) is not None:
            switch = leaf.flag if value else f"--no-{leaf.flag[2:]}"
            flags.append(switch if leaf.is_switch else f"{leaf.flag} {shlex.quote(str(value))}")
    return " ".join(["worker start", *flags, choice.flags])


def _widest(config: WorkerConfig, block_size: int) -> WorkerConfig:
    """Room for every choice and the current settings; one amount of memory, whatever the size of its blocks."""
    current, num_blocks = current_choice(config), config.model.num_blocks
    if num_blocks is not None:
        num_blocks = num_blocks * current.block_size // block_size
    batching = replace(
        config.batching,
        max_num_seqs=max(current.max_num_seqs, *MAX_NUM_SEQS),
        max_num_batched_tokens=max(current.max_num_batched_tokens, *MAX_NUM_BATCHED_TOKENS),
        long_prefill_token_threshold=0,
    )
    return replace(config, model=replace(config.model, block_size=block_size, num_blocks=num_blocks), batching=batching)


def _arrivals(config: WorkerConfig, environ: Mapping[str, str], asked: Asked, encode: Encoder) -> list[Arrival]:
    if asked.traffic is None:
        url = database_url_of(config, environ)
        return read_history(url, config.queue.name, hours=asked.hours, most=asked.requests)
    read = read_traffic(asked.traffic, lambda text: len(encode(text, add_special_tokens=True)), rate=asked.rate)
    return read[: asked.requests]


def _check_lengths(arrivals: list[Arrival], max_job_tokens: int) -> None:
    longest = max(one.num_prompt_tokens + max(one.num_output_tokens, one.max_tokens) for one in arrivals)
    if longest > max_job_tokens:
        raise ConfigError([f"the traffic has a request of {longest} tokens; this worker takes {max_job_tokens}"])


def report_of(found: Found, discipline: str, target: Target) -> str:
    """What was found, for people. Predicted is in virtual time, measured is served for real."""
    fit = found.fit
    lines = [
        f"a step takes {fit.step_time}",
        f"(of {fit.num_steps} steps half are within {fit.median_error:.0%}, all together {fit.total_error:+.0%})",
        *_warning(fit),
        f"target: TTFT <= {target.ttft_s:g} s, TPOT <= {target.tpot_s * 1e3:g} ms; discipline {discipline}; "
        f"{found.num_tried} choices tried in virtual time, these run for real too:",
        "",
        f"{'':<24}{'target met':>11}{'req/s':>8}{'TTFT p99 s':>12}{'TPOT mean ms':>14}{'p99 ms':>8}",
        _line("current, predicted", found.current.predicted),
        _line("current, measured", found.current.measured),
    ]
    if found.best == found.current:
        return "\n".join([*lines, "", "nothing better was found than the current settings:"])
    return "\n".join(
        [
            *lines,
            _line("recommended, predicted", found.best.predicted),
            _line("recommended, measured", found.best.measured),
        ]
    )


def _warning(fit: Fit) -> list[str]:
    if abs(fit.total_error) <= _LARGE_ERROR:
        return []
    return ["the machine did other things meanwhile: some steps took far longer than most. Tune on a quiet one."]


def _line(name: str, figures: Figures) -> str:
    return (
        f"{name:<24}{figures.attainment:>11.0%}{figures.requests_per_s:>8.2f}{figures.ttft_p99_s:>12.2f}"
        f"{figures.tpot_mean_s * 1e3:>14.1f}{figures.tpot_p99_s * 1e3:>8.1f}"
    )
