"""However requests are batched, they give the same tokens."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.request import Request
from tests.engine.given import Transcripts, checking_model, engine_over, note, request, undisturbed
from tests.examples import examples

prompts = st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=7)
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(5, 40),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
    }
)


@given(prompts, limits, st.sampled_from(DISCIPLINE_NAMES), st.integers(12, 40), st.randoms(use_true_random=False))
@settings(max_examples=examples(200), deadline=None)
def test_all_disciplines_give_the_tokens_of_a_request_that_has_the_engine_to_itself(
    texts: list[str], options: dict[str, Any], discipline: str, num_blocks: int, random: Any
) -> None:
    asked = [
        request(f"r{n}", text, max_tokens=random.randint(1, 16), seed=n, num_choices=random.randint(1, 2))
        for n, text in enumerate(texts)
    ]
    engine = engine_over(checking_model(num_blocks=num_blocks), discipline=discipline, batch_window_s=0.0, **options)

    transcripts: Transcripts = {}
    coming: list[Request] = list(asked)
    for _ in range(5000):
        if coming and random.random() < 0.4:
            engine.add([coming.pop(0)])
        note(transcripts, engine.advance())
        engine.check_invariants()
        if not coming and engine.is_idle:
            break

    assert {key: one.token_ids for key, one in transcripts.items()} == {
        key: one.token_ids for alone in asked for key, one in undisturbed(alone).items()
    }
    assert engine.stats.kv_tokens_used == 0
