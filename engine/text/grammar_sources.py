"""Compile grammars with llguidance, whose limits bound time and memory; ours bound what it recurses on."""

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from sluice.engine.errors import InvalidGrammar
from sluice.engine.executor import TextDecoder
from sluice.engine.request import Grammar, GrammarKind
from sluice.engine.text.matcher import CompiledGrammar, reason_of
from sluice.engine.text.token_table import SpelledDecoder, TokenTable

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""A mask is refused after about 20 ms; a lexer has 10 MB at most."""

_WHITESPACE = r"[ ]?|\n[ ]{0,16}"
"""Between the tokens of JSON. Unbounded, a model may write spaces until `max_tokens`."""

_LEXER_BYTES = 11 * 2**20
"""Of a lexer that is full."""

_BYTES_PER_CHARACTER = 300
"""Of a compiled grammar, at most: schemas of 100 bytes to 130 KB took 60 to 300."""


def grammar_compiler(decoder: TextDecoder, vocab_size: int) -> Callable[[Grammar], CompiledGrammar]:
    """Return what compiles grammars for a vocabulary, which takes a second for a large one.

    Raises:
        InvalidGrammar: this installation or tokenizer cannot constrain its output.
    """
    try:
        library: Any = import_module("llguidance")
    except ImportError as error:
        raise InvalidGrammar(
            "this worker cannot constrain output: it lacks the package llguidance. Install it there, or leave out the "
            "grammar."
        ) from error
    table = decoder.token_table() if isinstance(decoder, SpelledDecoder) else None
    if table is None:
        raise InvalidGrammar(
            "this model's output cannot be constrained: the text of its tokens depends on the tokens around them"
        )
    tokenizer = _tokenizer(library, cast("SpelledDecoder", decoder), table, vocab_size)
    limits = library.LLParserLimits(**_LIMITS)

    def is_wrong(grammar: Grammar) -> bool:
        source = _source(library.LLMatcher, grammar)
        return library.LLMatcher(tokenizer, source, log_level=0, limits=limits).is_error()

    def first_matcher(grammar: Grammar) -> Any:  # noqa: ANN401 - llguidance's
        matcher = library.LLMatcher(tokenizer, _source(library.LLMatcher, grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it learns here, all copies know
        if matcher.is_error():
            part = next((f" (in {name})" for name, alone in _alone(grammar) if is_wrong(alone)), "")
            raise InvalidGrammar(f"the grammar{part} cannot be compiled: {reason_of(matcher.get_error())}")
        return matcher

    def compile_one(grammar: Grammar) -> CompiledGrammar:
        num_bytes = _LEXER_BYTES + _BYTES_PER_CHARACTER * len(grammar.text)
        return CompiledGrammar(lambda: first_matcher(grammar), vocab_size, num_bytes)

    return compile_one


def _tokenizer(library: Any, decoder: SpelledDecoder, table: TokenTable, vocab_size: int) -> Any:  # noqa: ANN401
    # Any: llguidance is optional.
    end = vocab_size
    spare = range(len(table.tokens), vocab_size)
    tokens = [*table.tokens[:vocab_size], *(b"" for _ in spare), b"<end>"]
    hidden = {token_id for token_id, token in enumerate(tokens) if not token} | table.special_ids
    # No two tokens may be equal; special ones are never matched.
    tokens = [b"<%d>" % token_id if token_id in hidden else token for token_id, token in enumerate(tokens)]
    by_bytes = {token: token_id for token_id, token in enumerate(tokens) if token_id not in hidden and token_id != end}
    longest = max(map(len, by_bytes), default=1)

    class Spelling:
        """The tokenizer as llguidance asks for it: what a grammar forces is spelled as the model has learned it."""

        eos_token_id, bos_token_id = end, None
        special_token_ids = sorted({*hidden, end})

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, data: bytes) -> list[int]:
            token_ids = decoder.spelled(data.decode(errors="replace"))
            is_exact = hidden.isdisjoint(token_ids) and b"".join(tokens[token_id] for token_id in token_ids) == data
            return token_ids if is_exact else _greedy(data, by_bytes, longest)

    return library.LLTokenizer(library.TokenizerWrapper(Spelling()), n_vocab=vocab_size + 1, eos_token=end)


def _greedy(data: bytes, by_bytes: dict[bytes, int], longest: int) -> list[int]:
    """Return the longest tokens that `data` begins with, one after the other, as far as there are any."""
    token_ids: list[int] = []
    at = 0
    while at < len(data):
        lengths = range(min(longest, len(data) - at), 0, -1)
        length = next((length for length in lengths if data[at : at + length] in by_bytes), None)
        if length is None:
            break
        token_ids.append(by_bytes[data[at : at + length]])
        at += length
    return token_ids


def _source(matcher: Any, grammar: Grammar) -> str:  # noqa: ANN401 - llguidance is optional
    """Return a grammar in llguidance's form.

    Raises:
        InvalidGrammar: it is not in the form that its kind says.
    """
    match grammar.kind:
        case "regex":
            return str(matcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(matcher.grammar_from_lark(grammar.text))
        case "choice":
            return str(matcher.grammar_from_lark(f"start: {' | '.join(map(_quoted, _choices(grammar.text)))}"))
        case "json_schema" | "json_object":
            schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
            try:
                return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))
            except ValueError as error:
                raise InvalidGrammar(f"the JSON schema cannot be read: {reason_of(str(error))}") from error
        case "composed":
            return json.dumps({"grammars": [_named(matcher, *part) for part in grammar.parts]})


def _alone(grammar: Grammar) -> list[tuple[str, Grammar]]:
    """Return the parts of a composed grammar that refer to no other, with their names."""
    others = grammar.parts[1:] if grammar.kind == "composed" else []
    return [(name, Grammar(kind=kind, text=text)) for name, kind, text in others]


def _named(matcher: Any, name: str, kind: GrammarKind, text: str) -> dict[str, Any]:  # noqa: ANN401 - as above
    source = _source(matcher, Grammar(kind=kind, text=text))
    # The library returns the other kinds as JSON.
    inner: dict[str, Any] = (
        {"lark_grammar": source} if kind in ("lark", "choice") else json.loads(source)["grammars"][0]
    )
    return {**inner, "name": name}


def _choices(text: str) -> list[str]:
    choices: object = json.loads(text)
    if not isinstance(choices, list):
        raise InvalidGrammar("a choice must be a list of texts")
    return [str(choice) for choice in cast("list[object]", choices)]


def _quoted(text: str) -> str:
    # Its form of Lark has no raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
