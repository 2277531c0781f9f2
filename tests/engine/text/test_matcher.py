"""Matchers of one grammar: each is as if alone, and what was taken back leaves no trace."""

import json
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.request import Grammar, Request
from sluice.engine.text import grammar_sources
from sluice.engine.text.grammars import Compiler, Refused
from sluice.engine.text.matcher import CompiledGrammar, Matcher, only_token
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL

TOKENIZER = load_tokenizer(SMALL_MODEL)
VOCAB_SIZE = TOKENIZER.vocab_size

LINES = Grammar(
    kind="json_schema",
    text=json.dumps(
        {
            "type": "object",
            "properties": {"line": {"type": "string", "pattern": "^.{0,200}(error|warning).{0,200}$"}},
            "required": ["line"],
            "additionalProperties": False,
        }
    ),
)
"""Of an ordinary pattern that has many states."""

LISTS = Grammar(kind="json_schema", text='{"type": "array", "items": {"enum": ["red", "green", 12, null]}}')


def compiled(compiler: Compiler, grammar: Grammar) -> CompiledGrammar | Refused:
    """Wait for a grammar."""
    compiler.add(Request(id="r", prompt_token_ids=(1,), grammar=grammar), grammar)
    while not (ready := compiler.take_ready()):
        time.sleep(0.001)  # between two polls
    [(_, result)] = ready
    return result


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER, VOCAB_SIZE)


def choose(mask: bytearray, random: Random) -> int:
    """One of the tokens of a mask."""
    return random.choice([token for token in range(VOCAB_SIZE) if mask[token >> 3] >> (token & 7) & 1])


def walked(matcher: Matcher, random: Random, num_tokens: int) -> list[int]:
    """Take tokens that may follow."""
    taken: list[int] = []
    while len(taken) < num_tokens and any(mask := matcher.mask(())):
        taken.append(choose(mask, random))
        matcher.take(taken[-1])
    return taken


class TestGivenOneGrammarForManyJobs:
    def test_when_its_states_are_full_then_each_continues_as_if_alone(self) -> None:
        words = ["error", "warning", "disk", "full", "at", "node", "x", "alpha", "beta"]
        lexers: set[int] = set()
        grammar = compiled(Compiler(TOKENIZER, VOCAB_SIZE), LINES)
        assert isinstance(grammar, CompiledGrammar)
        for number in range(40):
            random = Random(number)
            text = " ".join(["error", *random.choices(words, k=random.randrange(5, 30))])[:180]
            matcher, alone = grammar.matcher_of_choice(), grammar.matcher_of_choice()
            lexers.add(id(grammar.origin))
            token_ids = TOKENIZER.encode('{"line":"' + text, add_special_tokens=False)
            mask = matcher.mask(())
            for token_id in token_ids:
                matcher.take(token_id)
                mask = matcher.mask(())
                assert matcher.problem is None
            for token_id in token_ids:
                alone.take(token_id)
            assert alone.mask(()) == mask
        assert len(lexers) > 1, "no lexer was full: this shows nothing"

    def test_when_a_lexer_of_its_own_is_too_small_then_the_grammar_is_too_costly(self, compiler: Compiler) -> None:
        grammar = compiled(compiler, Grammar(kind="regex", text="(.*a.{400}|.*b.{401}|.*c.{402})z"))

        problem = grammar.reason if isinstance(grammar, Refused) else None
        if isinstance(grammar, CompiledGrammar):
            matcher = grammar.matcher_of_choice()
            walked(matcher, Random(1), 3000)
            problem = matcher.problem

        assert problem is not None
        assert "grammar" in problem


class TestGivenTokensThatAreTakenBack:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_when_others_follow_then_masks_are_those_without_them(
        self, compiler: Compiler, data: st.DataObject
    ) -> None:
        random = Random(data.draw(st.integers(0, 2**32)))
        grammar = compiled(compiler, data.draw(st.sampled_from([LISTS, LINES])))
        assert isinstance(grammar, CompiledGrammar)
        matcher, plain = grammar.matcher_of_choice(), grammar.matcher_of_choice()
        for _ in range(data.draw(st.integers(1, 6))):
            guessed = walked(matcher, random, data.draw(st.integers(0, 5)))
            if data.draw(st.booleans()):
                # One that cannot follow.
                mask = matcher.mask(())
                wrong = next(token for token in range(VOCAB_SIZE) if not mask[token >> 3] >> (token & 7) & 1)
                matcher.take(wrong)
                guessed.append(wrong)
            matcher.take_back(len(guessed))
            assert matcher.problem is None
            assert matcher.mask([3]) == plain.mask([3])
            for token_id in walked(matcher, random, 1):
                plain.take(token_id)


class TestGivenACache:
    def test_when_many_grammars_are_asked_then_lexers_are_bounded(self) -> None:
        compiler = Compiler(TOKENIZER, VOCAB_SIZE, max_cache_bytes=40 * 2**20)
        found = [compiled(compiler, Grammar(kind="regex", text=f"a{number}")) for number in range(10)]
        again = compiled(compiler, Grammar(kind="regex", text="a9"))
        first = compiled(compiler, Grammar(kind="regex", text="a0"))

        assert again is found[-1]
        assert first is not found[0]

    def test_when_the_library_fails_once_then_the_next_job_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = Compiler(TOKENIZER, VOCAB_SIZE)

        def fail(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(grammar_sources, "_source", fail)
            refused = compiled(compiler, LISTS)

        assert isinstance(refused, Refused)
        assert not refused.is_final
        assert isinstance(compiled(compiler, LISTS), CompiledGrammar)


class TestGivenChoicesOfAnyText:
    @settings(max_examples=60, deadline=None)
    @given(
        texts=st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=4
        )
    )
    def test_when_they_are_compiled_then_each_matches(self, compiler: Compiler, texts: list[str]) -> None:
        grammar = compiled(compiler, Grammar(kind="choice", text=json.dumps(texts)))

        assert isinstance(grammar, CompiledGrammar), grammar
        for text in texts:
            matcher = grammar.matcher_of_choice()
            token_ids = TOKENIZER.encode(text, add_special_tokens=False)
            if TOKENIZER.decode(token_ids, skip_special_tokens=False) == text:
                assert matcher.num_fitting(token_ids) == len(token_ids)

    def test_when_one_has_a_delete_character_then_it_matches(self, compiler: Compiler) -> None:
        assert isinstance(compiled(compiler, Grammar(kind="choice", text=json.dumps(["a\x7fb"]))), CompiledGrammar)


class TestGivenAMask:
    @given(tokens=st.sets(st.integers(0, 99), max_size=3))
    def test_when_it_has_one_token_then_it_is_that_one(self, tokens: set[int]) -> None:
        mask = bytearray(16)
        for token in tokens:
            mask[token >> 3] |= 1 << (token & 7)

        assert only_token(bytes(mask)) == (next(iter(tokens)) if len(tokens) == 1 else None)
