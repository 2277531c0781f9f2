"""Sampling options are declared twice: by the contract (JobOptions) and by the engine (SamplingParams). They agree."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import pytest

from sluice.engine.errors import InvalidSamplingParams
from sluice.engine.request import MAX_LOGPROBS, SamplingParams
from sluice.producer.contract import limits
from sluice.producer.contract.errors import InvalidJob
from sluice.producer.contract.messages import JobOptions, SamplingOptions
from sluice.worker.model.translate import sampling_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OWN_OF_THE_CONTRACT = {"n"}
"""The engine has it as `Request.num_choices`."""

OWN_OF_THE_ENGINE = {"seed"}
"""The contract has it next to the options, in `NewJob`."""

NUMBERS = (-101, -100, -3, -2, -1, 0, 1, 2, 3, 20, 21, 100, 101)
FRACTIONS = (-2.1, -0.1, 1e-9, 0.5, 1.1, 2.1, float("inf"), float("nan"))

OTHERS: dict[str, tuple[object, ...]] = {
    "stop": ((), ("end",), ("",), ("end", "")),
    "stop_token_ids": ((), (0, 5)),
    "logit_bias": ({}, {3: 100.0}, {3: -100.0}, {3: 100.5}, {3: -101}),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "logprobs": (None, *NUMBERS),
}

CHANGED: dict[str, Any] = {  # Any: values of every option's type
    "max_tokens": 7, "min_tokens": 3, "temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.6,
    "repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.9, "logit_bias": {1: 2.0},
    "stop": ("end",), "stop_token_ids": (11,), "ignore_eos": True, "logprobs": 12, "skip_special_tokens": False,
}  # fmt: skip


def defaults_of(kind: "type[DataclassInstance]") -> dict[str, object]:
    return {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(kind)}


def values_of(name: str) -> tuple[object, ...]:
    if name in OTHERS:
        return OTHERS[name]
    is_whole = isinstance(defaults_of(JobOptions)[name], int)
    return NUMBERS if is_whole else (*NUMBERS, *FRACTIONS)


def takes(kind: Callable[..., object], error: type[Exception], name: str, value: object) -> bool:
    try:
        kind(**{name: value})
    except error:
        return False
    return True


SHARED = sorted(defaults_of(SamplingParams).keys() - OWN_OF_THE_ENGINE)


class TestGivenTheOptionsOfContractAndEngine:
    def test_when_names_are_compared_then_they_are_the_same(self) -> None:
        contract = defaults_of(JobOptions).keys() - OWN_OF_THE_CONTRACT

        assert contract == defaults_of(SamplingParams).keys() - OWN_OF_THE_ENGINE

    @pytest.mark.parametrize("name", SHARED)
    def test_when_defaults_are_compared_then_they_are_the_same(self, name: str) -> None:
        assert defaults_of(JobOptions)[name] == defaults_of(SamplingParams)[name]

    @pytest.mark.parametrize("name", SHARED)
    def test_when_values_around_a_bound_are_tried_then_both_take_the_same(self, name: str) -> None:
        taken_by_contract = [value for value in values_of(name) if takes(JobOptions, InvalidJob, name, value)]
        taken_by_engine = [
            value for value in values_of(name) if takes(SamplingParams, InvalidSamplingParams, name, value)
        ]

        assert taken_by_contract == taken_by_engine
        assert taken_by_contract

    def test_when_the_limits_on_logprobs_are_compared_then_they_are_the_same(self) -> None:
        assert limits.MAX_LOGPROBS == MAX_LOGPROBS

    def test_when_options_are_translated_then_every_value_is_passed_on(self) -> None:
        params = sampling_of(JobOptions(**CHANGED), seed=5)

        assert CHANGED.keys() == set(SHARED)
        assert params == SamplingParams(**CHANGED, seed=5)


class TestGivenTheOptionsAsKeywords:
    def test_when_names_are_compared_with_the_values_then_they_are_the_same(self) -> None:
        assert SamplingOptions.__annotations__.keys() == defaults_of(JobOptions).keys()

    @pytest.mark.parametrize("field", fields(JobOptions), ids=lambda field: field.name)
    def test_when_types_are_compared_then_a_value_of_the_option_is_one_of_the_keyword(self, field: Any) -> None:
        # Any: dataclasses.Field of any type. Sequences are looser as keywords: a tuple, list or one string.
        keyword = SamplingOptions.__annotations__[field.name]

        assert keyword == field.type or field.name in {"stop", "stop_token_ids"}
