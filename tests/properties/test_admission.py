"""Whatever a sequence reserves when it joins: the same tokens, no lost block; none preempted where all is reserved."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.config import ADMISSION_NAMES
from sluice.engine.request import Request
from tests.engine.given import Transcripts, checking_model, engine_over, lagging, note, request, undisturbed
from tests.examples import examples

prompts = st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=8)


@given(
    prompts,
    st.sampled_from(ADMISSION_NAMES),
    st.integers(12, 30),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([(0, 0), (7, 0), (7, 2)]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100), deadline=None)
def test_all_modes_give_the_tokens_of_a_request_that_has_the_engine_to_itself(
    texts: list[str],
    mode: str,
    num_blocks: int,
    is_caching: bool,
    lag: int,
    windows: tuple[int, int],
    random: Random,
) -> None:
    asked = [request(f"r{n}", text, max_tokens=random.randint(1, 17), seed=n) for n, text in enumerate(texts)]
    window, groups = windows
    model = checking_model(num_blocks=num_blocks * (1 + groups), sliding_window=window, window_groups=groups)
    engine = engine_over(
        lagging(model) if lag else model,
        admission=mode,
        enable_prefix_caching=is_caching,
        max_num_batched_tokens=random.choice([9, 11, 64]),
    )
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
    # Blocks that left a window may be shared, or in use by a step in flight: then they come back later.
    if mode == "guaranteed" and not window:
        assert engine.stats.num_preemptions == 0
