"""However long steps take, and whatever is aimed at: the same tokens, and prompts that advance."""

from random import Random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.config import EngineConfig, StepTargets
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Request
from sluice.engine.scheduling.timing import time_budget
from tests.engine.given import Transcripts, checking_model, lagging, note, request, undisturbed
from tests.examples import examples

seconds = st.sampled_from([None, 1e-9, 1e-3, 0.1, 10.0])
targets = st.builds(StepTargets, mixed_step_s=st.sampled_from([1e-9, 0.05, 10.0]), ttft_s=seconds, tpot_s=seconds)
prompts = st.lists(st.text("abc", min_size=1, max_size=60), min_size=1, max_size=7)


@given(prompts, targets, st.integers(5, 40), st.integers(0, 1), st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None)
def test_a_budget_of_time_changes_no_token_and_starves_none(
    texts: list[str], aimed_at: StepTargets, num_tokens: int, lag: int, random: Random
) -> None:
    asked = [request(f"r{n}", text, max_tokens=random.randint(1, 16), seed=n) for n, text in enumerate(texts)]
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += random.choice([0.0, 1e-4, 0.01, 3.0])
        return now_s

    model = checking_model(num_blocks=40)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=num_tokens, step_targets=aimed_at)
    engine = LLMEngine(lagging(model) if lag else model, NullTokenizer(), config, clock=clock)
    transcripts: Transcripts = {}
    coming: list[Request] = list(asked)
    num_steps = 0
    with patch.object(time_budget, "LEAST_CHUNK", 2):
        while coming or not engine.is_idle:
            if coming and random.random() < 0.4:
                engine.add([coming.pop(0)])
            note(transcripts, engine.advance())
            engine.check_invariants()
            num_steps += 1
            # Three steps for two tokens of a prompt, one for each of its output; twice that at lag 1; and the arrivals.
            assert num_steps <= 2 * sum(len(text) + 17 for text in texts) + 200, "starved"

    assert {key: one.token_ids for key, one in transcripts.items()} == {
        key: one.token_ids for alone in asked for key, one in undisturbed(alone).items()
    }
    assert model.largest_batch <= num_tokens
