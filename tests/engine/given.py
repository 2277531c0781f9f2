"""What the engine's tests start from: small engines, requests, and a model that checks what it computes."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any, NamedTuple

from sluice.engine.batch import Batch, BlockCopy, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.execution.slots import Slot, Slots
from sluice.engine.executor import Executor, ModelLimits
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Finish, Request, Sampling, TokenDelta
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import DraftSource, Worth
from sluice.engine.speculation.verification import verified_rows
from tests.engine.lagging import LaggingExecutor

JUNK = b"ab .\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"
"""Bytes of one, two, three and four byte characters, drawn in any order: most of it is not UTF-8."""


class Checked(NamedTuple):
    """A step of the checking model."""

    rows: list[Sampled]
    sampling: list[ScheduledRow]
    slots: Slots

    def collect(self) -> list[Sampled]:
        self.slots.add_tokens(self.sampling, self.rows)
        return self.rows


class CheckingModel:
    """A null model with a memory: it keeps what each slot of the cache stands for, and looks before it draws.

    A slot stands for a token and everything before it, under the sequence's salt, as keys and values do. A sequence
    that would attend to a slot with anything else in it is a bug of the scheduler.
    """

    lag = 0

    def __init__(self, config: NullModelConfig, *, alphabet: bytes = b"") -> None:
        self._model = NullModel(config)
        self._alphabet = alphabet
        self._contents_of: dict[int, int] = {}
        """By slot of the cache."""

        self._slots = Slots(
            num_slots=1024,
            max_blocks_per_seq=-(-config.max_model_len // config.block_size),
            window_groups=config.window_groups,
        )
        self._drawn: dict[int, int] = {}
        """The last token of each sequence of the step launched last, as a device keeps it."""

        self._salts: dict[int, str] = {}
        """By row slot."""

        self._host: dict[int, list[int]] = {}
        """Contents of each block of the host tier."""

        self._last_save = self.num_saves = self.num_loads = self.most_saves = 0
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.num_drafts = 0
        self.largest_batch = 0

    @property
    def limits(self) -> ModelLimits:
        return self._model.limits

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    def launch(self, batch: Batch) -> Checked:
        self._slots.write(batch)
        self._exchange_with_host(batch)
        self._salts |= {admission.slot: admission.cache_salt for admission in batch.admissions}
        self._copy(batch.copies)
        written: set[int] = set()
        for row in batch.rows:
            slot, drafts = self._slots[row], batch.drafts.get(row.sequence_id, ())
            assert row.num_tokens > 0
            token_ids = self._tokens(row, slot)
            assert row.samples == (row.start + row.num_tokens == len(token_ids))
            assert row.samples or not drafts
            token_ids = [*token_ids, *drafts]
            start, end = row.start, row.start + row.num_tokens + len(drafts)
            window, groups = self.limits.sliding_window, self.limits.window_groups
            for number, places in enumerate(self._places(row.slot, slot)):
                first = max(0, start - window + 1) if window and (number or not groups) else 0
                contents = list(self._contents(token_ids, f"{number}{self._salts[row.slot]}"))
                known = [self._contents_of.get(place) for place in places[first:start]]
                assert known == contents[first:start], "a slot holds something else"
                assert written.isdisjoint(places[start:end]), "two sequences, or layers, write the same slot"
                written |= set(places[start:end])
                self._contents_of |= zip(places[start:end], contents[start:end], strict=True)
        self.num_computed_tokens += batch.num_tokens
        self.largest_batch = max(self.largest_batch, batch.num_tokens)
        self.num_drafts += batch.num_drafts
        self._model.admit(batch)
        sampling = [row for row in batch.rows if row.samples]
        rows = verified_rows(sampling, batch.drafts, [self._translate(row) for row in self._model.draw(batch)])
        drawn = zip(sampling, rows, strict=True)
        self._drawn = {row.sequence_id: result.token_ids[-1] for row, result in drawn if result.token_ids}
        return Checked(rows, sampling, self._slots)

    def _exchange_with_host(self, batch: Batch) -> None:
        size = self.limits.block_size
        self.most_saves = max(self.most_saves, sum(save.number > self._last_save for save in batch.saves))
        for number, source, destination in batch.saves:
            if number > self._last_save:
                self._last_save = number
                self._host[destination] = [self._contents_of.get(source * size + offset, -1) for offset in range(size)]
        for _, source, destination in batch.loads:
            self._contents_of |= {destination * size + offset: it for offset, it in enumerate(self._host[source])}
        self.num_saves = self._last_save
        self.num_loads += len(batch.loads)

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        size = self.limits.block_size
        assert {copy.source for copy in copies}.isdisjoint(copy.destination for copy in copies), "copies have an order"
        for copy, offset in product(copies, range(size)):
            content = self._contents_of.get(copy.source * size + offset, -1)
            self._contents_of[copy.destination * size + offset] = content
        self.num_copies += len(copies)

    def scribble(self, block_ids: list[int]) -> None:
        """Write something over all slots of these blocks."""
        size = self.limits.block_size
        self._contents_of |= {block_id * size + offset: -1 for block_id in block_ids for offset in range(size)}

    def _translate(self, row: Sampled) -> Sampled:
        if not self._alphabet or row.token_ids[0] > 255:
            return row
        return Sampled(tuple(self._alphabet[token_id % len(self._alphabet)] for token_id in row.token_ids))

    def _tokens(self, row: ScheduledRow, slot: Slot) -> list[int]:
        """Those of a slot, with the one that only the device has where the step is to read it."""
        is_fed = row.start == len(slot.token_ids)
        return [*slot.token_ids, self._drawn[row.sequence_id]] if is_fed else slot.token_ids

    def _contents(self, token_ids: list[int], salt: str) -> Iterator[int]:
        content = hash(salt)
        for token_id in token_ids:
            content = hash((content, token_id))
            yield content

    def _places(self, number: int, slot: Slot) -> list[list[int]]:
        """The slots of the cache that a row slot has, in order, by each of its block tables."""
        size, tables = self.limits.block_size, (self._slots.tables, *self._slots.window_tables)
        rows: list[list[int]] = [table[number, : slot.num_blocks].tolist() for table in tables]
        return [[block_id * size + offset for block_id in row for offset in range(size)] for row in rows]


@dataclass(slots=True, eq=False)
class Transcript:
    """All that was said of one choice."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: Finish | None = None
    deltas: list[TokenDelta] = field(default_factory=list[TokenDelta])

    def note(self, delta: TokenDelta) -> None:
        assert self.finish is None, "something was said after the end"
        assert delta.start == len(self.token_ids), "a token is missing, or was said twice"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.finish = delta.finish
        self.deltas.append(delta)


Transcripts = dict[tuple[str, int], Transcript]


def note(transcripts: Transcripts, deltas: Iterable[TokenDelta]) -> None:
    """Add what a step said to what was said before."""
    for delta in deltas:
        transcripts.setdefault((delta.request_id, delta.choice), Transcript()).note(delta)


class Prophet:
    """A `DraftSource` that knows what comes, and is wrong on purpose with some of its guesses."""

    def __init__(self, expected: Transcripts, share_right: float, *, depth: int = 5) -> None:
        self._expected = expected
        self._share_right = share_right
        self._depth = depth
        self._random = Random(0)

    def propose(self, sequences: Items[Sequence], *, room: int, worth: Worth) -> list[tuple[int, ...]]:
        return [self._guesses(sequence, room) for sequence in sequences]

    def _guesses(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        known = self._expected.get((sequence.request_id, sequence.choice), Transcript()).token_ids
        coming = known[sequence.num_output_tokens :][: min(most, self._depth)]
        return tuple(one if self._random.random() < self._share_right else ord("?") for one in coming)

    def end(self, sequence: Sequence) -> None:
        """It keeps nothing."""


def request(request_id: str, prompt: str | bytes = "hello", **options: Any) -> Request:  # options go where they belong
    """A request for the null model; what is no field of a request is a sampling parameter."""
    names = ("num_choices", "priority", "cache_salt", "progress")
    own = {name: options.pop(name) for name in names if name in options}
    prompt_bytes = prompt.encode() if isinstance(prompt, str) else prompt
    return Request(id=request_id, prompt_token_ids=tuple(prompt_bytes), sampling=Sampling(**options), **own)


def checking_model(
    *, num_blocks: int = 64, block_size: int = 4, alphabet: bytes = b"", **options: Any
) -> CheckingModel:
    """A small model that checks; `options` are those of `NullModelConfig`."""
    return CheckingModel(NullModelConfig(num_blocks=num_blocks, block_size=block_size, **options), alphabet=alphabet)


def lagging(model: CheckingModel) -> LaggingExecutor:
    """`model` on a device that lags by one step, and writes over blocks that are used again too early."""
    return LaggingExecutor(model, scribble=model.scribble)


class TickingClock:
    """Seconds, of which each call takes one in a thousand: a step takes as long on a busy machine as on an idle one.

    What the engine plans depends on the time of its steps, so with the clock of the machine no test could be repeated.
    """

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self) -> float:
        self._num_calls += 1
        return self._num_calls / 1000


def engine_over(executor: Executor, **options: Any) -> LLMEngine:
    """An engine with small limits; `options` are those of `EngineConfig`, `clock`, `draft_source` and `draft_model`."""
    draft_source: DraftSource | None = options.pop("draft_source", None)
    draft_model: Executor | None = options.pop("draft_model", None)
    clock: Callable[[], float] = options.pop("clock", TickingClock())
    small: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLMEngine(
        executor,
        NullTokenizer(),
        EngineConfig(**small | options),
        clock=clock,
        draft_source=draft_source,
        draft_model=draft_model,
    )


def run(engine: LLMEngine, *, max_steps: int = 10_000) -> Transcripts:
    """Step until nothing is left to do, with the books checked after every step."""
    transcripts: Transcripts = {}
    for _ in range(max_steps):
        if engine.is_idle:
            assert engine.stats.kv_tokens_used == 0, "an idle engine holds blocks"
            return transcripts
        note(transcripts, engine.advance())
        engine.check_invariants()
    raise AssertionError(f"still busy after {max_steps} steps:\n" + "\n".join(engine.describe()))


def undisturbed(asked: Request, *, alphabet: bytes = b"", **options: Any) -> Transcripts:
    """What `asked` gives when it has an engine with plenty of everything to itself."""
    engine = engine_over(checking_model(num_blocks=1024, alphabet=alphabet, **options), max_num_batched_tokens=4096)
    engine.add([asked])
    return run(engine)
