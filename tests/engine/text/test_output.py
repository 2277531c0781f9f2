"""What is said of one choice, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.batch import Sampled
from sluice.engine.executor import ModelLimits
from sluice.engine.null_model import END_OF_SEQUENCE, NullTokenizer
from sluice.engine.request import FailureKind, Finish, FinishReason, Request, SampledLogprobs, Sampling, TokenDelta
from sluice.engine.sequence import Sequence
from sluice.engine.text.detokenizer import Detokenizer, PieceDetokenizer
from sluice.engine.text.output import ChoiceOutput, Outputs
from sluice.engine.text.tokenizer import Tokenizer, TokenizerFacts
from tests.engine.vocabularies import sentence_piece_backend

LIMITS = ModelLimits(
    max_model_len=100,
    vocab_size=257,
    eos_token_ids=frozenset({END_OF_SEQUENCE}),
    num_blocks=8,
    block_size=4,
)
LOGPROBS = tuple(SampledLogprobs(chosen=-float(n), top=()) for n in range(4))


def output(*, detokenizer: Detokenizer | None = None, **sampling: Any) -> ChoiceOutput:
    request = Request(id="r", prompt_token_ids=(1,), sampling=Sampling(**sampling))
    sequence = Sequence(id=0, request_id="r", choice=0, sampling=request.sampling, token_ids=[1], num_prompt_tokens=1)
    return ChoiceOutput(request, sequence, detokenizer or NullTokenizer().stream(skip_special_tokens=True), LIMITS)


class TestGivenARowOfSeveralTokens:
    def test_when_none_ends_the_output_then_all_are_said_in_one_delta(self) -> None:
        delta = output().accept(Sampled(tuple(b"abcd"), LOGPROBS))

        assert (delta.start, delta.token_ids, delta.text, delta.logprobs) == (0, tuple(b"abcd"), "abcd", LOGPROBS)

    def test_when_one_ends_it_then_what_follows_is_dropped(self) -> None:
        delta = output(stop=("bc",)).accept(Sampled(tuple(b"abcd"), LOGPROBS))

        assert (delta.token_ids, delta.text, delta.logprobs) == (tuple(b"abc"), "a", LOGPROBS[:3])
        assert delta.finish == Finish(reason=FinishReason.STOP, stop="bc")

    def test_when_the_sequence_ends_within_it_then_what_was_held_back_is_released(self) -> None:
        delta = output(stop=("bcx",)).accept(Sampled((*b"abc", END_OF_SEQUENCE, *b"d")))

        assert (delta.token_ids, delta.text) == ((*b"abc", END_OF_SEQUENCE), "abc")
        assert delta.finish == Finish(reason=FinishReason.STOP)

    def test_when_it_passes_max_tokens_then_it_is_cut_there(self) -> None:
        delta = output(max_tokens=2).accept(Sampled(tuple(b"abcd")))

        assert (delta.token_ids, delta.finish) == (tuple(b"ab"), Finish(reason=FinishReason.LENGTH))


def generated(tokens: bytes, **sampling: Any) -> list[TokenDelta]:
    """What steps of one token say of a choice with log-probabilities."""
    request = Request(id="r", prompt_token_ids=(1,), sampling=Sampling(logprobs=1, **sampling))
    sequence = Sequence(id=0, request_id="r", choice=0, sampling=request.sampling, token_ids=[1], num_prompt_tokens=1)
    choice = Outputs(NullTokenizer(), LIMITS).make(request, sequence)
    rows = (Sampled((token,), (SampledLogprobs(chosen=-1.0, top=((255, -0.5),)),)) for token in tokens)
    return [choice.accept(row) for row in rows]


class TestGivenLogprobs:
    def test_when_a_character_has_several_tokens_then_they_have_its_offset(self) -> None:
        deltas = generated("aé😀b".encode())

        found = [one for delta in deltas for one in delta.logprobs or ()]
        assert [one.offset for one in found] == [0, 1, 1, 2, 2, 2, 2, 3]
        assert b"".join(one.token or b"" for one in found).decode() == "aé😀b"
        assert {(one.chosen, one.top, one.top_tokens) for one in found} == {(-1.0, ((255, -0.5),), (b"\xff",))}

    def test_when_a_stop_string_may_begin_then_offsets_count_the_text_held_back(self) -> None:
        deltas = generated(b"abcd", stop=("bcx",))

        assert [delta.text for delta in deltas] == ["a", "", "", "bcd"]
        assert [one.offset for delta in deltas for one in delta.logprobs or ()] == [0, 1, 2, 3]

    def test_when_a_token_ends_the_output_then_it_is_after_all_text(self) -> None:
        *_, last = generated(b"abc", stop_token_ids=(ord("c"),))

        assert last.finish == Finish(reason=FinishReason.STOP, stop=ord("c"))
        assert last.logprobs is not None
        assert (last.text, last.logprobs[0].token, last.logprobs[0].offset) == ("", b"c", 2)

    def test_when_an_earlier_attempt_is_replayed_then_offsets_go_on(self) -> None:
        request = Request(id="r", prompt_token_ids=(1,), sampling=Sampling(logprobs=0))
        sequence = Sequence(
            id=0, request_id="r", choice=0, sampling=request.sampling, token_ids=[1, *b"ab"], num_prompt_tokens=1
        )
        choice = Outputs(NullTokenizer(), LIMITS).make(request, sequence)

        delta = choice.accept(Sampled((*b"cd",), LOGPROBS[:2]))

        assert (delta.start, [one.offset for one in delta.logprobs or ()]) == (2, [2, 3])


class TestGivenAnOpenCharacter:
    def test_when_a_stop_string_came_before_it_then_it_is_not_shown(self) -> None:
        choice = output(stop=("b",), max_tokens=9)

        delta = choice.accept(Sampled((*b"ab", 0xE2)))

        assert (delta.text, delta.finish) == ("a", Finish(reason=FinishReason.STOP, stop="b"))

    def test_when_the_output_is_ended_from_outside_then_it_is_replaced(self) -> None:
        choice = output()
        choice.accept(Sampled((0x61, 0xE2)))

        delta = choice.end(Finish(reason=FinishReason.ABORTED))

        assert (delta.start, delta.token_ids, delta.text) == (2, (), "\ufffd")


TOKENIZER = Tokenizer(sentence_piece_backend(), TokenizerFacts(special_tokens={}))
BEGIN, THE, FOX = (TOKENIZER.token_id(token) or 0 for token in ("<s>", "▁the", "▁fox"))


class TestGivenAVocabularyWithASpaceBeforeWords:
    """Llama 2's: its decoder drops the space at the beginning of a text."""

    @staticmethod
    def _text(*prompt: int, is_chat: bool = False, num_published: int = 0) -> str:
        """What is visible of two words after a prompt, of which an earlier attempt published some."""
        words = (THE, FOX)
        request = Request(id="r", prompt_token_ids=prompt, is_chat=is_chat)
        token_ids = [*prompt, *words[:num_published]]
        sequence = Sequence(
            id=0, request_id="r", choice=0, sampling=request.sampling, token_ids=token_ids,
            num_prompt_tokens=len(prompt),
        )  # fmt: skip
        limits = replace(LIMITS, vocab_size=TOKENIZER.vocab_size)
        return Outputs(TOKENIZER, limits).make(request, sequence).accept(Sampled(words[num_published:])).text

    def test_when_a_text_is_continued_then_the_space_after_it_stays(self) -> None:
        assert self._text(BEGIN, FOX) == " the fox"

    @pytest.mark.parametrize("is_chat", [True, False])
    def test_when_a_text_begins_then_it_has_no_space_before_it(self, is_chat: bool) -> None:
        assert self._text(BEGIN, *[FOX] * is_chat, is_chat=is_chat) == "the fox"

    @pytest.mark.parametrize("is_chat", [True, False])
    def test_when_an_earlier_attempt_is_replayed_then_the_text_goes_on(self, is_chat: bool) -> None:
        assert self._text(FOX, is_chat=is_chat, num_published=1) == " fox"

    def test_when_the_prompt_has_unknown_tokens_then_it_can_be_rejected(self) -> None:
        assert self._text(-1, 10**6) == "the fox"


class TestGivenAStopStringThatIsAByteToken:
    """A newline in the vocabularies of Llama 2 and Mistral."""

    def test_when_it_comes_then_the_output_ends_with_it(self) -> None:
        choice = output(stop=("\n",), detokenizer=PieceDetokenizer({1: " hi", 10: 10}, strips_first_space=True))

        delta = choice.accept(Sampled((1, 10, 1)))

        assert (delta.token_ids, delta.text) == ((1, 10), "hi")
        assert delta.finish == Finish(reason=FinishReason.STOP, stop="\n")


class TestGivenAStopStringOfTextThatTheEndReleases:
    def test_when_the_last_token_comes_then_it_is_found_and_not_shown(self) -> None:
        delta = output(stop=("\ufffd",), max_tokens=2).accept(Sampled((*b"a", 0xE2)))

        assert (delta.text, delta.finish) == ("a", Finish(reason=FinishReason.STOP, stop="\ufffd"))

    def test_when_the_sequence_ends_then_it_is_found_and_not_shown(self) -> None:
        choice = output(stop=("\ufffd",))

        delta = choice.accept(Sampled((*b"a", 0xE2, END_OF_SEQUENCE)))

        assert (delta.text, delta.finish) == ("a", Finish(reason=FinishReason.STOP, stop="\ufffd"))

    def test_when_an_earlier_attempt_had_all_tokens_then_its_replay_ends_alike(self) -> None:
        choice = output(stop=("\ufffd",), max_tokens=2)
        choice.replay([*b"a", 0xE2])
        assert choice.finish is not None

        delta = choice.end(choice.finish)

        assert (delta.text, delta.finish) == ("", Finish(reason=FinishReason.STOP, stop="\ufffd"))

    def test_when_the_caller_ends_it_then_the_text_is_cut_and_the_end_stands(self) -> None:
        choice = output(stop=("\ufffd",))
        choice.accept(Sampled((*b"a", 0xE2)))

        delta = choice.end(Finish(reason=FinishReason.ABORTED))

        assert (delta.text, delta.finish) == ("", Finish(reason=FinishReason.ABORTED))


class TestGivenARowWithoutNumbers:
    def test_when_it_comes_then_the_choice_ends_with_its_sentence(self) -> None:
        delta = output().accept(Sampled((), error="no numbers"))

        assert delta.finish == Finish(reason=FinishReason.ERROR, error="no numbers", failure=FailureKind.LOGITS)


class TestGivenASequenceOnItsWay:
    def test_when_the_scheduler_has_moved_it_then_the_next_delta_says_so(self) -> None:
        choice = output()
        choice.sequence.first_scheduled_s = 5.0
        choice.sequence.num_cached_tokens = 1
        before = choice.accept(Sampled((97,))).stats
        choice.sequence.num_preemptions = 1
        choice.sequence.preemptions = choice.sequence.preemptions.begin(6.0)

        after = choice.accept(Sampled((97,))).stats

        assert (before.num_cached_tokens, before.num_preemptions, before.first_scheduled_s) == (1, 0, 5.0)
        assert (after.num_preemptions, after.preemptions.since_s) == (1, 6.0)
