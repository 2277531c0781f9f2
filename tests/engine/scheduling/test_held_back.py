"""Sequences held back for a prefix that another one computes: who may join past them, and for how long."""

import random

import pytest

from sluice.engine.request import Request
from tests.engine.given import checking_model, engine_over, lagging, request

FirstTokens = dict[tuple[str, int], int]
"""The step of each choice's first token."""


def first_tokens(requests: list[Request], **options: int) -> tuple[FirstTokens, int]:
    """Run requests that come together, on a device that lags; return their first tokens, and the tokens computed."""
    model = checking_model(num_blocks=4096, block_size=16, max_model_len=20_000)
    engine = engine_over(lagging(model), **{"max_num_seqs": 256, "max_num_batched_tokens": 2048} | options)
    engine.add(requests)
    found: FirstTokens = {}
    num_steps = 0
    while not engine.is_idle:
        for delta in engine.advance():
            if delta.token_ids:
                found.setdefault((delta.request_id, delta.choice), num_steps)
        engine.check_invariants()
        num_steps += 1
    return found, model.num_computed_tokens


def prompt(seed: int, num_tokens: int) -> bytes:
    """A prompt that shares nothing with those of other seeds."""
    return random.Random(seed).randbytes(num_tokens)


class TestGivenManyRequestsOfTwoChoices:
    """Their prompts fill the budget of ten steps."""

    def test_when_they_come_together_then_no_step_waits_for_one_prompt(self) -> None:
        requests = [request(f"r{n}", prompt(n, 200), num_choices=2, max_tokens=4) for n in range(64)]

        found, num_computed = first_tokens(requests)

        assert max(found.values()) <= 10
        assert num_computed <= 64 * 200 + 128 * 4, "each prompt is computed once"


class TestGivenTwoLongPromptsThatShareAPrefix:
    """The second one is held back for many steps."""

    def test_when_short_prompts_come_after_them_then_they_join_at_once(self) -> None:
        long = prompt(0, 4000)
        shorts = [request(f"short{n}", prompt(n + 1, 4), max_tokens=2) for n in range(20)]

        found, num_computed = first_tokens(
            [request("a", long, max_tokens=2), request("b", long, max_tokens=2), *shorts],
            long_prefill_token_threshold=256,
        )

        assert {found[f"short{n}", 0] for n in range(20)} == {1}
        assert found["b", 0] <= found["a", 0] + 2
        assert num_computed < 4000 + 200

    def test_when_as_many_joined_as_may_then_the_next_ones_wait_for_it(self) -> None:
        long = prompt(0, 4000)
        shorts = [request(f"short{n}", prompt(n + 1, 4), max_tokens=2) for n in range(100)]

        found, _ = first_tokens(
            [request("a", long, max_tokens=2), request("b", long, max_tokens=2), *shorts],
            long_prefill_token_threshold=256,
        )

        num_before = sum(found[f"short{n}", 0] < found["b", 0] for n in range(100))
        assert num_before == 64

    @pytest.mark.parametrize(("num_sharing", "joins"), [(15, True), (16, False)])
    def test_when_as_many_are_held_back_as_may_then_none_joins_past_them(self, num_sharing: int, joins: bool) -> None:
        long = prompt(0, 4000)
        sharing = [request(f"r{n}", long, max_tokens=2) for n in range(1 + num_sharing)]

        found, _ = first_tokens(
            [*sharing, request("short", prompt(1, 4), max_tokens=2)], long_prefill_token_threshold=256
        )

        assert (found["short", 0] < found["r0", 0]) == joins
