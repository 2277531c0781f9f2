"""`worker tune`, put together: the model that is named, the traffic that is given or remembered, and the report."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.executor import Executor
from engine.simulation.figures import Target
from engine.simulation.replay import Arrival, RealClock
from worker.config import SETTINGS, WorkerConfig
from worker.errors import ConfigError
from worker.places import database_url_of
from worker.serving import load
from worker.traffic import read_history, read_traffic
from worker.translate import Encoder
from worker.tune import BLOCK_SIZES, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Choice, Model, report_of, tune


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
    first = load(_widest(config, BLOCK_SIZES[0]))
    arrivals = _arrivals(config, environ, asked, first.encode)
    _check_lengths(arrivals, first.max_job_tokens)
    loaded: list[Executor] = [first.executor]
    del first

    def load_with(block_size: int) -> Executor:
        return loaded.pop() if loaded and block_size == BLOCK_SIZES[0] else load(_widest(config, block_size)).executor

    tuned = tune(Model(load_with, RealClock()), arrivals, asked.target)
    return f"{report_of(tuned, asked.target)}\n\n{start_command(config, tuned.choice)}"


def start_command(config: WorkerConfig, choice: Choice) -> str:
    """The command that starts what was tuned, whatever the environment says there: the queue, the device and all that
    was measured with, then the choice. Not where Redis and the history are: their addresses may hold passwords."""
    model = _widest(config, choice.block_size).model
    kind, _, index = model.device.partition(":")
    flags = [f"--queue {shlex.quote(config.queue.name)}", "--cpu" if kind == "cpu" else f"--gpu {index or 0}"]
    for leaf in SETTINGS:
        if leaf.section != "model" or leaf.name in ("device", "block_size"):
            continue
        if (value := getattr(model, leaf.name)) is not None:
            flags.append(f"{leaf.flag} {shlex.quote(str(value))}")
    return " ".join(["worker start", *flags, choice.flags])


def _widest(config: WorkerConfig, block_size: int) -> WorkerConfig:
    """Room for every choice; one amount of memory, whatever the size of its blocks."""
    model, num_blocks = config.model, config.model.num_blocks
    if num_blocks is not None:
        num_blocks = num_blocks * BLOCK_SIZES[0] // block_size
    batching = replace(
        config.batching,
        max_num_seqs=max(MAX_NUM_SEQS),
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS),
        long_prefill_token_threshold=0,
    )
    return replace(config, model=replace(model, block_size=block_size, num_blocks=num_blocks), batching=batching)


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
