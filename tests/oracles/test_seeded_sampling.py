"""Sampled tokens are a function of the request alone: not of neighbours, chunks, preemption, attempt or process."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from sluice.engine.request import ChoiceProgress, Request, Sampling
from tests.oracles.engines import CALM, DISTURBED, FAILING, EngineRun, Setting, run
from tests.oracles.tiny_models import TINY_MODELS

PARAMS = {
    "plain": Sampling(temperature=1.0, seed=1),
    "cold": Sampling(temperature=0.4, seed=2**64 - 1),
    "top-k": Sampling(temperature=0.9, top_k=5, seed=3),
    "top-p": Sampling(temperature=1.3, top_p=0.7, seed=4),
    "min-p": Sampling(min_p=0.05, seed=5),
    "all": Sampling(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, seed=6),
    "greedy": Sampling(temperature=0, seed=7),
    "penalties": Sampling(
        repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=-0.3, seed=8, logit_bias={5: 3.0, 9: -100.0}
    ),
    "greedy, penalties": Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=1.5, min_tokens=12),
    "logprobs": Sampling(logprobs=3, seed=9),
    "greedy, logprobs": Sampling(temperature=0, logprobs=2, frequency_penalty=0.8),
    "penalties, logprobs": Sampling(logprobs=4, repetition_penalty=1.2, top_p=0.9, seed=10),
}
LOGPROB_BOUND = 2e-5
"""In fp32: a product of matrices sums in another order when it has other rows, as a prefill of what decodes made has.

Seen: 4.1e-6 at most, resumed or in a batch; they are hardly ever equal to the last bit.
"""


def requests() -> list[Request]:
    """One request per way of sampling, two choices each for some."""
    return [
        Request(
            id=name,
            prompt_token_ids=tuple((7 * i + 3 * j) % 90 + 2 for j in range(5 + 4 * i)),
            sampling=replace(params, max_tokens=16),
            num_choices=2 if i % 3 == 0 else 1,
        )
        for i, (name, params) in enumerate(PARAMS.items())
    ]


@cache
def folder() -> Path:
    path = Path(mkdtemp(prefix="sluice-tiny-"))
    TINY_MODELS["qwen3"].save(path)
    return path


@cache
def alone() -> EngineRun:
    """Each request in a separate engine."""
    outcome = EngineRun()
    for request in requests():
        single = run(folder(), [request])
        outcome.token_ids |= single.token_ids
        outcome.logprobs |= single.logprobs
    return outcome


def check_logprobs(outcome: EngineRun, cut: int = 0) -> None:
    """From `cut` on they are those of an engine that did nothing else: of the drawn token, and of the likeliest."""
    asked = [key for key, entries in alone().logprobs.items() if entries]
    assert len(asked) == 4, "of three requests, of which one has two choices"
    for key in asked:
        entries = alone().logprobs[key][cut:]
        got = outcome.logprobs.get(key, [])
        assert [entry.chosen for entry in got] == pytest.approx([one.chosen for one in entries], abs=LOGPROB_BOUND)
        assert [dict(entry.top) for entry in got] == [
            pytest.approx(dict(one.top), abs=LOGPROB_BOUND) for one in entries
        ]


class TestGivenSeeds:
    @pytest.mark.parametrize("setting", [s for s in (*DISTURBED.values(), *FAILING.values()) if not s.abort], ids=str)
    def test_when_requests_run_in_any_batch_then_tokens_are_the_same(self, setting: Setting) -> None:
        outcome = run(folder(), requests(), setting)

        assert outcome.token_ids == alone().token_ids
        check_logprobs(outcome)

    @pytest.mark.parametrize("cut", [1, 7, 15])
    def test_when_an_earlier_attempt_stopped_then_tokens_resume_there(self, cut: int) -> None:
        resumed = [
            replace(
                request,
                progress=tuple(
                    ChoiceProgress(token_ids=tuple(alone().token_ids[request.id, choice][:cut]))
                    for choice in range(request.num_choices)
                ),
            )
            for request in requests()
        ]

        outcome = run(folder(), resumed, DISTURBED["preemption"])

        for key, tokens in alone().token_ids.items():
            assert outcome.token_ids.get(key, []) == tokens[cut:]
        check_logprobs(outcome, cut)

    def test_when_choices_or_seeds_differ_then_so_do_their_tokens(self) -> None:
        request = Request(id="r", prompt_token_ids=(5, 6), sampling=Sampling(seed=1, max_tokens=16), num_choices=3)
        other = replace(request, id="other", sampling=replace(request.sampling, seed=2), num_choices=1)

        tokens = run(folder(), [request, other]).token_ids

        assert len({tuple(choice) for choice in tokens.values()}) == 4


class TestGivenPenalties:
    def test_when_they_are_high_then_more_different_tokens_are_drawn(self) -> None:
        calm = Request(
            id="r", prompt_token_ids=(5, 6, 7), sampling=Sampling(temperature=0, max_tokens=30, ignore_eos=True)
        )
        penalised = replace(
            calm, id="p", sampling=replace(calm.sampling, frequency_penalty=2.0, repetition_penalty=2.0)
        )

        tokens = run(folder(), [calm, penalised], CALM).token_ids

        assert len(set(tokens["p", 0])) > len(set(tokens["r", 0]))


class TestGivenLogprobs:
    def test_when_greedy_then_the_chosen_token_is_the_first_of_the_top(self) -> None:
        request = Request(
            id="r", prompt_token_ids=(5, 6, 7), sampling=Sampling(temperature=0, max_tokens=8, logprobs=4)
        )

        outcome = run(folder(), [request])

        for token, entry in zip(outcome.token_ids["r", 0], outcome.logprobs["r", 0], strict=True):
            assert len(entry.top) == 4
            assert entry.top[0] == (token, pytest.approx(entry.chosen))
            assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)

    def test_when_a_bias_forces_a_token_then_its_logprob_is_that_of_the_raw_logits(self) -> None:
        request = Request(
            id="r",
            prompt_token_ids=(5, 6, 7),
            sampling=Sampling(temperature=0, max_tokens=1, logprobs=0, logit_bias={33: 100.0}),
        )

        outcome = run(folder(), [request])

        assert outcome.token_ids["r", 0] == [33]
        assert outcome.logprobs["r", 0][0].top == ()
        assert outcome.logprobs["r", 0][0].chosen < -0.5


class TestGivenATokenThatWouldEndTheOutput:
    """The end of the sequence (token 1) and a stop token are all that the model wants to say."""

    params = Sampling(temperature=0, max_tokens=10, logit_bias={1: 100.0, 40: 90.0}, stop_token_ids=(40,))

    @pytest.mark.parametrize("min_tokens", [0, 1, 4, 10])
    def test_when_more_tokens_are_asked_for_then_it_is_not_drawn_before(self, min_tokens: int) -> None:
        request = Request(id="r", prompt_token_ids=(5, 6), sampling=replace(self.params, min_tokens=min_tokens))

        tokens = run(folder(), [request]).token_ids["r", 0]

        assert {1, 40}.isdisjoint(tokens[:min_tokens])
        assert len(tokens) in (min_tokens, min_tokens + 1)

    def test_when_the_end_is_ignored_then_it_is_drawn_like_any_token(self) -> None:
        request = Request(id="r", prompt_token_ids=(5, 6), sampling=replace(self.params, ignore_eos=True, min_tokens=3))

        tokens = run(folder(), [request]).token_ids["r", 0]

        assert tokens == [1] * 10
