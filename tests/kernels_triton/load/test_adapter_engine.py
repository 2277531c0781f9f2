"""A whole engine over the interpreted kernels, with adapters: the tokens of the paths of a CPU."""

from pathlib import Path

import pytest

from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.engine.request import Request, Sampling
from tests.oracles.adapters import save_adapter
from tests.oracles.engines import run
from tests.oracles.tiny_models import TinyModel

TINY = TinyModel("qwen3", {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})


@pytest.mark.long
def test_when_kernels_add_adapters_then_tokens_are_those_of_their_definition(tmp_path: Path) -> None:
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    TINY.save(model)
    for number, name in enumerate(("one", "two")):
        save_adapter(adapters / name, model, rank=3 + number, seed=number, std=0.3)
    asked = [
        Request(
            id=adapter,
            prompt_token_ids=(5, 9, 40),
            adapter=adapter,
            sampling=Sampling(temperature=0, max_tokens=3, ignore_eos=True),
        )
        for adapter in ("", "one", "two")
    ]
    expected = run(model, asked, adapters=adapters).token_ids

    with triton_in_place_of_cpu():
        found = run(model, asked, adapters=adapters).token_ids

    assert found == expected
    assert len(set(map(tuple, found.values()))) == len(asked)
