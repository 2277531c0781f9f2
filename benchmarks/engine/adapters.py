"""What adapters cost: `python -m benchmarks adapters`, on this CPU, with the bare engine.

The random model `llama-100m` in bfloat16, 16 sequences at once, each of one of 8 adapters with pairs for all linear
layers, beside the same sequences without any, in turns. TPOT is the time of each token but the first; the share is the
median over the rounds of what adapters add to it, and to the time of the prompts (TTFT).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from safetensors.torch import save_file

from benchmarks.engine.models import VOCAB_SIZE, model_folder
from benchmarks.native_kernels import require_native_kernels
from benchmarks.tables import table
from sluice.engine.adapters.modules import modules_of
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.request import Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer

NUM_ADAPTERS, NUM_SEQUENCES, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 16, 64, 64
RANKS = (8, 16, 64)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, in turns (default 7)")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"), help="of the weights")
    arguments = parser.parse_args()
    require_native_kernels()
    folder = model_folder()
    rows: list[list[object]] = [["rank", "TPOT without", "TPOT with", "added", "TTFT without", "TTFT with", "added"]]
    for rank in RANKS:
        options = ModelOptions(
            path=folder,
            num_blocks=NUM_SEQUENCES * 16,
            max_model_len=256,
            max_num_seqs=NUM_SEQUENCES,
            quantization=arguments.quantization,
            adapters=saved_adapters(folder, rank),
            max_loaded_adapters=NUM_ADAPTERS,
        )
        config = EngineConfig(max_num_seqs=NUM_SEQUENCES, max_num_batched_tokens=1024, enable_prefix_caching=False)
        engine = LLMEngine(load_model_runner(options), load_tokenizer(folder), config)
        names = [f"adapter-{number % NUM_ADAPTERS}" for number in range(NUM_SEQUENCES)]
        for adapters in (names, [""] * NUM_SEQUENCES):
            _run(engine, adapters, "warm-up")
        pairs = [
            (_run(engine, [""] * NUM_SEQUENCES, f"plain {number}"), _run(engine, names, f"adapted {number}"))
            for number in range(arguments.rounds)
        ]
        rows.append([rank, *_cells(pairs, 0), *_cells(pairs, 1)])
    print(table(rows))


def saved_adapters(model: Path, rank: int) -> Path:
    """Return a folder of random adapters of a rank, creating it if necessary."""
    folder = Path(tempfile.gettempdir()) / f"{model.name}-adapters-{rank}"
    modules = modules_of(parse_config(open_model_folder(model).config))
    for number in range(NUM_ADAPTERS):
        path = folder / f"adapter-{number}"
        if (path / "adapter_config.json").is_file():
            continue
        path.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number)
        tensors: dict[str, torch.Tensor] = {}
        for product in modules:
            for name, size in zip(product.names, product.sizes.part_sizes, strict=True):
                prefix = f"base_model.model.{name}"
                down = torch.randn(rank, product.sizes.in_size, generator=generator)
                tensors[f"{prefix}.lora_A.weight"] = down * 0.02
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.02
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
        # Last: it marks the folder as complete.
        (path / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _run(engine: LLMEngine, adapters: list[str], name: str) -> tuple[float, float]:
    """Return the times of each further token, and of the first ones, in seconds."""
    random, began_s = Random(name), time.perf_counter()
    requests = [
        Request(
            id=f"{name} {number}",
            prompt_token_ids=tuple(random.randrange(300, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)),
            adapter=adapter,
            sampling=Sampling(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True),
        )
        for number, adapter in enumerate(adapters)
    ]
    engine.add(requests)
    first_s: dict[str, float] = {}
    while not engine.is_idle:
        for delta in engine.advance():
            assert delta.finish is None or delta.finish.error is None, f"{name}: {delta.finish}"
            if delta.token_ids:
                first_s.setdefault(delta.request_id, time.perf_counter())
    all_s = max(first_s.values())
    return (time.perf_counter() - all_s) / (NUM_OUTPUT_TOKENS - 1), all_s - began_s


def _cells(pairs: list[tuple[tuple[float, float], tuple[float, float]]], which: int) -> list[str]:
    without, with_them = ([one[which] for one in side] for side in zip(*pairs, strict=True))
    added = median(other / one - 1 for one, other in zip(without, with_them, strict=True))
    return [f"{1e3 * median(without):.2f} ms", f"{1e3 * median(with_them):.2f} ms", f"{added:+.1%}"]


if __name__ == "__main__":
    main()
