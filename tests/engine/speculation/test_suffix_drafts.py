"""Drafts from the text so far: what they follow, when they stop, and whom they never see."""

from random import Random

from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import Worth
from sluice.engine.speculation.suffix_drafts import MAX_SALTS, SuffixDrafts

TEXT = Random(7).sample(range(10, 1000), 200)


def sequence_of(token_ids: list[int], *, number: int = 0, salt: str = "", num_prompt_tokens: int = 0) -> Sequence:
    return Sequence(
        id=number,
        request_id=str(number),
        choice=0,
        sampling=Sampling(),
        cache_salt=salt,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens,
    )


def guesses(source: SuffixDrafts, sequence: Sequence, most: int = 8, worth: float = 0.01) -> tuple[int, ...]:
    return source.propose([sequence], room=most, worth=Worth(worth))[0]


class TestGivenAPromptThatIsRepeated:
    """Its output so far is the beginning of the prompt."""

    def test_when_three_tokens_agree_then_those_that_followed_are_guessed(self) -> None:
        sequence = sequence_of([*TEXT, *TEXT[50:53]])

        assert guesses(SuffixDrafts(), sequence, most=2) == tuple(TEXT[53:55])

    def test_when_two_tokens_agree_then_nothing_is_guessed(self) -> None:
        assert guesses(SuffixDrafts(), sequence_of([*TEXT, 1001, *TEXT[50:52]])) == ()

    def test_when_a_word_was_changed_then_the_rest_is_guessed(self) -> None:
        for changed in ([5000, TEXT[60]], [TEXT[61]], [5000, TEXT[59]]):
            source = SuffixDrafts()
            sequence = sequence_of([*TEXT, *TEXT[50:59]])
            guesses(source, sequence)
            for token_id in changed[:-1]:
                sequence.token_ids.append(token_id)
                guesses(source, sequence)
            sequence.token_ids.append(changed[-1])

            start = TEXT.index(changed[-1]) + 1
            assert guesses(source, sequence, most=2) == tuple(TEXT[start : start + 2])

    def test_when_guesses_have_been_right_then_more_of_them_are_worth_it(self) -> None:
        source = SuffixDrafts()
        sequence = sequence_of([*TEXT, *TEXT[:3]])
        first = guesses(source, sequence, most=24, worth=0.5)
        for token_id in TEXT[3:60]:
            sequence.token_ids.append(token_id)
            guesses(source, sequence)

        assert len(guesses(source, sequence, most=24, worth=0.5)) > len(first)

    def test_when_guesses_have_been_wrong_then_none_is_worth_it(self) -> None:
        source, random = SuffixDrafts(), Random(0)
        sequence = sequence_of(TEXT)
        for _ in range(80):
            start = random.randrange(150)
            sequence.token_ids += TEXT[start : start + 3]
            guesses(source, sequence)
            sequence.token_ids.append(random.randrange(2000, 3000))
            guesses(source, sequence)
        sequence.token_ids += TEXT[20:23]

        assert guesses(source, sequence, worth=0.4) == ()
        assert len(guesses(source, sequence, most=1, worth=0.001)) == 1


class TestGivenAnOutputThatHasEnded:
    """Of one tenant, who has the salt a."""

    def test_when_another_one_of_the_tenant_begins_alike_then_it_is_guessed(self) -> None:
        source = SuffixDrafts()
        ended = sequence_of([1, 2, 3, *TEXT], salt="a", num_prompt_tokens=3)
        guesses(source, ended)
        source.end(ended)

        assert guesses(source, sequence_of([9, 9, 9, *TEXT[:4]], number=1, salt="a"), most=2) == tuple(TEXT[4:6])

    def test_when_it_is_another_tenant_then_nothing_is_guessed(self) -> None:
        source = SuffixDrafts()
        ended = sequence_of(TEXT, salt="a")
        guesses(source, ended)
        source.end(ended)

        assert guesses(source, sequence_of([9, 9, 9, *TEXT[:4]], number=1, salt="b")) == ()

    def test_when_its_prompt_returns_then_it_is_not_guessed(self) -> None:
        source = SuffixDrafts()
        ended = sequence_of(TEXT, salt="a", num_prompt_tokens=100)
        guesses(source, ended)
        source.end(ended)

        assert guesses(source, sequence_of([9, 9, 9, *TEXT[:4]], number=1, salt="a")) == ()

    def test_when_many_tenants_have_come_since_then_it_is_forgotten(self) -> None:
        source = SuffixDrafts()
        for number in range(MAX_SALTS + 1):
            one = sequence_of(TEXT, number=number, salt=str(number))
            guesses(source, one)
            source.end(one)

        assert guesses(source, sequence_of([9, 9, 9, *TEXT[:4]], number=1000, salt="0")) == ()
        assert guesses(source, sequence_of([9, 9, 9, *TEXT[:4]], number=1001, salt="9"), most=1) == (TEXT[4],)
