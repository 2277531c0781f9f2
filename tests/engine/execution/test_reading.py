"""What is kept of prompts that are read in several steps."""

from typing import Literal

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Embed, Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL


class TestGivenAPromptThatIsReadInSeveralSteps:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("way", ["abort", "drop"])
    def test_when_its_request_ends_amid_it_then_nothing_is_kept_of_it(self, lag: Literal[0, 1], way: str) -> None:
        options = ModelOptions(
            path=SMALL_MODEL, num_blocks=64, max_model_len=256, max_num_seqs=4, num_threads=1, lag=lag
        )
        runner = load_model_runner(options)
        engine = LLMEngine(runner, load_tokenizer(SMALL_MODEL), EngineConfig(max_num_seqs=4, max_num_batched_tokens=16))
        reader = runner._reader  # pyright: ignore[reportPrivateUsage] - nobody else needs to know
        embed = Embed(pooling="mean")
        engine.add(
            [
                Request(id="other", prompt_token_ids=(1, 2), sampling=Sampling(max_tokens=40, ignore_eos=True)),
                Request(id="read", prompt_token_ids=(5,) * 100, sampling=Sampling(max_tokens=0), embed=embed),
            ]
        )
        for _ in range(3):
            engine.advance()
        assert reader.num_kept == 1

        getattr(engine, way)(["read"])
        for _ in range(2):
            engine.advance()

        assert not engine.is_idle
        assert reader.num_kept == 0
