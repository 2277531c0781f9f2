"""Requests that can never run."""

from typing import Any

import pytest

from sluice.engine.errors import (
    PromptEmpty,
    PromptTooLong,
    RequestRejected,
    RequestTooLarge,
    UnknownToken,
)
from sluice.engine.executor import ModelLimits
from sluice.engine.request import ChoiceProgress, Request, Sampling
from sluice.engine.validation import check_request

LIMITS = ModelLimits(max_model_len=20, vocab_size=10, eos_token_ids=frozenset(), num_blocks=4, block_size=4)


def request(prompt: tuple[int, ...] = (1, 2), *, sampling: dict[str, Any] | None = None, **options: Any) -> Request:
    asked: dict[str, Any] = {"max_tokens": 4} | (sampling or {})
    return Request(id="r", prompt_token_ids=prompt, sampling=Sampling(**asked), **options)


class TestGivenARequest:
    @pytest.mark.parametrize(
        ("asked", "error", "words"),
        [
            (request(()), PromptEmpty, "no tokens"),
            (request((1,) * 20), PromptTooLong, "prompt is 20 tokens; this model reads 19"),
            (request((1,) * 14), RequestTooLarge, "18 tokens; this worker's KV cache holds 16"),
            (request((1, 10)), UnknownToken, "the prompt has the token id 10; this model knows 0 to 9"),
            (request((1, -1)), UnknownToken, "-1"),
            (request(sampling={"stop_token_ids": (11,)}), UnknownToken, "stop_token_ids"),
            (request(sampling={"logit_bias": {12: 1.0}}), UnknownToken, "logit_bias"),
            (request(progress=(ChoiceProgress(token_ids=(99,)),)), UnknownToken, "the output so far"),
            (
                request(sampling={"max_tokens": 0, "prompt_logprobs": 1}, num_choices=2),
                RequestRejected,
                "read once, but 2 choices are asked",
            ),
            (request(num_choices=0), RequestRejected, "1 choice or more, got 0"),
            (request(num_choices=2, progress=(ChoiceProgress(),)), RequestRejected, "each of its 2 choices, got 1"),
        ],
    )
    def test_when_it_can_never_run_then_the_sentence_says_why(
        self, asked: Request, error: type[RequestRejected], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            check_request(asked, LIMITS)

    @pytest.mark.parametrize(
        "asked",
        [
            request((1,) * 13),
            request((1,) * 12, sampling={"max_tokens": 5}),
            request((0, 9)),
            request((1,), num_choices=3, progress=(ChoiceProgress(),) * 3),
        ],
    )
    def test_when_it_can_run_then_nothing_is_said(self, asked: Request) -> None:
        check_request(asked, LIMITS)


class TestGivenMoreTokensAskedForThanTheContextHas:
    def test_when_the_request_is_new_then_it_is_refused_with_the_numbers(self) -> None:
        words = r"prompt \(2 tokens\) and max_tokens \(1000\) are 1002 tokens; this model's context is 20"
        check_request(request(sampling={"max_tokens": 14}), LIMITS)

        with pytest.raises(RequestTooLarge, match=words):
            check_request(request(sampling={"max_tokens": 1000}), LIMITS)
        with pytest.raises(RequestTooLarge, match="are 21 tokens"):
            check_request(request(sampling={"max_tokens": 19}), LIMITS)

    def test_when_it_was_begun_where_the_context_is_longer_then_only_the_context_must_fit(self) -> None:
        limits = ModelLimits(max_model_len=17, vocab_size=10, eos_token_ids=frozenset(), num_blocks=4, block_size=4)
        begun = (ChoiceProgress(token_ids=(3,)),)

        check_request(request((1,), sampling={"max_tokens": 1000}, progress=begun), limits)
