"""The command `worker tune`: from options to a report."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from sluice.engine.executor import Executor
from sluice.engine.scheduling.timing.fitting import Fit
from sluice.worker.config import DEFAULT_BLOCK_SIZE, SETTINGS, WorkerConfig
from sluice.worker.endpoints import database_url_of
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import engine_config, load
from sluice.worker.model.translate import Encoder
from sluice.worker.tune.figures import Figures, Target
from sluice.worker.tune.progress import ProgressReporter
from sluice.worker.tune.replay import Arrival, ComputeClock
from sluice.worker.tune.search import (
    BLOCK_SIZES,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Choice,
    Model,
    SearchResult,
    search,
)
from sluice.worker.tune.traffic import read_history, read_traffic

_LARGE_ERROR = 0.2
_SET_ELSEWHERE = {"device", "enable_prefix_caching", *(field.name for field in fields(Choice))}
"""Settings that the printed command names elsewhere, or omits: prefix caching was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of the command besides the worker's settings."""

    traffic: Path | None
    ttft_s: float
    tpot_s: float
    rate: float
    requests: int
    hours: float

    @property
    def target(self) -> Target:
        """The latency target."""
        return Target(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


def run_tune(
    config: WorkerConfig, environ: Mapping[str, str], options: TuneOptions, write: Callable[[str], None]
) -> str:
    """Tune for a model and a traffic, and return a report that ends with the command to start the result.

    Progress and estimates go to `write`, line by line.

    Raises:
        ConfigError: the model, the traffic or a number is wrong.
        NotReady: the history cannot be read.
    """
    batching, progress = engine_config(config), ProgressReporter(write)
    write(f"loading {config.model.path}")
    first = load(_widest(config, BLOCK_SIZES[0]))
    arrivals = _arrivals(config, environ, options, first.encode)
    _check_lengths(arrivals, first.max_job_tokens)
    loaded: list[Executor] = [first.executor]
    del first

    def load_with(block_size: int) -> Executor:
        return loaded.pop() if loaded and block_size == BLOCK_SIZES[0] else load(_widest(config, block_size)).executor

    write(f"tuning for {len(arrivals)} requests of {arrivals[-1].at_s:.0f} s; pauses between them are skipped")
    model = Model(load_with, ComputeClock(), batching, progress)
    result = search(model, arrivals, options.target, current_choice(config))
    report = report_of(result, batching.discipline, options.target)
    return f"{report}\n\n{start_command(config, result.best.choice)}"


def current_choice(config: WorkerConfig) -> Choice:
    """Return the choice that these settings stand for."""
    limits = config.step_limits
    return Choice(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        long_prefill_token_threshold=config.batching.long_prefill_token_threshold,
        block_size=config.model.block_size or DEFAULT_BLOCK_SIZE,
    )


def start_command(config: WorkerConfig, choice: Choice) -> str:
    """Return a command that starts a worker as tuned, independent of the environment.

    It names the queues, the device, the settings of the measurement and the choice. It omits the URLs of Redis and the
    history, because they may contain passwords.
    """
    model = _widest(config, choice.block_size).model
    kind, _, index = model.device.partition(":")
    queues = [f"--queue {shlex.quote(queue)}" for queue in config.queue.name]
    flags = [*queues, "--cpu" if kind == "cpu" else f"--gpu {index or 0}"]
    sections = {"model": model, "batching": config.batching}
    for leaf in SETTINGS:
        if leaf.section not in sections or leaf.name in _SET_ELSEWHERE:
            continue
        if (value := getattr(sections[leaf.section], leaf.name)) is not None:
            switch = leaf.flag if value else f"--no-{leaf.flag[2:]}"
            values = value if leaf.is_list else (value,)
            flags += [switch] if leaf.is_switch else [f"{leaf.flag} {shlex.quote(str(one))}" for one in values]
    return " ".join(["worker start", *flags, choice.flags])


def _widest(config: WorkerConfig, block_size: int) -> WorkerConfig:
    """Return a configuration with room for every choice, and the same cache memory for any block size."""
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


def _arrivals(config: WorkerConfig, environ: Mapping[str, str], options: TuneOptions, encode: Encoder) -> list[Arrival]:
    if options.traffic is None:
        url = database_url_of(config, environ)
        return read_history(url, config.queue.names, hours=options.hours, most=options.requests)
    read = read_traffic(options.traffic, lambda text: len(encode(text, add_special_tokens=True)), rate=options.rate)
    return read[: options.requests]


def _check_lengths(arrivals: list[Arrival], max_job_tokens: int) -> None:
    longest = max(job.num_prompt_tokens + max(job.num_output_tokens, job.max_tokens) for job in arrivals)
    if longest > max_job_tokens:
        raise ConfigError([f"the traffic has a request of {longest} tokens; this worker takes {max_job_tokens}"])


def report_of(result: SearchResult, discipline: str, target: Target) -> str:
    """Format a search result. Predicted figures are from virtual time, measured ones from real runs."""
    fit, candidate = result.fit, result.candidate
    lines = [
        f"a step takes {fit.step_time}",
        f"(of {fit.num_steps} steps half are within {fit.median_error:.0%}, all together {fit.total_error:+.0%})",
        *_warning(fit),
        f"target: TTFT <= {target.ttft_s:g} s, TPOT <= {target.tpot_s * 1e3:g} ms; discipline {discipline}; "
        f"{result.num_tried} choices simulated, these measured:",
        "",
        f"{'':<24}{'target met':>11}{'req/s':>8}{'TTFT p99 s':>12}{'TPOT mean ms':>14}{'p99 ms':>8}",
        _line("current, predicted", result.current.predicted),
        _line("current, measured", result.current.measured),
    ]
    if candidate == result.current:
        return "\n".join([*lines, "", "no choice was predicted to be better than the current settings:"])
    name = "recommended" if result.best == candidate else "rejected"
    lines += [_line(f"{name}, predicted", candidate.predicted), _line(f"{name}, measured", candidate.measured)]
    if result.best == result.current:
        lines += ["", "the rejected settings did not measure better than the current ones:"]
    return "\n".join(lines)


def _warning(fit: Fit) -> list[str]:
    if abs(fit.total_error) <= _LARGE_ERROR:
        return []
    return ["warning: some steps took far longer than most, so the machine was busy. Repeat this on an idle machine."]


def _line(name: str, figures: Figures) -> str:
    return (
        f"{name:<24}{figures.attainment:>11.0%}{figures.requests_per_s:>8.2f}{figures.ttft_p99_s:>12.2f}"
        f"{figures.tpot_mean_s * 1e3:>14.1f}{figures.tpot_p99_s * 1e3:>8.1f}"
    )
