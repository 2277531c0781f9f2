"""What an engine can run: options that it refuses, and requests that state them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.capabilities import GRAMMAR, NUM_CHOICES, Capabilities, Exactness
from sluice.engine.errors import OptionRefused
from sluice.engine.request import Grammar, Request, Sampling
from sluice.worker.model.offered import features_without, lacking_features

CHANGED: dict[str, object] = {
    "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
    "frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": {1: 1.0}, "stop": ("x",), "stop_token_ids": (1,),
    "ignore_eos": True, "logprobs": 0, "skip_special_tokens": False, NUM_CHOICES: 2,
    GRAMMAR: Grammar(kind="json_object"),
}  # fmt: skip
"""A value other than the default, of each option that an engine may lack."""

options = st.sets(st.sampled_from(sorted(CHANGED)))


def engine_without(refused: dict[str, str]) -> Capabilities:
    return Capabilities(
        engine="other", version="1.0", families=("llama",), weights=("plain",), features=features_without(refused),
        exactness=Exactness.GREEDY_ONLY, refused=refused,
    )  # fmt: skip


def request_with(stated: set[str]) -> Request:
    changed = {name: CHANGED[name] for name in stated - {NUM_CHOICES, GRAMMAR}}
    num_choices = 2 if NUM_CHOICES in stated else 1
    sampling = replace(Sampling(), **changed)  # pyright: ignore[reportArgumentType]  # fields by name
    grammar = Grammar(kind="json_object") if GRAMMAR in stated else None
    return Request(id="r", prompt_token_ids=(1,), num_choices=num_choices, sampling=sampling, grammar=grammar)


class TestGivenAnEngineThatRefusesOptions:
    @pytest.mark.parametrize(("option", "name"), [("min_p", "min_p"), (NUM_CHOICES, "n"), (GRAMMAR, "structured")])
    def test_when_a_request_states_one_then_the_sentence_names_it_and_the_reason(self, option: str, name: str) -> None:
        engine = engine_without({option: "it has no code for that"})

        with pytest.raises(OptionRefused) as raised:
            engine.check(request_with({option}))

        assert str(raised.value) == f"the engine other 1.0 refuses {name}: it has no code for that"

    @given(refused=options, stated=options)
    def test_when_a_request_is_checked_then_it_is_refused_if_and_only_if_it_states_one(
        self, refused: set[str], stated: set[str]
    ) -> None:
        engine = engine_without(dict.fromkeys(refused, "why"))

        try:
            engine.check(request_with(stated))
        except OptionRefused:
            is_refused = True
        else:
            is_refused = False

        assert is_refused == bool(refused & stated)

    @pytest.mark.parametrize(
        ("refused", "lacking"),
        [
            ((), set[str]()),
            (("min_p", "stop"), set[str]()),
            (("presence_penalty",), {"penalties"}),
            ((NUM_CHOICES, "logprobs", "logit_bias"), {"choices", "logprobs", "logit_bias"}),
        ],
    )
    def test_when_its_features_are_derived_then_each_needs_all_its_options(
        self, refused: tuple[str, ...], lacking: set[str]
    ) -> None:
        assert lacking_features(engine_without(dict.fromkeys(refused, "why"))) == lacking


class TestGivenARefusalOfWhatNoRequestHas:
    def test_when_the_capabilities_are_made_then_they_are_wrong(self) -> None:
        with pytest.raises(ValueError, match="refused names best_of, which no request has"):
            replace(engine_without({}), refused={"best_of": "why"})
