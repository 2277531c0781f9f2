"""In bfloat16 on the CPU, too, a request's tokens and log-probabilities are its own, to the last bit.

A product of matrices that sums in another order with other rows next to it would move a bfloat16 logit by its rounding,
and now and then a token: so a resumed job could continue with others. The native products sum each row in one order.
Attention sums block by block, so this holds among workers of one block size.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from sluice.engine.request import ChoiceProgress, Request
from tests.grids import fast_only, grid
from tests.oracles.engines import DISTURBED, EngineRun, Setting, run
from tests.oracles.test_seeded_sampling import requests
from tests.oracles.tiny_models import QWEN3_MOE, TinyModel

pytestmark = pytest.mark.usefixtures("native_products")

DTYPE = "bfloat16"
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODEL = TinyModel("qwen3", SIZES)
MODELS = {
    "qwen3": MODEL,
    "qwen3_moe": TinyModel("qwen3_moe", {**SIZES, **QWEN3_MOE, "head_dim": 32, "moe_intermediate_size": 64}),
}
"""Of shapes that the native products take."""

FORMS: Mapping[str, Mapping[str, Any]] = {  # Any: options of `run`
    "none": {"quantization": "none"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@cache
def folder(model: str) -> Path:
    path = Path(mkdtemp(prefix="sluice-tiny-"))
    MODELS[model].save(path, torch.bfloat16)
    return path


@cache
def alone(model: str, block_size: int, form: str) -> EngineRun:
    """Each request in a separate engine."""
    outcome = EngineRun()
    for request in requests():
        single = run(folder(model), [request], Setting(block_size=block_size), dtype=DTYPE, **FORMS[form])
        outcome.token_ids |= single.token_ids
        outcome.logprobs |= single.logprobs
    return outcome


SETTINGS = [setting for setting in DISTURBED.values() if not setting.abort]
FAST = [
    *((DISTURBED[name], "none", "qwen3") for name in ("together", "tiny blocks", "preemption", "overlapped")),
    (DISTURBED["chunks of three"], "int4", "qwen3"),
    (DISTURBED["preemption"], "int8 cache", "qwen3"),
    (DISTURBED["chunks of three"], "none", "qwen3_moe"),
    (DISTURBED["preemption"], "int4", "qwen3_moe"),
]


class TestGivenWeightsOrKeysInBfloat16OrFewerBits:
    @pytest.mark.parametrize(("setting", "form", "model"), grid(SETTINGS, list(FORMS), list(MODELS), fast=FAST))
    def test_when_requests_run_in_any_batch_then_nothing_depends_on_it(
        self, setting: Setting, form: str, model: str
    ) -> None:
        outcome = run(folder(model), requests(), setting, dtype=DTYPE, **FORMS[form])

        expected = alone(model, setting.block_size, form)
        assert outcome.token_ids == expected.token_ids
        assert outcome.logprobs == expected.logprobs

    @pytest.mark.parametrize(
        ("cut", "form"), fast_only([(7, "none"), (7, "int4"), (7, "int8 cache")], [(1, "none"), (15, "none")])
    )
    def test_when_a_request_is_resumed_then_it_goes_on_to_the_bit(self, cut: int, form: str) -> None:
        setting = DISTURBED["preemption"]
        expected = alone("qwen3", setting.block_size, form)
        later = [resumed(request, expected, cut) for request in requests()]

        outcome = run(folder("qwen3"), later, setting, dtype=DTYPE, **FORMS[form])

        for key, tokens in expected.token_ids.items():
            assert outcome.token_ids.get(key, []) == tokens[cut:]
            assert outcome.logprobs.get(key, []) == expected.logprobs[key][cut:]


def resumed(request: Request, whole: EngineRun, cut: int) -> Request:
    """As it is after another worker has said `cut` tokens of each choice."""
    published = (tuple(whole.token_ids[request.id, choice][:cut]) for choice in range(request.num_choices))
    return replace(request, progress=tuple(ChoiceProgress(token_ids=token_ids) for token_ids in published))
