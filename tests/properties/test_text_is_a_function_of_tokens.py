"""What is visible after k tokens depends on those tokens and the stop strings only, never on how steps cut them."""

import re
from contextlib import suppress
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from sluice.engine.batch import Sampled
from sluice.engine.executor import ModelLimits
from sluice.engine.request import Finish, FinishReason, Request, Sampling, TokenDelta
from sluice.engine.sequence import Sequence
from sluice.engine.text.detokenizer import Detokenizer, WindowDetokenizer
from sluice.engine.text.output import ChoiceOutput
from sluice.engine.text.tokenizer import Tokenizer, TokenizerFacts
from tests.engine.vocabularies import byte_level_backend, gemma_backend, metaspace_backend, sentence_piece_backend
from tests.examples import examples


@cache
def tokenizer_of(name: str) -> Tokenizer:
    backends: dict[str, Backend] = {
        "byte-level": byte_level_backend(),
        "sentence-piece": sentence_piece_backend(),
        "gemma": gemma_backend(),
        "other": metaspace_backend(),
    }
    return Tokenizer(backends[name], TokenizerFacts(special_tokens={}))


@st.composite
def outputs(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer and any of its tokens in any order, so mostly junk; some ids belong to no token."""
    tokenizer = tokenizer_of(draw(st.sampled_from(names)))
    return tokenizer, draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))


EXACT = ("byte-level", "sentence-piece", "gemma")
ALL = (*EXACT, "other")


def streamed(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def text_of(tokenizer: Tokenizer, token_ids: list[int], *, skips: bool) -> str:
    """What pieces and bytes stand for, where bytes that are part of no character are U+FFFD each."""
    before = tokenizer.encode("the", add_special_tokens=False)
    text, run = tokenizer.decode(before, skip_special_tokens=skips), b""
    num_before = len(text)
    for token_id in token_ids:
        byte = re.fullmatch("<0x(..)>", tokenizer.token(token_id) or "")
        piece = tokenizer.decode([*before, token_id], skip_special_tokens=skips)[num_before:]
        if byte:
            run += bytes.fromhex(byte[1])
        elif piece:
            text, run = text + shown(run) + piece, b""
    return text[num_before:] + shown(run)


def shown(run: bytes) -> str:
    """The characters of a run of bytes, and a U+FFFD for each byte that is part of none."""
    for end in range(1, min(4, len(run)) + 1):
        with suppress(UnicodeDecodeError):
            return run[:end].decode() + shown(run[end:])
    return "\ufffd" + shown(run[1:]) if run else ""


@given(outputs(EXACT), st.booleans())
@settings(max_examples=examples(500), deadline=None)
def test_pieces_together_are_what_all_tokens_decode_to(output: tuple[Tokenizer, list[int]], skips: bool) -> None:
    tokenizer, token_ids = output

    text = "".join(streamed(tokenizer.stream(skip_special_tokens=skips), token_ids))

    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    if tokenizer is not tokenizer_of("byte-level") and "\ufffd" in whole:
        whole = text_of(tokenizer, token_ids, skips=skips)
        whole = whole.removeprefix(" ") if tokenizer is tokenizer_of("sentence-piece") else whole
    assert text == whole


@given(outputs(("byte-level",)), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_no_character_is_shown_before_it_is_sure(output: tuple[Tokenizer, list[int]], skips: bool) -> None:
    """What is visible after k tokens is a prefix of whatever those k tokens and any others decode to."""
    tokenizer, token_ids = output
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    stream = tokenizer.stream(skip_special_tokens=skips)
    visible = ""

    for count, token_id in enumerate(token_ids, 1):
        visible += stream.push(token_id)

        assert whole.startswith(visible)
        alone = tokenizer.decode(token_ids[:count], skip_special_tokens=skips)
        assert alone.startswith(visible)
        assert set(alone[len(visible) :]) <= {"\ufffd"}, "more is held back than an open character"


@given(st.lists(st.sampled_from(["a", " b", "é", "€ ", "日本", "\n", "😀"]), max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_windows_show_what_bytes_show_where_the_text_is_sound(parts: list[str]) -> None:
    tokenizer = tokenizer_of("byte-level")
    token_ids = tokenizer.encode("".join(parts))

    windows = streamed(WindowDetokenizer(tokenizer, skip_special_tokens=True), token_ids)

    assert "".join(windows) == "".join(parts)


@given(st.lists(st.integers(0, 4), max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_windows_add_up_for_a_decoder_of_another_kind(token_ids: list[int]) -> None:
    tokenizer = tokenizer_of("other")
    # A text may begin with more tokens without text than a window holds: then a space is lost.
    token_ids = [0, *token_ids]

    pieces = streamed(tokenizer.stream(skip_special_tokens=True), token_ids)

    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


def choice_output(tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int) -> ChoiceOutput:
    sampling = Sampling(max_tokens=1000, stop=stop, min_tokens=min_tokens)
    limits = ModelLimits(max_model_len=2000, vocab_size=1000, eos_token_ids=frozenset({2}), num_blocks=1, block_size=1)
    sequence = Sequence(id=0, request_id="r", choice=0, sampling=sampling, token_ids=[0], num_prompt_tokens=1)
    stream = tokenizer.stream(skip_special_tokens=True)
    return ChoiceOutput(Request(id="r", prompt_token_ids=(0,), sampling=sampling), sequence, stream, limits)


@st.composite
def stopped_outputs(draw: st.DrawFn) -> tuple[Tokenizer, list[int], tuple[str, ...], int]:
    """Tokens, and stop strings that are mostly cut from their own text."""
    tokenizer, token_ids = draw(outputs(ALL))
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    cut = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda begin: st.integers(1, 6).map(lambda length: text[begin : begin + length] or "x")
    )
    stops = draw(st.lists(st.one_of(cut, st.sampled_from(["the", "ab", "aab", " "])), max_size=3))
    return tokenizer, token_ids, tuple(stops), draw(st.integers(0, 12))


@given(stopped_outputs(), st.data())
@settings(max_examples=examples(500), deadline=None)
def test_steps_may_cut_the_tokens_anywhere(
    case: tuple[Tokenizer, list[int], tuple[str, ...], int], data: st.DataObject
) -> None:
    tokenizer, token_ids, stop, min_tokens = case
    one_by_one = choice_output(tokenizer, stop, min_tokens)
    visible = [""]
    for token_id in token_ids:
        if one_by_one.finish is None:
            visible.append(visible[-1] + one_by_one.accept(Sampled((token_id,))).text)

    in_runs = choice_output(tokenizer, stop, min_tokens)
    text, left = "", token_ids
    while left and in_runs.finish is None:
        size = data.draw(st.integers(1, len(left)))
        delta = in_runs.accept(Sampled(tuple(left[:size])))
        text, left = text + delta.text, left[size:]

        assert text == visible[in_runs.num_tokens]
    assert in_runs.finish == one_by_one.finish
    assert in_runs.num_tokens == one_by_one.num_tokens


@given(stopped_outputs(), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_a_replay_goes_on_where_the_text_was(
    case: tuple[Tokenizer, list[int], tuple[str, ...], int], data: st.DataObject
) -> None:
    tokenizer, token_ids, stop, min_tokens = case
    whole = choice_output(tokenizer, stop, min_tokens)
    deltas: list[TokenDelta] = []
    for token_id in token_ids:
        if whole.finish is None:
            deltas.append(whole.accept(Sampled((token_id,))))
    count = data.draw(st.integers(0, max(0, len(deltas) - 1)))

    resumed = choice_output(tokenizer, stop, min_tokens)
    resumed.replay(token_ids[:count])
    rest = [resumed.accept(Sampled((token_id,))) for token_id in token_ids[count : len(deltas)]]

    assert [(d.start, d.token_ids, d.text, d.finish) for d in rest] == [
        (d.start, d.token_ids, d.text, d.finish) for d in deltas[count:]
    ]


@given(stopped_outputs())
@settings(max_examples=examples(500), deadline=None)
def test_the_text_ends_where_reading_it_slowly_would_end_it(
    case: tuple[Tokenizer, list[int], tuple[str, ...], int],
) -> None:
    """Against the obvious way: look at the whole text after every token, character by character."""
    tokenizer, token_ids, stop, min_tokens = case
    output = choice_output(tokenizer, stop, min_tokens)
    stream, text, visible = tokenizer.stream(skip_special_tokens=True), "", ""

    for count, token_id in enumerate(token_ids, 1):
        visible += output.accept(Sampled((token_id,))).text

        if token_id == 2 and count >= min_tokens:
            found, whole = cut(text, stream.flush(), stop)
            assert output.finish == Finish(reason=FinishReason.STOP, stop=found)
            assert visible == whole
            return
        old, text = text, text + stream.push(token_id)
        found = first_stop(text, len(old), stop) if count >= min_tokens else None
        if found is not None:
            assert output.finish is not None
            assert (output.finish.stop, visible) == (found, text[: text.index(found, len(visible))])
            return
        assert output.finish is None
        assert visible == text[: len(text) - longest_beginning(text, stop)]
    ended = output.end(Finish(reason=FinishReason.ABORTED))
    rest = stream.flush()
    assert visible + ended.text == (cut(text, rest, stop)[1] if len(token_ids) >= min_tokens else text + rest)


def cut(text: str, rest: str, stops: tuple[str, ...]) -> tuple[str | None, str]:
    """The stop string that the released `rest` completes, if one, and the text before it."""
    whole, num_shown = text + rest, len(text) - longest_beginning(text, stops)
    found = first_stop(whole, len(text), stops)
    return found, whole if found is None else whole[: whole.index(found, num_shown)]


def first_stop(text: str, num_old: int, stops: tuple[str, ...]) -> str | None:
    for end in range(num_old + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop
    return None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """How much of the end of `text` could become a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)
