"""A real model with drafts against the same model without: the same tokens, greedy and sampled, in any disturbance."""

from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest

from sluice.engine.config import StepLimits
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.request import Request, Sampling
from sluice.engine.speculation.model_drafts import ModelDrafts
from sluice.engine.speculation.suffix_drafts import SuffixDrafts
from tests.engine.given import Prophet, Transcript
from tests.grids import fast_only
from tests.oracles.engines import EngineRun, Setting, run
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE

NAME = "qwen3"
SETTINGS = {
    "together": Setting(),
    "chunks of three": Setting(block_size=4, max_num_batched_tokens=7, max_num_seqs=3, arrivals=20),
    "preemption": Setting(block_size=4, num_blocks=30, max_num_batched_tokens=40, arrivals=3),
    "tiny blocks": Setting(block_size=1, num_blocks=600, arrivals=9),
    "overlapped": Setting(lag=1, block_size=4, arrivals=9),
    "recorded steps": Setting(lag=1, graphs=True, block_size=4, arrivals=9),
    "overlapped, a late device, aborts": Setting(
        lag=1, is_late=True, block_size=2, num_blocks=80, arrivals=10, abort=frozenset({"1", "4", "5"})
    ),
}


NOT_OVERLAPPED = [name for name, setting in SETTINGS.items() if not setting.lag]
"""With a draft model steps do not overlap."""


def requests() -> list[Request]:
    """Greedy and sampled, with what depends on the tokens before: penalties, bans, ends, log-probabilities."""
    random = Random(3)
    samplings = [
        Sampling(temperature=0, max_tokens=24, ignore_eos=True),
        Sampling(temperature=0, max_tokens=24, frequency_penalty=0.7, presence_penalty=0.3, ignore_eos=True),
        Sampling(temperature=0.3, seed=5, max_tokens=24, repetition_penalty=1.3, logprobs=2),
        Sampling(temperature=0.2, seed=6, max_tokens=24, min_tokens=9, top_k=8, logit_bias={3: 2.0}),
        Sampling(temperature=1, seed=7, max_tokens=17, top_p=0.9, logprobs=0),
        Sampling(temperature=0.5, seed=8, max_tokens=24, stop_token_ids=(5, 9, 11), min_tokens=3),
    ]
    return [
        Request(
            id=str(number),
            prompt_token_ids=tuple(random.randrange(2, VOCAB_SIZE) for _ in range(random.randint(1, 40))),
            sampling=sampling,
            num_choices=1 + number % 2,
        )
        for number, sampling in enumerate(samplings)
    ]


@cache
def folder_and_expected() -> tuple[Path, EngineRun]:
    folder = Path(mkdtemp(prefix="sluice-tiny-"))
    TINY_MODELS[NAME].save(folder)
    return folder, run(folder, requests())


def check_same(outcome: EngineRun, setting: Setting) -> None:
    """Check tokens and log-probabilities against the run without drafts or disturbance."""
    _, expected = folder_and_expected()
    for key, token_ids in expected.token_ids.items():
        actual = outcome.token_ids.get(key, [])
        assert actual == (token_ids[: len(actual)] if key[0] in setting.abort else token_ids)
        for mine, other in zip(outcome.logprobs.get(key, []), expected.logprobs[key], strict=False):
            assert mine.chosen == pytest.approx(other.chosen, abs=1e-4)
    assert outcome.errors == {}


def random_setting(random: Random) -> Setting:
    """Any chunks, blocks, lag, arrivals and aborts, and a cache that holds a few sequences or just the longest."""
    block_size, is_lagging = random.choice([1, 2, 4, 16]), random.random() < 0.5
    max_num_seqs = random.randint(1, 7)
    return Setting(
        block_size=block_size,
        num_blocks=-(-64 * random.randint(1, 5) // block_size) + 1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, random.choice([3, 8, 20, 60])),
        enable_prefix_caching=random.random() < 0.7,
        arrivals=random.choice([1, 10]),
        abort=frozenset(random.sample("012345", k=random.choice([0, 0, 2]))),
        seed=random.randrange(100),
        lag=1 if is_lagging else 0,
        is_late=is_lagging and random.random() < 0.5,
    )


class TestGivenDrafts:
    """Of any quality: all right, half of them, none."""

    @pytest.mark.parametrize(
        ("setting", "share_right"),
        fast_only(
            [("together", 0.8), ("preemption", 0.5), ("recorded steps", 1.0)],
            [(name, share) for name in SETTINGS for share in (0.0, 0.3, 0.9, 1.0)],
        ),
    )
    def test_when_steps_verify_them_then_tokens_and_logprobs_are_the_same(
        self, setting: str, share_right: float
    ) -> None:
        folder, expected = folder_and_expected()
        known = {key: Transcript(token_ids=token_ids) for key, token_ids in expected.token_ids.items()}

        outcome = run(folder, requests(), SETTINGS[setting], draft_source=Prophet(known, share_right))

        check_same(outcome, SETTINGS[setting])
        assert outcome.num_drafted_tokens > 0
        assert (outcome.num_accepted_tokens > 0) == (share_right > 0)

    @pytest.mark.parametrize("seed", fast_only(range(3), range(3, 60)))
    def test_when_settings_are_random_then_tokens_and_logprobs_are_the_same(self, seed: int) -> None:
        random = Random(seed)
        setting = random_setting(random)
        folder, expected = folder_and_expected()
        known = {key: Transcript(token_ids=token_ids) for key, token_ids in expected.token_ids.items()}
        source = Prophet(known, random.random(), depth=random.randint(1, 12)) if seed % 2 else SuffixDrafts()

        outcome = run(folder, requests(), setting, draft_source=source)

        check_same(outcome, setting)


def model_drafts(name: str, setting: Setting, *, num_blocks: int = 300) -> ModelDrafts:
    """Drafts of the tiny model of a family, whose steps count as if they took no time."""
    folder = Path(mkdtemp(prefix="sluice-tiny-draft-"))
    TINY_MODELS[name].save(folder)
    limits = StepLimits(setting.max_num_seqs, 40)
    options = ModelOptions(
        path=folder,
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    return ModelDrafts(load_model_runner(options), limits, vocab_size=VOCAB_SIZE, clock=lambda: 0.0)


class TestGivenADraftModel:
    """Of the same weights, or of another family with the same vocabulary."""

    @pytest.mark.parametrize(
        ("name", "setting", "num_blocks"),
        fast_only(
            [(NAME, "together", 300), ("llama", "preemption", 40)],
            [(name, setting, count) for name in (NAME, "llama") for setting in NOT_OVERLAPPED for count in (20, 300)],
        ),
    )
    def test_when_steps_verify_its_guesses_then_tokens_and_logprobs_are_the_same(
        self, name: str, setting: str, num_blocks: int
    ) -> None:
        folder, _ = folder_and_expected()
        source = model_drafts(name, SETTINGS[setting], num_blocks=num_blocks)

        outcome = run(folder, requests(), SETTINGS[setting], draft_source=source)

        check_same(outcome, SETTINGS[setting])
        assert outcome.num_drafted_tokens > 0
        assert source.rows.num_held == 0
        source.rows.check_invariants()

    def test_when_it_has_the_same_weights_then_all_greedy_guesses_are_right(self) -> None:
        folder, expected = folder_and_expected()
        greedy = [one for one in requests() if one.id == "0"]

        outcome = run(folder, greedy, draft_source=model_drafts(NAME, Setting()))

        assert outcome.token_ids["0", 0] == expected.token_ids["0", 0]
        assert outcome.num_accepted_tokens == outcome.num_drafted_tokens > 0
