"""What is said of one choice, row by row."""

from typing import Any

from sluice.engine.batch import Sampled
from sluice.engine.executor import ModelLimits
from sluice.engine.null_model import END_OF_SEQUENCE, NullTokenizer
from sluice.engine.request import FailureKind, Finish, FinishReason, Request, SamplingParams, TokenLogprobs
from sluice.engine.sequence import Sequence
from sluice.engine.text.output import ChoiceOutput

LIMITS = ModelLimits(
    max_model_len=100,
    vocab_size=257,
    eos_token_ids=frozenset({END_OF_SEQUENCE}),
    num_blocks=8,
    block_size=4,
)
LOGPROBS = tuple(TokenLogprobs(chosen=-float(n), top=()) for n in range(4))


def output(**sampling: Any) -> ChoiceOutput:
    request = Request(id="r", prompt_token_ids=(1,), sampling=SamplingParams(**sampling))
    sequence = Sequence(id=0, request_id="r", choice=0, sampling=request.sampling, token_ids=[1], num_prompt_tokens=1)
    return ChoiceOutput(request, sequence, NullTokenizer().stream(skip_special_tokens=True), LIMITS)


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
        choice.sequence.num_preemptions = 2

        after = choice.accept(Sampled((97,))).stats

        assert (before.num_cached_tokens, before.num_preemptions, before.first_scheduled_s) == (1, 0, 5.0)
        assert after.num_preemptions == 2
