"""Sampling options are declared three times: twice by the contract (JobOptions, and SamplingOptions for keyword
arguments) and once by the engine (SamplingParams). They agree."""

import ast
import inspect
import re
from collections.abc import Callable
from ctypes import c_float
from dataclasses import MISSING, fields
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.errors import InvalidSamplingParams
from sluice.engine.request import MAX_LOGPROBS, SamplingParams
from sluice.protocol import limits
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import Options, SamplingOptions
from sluice.protocol.messages import NEUTRAL, JobOptions
from sluice.worker.model.sampling_defaults import NOTHING_STATED, resolve
from sluice.worker.model.translate import sampling_of
from tests.examples import examples

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OWN_OF_THE_CONTRACT = {"n"}
"""The engine has it as `Request.num_choices`."""

OWN_OF_THE_ENGINE = {"seed", "end_token_ids"}
"""The contract has the seed next to the options, in `NewJob`; the worker adds the model's end tokens."""

NUMBERS = (-101, -100, -3, -2, -1, 0, 1, 2, 3, 20, 21, 100, 101)
FRACTIONS = (-2.1, -0.1, 1e-9, 0.0009, 0.001, 0.5, 1.1, 2.1, 1000.1, 10_000.1, float("inf"), float("nan"))

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
    """The values of what is not stated, by a request or by its model."""
    return {**_declared(kind), **(NEUTRAL if issubclass(kind, JobOptions) else {})}


def _declared(kind: "type[DataclassInstance]") -> dict[str, object]:
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


def docstrings_of(kind: type) -> dict[str, str]:
    """What an editor shows for each field of a class."""
    (body,) = [node.body for node in ast.walk(ast.parse(inspect.getsource(kind))) if isinstance(node, ast.ClassDef)]
    texts = {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    return {name: " ".join(text.split()) for name, text in texts.items()}


def shown(name: str) -> str:
    """A default as a docstring names it."""
    default = defaults_of(JobOptions)[name]
    return f"the model's, or {plain(default)}" if name in NEUTRAL else plain(default)


def plain(default: object) -> str:
    if isinstance(default, bool) or default is None:
        return str(default)
    return f"{default:g}" if isinstance(default, int | float) else "none"


SHARED = sorted(defaults_of(SamplingParams).keys() - OWN_OF_THE_ENGINE)
FLOATS = [name for name in SHARED if isinstance(defaults_of(SamplingParams)[name], float)]


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

    @given(name=st.sampled_from([*FLOATS, "logit_bias"]), value=st.floats())
    @settings(max_examples=examples(300), deadline=None)
    def test_when_any_number_is_tried_then_both_take_it_or_neither_and_it_fits(self, name: str, value: float) -> None:
        stated = {3: value} if name == "logit_bias" else value

        is_taken = takes(JobOptions, InvalidJob, name, stated)

        assert is_taken == takes(SamplingParams, InvalidSamplingParams, name, stated)
        # The engine computes with 32 bits, and divides by the repetition penalty.
        assert not is_taken or isfinite(c_float(value).value)
        assert not is_taken or name != "repetition_penalty" or c_float(value).value > 0

    def test_when_the_limits_on_logprobs_are_compared_then_they_are_the_same(self) -> None:
        assert limits.MAX_LOGPROBS == MAX_LOGPROBS

    def test_when_options_are_translated_then_every_value_is_passed_on(self) -> None:
        options = JobOptions(**CHANGED)

        params = sampling_of(options, resolve(options, NOTHING_STATED, frozenset({8})), seed=5)

        assert CHANGED.keys() == set(SHARED)
        assert params == SamplingParams(**CHANGED, end_token_ids=frozenset({8}), seed=5)


class TestGivenTheOptionsAsKeywords:
    def test_when_names_are_compared_with_the_values_then_they_are_the_same(self) -> None:
        assert SamplingOptions.__annotations__.keys() == defaults_of(JobOptions).keys()

    @pytest.mark.parametrize("field", fields(JobOptions), ids=lambda field: field.name)
    def test_when_types_are_compared_then_a_value_of_the_option_is_one_of_the_keyword(self, field: Any) -> None:
        # Any: dataclasses.Field of any type. Sequences are looser as keywords: a tuple, list or one string.
        keyword = SamplingOptions.__annotations__[field.name]

        assert keyword == field.type or field.name in {"stop", "stop_token_ids"}

    @pytest.mark.parametrize("kind", [SamplingOptions, Options])
    def test_when_an_editor_shows_them_then_each_says_its_default(self, kind: type) -> None:
        own = kind.__annotations__.keys() - (SamplingOptions.__annotations__.keys() if kind is Options else ())

        described = {name for name, text in docstrings_of(kind).items() if "Default: " in text}

        assert described == own

    @pytest.mark.parametrize("name", SamplingOptions.__annotations__)
    def test_when_an_editor_shows_one_then_default_and_bounds_are_those_of_the_contract(self, name: str) -> None:
        text = docstrings_of(SamplingOptions)[name]

        assert text.endswith(f" Default: {shown(name)}.")
        if name == "logprobs" or name not in OTHERS:
            for least, most in re.findall(r"(-?\d+) to (-?\d+)", text):
                tried = [int(least) - 1, int(least), int(most), int(most) + 1]
                assert [takes(JobOptions, InvalidJob, name, value) for value in tried] == [False, True, True, False]

    def test_when_an_editor_shows_lists_then_their_limits_are_those_of_the_contract(self) -> None:
        texts = docstrings_of(SamplingOptions)

        assert f"up to {limits.MAX_STOPS} texts of up to {limits.MAX_STOP_CHARS} characters" in texts["stop"]
        assert f"up to {limits.MAX_STOP_TOKEN_IDS} tokens" in texts["stop_token_ids"]
        assert f"up to {limits.MAX_LOGIT_BIAS} tokens" in texts["logit_bias"]
