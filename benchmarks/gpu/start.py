"""Start of an engine on a GPU: seconds until ready, kernels compiled after that, and drills with broken kernels.

    python -m benchmarks gpu --start                 # a random model of 0.6 B parameters
    python -m benchmarks gpu --start --model FOLDER --quantization int8 --kv-cache-dtype fp8

Each start is a process of its own: with an empty compile cache, with a full one, and with each of some kernels broken
in a copy of the source. Prints a line of JSON per start.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any  # triton's hooks

if TYPE_CHECKING:
    from sluice.engine.execution.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]
NUM_WAVES = 6

DRILLS: Mapping[str, tuple[str, str, str, str]] = {
    "wrong result": ("rms_norm", "rms_norm/kernel.py", "return x / tl.sqrt(", "return 2.0 * x / tl.sqrt("),
    "does not compile": ("gated_activation", "gated_activation/kernel.py", "offsets < I\n", "offsets < UNKNOWN\n"),
    "illegal access": (
        "write_kv",
        "write_kv/kernel.py",
        "query_rows = out_ptr + token",
        "query_rows = out_ptr + 1099511627776 + token",
    ),
}
"""Operation, file below kernels, and what is replaced in it."""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu --start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="A model folder. A random one of 0.6 B parameters if not given.")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--kernels", choices=["auto", "triton", "torch"], default="auto")
    parser.add_argument("--drills", default=",".join(DRILLS), help="Drills to run, separated by commas.")
    parser.add_argument("--one", action="store_true", help="Start once in this process and print its line.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the starts; return the exit code."""
    arguments = _arguments(argv)
    if arguments.one:
        print(json.dumps(_start(arguments)), flush=True)
        return 0
    from benchmarks.gpu.engines import random_folder
    from benchmarks.gpu.scale import card_scale

    given = arguments.model
    with nullcontext(given) if given else random_folder(card_scale()) as folder, tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "full cache"):
            _report(name, _child(ROOT, folder, cache, arguments))
        for name in filter(None, arguments.drills.split(",")):
            with tempfile.TemporaryDirectory() as copy:
                break_kernel(Path(copy), *DRILLS[name][1:])
                _report(f"{DRILLS[name][0]}: {name}", _child(Path(copy), folder, cache, arguments))
    return 0


def _report(name: str, line: Mapping[str, object]) -> None:
    print(json.dumps({"start": name} | dict(line)), flush=True)


def break_kernel(copy: Path, file: str, old: str, new: str) -> None:
    """Copy the source, and replace `old` in a kernel."""
    for part in ("sluice", "engine", "kernels", "producer", "worker", "benchmarks", "migrations"):
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "kernels" / file
    text = path.read_text()
    if old not in text:
        raise SystemExit(f"{file} has no {old!r}: update the drill")
    path.write_text(text.replace(old, new))


def _child(root: Path, folder: Path, cache: str, arguments: argparse.Namespace) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.gpu.start", "--one", "--model", str(folder)]
    for name in ("quantization", "kv_cache_dtype", "kernels"):
        command += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(root)}
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"exit_code": done.returncode, "said": done.stderr[-1500:]}
    return {"process_s": round(time.monotonic() - began_s, 1)} | json.loads(lines[-1])


def _start(arguments: argparse.Namespace) -> dict[str, object]:
    """Load the model, run random requests, and return what happened."""
    began_s = time.monotonic()
    from sluice.engine.config import GPU_STEP
    from sluice.engine.execution.options import ModelOptions
    from sluice.engine.execution.start.model_loading import load_model_runner
    from sluice.kernels import chain

    # The clock times of the parts of a load.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    compiled = _count_variants()
    imported_s = time.monotonic()
    runner = load_model_runner(
        ModelOptions(
            path=arguments.model,
            device="cuda:0",
            quantization=arguments.quantization,
            kv_cache_dtype=arguments.kv_cache_dtype,
            kernels=arguments.kernels,
            warms_up=True,
            max_num_seqs=GPU_STEP.max_num_seqs,
            max_num_batched_tokens=GPU_STEP.max_num_batched_tokens,
        )
    )
    ready_s = time.monotonic()
    in_load = dict(compiled)
    compiled.clear()
    num_steps = _serve(runner)
    return {
        "import_s": round(imported_s - began_s, 1),
        "load_s": round(ready_s - imported_s, 1),
        "variants_at_load": sum(in_load.values()),
        "variants_after": dict(compiled),
        "num_steps": num_steps,
        "replaced": chain.stepped_down(),
        "fingerprint": runner.fingerprint[:8],
        "num_recorded": len(runner.graphs.recorded) if runner.graphs is not None else 0,
        "kv_tokens": runner.limits.num_blocks * runner.limits.block_size,
    }


def _count_variants() -> Counter[str]:
    """Count the variants that this process compiles or loads, by kernel, from now on."""
    from triton import knobs

    counts: Counter[str] = Counter()

    def note(*, fn: Any, **_: object) -> None:  # noqa: ANN401 - triton's own type
        counts[fn.name] += 1

    knobs.runtime.jit_post_compile_hook = note
    return counts


def _serve(runner: "ModelRunner") -> int:
    """Run random requests with every option, in waves of every size; return the number of steps."""
    from benchmarks.engine.bare import Words
    from sluice.engine.config import GPU_STEP, EngineConfig
    from sluice.engine.llm_engine import LLMEngine
    from sluice.engine.request import Request, Sampling

    options = (
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, logprobs=3),
        Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.1, logit_bias={3: -1.0}),
        Sampling(min_tokens=3, temperature=0.0),
    )
    random, num_steps = Random(3), 0
    config = EngineConfig(max_num_seqs=GPU_STEP.max_num_seqs, max_num_batched_tokens=GPU_STEP.max_num_batched_tokens)
    engine = LLMEngine(runner, Words(runner.limits.vocab_size), config)
    longest = runner.limits.max_model_len - 64
    for wave in range(NUM_WAVES):
        engine.add([
            Request(
                id=f"{wave}-{n}",
                prompt_token_ids=tuple(
                    random.randrange(runner.limits.vocab_size) for _ in range(random.choice([1, 3, 30, 200, longest]))
                ),
                sampling=replace(random.choice(options), max_tokens=random.randrange(3, 40), ignore_eos=True),
            )
            for n in range(random.choice([1, 2, 7, 40, 100]))
        ])  # fmt: skip
        while not engine.is_idle:
            engine.advance()
            num_steps += 1
        while runner.has_preparations:
            runner.prepare()
    return num_steps


if __name__ == "__main__":
    main()
