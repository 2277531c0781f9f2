"""Compile grammars beside the engine's loop, and say which tokens may follow a text. Read `Compiler.add` first.

llguidance compiles them (M. Moskal et al., https://github.com/guidance-ai/llguidance): an Earley parser over lexemes
whose regular expressions are matched by derivatives. Its limits bound time and memory; ours bound what it recurses on.
"""

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from importlib import import_module
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

from sluice.engine.batch import mask_bytes
from sluice.engine.errors import InvalidGrammar
from sluice.engine.executor import TextDecoder
from sluice.engine.request import Grammar, GrammarKind, Request
from sluice.engine.text.token_table import SpelledDecoder, TokenTable

MAX_CACHE_BYTES = 64 * 2**20
"""Of the compiled grammars that are kept."""

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""A mask is refused after about 20 ms; a matcher has 20 to 40 MB at most."""

_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles: the compiler recurses once for each reference in a chain. Only used pages are real."""

_WHITESPACE = r"[ ]?|\n[ ]{0,16}"
"""Between the tokens of JSON. Unbounded, a model may write spaces until `max_tokens`."""

_SPOILED = "the grammar was left at output token {}: {}"
_MAX_REASON_CHARS = 300


class Matcher:
    """What may follow the text of one choice. Mutable."""

    __slots__ = ("_matcher", "_vocab_size", "num_tokens", "problem")

    def __init__(self, matcher: Any, vocab_size: int) -> None:  # noqa: ANN401 - llguidance's, which is optional
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.num_tokens = 0
        self.problem: str | None = None
        """Why no token may follow, in a sentence."""

    def take(self, token_id: int) -> None:
        """Take the next token of the text."""
        self.num_tokens += 1
        if self.problem is None and not self._matcher.consume_token(token_id):
            self.problem = _SPOILED.format(self.num_tokens - 1, _reason(self._matcher.get_error()))

    def mask(self, end_ids: Iterable[int]) -> bytearray:
        """Return the tokens that may follow, see `Masks`; those of `end_ids` where the text may end."""
        vocab_size = self._vocab_size
        bits = bytearray(self._matcher.compute_bitmask())
        if self.problem is None and self._matcher.is_error():
            self.problem = _SPOILED.format(self.num_tokens, _reason(self._matcher.get_error()))
        if self.problem is not None:
            return bytearray(mask_bytes(vocab_size))
        # The token after the vocabulary stands for the end.
        may_end = bits[vocab_size >> 3] >> (vocab_size & 7) & 1
        bits[vocab_size >> 3] &= ~(1 << (vocab_size & 7)) & 0xFF
        for token_id in end_ids:
            set_token(bits, token_id, is_allowed=bool(may_end))
        return bits[: mask_bytes(vocab_size)]

    def copy(self) -> "Matcher":
        """Return a matcher at the same place of the text, to look ahead."""
        copy = Matcher(self._matcher.deep_copy(), self._vocab_size)
        copy.num_tokens, copy.problem = self.num_tokens, self.problem
        return copy

    def num_fitting(self, token_ids: Items[int]) -> int:
        """Return how many of these tokens, one after the other, may follow."""
        return 0 if self.problem is not None else int(self._matcher.validate_tokens(list(token_ids)))

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self.problem is None and bool(self._matcher.is_stopped())


def set_token(mask: bytearray, token_id: int, *, is_allowed: bool) -> None:
    """Allow or ban a token in a mask."""
    bit = 1 << (token_id & 7)
    mask[token_id >> 3] = mask[token_id >> 3] | bit if is_allowed else mask[token_id >> 3] & ~bit & 0xFF


def only_token(mask: bytes) -> int | None:
    """Return the token that a mask allows; None if it allows none, or more than one."""
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


class Compiled(NamedTuple):
    """A compiled grammar."""

    matcher: Any  # llguidance's, which is optional
    vocab_size: int
    num_bytes: int

    def matcher_of_choice(self) -> Matcher:
        """Return a matcher at the beginning of a text."""
        return Matcher(self.matcher.deep_copy(), self.vocab_size)


class Refused(NamedTuple):
    """A grammar that cannot be used."""

    reason: str
    num_bytes: int


class Compiler:
    """Compiles the grammars of requests on a thread of its own, which runs while there are any. Mutable.

    Compiled grammars are kept, the least recently used one is dropped first. All but the thread's work is done by the
    engine's thread.
    """

    def __init__(self, decoder: TextDecoder, vocab_size: int, *, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self._decoder, self._vocab_size = decoder, vocab_size
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[Grammar, Compiled | Refused] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[str, tuple[Request, Grammar]] = {}
        """By id: requests whose grammar is not compiled yet."""

        self._asked: set[Grammar] = set()
        self._lock = threading.Lock()
        self._orders: deque[Grammar] = deque()
        """Guarded by the lock, as is the next one."""

        self._has_thread = False
        self._compile: Callable[[Grammar], Compiled] | None = None
        """The thread's; made with its first grammar."""

        self._compiled: SimpleQueue[tuple[Grammar, Compiled | Refused]] = SimpleQueue()

    def add(self, request: Request, grammar: Grammar) -> None:
        """Let the grammar of a request be compiled; `take_ready` returns the request then."""
        self._waiting[request.id] = request, grammar
        if grammar in self._cache or grammar in self._asked:
            return
        self._asked.add(grammar)
        with self._lock:
            self._orders.append(grammar)
            is_started, self._has_thread = self._has_thread, True
        if not is_started:
            self._start()

    def take_ready(self) -> list[tuple[Request, Compiled | Refused]]:
        """Return the requests whose grammars were compiled, or cannot be."""
        while not self._compiled.empty():
            grammar, result = self._compiled.get()
            self._asked.discard(grammar)
            self._cache[grammar] = result
            self._cached_bytes += result.num_bytes
        ready: list[tuple[Request, Compiled | Refused]] = []
        for request, grammar in list(self._waiting.values()):
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                del self._waiting[request.id]
                ready.append((request, self._cache[grammar]))
        while self._cached_bytes > self._max_cache_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return ready

    def take_back(self, request_ids: Iterable[str]) -> list[Request]:
        """Return those of these requests that wait, and forget them."""
        return [self._waiting.pop(request_id)[0] for request_id in request_ids if request_id in self._waiting]

    @property
    def waiting(self) -> list[Request]:
        """The requests whose grammars are being compiled."""
        return [request for request, _ in self._waiting.values()] if self._waiting else []

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        # The size is the process's: it is put back before another thread is likely to begin.
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        """Compile until no order is left."""
        while (grammar := self._next()) is not None:
            num_bytes = _kept_bytes(grammar)
            try:
                self._compile = self._compile or _compiler(self._decoder, self._vocab_size)
                result: Compiled | Refused = self._compile(grammar)
            except InvalidGrammar as error:
                result = Refused(str(error), num_bytes)
            except BaseException as error:  # noqa: BLE001 - a panic of the library is none of the others
                result = Refused(f"the grammar cannot be compiled: {_reason(repr(error))}", num_bytes)
            self._compiled.put((grammar, result))

    def _next(self) -> Grammar | None:
        with self._lock:
            if not self._orders:
                self._has_thread = False
                return None
            return self._orders.popleft()


def _kept_bytes(grammar: Grammar) -> int:
    """Estimate the memory of a compiled grammar (schemas of 100 bytes to 130 KB: 20 KB and 60 to 300 times theirs)."""
    return 2**16 + 300 * len(grammar.text)


def _compiler(decoder: TextDecoder, vocab_size: int) -> Callable[[Grammar], Compiled]:
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

    def compile_one(grammar: Grammar) -> Compiled:
        matcher = library.LLMatcher(tokenizer, _source(library.LLMatcher, grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it learns here, all copies know
        if matcher.is_error():
            part = next((f" (in {name})" for name, alone in _alone(grammar) if is_wrong(alone)), "")
            raise InvalidGrammar(f"the grammar{part} cannot be compiled: {_reason(matcher.get_error())}")
        return Compiled(matcher, vocab_size, _kept_bytes(grammar))

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
                raise InvalidGrammar(f"the JSON schema cannot be read: {_reason(str(error))}") from error
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
    return json.dumps(text, ensure_ascii=False)


def _reason(error: str) -> str:
    """Return the first line of an error, shortened."""
    first = re.split(r"\n|<state>", error.strip(), maxsplit=1)[0].strip()
    return first if len(first) <= _MAX_REASON_CHARS else first[:_MAX_REASON_CHARS] + "…"
