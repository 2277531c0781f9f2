"""Sampling options are declared once, by `JobOptions`. What is written of it for type checkers is what it declares."""

import ast
import inspect
import re
from ctypes import c_float
from itertools import pairwise
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.request import Sampling
from sluice.protocol import limits
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import Options
from sluice.protocol.sampling import DEFAULTS, NEUTRAL, JobOptions, SamplingOptions
from sluice.worker.model.sampling_defaults import NOTHING_STATED, resolve
from sluice.worker.model.translate import sampling_of
from tests.examples import examples
from tools import sampling_options

NUMBERS = (-101, -100, -3, -2, -1, 0, 1, 2, 3, 20, 21, 100, 101)
FRACTIONS = (-2.1, -0.1, 1e-9, 0.0009, 0.001, 0.5, 1.1, 2.1, 1000.1, 10_000.1, float("inf"), float("nan"))

OTHERS: dict[str, tuple[object, ...]] = {
    "stop": ((), ("end",), ("",), ("end", "")),
    "stop_token_ids": ((), (0, 5)),
    "logit_bias": ({}, {3: 100.0}, {3: -100.0}, {3: 100.5}, {3: -101}),
    "structured": ({}, {"regex": "a"}, {"regex": 5}, {"other": "a"}),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "logprobs": (None, *NUMBERS),
    "prompt_logprobs": (None, *NUMBERS),
    "dimensions": (None, *NUMBERS),
    "echo": (True, False),
    "embed": (True, False),
    "classify": (True, False),
}

CHANGED: dict[str, Any] = {  # Any: values of every option's type
    "max_tokens": 7, "min_tokens": 3, "temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.6,
    "repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.9, "logit_bias": {1: 2.0},
    "stop": ("end",), "stop_token_ids": (11,), "ignore_eos": True, "logprobs": 12, "prompt_logprobs": 13,
    "skip_special_tokens": False,
}  # fmt: skip


VALUES: dict[str, Any] = {**DEFAULTS, **NEUTRAL}  # Any: of several types
"""The values of what is not stated, by a request or by its model."""


def values_of(name: str) -> tuple[object, ...]:
    if name in OTHERS:
        return OTHERS[name]
    is_whole = isinstance(VALUES[name], int)
    return NUMBERS if is_whole else (*NUMBERS, *FRACTIONS)


def takes(name: str, value: Any) -> bool:  # Any: of every option's type
    try:
        JobOptions(**{name: value})
    except InvalidJob:
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


FLOATS = [name for name, value in VALUES.items() if isinstance(value, float)]


class TestGivenTheDeclaration:
    def test_when_files_are_written_from_it_then_they_are_as_they_are(self) -> None:
        contract, guide = sampling_options.CONTRACT.read_text(), sampling_options.PAGE.read_text()

        written = (sampling_options.contract(contract), sampling_options.engine(), sampling_options.page(guide))

        found = (contract, sampling_options.ENGINE.read_text(), guide)
        assert found == written, "run `python -m tools.sampling_options`"


class TestGivenTheOptionsOfContractAndEngine:
    @pytest.mark.parametrize("name", VALUES)
    def test_when_values_around_a_bound_are_tried_then_some_are_taken(self, name: str) -> None:
        assert any(takes(name, value) for value in values_of(name))

    @given(name=st.sampled_from([*FLOATS, "logit_bias"]), value=st.floats())
    @settings(max_examples=examples(300), deadline=None)
    def test_when_any_number_is_taken_then_it_fits_the_engine(self, name: str, value: float) -> None:
        is_taken = takes(name, {3: value} if name == "logit_bias" else value)

        # The engine computes with 32 bits, and divides by the repetition penalty.
        assert not is_taken or isfinite(c_float(value).value)
        assert not is_taken or name != "repetition_penalty" or c_float(value).value > 0

    def test_when_options_are_translated_then_every_value_is_passed_on(self) -> None:
        options = JobOptions(**CHANGED)

        params = sampling_of(options, resolve(options, NOTHING_STATED, frozenset({8})), seed=5)

        assert CHANGED.keys() == VALUES.keys() - {"n", "structured", "echo", "embed", "classify", "dimensions"}
        assert params == Sampling(**CHANGED, end_token_ids=frozenset({8}), seed=5)


class TestGivenTheOptionsAsKeywords:
    @pytest.mark.parametrize("kind", [SamplingOptions, Options])
    def test_when_an_editor_shows_them_then_each_says_its_default(self, kind: type) -> None:
        own = kind.__annotations__.keys() - (SamplingOptions.__annotations__.keys() if kind is Options else ())

        described = {name for name, text in docstrings_of(kind).items() if "Default: " in text}

        assert described == own

    @pytest.mark.parametrize("name", SamplingOptions.__annotations__)
    def test_when_an_editor_shows_one_then_its_bounds_are_those_of_the_contract(self, name: str) -> None:
        text = docstrings_of(SamplingOptions)[name]

        if None in OTHERS.get(name, (None,)):
            for least, most in re.findall(r"(-?\d+) to (-?\d+)", text):
                tried = [int(least) - 1, int(least), int(most), int(most) + 1]
                assert [takes(name, value) for value in tried] == [False, True, True, False]

    def test_when_an_editor_shows_lists_then_their_limits_are_those_of_the_contract(self) -> None:
        texts = docstrings_of(SamplingOptions)

        assert f"up to {limits.MAX_STOPS} texts of up to {limits.MAX_STOP_CHARS} characters" in texts["stop"]
        assert f"up to {limits.MAX_STOP_TOKEN_IDS} tokens" in texts["stop_token_ids"]
        assert f"up to {limits.MAX_LOGIT_BIAS} tokens" in texts["logit_bias"]
