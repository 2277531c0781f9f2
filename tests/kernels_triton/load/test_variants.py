"""No kernel is compiled for a job: what a warm-up launches are all variants that a worker launches later.

Launches are noted and not run, over tensors of zeros on the CPU; so no GPU is needed, and no compiler.
"""

# torch's and triton's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.engine.config import EngineConfig
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner, plan_load
from sluice.engine.execution.start.warm_up import warm_up_batches
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.kernels.chain import OPERATIONS
from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.words import WordWeight
from sluice.kernels.trial.cases import cases_of
from sluice.kernels.trial.compare import WrongResult
from tests.engine.quantized.writing import awq, fp8, write_folders
from tests.grids import fast_only
from tests.kernels_triton.load.test_packed_engine import SIZES
from tests.oracles.tiny_models import TINY_MODELS, TinyModel

RUNS_COMPILED = True

PACKED = {"awq": lambda: awq(64), "fp8": fp8}
MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN = 21, 150, 700
OPTIONS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, logprobs=3),
    Sampling(repetition_penalty=1.2, presence_penalty=0.1, logit_bias={3: -1.0}),
    Sampling(min_tokens=3, temperature=0.0),
)


class Zeros(TorchDispatchMode):
    """A mode in which new memory is zero: what a noted launch would have written is a valid id or slot."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's own
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "new_empty", "empty_like", "empty_strided"):
            out.zero_()
        return out


def kind_of(value: object, parameter: Any) -> object:  # triton's own type
    """What Triton compiles a kernel for, of one argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter.is_constexpr or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return width if parameter.do_not_specialize else (width, value == 1, value % 16 == 0)
    return type(value)


def always(_weight: WordWeight | Float8Weight) -> bool:
    """Whether one row has a kernel of its own, on a GPU."""
    return True


def max_few_rows(weight: Tensor) -> int:
    """The limit of few rows on a GPU, for tiny weights."""
    return 4 if weight.shape[0] < 200 else 1


@contextmanager
def launches(*, deterministic: bool) -> Generator[set[tuple[object, ...]]]:
    """The variants launched while it is open."""
    seen: set[tuple[object, ...]] = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:  # triton's own
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | {name: v for name, v in named.items() if name in names}
        kinds = [(one.name, kind_of(values[one.name], one)) for one in kernel.params]
        options = sorted((name, v) for name, v in named.items() if name not in names)
        seen.add((kernel.__name__, *kinds, *options))

    with pytest.MonkeyPatch.context() as patch, triton_in_place_of_cpu(deterministic=deterministic), Zeros():
        patch.setattr(JITFunction, "run", cast("Any", note))
        # A GPU's choice of kernels for few rows, which the CPU does not take.
        patch.setattr("sluice.kernels.linear.cuda.max_few_rows", max_few_rows)
        patch.setattr("sluice.kernels.linear.cuda.has_row_kernel", always)
        # Contexts that these models have are long.
        patch.setattr("sluice.kernels.paged_attention.kernel.SHORT_CHUNK_KEYS", 300)
        yield seen


def options_of(name: str, folder: Path, *, is_int8: bool) -> ModelOptions:
    if is_packed := name in PACKED:
        TinyModel("llama", {**SIZES, "max_position_embeddings": MAX_LEN}).save(folder / "plain")
        folder, _ = write_folders(folder / "plain", PACKED[name](), folder)
    else:
        model = TINY_MODELS[name]
        TinyModel(model.family, {**model.config, "max_position_embeddings": MAX_LEN}).save(folder)
    return ModelOptions(
        path=folder,
        dtype="bfloat16",
        quantization="int8" if is_int8 else "auto" if is_packed else "none",
        num_blocks=120,
        num_threads=1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        graphs=True,
        lag=1,
    )


def try_cases(options: ModelOptions, *, deterministic: bool) -> None:
    """Run a trial's cases; what is not computed is wrong, which does not matter."""
    plan = plan_load(options)
    options = replace(options, is_deterministic=deterministic)
    sizes = replace(plan, options=options).sizes
    for operation in OPERATIONS:
        for case in cases_of(operation, sizes, torch.device("cpu")):
            with contextlib.suppress(WrongResult):
                case()


def warm_up(runner: ModelRunner) -> None:
    for batch in warm_up_batches(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, block_size=16
    ):
        runner.launch(batch).collect()


def serve(runner: ModelRunner) -> int:
    """Run random requests with every option; returns the steps."""
    random = Random(3)
    config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS)
    engine, num_steps = LLMEngine(runner, NullTokenizer(), config), 0
    for wave in range(6):
        engine.add([
            Request(
                id=f"{wave}-{n}",
                prompt_token_ids=tuple(random.randrange(97) for _ in range(random.choice([1, 2, 5, 17, 60, 120, 650]))),
                sampling=replace(random.choice(OPTIONS), max_tokens=random.randrange(3, 30), ignore_eos=True),
            )
            for n in range(random.randrange(1, 2 * MAX_NUM_SEQS))
        ])  # fmt: skip
        for _ in range(random.randrange(4, 40)):
            engine.advance()
            num_steps += 1
        while runner.has_preparations:
            runner.prepare()
    return num_steps


MODELS = fast_only(
    [("gemma2", False, False)],
    [
        ("qwen3", True, False),
        ("llama", False, False),
        ("mistral-window", False, False),
        ("gemma2", False, True),
        ("awq", False, False),
        ("awq", False, True),
        ("fp8", False, False),
        ("gemma3", False, False),
    ],
)


@pytest.mark.parametrize(("name", "is_int8", "deterministic"), MODELS)
class TestGivenAModelThatWasWarmedUp:
    def test_when_random_requests_run_then_no_variant_is_new(
        self, tmp_path: Path, name: str, *, is_int8: bool, deterministic: bool
    ) -> None:
        with launches(deterministic=deterministic) as seen:
            runner = load_model_runner(options_of(name, tmp_path, is_int8=is_int8))
            warm_up(runner)
            warmed_up = set(seen)

            num_steps = serve(runner)

        assert num_steps > 50
        assert len(warmed_up) > 10
        # Within a window on every layer no chunk sees enough keys to be divided.
        has_short_chunks = not deterministic and name != "mistral-window"
        assert ("short_chunk_kernel" in {variant[0] for variant in warmed_up}) == has_short_chunks
        assert sorted(map(str, seen - warmed_up)) == []

    def test_when_its_kernels_were_tried_before_then_hardly_a_variant_is_left(
        self, tmp_path: Path, name: str, *, is_int8: bool, deterministic: bool
    ) -> None:
        options = options_of(name, tmp_path, is_int8=is_int8)
        with launches(deterministic=deterministic) as seen:
            try_cases(options, deterministic=deterministic)
            tried = set(seen)

            warm_up(load_model_runner(options))

        # Each compiles while the worker starts, one after another.
        assert len(seen - tried) <= 3, sorted(map(str, seen - tried))
