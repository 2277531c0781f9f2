"""The option `structured`: what callers give, what is stored, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.request import GRAMMAR_KINDS
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import sampling_options, template
from sluice.protocol.limits import MAX_STRUCTURED_CHARS
from sluice.protocol.sampling import JobOptions
from sluice.protocol.structured import KINDS, stored_structured
from sluice.protocol.wire import JobSpec, WireError, decode_spec, encode_spec

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda v: st.lists(v, max_size=4) | st.dictionaries(TEXTS, v, max_size=4),
    max_leaves=12,
)


class TestGivenValuesOfCallers:
    @given(schema=st.dictionaries(TEXTS, VALUES, max_size=6))
    def test_when_a_schema_is_given_then_it_is_stored_as_json_in_its_order(self, schema: dict[str, Any]) -> None:
        stored = stored_structured({"json_schema": schema})

        assert list(json.loads(stored["json_schema"]).items()) == list(schema.items())
        assert stored_structured({"json_schema": json.dumps(schema)}) == stored

    @given(choices=st.lists(TEXTS, min_size=1, max_size=9))
    def test_when_choices_are_given_then_they_are_stored_as_json(self, choices: list[str]) -> None:
        assert json.loads(stored_structured({"choice": choices})["choice"]) == choices

    @given(text=TEXTS, kind=st.sampled_from(["regex", "lark"]))
    def test_when_text_is_given_then_it_is_stored(self, text: str, kind: str) -> None:
        assert stored_structured({kind: text}) == {kind: text}

    @pytest.mark.parametrize("value", [None, {}])
    def test_when_nothing_is_given_then_nothing_is_stored_and_no_feature_needed(self, value: Any) -> None:
        assert sampling_options({"structured": value}) == JobOptions()
        assert template({"structured": value}).features == ()

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("json", "exactly one"),
            ({"json": {}}, "exactly one"),
            ({"regex": "a", "lark": "b"}, "exactly one"),
            ({"regex": ""}, "a regular expression"),
            ({"regex": 5}, "a regular expression"),
            ({"json_object": False}, "true"),
            ({"json_schema": []}, "a JSON schema"),
            ({"json_schema": "["}, "can be read"),
            ({"json_schema": {"minimum": float("nan")}}, "can be read"),
            ({"json_schema": {"a": object()}}, "can be read"),
            ({"choice": []}, "a list of texts"),
            ({"choice": ["a", ""]}, "a list of texts"),
            ({"choice": "a"}, "a list of texts"),
            ({"regex": "a" * (MAX_STRUCTURED_CHARS + 1)}, "at most"),
            ({"regex": "\ud800"}, "one pair of text"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_when_a_value_is_wrong_then_the_error_names_the_option(self, value: Any, words: str) -> None:
        with pytest.raises(InvalidJob, match=words) as raised:
            sampling_options({"structured": value})

        assert str(raised.value).startswith("structured must")

    def test_when_schemas_are_nested_without_end_then_they_are_refused(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(100_000):
            schema = {"items": schema}

        with pytest.raises(InvalidJob, match="structured must"):
            sampling_options({"structured": {"json_schema": schema}})

    def test_when_the_end_is_ignored_then_it_is_refused(self) -> None:
        with pytest.raises(InvalidJob, match="ignore_eos"):
            sampling_options({"structured": {"json_object": True}, "ignore_eos": True})


class TestGivenAStoredJob:
    @given(text=TEXTS, kind=st.sampled_from(sorted(KINDS)))
    def test_when_it_is_read_then_it_is_the_same_and_needs_the_feature(self, text: str, kind: str) -> None:
        spec = JobSpec(options=JobOptions(structured={kind: text}))

        read = decode_spec(encode_spec(spec))

        assert read == spec
        assert read.options.features == ("structured_output",)

    def test_when_it_has_no_grammar_then_its_bytes_are_those_of_before(self) -> None:
        assert b"structured" not in encode_spec(JobSpec(options=JobOptions(max_tokens=3)))

    @pytest.mark.parametrize("value", [{"regex": 5}, {"other": "a"}, {"regex": "a", "lark": "b"}, ["regex"], "a", None])
    def test_when_another_program_has_written_it_then_it_is_refused(self, value: object) -> None:
        from sluice.protocol.packing import WIRE_VERSION, packed

        data = packed([WIRE_VERSION, {"options": {"structured": value}}])

        with pytest.raises(WireError):
            decode_spec(data)


class TestGivenTheEngine:
    def test_when_its_grammars_are_compared_then_their_kinds_are_the_same(self) -> None:
        # What a worker composes of grammars is its own.
        assert sorted([*KINDS, "composed"]) == sorted(GRAMMAR_KINDS)
