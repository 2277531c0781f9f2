"""Our engine on a device, with random weights, for the sections that run whole engines."""

import gc
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.engine.bare import Job, best_of_two_s, config_of, run_jobs
from benchmarks.engine.models import save_random_model, save_words
from benchmarks.gpu.models import SHAPES, random_decoder
from benchmarks.gpu.scale import Scale
from sluice.engine.config import StepLimits
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.executor import ModelLimits

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096


def shape_of(scale: Scale) -> str:
    """The shape that whole engines are measured with."""
    return "toy" if scale.is_toy else "0.6B"


@contextmanager
def random_folder(scale: Scale, *, has_tokenizer: bool = False) -> Generator[Path]:
    """Create a folder with random weights, in the dtype that speed is measured in; every token is a word."""
    shape = SHAPES[shape_of(scale)] | {"max_position_embeddings": MAX_MODEL_LEN}
    with tempfile.TemporaryDirectory(prefix="sluice-gpu-") as folder:
        # Not in inference mode, which other engines' threads are not in.
        with torch.inference_mode(False), torch.device(scale.device):
            torch.manual_seed(0)
            save_random_model(shape, Path(folder), scale.dtype)
        if has_tokenizer:
            save_words(Path(folder), int(str(shape["vocab_size"])))
        yield Path(folder)


def empty_device(scale: Scale) -> None:
    """Release unreferenced memory."""
    gc.collect()
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()


def options_of(scale: Scale, folder: Path, *, max_num_seqs: int) -> ModelOptions:
    """Return blocks for as many sequences as may run, of 1,280 tokens each on average."""
    return ModelOptions(
        path=folder,
        device="cuda:0" if scale.device.type == "cuda" else "cpu",
        block_size=BLOCK_SIZE,
        num_blocks=max_num_seqs * (64 if scale.is_toy else 1280) // BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=StepLimits.of(scale.device.type).max_num_batched_tokens,
        max_model_len=64 if scale.is_toy else MAX_MODEL_LEN,
    )


def random_runner(scale: Scale, shape: str, *, max_num_seqs: int) -> ModelRunner:
    """Return our engine's executor for a shape, with weights created on the device."""
    options = options_of(scale, Path(), max_num_seqs=max_num_seqs)
    max_model_len, num_blocks = options.max_model_len or 0, options.num_blocks or 0
    decoder = random_decoder(
        shape, scale.device, max_model_len=max_model_len, max_tokens=options.max_num_batched_tokens
    )
    limits = ModelLimits(
        max_model_len=max_model_len,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=frozenset(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    runner = ModelRunner(decoder, options, limits, fingerprint="")
    runner.prepare_first()
    return runner


def run_ours(runner: ModelRunner, jobs: Sequence[Job], *, max_num_seqs: int = 0, temperature: float = 0.6) -> None:
    """Generate all jobs; `max_num_seqs` at once, 0: all. The temperature is nano-vllm's if not given."""
    device = runner.decoder.weights.device.type
    config = config_of(max_num_seqs or len(jobs), StepLimits.of(device).max_num_batched_tokens)
    run_jobs(runner, jobs, config, temperature=temperature)


def warm_up(runner: ModelRunner, jobs: Sequence[Job], **options: float) -> None:
    """Run all jobs once, and record the steps that they wanted."""
    run_ours(runner, jobs, **options)
    while runner.has_preparations:
        runner.prepare()


def warm_s(runner: ModelRunner, jobs: Sequence[Job], **options: float) -> float:
    """Return seconds for all jobs, the better of two runs, after a warm-up that records its steps."""
    warm_up(runner, jobs, **options)
    return best_of_two_s(lambda: run_ours(runner, jobs, **options))
