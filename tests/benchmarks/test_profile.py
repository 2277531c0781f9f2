"""The profile at toy size: each phase of a native step has its time, and products and attention a bound."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator

import pytest
import torch

from benchmarks.engine.models import VOCAB_SIZE
from benchmarks.engine.profile import Case, bounds_us, measure_roof, print_case
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from tests.oracles.tiny_models import TinyModel

TINY = TinyModel(
    "llama",
    {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("tiny")
    TINY.save(folder, torch.bfloat16)
    runner = load_model_runner(ModelOptions(path=folder, num_blocks=64))
    if not runner.decoder.has_native_step:
        pytest.skip("this machine has no native step to look into")
    with torch.inference_mode():
        yield runner


class TestGivenAStepOnThisCPU:
    @pytest.mark.parametrize("case", [Case("2 decodes", 2, 1, 20), Case("a prefill", 1, 32, 32)], ids=str)
    def test_when_it_is_profiled_then_its_phases_are_printed_beside_their_bounds(
        self, runner: ModelRunner, case: Case, capsys: pytest.CaptureFixture[str]
    ) -> None:
        roof = measure_roof(runner.decoder.weights)

        print_case(runner, case, roof)

        printed = capsys.readouterr().out
        assert f"{case.name}: " in printed
        bounds = bounds_us(runner, case, roof)
        assert {"qkv", "gated", "down", "output", "attention"} <= bounds.keys()
        assert all(name in printed for name in (*bounds, "batch layout", "products and keys and values alone"))
