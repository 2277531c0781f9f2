"""Models in which some layers have a sliding window: contexts of many windows give the tokens of transformers.

That they are equal however requests are batched is tested with all families in test_greedy_tokens.py.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.request import ChoiceProgress, Request, Sampling
from tests.oracles.engines import EngineRun, Setting, run
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE

WINDOW = 11
MAX_TOKENS = 30
SMALL = Setting(block_size=4, num_blocks=26, max_num_batched_tokens=16, max_num_seqs=8)


def requests() -> list[Request]:
    """Prompts of up to eleven windows, some with a common beginning."""
    random = Random(6)

    def tokens(count: int) -> list[int]:
        return [random.randrange(2, VOCAB_SIZE) for _ in range(count)]

    shared = tokens(70)
    prompts = [tokens(count) for count in (7, 3, 12, 5, 9, 2, 123, 64)]
    prompts += [shared + tokens(9), shared + tokens(30), shared]
    sampling = Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [Request(id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["gemma3-untied", "gemma2-no-caps"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineRun]:
    """A folder, and what an engine with memory for everything gives, which transformers would give too."""
    folder = tmp_path_factory.mktemp("model")
    peer = TINY_MODELS[request.param].save(folder)
    expected = run(folder, requests(), Setting(num_blocks=600))
    for asked in requests():
        whole = torch.tensor([[*asked.prompt_token_ids, *expected.token_ids[asked.id, 0]]])
        with torch.inference_mode():
            likeliest = peer(whole).logits[0].argmax(-1)[len(asked.prompt_token_ids) - 1 : -1]
        assert expected.token_ids[asked.id, 0] == likeliest.tolist()
    return folder, expected


class TestGivenContextsOfManyWindows:
    @pytest.mark.parametrize(
        "setting",
        [
            SMALL,
            replace(SMALL, lag=1, is_late=True, arrivals=12),
            replace(SMALL, enable_prefix_caching=False),
            replace(SMALL, graphs=True, lag=1, max_num_batched_tokens=256, num_blocks=220),
        ],
        ids=["small", "late device", "no prefix cache", "recorded"],
    )
    def test_when_memory_is_small_then_tokens_are_the_same(
        self, model: tuple[Path, EngineRun], setting: Setting
    ) -> None:
        folder, expected = model

        outcome = run(folder, requests(), setting)

        assert outcome.errors == {}
        assert outcome.token_ids == expected.token_ids

    def test_when_memory_is_small_then_sequences_are_preempted_and_share_prefixes(
        self, model: tuple[Path, EngineRun]
    ) -> None:
        folder, _ = model

        assert run(folder, requests(), SMALL).num_preemptions > 0
        assert run(folder, requests(), replace(SMALL, num_blocks=80)).num_cached_tokens >= 60

    def test_when_a_request_is_resumed_then_it_continues_with_the_same_tokens(
        self, model: tuple[Path, EngineRun]
    ) -> None:
        folder, expected = model
        resumed = [
            replace(asked, progress=(ChoiceProgress(token_ids=tuple(expected.token_ids[asked.id, 0][: 2 * i + 1])),))
            for i, asked in enumerate(requests())
        ]

        outcome = run(folder, resumed, SMALL)

        for i, asked in enumerate(requests()):
            assert outcome.token_ids[asked.id, 0] == expected.token_ids[asked.id, 0][2 * i + 1 :]


class TestGivenTheBlocksOfARunner:
    @pytest.mark.parametrize(("name", "num_tables"), [("gemma3", 3), ("qwen2-window", 3), ("mistral-window", 1)])
    def test_when_blocks_are_stated_then_they_are_of_all_layers(
        self, tmp_path: Path, name: str, num_tables: int
    ) -> None:
        TINY_MODELS[name].save(tmp_path)

        runner = load_model_runner(ModelOptions(path=tmp_path, num_blocks=10, host_cache_bytes=2**20))

        limits = runner.limits
        assert (limits.num_blocks, limits.blocks_per_entry) == (10 * num_tables, num_tables)
        assert limits.num_cache_tokens == 160
        assert limits.sliding_window > 0
        assert limits.num_host_blocks == 0

    def test_when_layers_may_not_be_grouped_then_a_sequence_has_one_table(self, tmp_path: Path) -> None:
        """A draft model has its own simple block tables."""
        TINY_MODELS["gemma3"].save(tmp_path)

        runner = load_model_runner(ModelOptions(path=tmp_path, num_blocks=10, groups_layers=False))

        assert (runner.limits.num_blocks, runner.limits.window_groups) == (10, 0)
