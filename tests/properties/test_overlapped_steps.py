"""A step that overlaps the one before gives the tokens of the step that is waited for: the plain one is the oracle."""

from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import FinishReason, Request, TokenDelta
from tests.engine.given import Transcripts, checking_model, engine_over, lagging, note, request

prompts = st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=8)


def tokens_of(
    engine: LLMEngine, step: Callable[[], list[TokenDelta]], asked: list[Request], arrivals: Random
) -> dict[tuple[str, int], tuple[list[int], FinishReason | None]]:
    """Let the requests arrive over time, and step until all have ended."""
    transcripts: Transcripts = {}
    coming = list(asked)
    for _ in range(5000):
        if coming and arrivals.random() < 0.5:
            engine.add([coming.pop(0)])
        note(transcripts, step())
        engine.check_invariants()
        if not coming and engine.is_idle:
            break
    assert engine.stats.kv_tokens_used == 0
    return {key: (one.token_ids, one.finish and one.finish.reason) for key, one in transcripts.items()}


@given(prompts, st.integers(12, 40), st.integers(5, 40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_steps_that_overlap_give_the_same_tokens(
    texts: list[str], num_blocks: int, num_tokens: int, random: Random
) -> None:
    asked = [
        request(
            f"r{n}",
            text,
            max_tokens=random.randint(1, 20),
            seed=n,
            num_choices=random.randint(1, 2),
            frequency_penalty=random.choice([0.0, 0.5]),
        )
        for n, text in enumerate(texts)
    ]
    results: list[dict[tuple[str, int], tuple[list[int], FinishReason | None]]] = []
    for is_overlapped in (False, True):
        # The same device, which may be asked for a step while one is in flight.
        model = lagging(checking_model(num_blocks=num_blocks, mean_output_tokens=6))
        engine = engine_over(model, max_num_seqs=4, max_num_batched_tokens=num_tokens)
        step = engine.step_overlapped if is_overlapped else engine.step
        results.append(tokens_of(engine, step, asked, Random(num_blocks)))
        assert is_overlapped or not model.num_lagged

    assert results[0] == results[1]
