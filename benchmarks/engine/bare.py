"""Throughput of the engine on this CPU, compared with its peers and its bound.

    python -m benchmarks engine [--peers none|all] [--threads N] [--spin]

A random model of 125 M parameters in Llama's shape (12 layers x 768, 12/4 heads, vocabulary 32,000, bf16), created once
in a temporary folder. 48 requests of 16 to 384 prompt tokens and 8 to 192 output tokens, greedy, end-of-sequence
ignored, no prefix cache. Useful tokens per second, the better of two runs. Rows:

- our engine, with 16 and with 48 sequences, and with one request of 128 + 128 tokens alone;
- the matrix products alone: the same steps without everything else, the bound of any engine with these products;
- transformers `generate` in static batches of 16 (sorted by length, in its favour), and `generate_batch`;
- the engine's own Python per step, over the null model.

Compare only rows of one run, on an otherwise idle machine.
"""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.engine.scheduler import measure
from benchmarks.native_kernels import require_native_kernels
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.executor import Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, SamplingParams
from sluice.engine.text.detokenizer import ByteDetokenizer

VOCAB_SIZE = 32_000
STATIC_BATCH = 16
MAX_NUM_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and its number of output tokens."""

    prompt: tuple[int, ...]
    num_output_tokens: int


def make_jobs() -> list[Job]:
    """Return 48 jobs, always the same."""
    random = Random(0)

    def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
        return Job(tuple(random.randrange(3, VOCAB_SIZE) for _ in range(num_prompt_tokens)), num_output_tokens)

    return [job(random.randint(16, 284), random.randint(8, 137)) for _ in range(46)] + [job(384, 192), job(16, 8)]


def model_folder() -> Path:
    """Return the random model's folder, creating it if necessary."""
    folder = Path(tempfile.gettempdir()) / "sluice-benchmark-llama-125m"
    if not (folder / "model.safetensors").is_file():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        )
        torch.nn.Module.to(model := LlamaForCausalLM(config), torch.bfloat16)
        model.save_pretrained(folder)
    return folder


@cache
def _pieces(vocab_size: int) -> dict[int, str | bytes]:
    # Created once: a run is timed with its `Words`.
    return {token_id: f" {token_id}" for token_id in range(vocab_size)}


class Words:
    """A decoder for a model without a tokenizer: every token is a word."""

    def __init__(self, vocab_size: int) -> None:
        self._pieces = _pieces(vocab_size)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        return "".join(f" {token_id}" for token_id in token_ids)

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> ByteDetokenizer:
        """Begin the text of a choice."""
        return ByteDetokenizer(self._pieces)


class RecordingRunner:
    """A model runner that records the size of each step, (tokens, rows that sample)."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[tuple[int, int]] = []
        self.limits = runner.limits
        self.fingerprint = runner.fingerprint
        self.lag = runner.lag

    def launch(self, batch: Batch) -> Launched:
        """Start the step, and record it."""
        self.steps.append((batch.num_tokens, sum(row.samples for row in batch.rows)))
        return self.runner.launch(batch)


def run_ours(runner: RecordingRunner, jobs: Sequence[Job], max_num_seqs: int) -> None:
    """Generate all jobs with the engine."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, enable_prefix_caching=False
    )
    engine = LLMEngine(runner, Words(runner.limits.vocab_size), config)
    engine.add(
        Request(
            id=str(i),
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True),
        )
        for i, job in enumerate(jobs)
    )
    num_tokens = 0
    runner.steps.clear()
    while not engine.is_idle:
        num_tokens += sum(len(delta.token_ids) for delta in engine.advance())
    assert num_tokens == sum(job.num_output_tokens for job in jobs)


@torch.inference_mode()
def run_products(runner: RecordingRunner) -> None:
    """Repeat only the matrix products of the recorded steps."""
    weights = runner.runner.decoder.weights
    config = runner.runner.decoder.config
    hidden = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.hidden_size, dtype=torch.bfloat16)
    attended = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.num_heads * config.head_size, dtype=torch.bfloat16)
    inner = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.intermediate_size, dtype=torch.bfloat16)
    for num_tokens, num_rows in runner.steps:
        for index, layer in enumerate(weights.layers):
            layer.qkv(hidden[:num_tokens])
            num_left = num_rows if index == len(weights.layers) - 1 else num_tokens
            layer.attention_output(attended[:num_left])
            layer.gated(hidden[:num_left])
            layer.down(inner[:num_left])
        weights.output(hidden[:num_rows])


def run_generate(model: Any, jobs: Sequence[Job]) -> None:  # noqa: ANN401 - typed for many kinds of model
    """Generate all jobs with transformers, in static batches of jobs of similar length."""
    ordered = sorted(jobs, key=lambda job: job.num_output_tokens)
    for batch in _cut(ordered, STATIC_BATCH):
        longest = max(len(job.prompt) for job in batch)
        padding = [longest - len(job.prompt) for job in batch]
        ids = torch.tensor([[0] * pad + list(job.prompt) for pad, job in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        steps = max(job.num_output_tokens for job in batch)
        model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)


def run_generate_batch(model: Any, jobs: Sequence[Job]) -> None:  # noqa: ANN401 - as above
    """Generate all jobs with transformers' continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=MAX_NUM_BATCHED_TOKENS)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        for job in jobs:
            manager.add_request(list(job.prompt), max_new_tokens=job.num_output_tokens)
        num_done = 0
        while num_done < len(jobs):
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("generate_batch stopped without an answer")
            num_done += result.is_finished()


def _cut(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]


def best_of_two_s(run: Callable[[], None]) -> float:
    """Return seconds of the faster of two runs."""
    times: list[float] = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def print_row(name: str, num_tokens: int, seconds: float, note: str = "") -> None:
    """Print one line of the table."""
    print(f"{name:<52} {num_tokens / seconds:>8.0f} tokens/s {seconds:>8.2f} s  {note}", flush=True)


def measure_ours(folder: Path, jobs: list[Job]) -> None:
    """Print the engine's rows, each followed by its bound."""
    options = ModelOptions(path=folder, num_blocks=2048, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
    runner = RecordingRunner(load_model_runner(options))
    alone = [Job(jobs[-2].prompt[:128], 128)]
    for name, work, max_num_seqs in (("16 sequences", jobs, 16), ("48 sequences", jobs, 48), ("one request", alone, 1)):
        num_tokens = sum(job.num_output_tokens for job in work)
        ours_s = best_of_two_s(lambda work=work, n=max_num_seqs: run_ours(runner, work, n))
        products_s = best_of_two_s(lambda: run_products(runner))
        print_row(f"this engine, {name}", num_tokens, ours_s, f"{products_s / ours_s:.0%} of the products alone")
        print_row(f"matrix products alone, {name}", num_tokens, products_s)


def measure_peers(folder: Path, jobs: list[Job]) -> None:
    """Print transformers' rows."""
    from transformers import AutoModelForCausalLM

    num_tokens = sum(job.num_output_tokens for job in jobs)
    for name, run, attention in (
        ("transformers generate, static batches of 16", run_generate, "sdpa"),
        ("transformers generate_batch", run_generate_batch, "sdpa"),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)
        print_row(name, num_tokens, best_of_two_s(lambda run=run, model=model: run(model, jobs)))


FIRST_TOKEN = """
import time; begin = time.perf_counter()
from pathlib import Path
from sluice.engine.batch import batch_of
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.request import SamplingParams
from sluice.engine.sequence import Sequence
runner = load_model_runner(ModelOptions(path=Path({folder!r}), num_blocks=1024))
loaded = time.perf_counter()
sequence = Sequence(id=0, request_id="r", choice=0, sampling=SamplingParams(temperature=0), token_ids=[5] * 64,
                    num_prompt_tokens=64, block_table=[1, 2, 3, 4])
runner.launch(batch_of([(sequence, 0, 64, True)])).collect()
print(f"{{loaded - begin:.2f}} s to load, {{time.perf_counter() - begin:.2f}} s to the first token of 64")
"""


def measure_start(folder: Path) -> None:
    """Print the time from the start of a process to its first token."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN.format(folder=str(folder))], capture_output=True, text=True, check=True
    )
    print(f"{'start of a process':<52} {done.stdout.strip()} (limit 4 s)")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", choices=("none", "all"), default="all", help="also measure transformers")
    parser.add_argument("--spin", action="store_true", help="let waiting threads spin, as OpenMP does by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch and the kernels")
    arguments = parser.parse_args()
    if not arguments.spin and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # As in the worker: it must come before torch.
        limit_spinning()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "engine", *sys.argv[1:]])
    require_native_kernels()
    torch.set_num_threads(arguments.threads)
    folder, jobs = model_folder(), make_jobs()
    num_prompt_tokens = sum(len(job.prompt) for job in jobs)
    num_output_tokens = sum(job.num_output_tokens for job in jobs)
    print(f"{len(jobs)} requests, {num_prompt_tokens} prompt tokens, {num_output_tokens} output tokens")
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f} before the start\n")
    measure_start(folder)
    measure_ours(folder, jobs)
    print(f"{'peak memory of this process':<52} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:>8.0f} MiB")
    if arguments.peers == "all":
        measure_peers(folder, jobs)
    for num_running in (64, 256):
        cost = measure(num_running, num_windows=20)
        name = f"a step less the model, {num_running} sequences"
        print(f"{name:<52} {cost.median_ms:>8.3f} ms (best {cost.best_ms:.3f})")


if __name__ == "__main__":
    main()
