"""A real model's tokens are the same where the blocks of others were copied, in every layout of the cache."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.execution import model_runner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.kernels.copy_blocks import copy_blocks
from tests.oracles.engines import EngineRun
from tests.oracles.tiny_models import TINY_MODELS

SHARED = tuple((7 * n) % 90 + 2 for n in range(27))
SETTINGS: dict[str, dict[str, Any]] = {
    "one after the other": {},
    "a step ahead": {"lag": 1},
    "recorded steps": {"graphs": True, "lag": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "fp8 cache": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "small steps": {"max_num_batched_tokens": 8},
}


@cache
def folder() -> Path:
    path = Path(mkdtemp(prefix="sluice-tiny-"))
    TINY_MODELS["qwen3"].save(path)
    return path


def requests() -> list[Request]:
    """Prompts that differ from the middle of a block, one from within the shared part, one with choices."""
    tails = [(5, 6), (8,), (50,) * 9, (), (5, 6)]
    return [
        Request(
            id=str(number),
            prompt_token_ids=(*SHARED[: 25 if number == 2 else 27], *tail),
            sampling=Sampling(temperature=0.7 * (number % 2), seed=number, max_tokens=12, ignore_eos=True),
            num_choices=2 if number == 1 else 1,
        )
        for number, tail in enumerate(tails)
    ]


def run(*, shares: bool, **options: Any) -> tuple[EngineRun, int]:
    """What is said where a request comes every third step, and how many blocks were copied for sequences."""
    sizes: dict[str, Any] = {"block_size": 8, "num_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    runner = load_model_runner(ModelOptions(path=folder(), **sizes | options))
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=options.get("max_num_batched_tokens", 64),
        enable_prefix_caching=shares,
    )
    engine = LLMEngine(runner, NullTokenizer(), config)
    outcome, waiting = EngineRun(), requests()
    with patch.object(model_runner, "copy_blocks", wraps=copy_blocks) as copy:
        for step in range(400):
            if waiting and step % 3 == 0:
                engine.add([waiting.pop(0)])
            for delta in engine.advance():
                outcome.note(delta)
            engine.check_invariants()
    assert engine.is_idle
    assert not outcome.errors
    return outcome, sum(len(call.args[1]) for call in copy.call_args_list)


class TestGivenBlocksThatAreCopied:
    @pytest.mark.parametrize("options", SETTINGS.values(), ids=list(SETTINGS))
    def test_when_requests_run_then_tokens_are_those_of_an_engine_without_sharing(
        self, options: dict[str, Any]
    ) -> None:
        outcome, num_copied = run(shares=True, **options)

        alone, num_copied_alone = run(shares=False, **options)
        assert num_copied >= 4
        assert num_copied_alone == 0
        assert outcome.token_ids == alone.token_ids
