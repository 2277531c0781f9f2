"""Lines of a bulk file: what becomes a job, and what is refused with which word."""

import functools
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sluice.producer.bulk.output import bad_line, encoded
from sluice.producer.errors import InvalidJob, InvalidSetting
from sluice.protocol.bulk_files.input import MAX_BLANK_BYTES, MAX_LINE_BYTES, BadLine, Line, LineReader, lines, opened
from sluice.protocol.bulk_files.jobs import BulkSpec, LineJobs
from sluice.protocol.jobs import OPTION_NAMES, Options
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, Endpoint


def read(fields: object, *, endpoint: Endpoint | None = None, model: str | None = None) -> Line | BadLine:
    """One line, given as what it holds (or as its bytes)."""
    line = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return LineReader(endpoint=endpoint, model=model, defaults=Options(max_tokens=64)).read(7, line)


def chat(**body: Any) -> dict[str, Any]:
    """An OpenAI batch line for a chat."""
    messages = [{"role": "user", "content": "hi"}]
    return {"custom_id": "c", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": messages, **body}}


def completion(**body: Any) -> dict[str, Any]:
    """An OpenAI batch line for a completion."""
    return {"custom_id": "c", "method": "POST", "url": COMPLETIONS, "body": {"model": "m", "prompt": "hi", **body}}


def options_of(line: Line | BadLine) -> dict[str, Any]:
    """What a good line asks for."""
    assert isinstance(line, Line), line
    return dict(line.options)


def _in_list(inner: object, _: int) -> object:
    return [inner]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NESTED: object = functools.reduce(_in_list, range(900), "deep")

ODD: dict[str, object] = {
    "huge": 10**400,
    "minus_huge": -(10**400),
    "infinite": 1e999,
    "surrogate": "\ud800",
    "surrogate_key": {"\ud800": 1},
    "digits_key": {"9" * 5000: 1},
    "deep": NESTED,
    "null_in_list": [None],
}


def checked(found: Line | BadLine) -> Line | BadLine:
    """A line whose values are checked, too."""
    if isinstance(found, Line):
        try:
            LineJobs(BulkSpec(queue="q", batch="b")).job(found)
        except InvalidJob as error:
            return found.refused(error)
    return found


def written_for(line: bytes) -> bytes | None:
    """What the error file says of a line, or None if it becomes a job."""
    found = checked(LineReader(endpoint=None, model=None, defaults=Options()).read(7, line))
    return None if isinstance(found, Line) else encoded(bad_line("name", found)).encode()


class TestGivenPlainLines:
    def test_when_it_has_a_prompt_then_its_options_come_on_top_of_the_defaults(self) -> None:
        line = read({"prompt": "hi", "temperature": 0.5, "max_tokens": 3, "metadata": {"user": "7"}})

        assert isinstance(line, Line)
        assert (line.number, line.custom_id, line.endpoint, line.prompt) == (7, None, COMPLETIONS, "hi")
        assert line.options == {"temperature": 0.5, "max_tokens": 3, "metadata": {"user": "7"}}

    def test_when_it_has_messages_then_it_is_answered_as_a_chat(self) -> None:
        line = read({"messages": [{"role": "user", "content": "hi"}], "custom_id": "x"})

        assert isinstance(line, Line)
        assert (line.endpoint, line.custom_id, line.prompt) == (CHAT, "x", [{"role": "user", "content": "hi"}])

    def test_when_it_has_token_ids_then_they_are_the_prompt(self) -> None:
        line = read({"token_ids": [1, 2]})

        assert isinstance(line, Line)
        assert line.prompt == [1, 2]

    def test_when_times_and_biases_are_written_in_json_then_they_are_read(self) -> None:
        options = options_of(read({"prompt": "hi", "deadline": "2031-01-01T00:00:00Z", "logit_bias": {"5": -1}}))

        assert options["deadline"].year == 2031
        assert options["logit_bias"] == {5: -1}


class TestGivenOpenAILines:
    def test_when_it_is_a_chat_then_parameters_get_their_names_here(self) -> None:
        options = options_of(
            read(chat(max_completion_tokens=9, temperature=None, logprobs=True, top_logprobs=3, stop=["a"], top_k=5))
        )

        assert options == {"max_tokens": 9, "logprobs": 3, "stop": ["a"], "top_k": 5, "model": "m"}

    def test_when_content_comes_in_text_parts_then_they_are_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

        line = read(chat(messages=[{"role": "user", "content": parts}]))

        assert isinstance(line, Line)
        assert line.prompt == [{"role": "user", "content": "ab"}]

    @pytest.mark.parametrize(
        ("prompt", "expected"), [("hi", "hi"), ([1, 2], [1, 2]), (["hi"], "hi"), ([[1, 2]], [1, 2])]
    )
    def test_when_it_is_a_completion_then_text_and_token_ids_are_taken(self, prompt: object, expected: object) -> None:
        line = read(completion(prompt=prompt, logprobs=2))

        assert isinstance(line, Line)
        assert (line.prompt, line.endpoint, line.options.get("logprobs")) == (expected, COMPLETIONS, 2)

    def test_when_asked_for_what_changes_nothing_then_it_is_taken(self) -> None:
        harmless: dict[str, Any] = {
            "stream": False, "functions": [], "function_call": "none", "response_format": {"type": "text"}, "user": "u",
            "store": False, "service_tier": "auto", "stream_options": None, "tools": None,
        }  # fmt: skip

        assert options_of(read(chat(**harmless))) == {"max_tokens": 64, "model": "m"}

    def test_when_an_endpoint_is_given_then_method_and_url_may_be_missing(self) -> None:
        line = read({"custom_id": "c", "body": {"prompt": "hi"}}, endpoint=COMPLETIONS)
        bare = read({"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}, endpoint=CHAT)

        assert isinstance(line, Line)
        assert options_of(bare)["max_tokens"] == 5


class TestGivenBadLines:
    @pytest.mark.parametrize(
        ("fields", "code", "words"),
        [
            (b"{", "invalid_json", "not JSON"),
            (b"[1]", "invalid_json", "JSON object"),
            (b"\xff{}", "invalid_utf8", "byte 0"),
            (b"[" * 100_000, "invalid_json", "not JSON"),
            ({"prompt": "a", "custom_id": "\ud800"}, "invalid_unicode", "surrogate"),
            ({"prompt": "a", "\udfff": 1}, "invalid_unicode", "surrogate"),
            (chat(logit_bias={"1" * 5000: 1}), "invalid_request", "logit_bias"),
            ({}, "invalid_request", "one of prompt"),
            ({"prompt": "a", "messages": []}, "invalid_request", "one of prompt"),
            ({"prompt": "a", "temprature": 1}, "unknown_parameter", "metadata. Did you mean 'temperature'?"),
            ({"prompt": "a", "job_id": "0.a.b"}, "unknown_parameter", "'job_id'; your own fields belong in metadata"),
            ({"prompt": "a", "deadline": "soon"}, "invalid_request", "ISO 8601"),
            ({"prompt": "a", "custom_id": 5}, "invalid_custom_id", "string"),
            ({"body": {"prompt": "a"}}, "missing_custom_id", "custom_id"),
            ({**chat(), "url": None}, "missing_url", "--endpoint"),
            ({**chat(), "url": "/v1/edits"}, "invalid_url", "/v1/embeddings"),
            ({**chat(), "method": "GET"}, "invalid_method", "GET"),
            ({**chat(), "extra": 1}, "invalid_request", "extra"),
            ({**chat(), "body": []}, "invalid_request", "object"),
            (chat(stream="yes"), "invalid_request", "stream"),
            (b'{"prompt": "a", "user": NaN}', "invalid_json", "NaN is not valid JSON"),
            ({"prompt": "a", "ttl_s": True}, "invalid_request", "ttl_s"),
            ({"prompt": [{"role": "user", "content": "a"}]}, "invalid_request", "prompt"),
            ({"token_ids": "a"}, "invalid_request", "token_ids"),
            ({"prompt": "a", "batch": "b"}, "unknown_parameter", "batch"),
            (chat(tools=[{"type": "function"}]), "invalid_request", "tools"),
            (chat(tools=[{"type": "web_search"}]), "invalid_request", "tools"),
            (chat(tool_choice="required"), "invalid_request", "tool_choice"),
            ({"prompt": "a", "tools": [{"type": "function"}]}, "unsupported", "tools"),
            (chat(response_format={"type": "json_schema", "json_schema": {}}), "invalid_request", "response_format"),
            (chat(response_format={"type": "structural_tag"}), "unsupported", "response_format"),
            (chat(structured_outputs={"structural_tag": "x"}), "unsupported", "structural_tag"),
            (chat(guided_choice="a"), "invalid_request", "guided_choice must have a list of texts"),
            (chat(guided_regex="a", guided_choice=["a"]), "invalid_request", "both constrain"),
            ({"prompt": "a", "structured": {"lark": "x", "regex": "y"}}, "invalid_request", "exactly one"),
            (chat(audio={}), "unsupported", "audio"),
            (chat(max_token=3), "unknown_parameter", "'max_token'. Did you mean 'max_tokens'?"),
            (chat(top_logprobs=3), "invalid_request", "logprobs: true"),
            (chat(logprobs=3), "invalid_request", "true or false"),
            (chat(messages=[]), "invalid_request", "messages"),
            (chat(messages="hi"), "invalid_request", "messages"),
            (chat(messages=["hi"]), "invalid_request", "object"),
            (chat(messages=[{"role": "function", "content": "x"}]), "unsupported", "role function"),
            (
                chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [1]}]),
                "invalid_request",
                "tool_calls",
            ),
            (chat(messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]), "invalid_request", "tool_calls"),
            (chat(messages=[{"role": "user", "content": "x", "tool_call_id": "a"}]), "invalid_request", "tool_call_id"),
            (chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 1}]), "invalid_request", "tool_call_id"),
            (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "unsupported", "image_url"),
            (chat(messages=[{"role": "user", "content": 5}]), "invalid_request", "content"),
            (chat(logit_bias={"a": 1}), "invalid_request", "logit_bias"),
            (completion(prompt=["a", "b"]), "unsupported", "several prompts"),
            (completion(prompt=5), "invalid_request", "prompt"),
            (completion(echo=True, stream=True), "unsupported", "echo"),
            (completion(best_of=3), "unsupported", "best_of"),
            (completion(suffix="x"), "unsupported", "suffix"),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_when_it_cannot_be_a_job_then_the_reason_is_named(self, fields: object, code: str, words: str) -> None:
        line = checked(read(fields))

        assert isinstance(line, BadLine), line
        assert (line.number, line.code) == (7, code)
        assert words in line.message

    def test_when_it_has_no_custom_id_then_the_errors_file_has_its_number(self) -> None:
        nameless = json.loads(written_for(b'{"prompt": "a", "n": 65}') or b"")
        named = json.loads(written_for(b'{"prompt": "a", "n": 65, "custom_id": "mine"}') or b"")

        assert (nameless["custom_id"], named["custom_id"]) == ("line-7", "mine")
        assert nameless["response"]["body"]["error"]["param"] == "n"

    def test_when_a_time_to_live_is_too_long_then_its_bounds_are_named(self) -> None:
        found = checked(read({"prompt": "a", "ttl_s": 1e30}))

        assert isinstance(found, BadLine)
        assert (found.param, "under 1000000000, got 1e+30" in found.message) == ("ttl_s", True)

    def test_when_a_custom_id_comes_twice_then_the_second_is_bad(self) -> None:
        reader = LineReader(endpoint=None, model=None, defaults=Options())
        line = json.dumps(chat()).encode()

        first, second = reader.read(1, line), reader.read(2, line)

        assert isinstance(first, Line)
        assert isinstance(second, BadLine)
        assert second.code == "duplicate_custom_id"

    def test_when_it_asks_for_another_model_than_was_said_then_it_is_bad(self) -> None:
        other = read(chat(), model="other")
        same = read(chat(), model="m")
        silent = read({"prompt": "hi"}, model="m")

        assert isinstance(other, BadLine)
        assert other.code == "model_mismatch"
        assert options_of(same)["model"] == options_of(silent)["model"] == "m"

    @pytest.mark.parametrize("name", sorted(OPTION_NAMES | {"custom_id", "prompt", "messages", "token_ids"}))
    @pytest.mark.parametrize("value", list(ODD.values()), ids=list(ODD))
    def test_when_a_value_is_odd_then_the_next_line_is_still_read(self, name: str, value: object) -> None:
        odd = json.dumps({"prompt": "a", name: value} if name not in ("messages", "token_ids") else {name: value})

        for line in (odd, json.dumps(completion(**{name: value})), json.dumps(chat(**{name: value}))):
            written = written_for(line.encode())

            assert written is None or json.loads(written)["response"]["body"]["error"]["line"] == 7, line[:200]

    @given(line=st.one_of(st.binary(max_size=60), st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["prompt", "messages", "body", "url", "custom_id", "role", "content", "logit_bias"]), inner,
            max_size=4),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())))  # fmt: skip
    def test_when_it_is_anything_at_all_then_it_is_a_line_or_a_bad_line(self, line: bytes) -> None:
        for endpoint in (None, CHAT, COMPLETIONS):
            assert isinstance(read(line, endpoint=endpoint), (Line, BadLine))


class TestGivenAFile:
    CONTENT = b'\xef\xbb\xbf{"prompt":"1"}\r\n\n   \n{"prompt":"4"}'

    @pytest.mark.parametrize("packed", ["plain", "gz", "zst"])
    def test_when_it_is_read_then_blanks_and_bom_are_skipped_and_line_numbers_kept(
        self, tmp_path: Path, packed: str
    ) -> None:
        data = {"plain": bytes, "gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}[packed](self.CONTENT)
        path = tmp_path / "jobs"
        path.write_bytes(data)

        with opened(str(path)) as file:
            found = list(lines(file))

        assert found == [(1, b'{"prompt":"1"}'), (4, b'{"prompt":"4"}')]

    def test_when_it_is_empty_then_there_are_no_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "jobs"
        path.write_bytes(b"")

        with opened(str(path)) as file:
            assert list(lines(file)) == []

    def test_when_a_line_is_huge_then_it_is_skipped_and_the_next_is_read(self) -> None:
        file = io.BytesIO(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\nnext\n")

        assert list(lines(file)) == [(1, None), (2, b"next")]

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gz", "zst"])
    def test_when_blank_lines_go_on_and_on_then_it_is_refused(
        self, tmp_path: Path, pack: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / "bomb"
        path.write_bytes(pack(b"one\n") + pack((b" " * 63 + b"\n") * (MAX_BLANK_BYTES // 64 + 1)))

        with opened(str(path)) as file, pytest.raises(InvalidSetting, match="bytes of blank lines before line"):
            list(lines(file))

    def test_when_one_line_never_ends_then_it_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sluice.protocol.bulk_files.input.MAX_SKIPPED_BYTES", 2 * MAX_LINE_BYTES)

        with pytest.raises(InvalidSetting, match="line 2 is longer than"):
            list(lines(io.BytesIO(b"one\n" + b"x" * (4 * MAX_LINE_BYTES))))

    def test_when_several_compressed_parts_are_joined_then_all_are_read(self, tmp_path: Path) -> None:
        for name, pack in (("a", gzip.compress), ("b", zstandard.ZstdCompressor().compress)):
            path = tmp_path / name
            path.write_bytes(pack(b"one\n") + pack(b"two\n"))

            with opened(str(path)) as file:
                assert [line for _, line in lines(file)] == [b"one", b"two"]

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gz", "zst"])
    def test_when_compressed_data_is_cut_short_then_the_error_says_after_which_line(
        self, tmp_path: Path, pack: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / "jobs"
        path.write_bytes(pack(b"one\n" * 1000)[:-9])

        with opened(str(path)) as file, pytest.raises(InvalidSetting, match="broken after line"):
            list(lines(file))
