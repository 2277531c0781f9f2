"""Compile grammars beside the engine's loop, and keep those that were used lately. Read `Compiler.add` first."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import NamedTuple

from sluice.engine.errors import InvalidGrammar
from sluice.engine.executor import TextDecoder
from sluice.engine.request import Grammar, Request
from sluice.engine.text.grammar_sources import grammar_compiler
from sluice.engine.text.matcher import CompiledGrammar, reason_of

MAX_CACHE_BYTES = 512 * 2**20
"""Of the compiled grammars that are kept, if the lexer of each were full: about fifty."""

_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles: the compiler recurses once for each reference in a chain. Only used pages are real."""


class Refused(NamedTuple):
    """A grammar that cannot be used."""

    reason: str
    num_bytes: int
    is_final: bool = True
    """Whether it would be refused again."""


class Compiler:
    """Compiles the grammars of requests on a thread of its own, which runs while there are any. Mutable.

    Compiled grammars are kept, the least recently used one is dropped first. All but the thread's work is done by the
    engine's thread.
    """

    def __init__(self, decoder: TextDecoder, vocab_size: int, *, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self._decoder, self._vocab_size = decoder, vocab_size
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[Grammar, CompiledGrammar | Refused] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[str, tuple[Request, Grammar]] = {}
        """By id: requests whose grammar is not compiled yet."""

        self._asked: set[Grammar] = set()
        self._lock = threading.Lock()
        self._orders: deque[Grammar] = deque()
        """Guarded by the lock, as is the next one."""

        self._has_thread = False
        self._compile: Callable[[Grammar], CompiledGrammar] | None = None
        """The thread's; made with its first grammar."""

        self._compiled: SimpleQueue[tuple[Grammar, CompiledGrammar | Refused]] = SimpleQueue()

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

    def take_ready(self) -> list[tuple[Request, CompiledGrammar | Refused]]:
        """Return the requests whose grammars were compiled, or cannot be."""
        passing: list[Grammar] = []
        while not self._compiled.empty():
            grammar, result = self._compiled.get()
            self._asked.discard(grammar)
            self._cache[grammar] = result
            self._cached_bytes += result.num_bytes
            if isinstance(result, Refused) and not result.is_final:
                passing.append(grammar)
        ready: list[tuple[Request, CompiledGrammar | Refused]] = []
        for request, grammar in list(self._waiting.values()):
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                del self._waiting[request.id]
                ready.append((request, self._cache[grammar]))
        for grammar in passing:
            self._cached_bytes -= self._cache.pop(grammar).num_bytes
        while self._cached_bytes > self._max_cache_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return ready

    def take_back(self, request_ids: Iterable[str]) -> list[Request]:
        """Return those of these requests that wait, and forget them."""
        return [self._waiting.pop(request_id)[0] for request_id in request_ids if request_id in self._waiting]

    @property
    def waiting(self) -> list[Request]:
        """The requests whose grammars are being compiled. Any thread may ask."""
        # The list is a copy made at once: the engine's thread may add one while this goes through them.
        return [request for request, _ in list(self._waiting.values())] if self._waiting else []

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
            num_bytes = len(grammar.text)
            try:
                self._compile = self._compile or grammar_compiler(self._decoder, self._vocab_size)
                result: CompiledGrammar | Refused = self._compile(grammar)
            except InvalidGrammar as error:
                result = Refused(str(error), num_bytes)
            except BaseException as error:  # noqa: BLE001 - a panic of the library is none of the others
                reason = f"the grammar could not be compiled: {reason_of(repr(error))}"
                result = Refused(reason, num_bytes, is_final=False)
            self._compiled.put((grammar, result))

    def _next(self) -> Grammar | None:
        with self._lock:
            if not self._orders:
                self._has_thread = False
                return None
            return self._orders.popleft()
