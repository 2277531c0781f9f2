"""One sequence being generated: its tokens, its blocks and its progress. Knows no tensors and no text."""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, repeat, zip_longest

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow
from sluice.engine.request import NEVER_PREEMPTED, NO_TARGETS, LatencyTargets, Preemptions, Sampling

_HASH_BYTES = 16


class SequenceStatus(Enum):
    """State of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Preempted while a step with its row is in flight: it returns to waiting when that step completes."""

    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request during generation. Mutable; only this module writes its fields.

    A sequence has no phase: it is owed the tokens that are not computed yet, one (decode) or thousands (prefill).

    Tokens of a step in flight are counted separately, since the step may still fail.
    """

    id: int
    """Unique in this engine; never reused."""

    request_id: str
    choice: int
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    adapter_place: int = -1
    """The place of its adapter (`sluice.engine.scheduling.adapter_places`) while it runs; -1 without one."""

    targets: LatencyTargets = NO_TARGETS
    needs_all: bool = False
    """Whether all tokens of its prompt are computed, cached or not: something is read from each."""

    token_ids: list[int]
    """Prompt, then output (a resumed sequence starts with its earlier output)."""

    num_prompt_tokens: int
    num_resumed_tokens: int = 0
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    """Tokens beyond the computed ones that a step in flight computes."""

    num_drawn_tokens: int = 0
    """Tokens that a step in flight samples: known on the device, not yet on the host."""

    num_launched_drafts: int = 0
    """Drafts that a step in flight verifies: until it has landed, the position of the next token is not known."""

    most_ahead_tokens: int = 0
    """With more tokens, one of them in flight, nothing of it can be planned: the last one has no keys and values."""

    awaits_run: bool = False
    """Whether nothing of it is planned while a token is in flight: others will follow that one at once (`extend`)."""

    slot: int = 0
    """Its row slot (`sluice.engine.scheduling.row_slots`). Any number while it has no blocks."""

    tables: list[list[int]] = field(default_factory=lambda: [[]])
    """Its block tables, for the same tokens each: one, or with window groups that of the layers that attend to all
    tokens, then one for each group, which may have fewer entries.
    """

    num_slots: int = 0
    """Tokens that it has blocks for in all layers."""

    num_passed_blocks: int = 0
    """Leading entries of the tables of window groups, or without these of its only one, that it does not hold.

    They are before the sliding window, and nothing reads them.
    """

    block_hashes: list[int] = field(default_factory=list[int])
    """Chained hash of each full block of `token_ids`, extended as tokens arrive."""

    num_published_blocks: int = 0
    """Leading entries of the tables that are published in the prefix cache or came from it."""

    cow_sources: tuple[int, ...] = ()
    """Sources of the pending copy-on-write of the block with the first uncomputed token, one for each block table.

    Empty once a step with the copies has succeeded.
    """

    loads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Pending loads, (block of the host tier, block of its table); empty once a step with them has succeeded."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    preemptions: Preemptions = NEVER_PREEMPTED
    num_yields: int = 0
    """Preemptions in favour of a sequence of a higher class."""

    num_overtaken: int = 0
    """Sequences that joined before it while it was held back for a prefix that another one computes."""

    first_scheduled_s: float | None = None

    # ------------------------------------------------------------ what it owes

    def owed(self) -> ScheduledRow | None:
        """Return the row that computes all that it owes next.

        None if that depends on a step in flight: on drafts that it verifies, on whether its token is the last, or on
        the tokens that follow it at once.
        """
        start, num_tokens = self.num_computed_tokens, len(self.token_ids)
        if self.num_launched_tokens:
            start += self.num_launched_tokens
            num_tokens += self.num_drawn_tokens
            if self.num_launched_drafts:
                return None
            if self.num_drawn_tokens and (self.awaits_run or num_tokens > self.most_ahead_tokens):
                return None
        # One for each sequence and step: `ScheduledRow(...)` would take twice as long.
        row = (self.slot, self.id, start, num_tokens - start, True)
        return tuple.__new__(ScheduledRow, row)  # pyright: ignore[reportUnknownMemberType] - it is generic

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are neither cached nor being computed by a step in flight."""
        num_coming = self.num_drawn_tokens - self.num_launched_tokens
        return len(self.token_ids) + num_coming - self.num_computed_tokens

    def ends_within(self, num_steps: int) -> bool:
        """Return whether so many steps end it for certain, by its limit. A step in flight is the first of them."""
        num_left = self.num_prompt_tokens + self.sampling.max_tokens - len(self.token_ids)
        num_coming = self.num_drawn_tokens if self.num_launched_tokens else 1
        return num_left < num_coming + num_steps and self.num_uncomputed_tokens <= 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    # ------------------------------------------------------------ its life

    def join(self, slot: int, num_cached_tokens: int, now_s: float) -> None:
        """Run, in row slot `slot`, with the keys and values of its first tokens in its blocks."""
        self.status = SequenceStatus.RUNNING
        self.slot = slot
        self.num_computed_tokens = num_cached_tokens
        self.preemptions = self.preemptions.end(now_s)
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
            self.num_cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)

    def use_adapter(self, place: int) -> None:
        """Have its adapter in a place, or in none."""
        self.adapter_place = place

    def preempt(self, now_s: float, *, is_yield: bool) -> None:
        """Run no more. It keeps its blocks until no step in flight has them; `wait` then."""
        self.status = SequenceStatus.LEAVING
        self.num_preemptions += 1
        self.num_yields += is_yield
        self.preemptions = self.preemptions.begin(now_s)

    def wait(self) -> None:
        """Wait to be computed again, without blocks."""
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0

    def note_overtaken(self) -> None:
        """Note that another one has joined before it."""
        self.num_overtaken += 1

    def note_run(self, awaits_run: bool) -> None:
        """Note whether its next token will be followed by others at once."""
        self.awaits_run = awaits_run

    @property
    def is_ahead(self) -> bool:
        """Whether a step in flight follows the one that is being read."""
        return self.num_drawn_tokens > 1

    def extend(self, token_ids: Items[int]) -> None:
        """Take tokens that follow without having been sampled; no step in flight follows them."""
        self.token_ids += token_ids

    def note_read(self) -> None:
        """Note that its prompt was read."""
        self.needs_all = False

    def finish(self) -> None:
        """End. It keeps its blocks until no step in flight has them."""
        self.status = SequenceStatus.FINISHED

    # ------------------------------------------------------------ its blocks

    def hold(self, tables: list[list[int]], block_size: int, *, num_passed: int, num_published: int) -> None:
        """Take block tables, of which the first `num_passed` entries are before the window."""
        self.tables = tables
        self.num_slots = len(tables[-1]) * block_size
        self.num_passed_blocks = num_passed
        self.num_published_blocks = num_published

    def grow(self, num_entries: int, take: Callable[[], int], block_size: int) -> None:
        """Extend each of its tables to `num_entries`, by blocks that `take` returns."""
        for table in self.tables:
            while len(table) < num_entries:
                table.append(take())
        self.num_slots = len(self.tables[-1]) * block_size

    def plan_copies(self, cow_sources: tuple[int, ...], loads: Items[tuple[int, int]]) -> None:
        """Note the copies and loads that fill its blocks before its next step computes."""
        self.cow_sources, self.loads = cow_sources, list(loads)

    def note_published(self, num_entries: int) -> None:
        """Note that its first entries are in the prefix cache."""
        self.num_published_blocks = num_entries

    def note_passed(self, num_entries: int) -> None:
        """Note that it has given back its first entries, which are before the sliding window."""
        self.num_passed_blocks = num_entries

    def drop_blocks(self) -> None:
        """Hold no blocks."""
        # New lists: a step in flight may still read the old ones.
        self.tables = [[] for _ in self.tables]
        self.num_slots = self.num_published_blocks = self.num_passed_blocks = 0

    def extend_hashes(self, num_blocks: int, block_size: int) -> None:
        """Extend `block_hashes` to its first `num_blocks` blocks, which are full."""
        hashes = self.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(self.cache_salt)
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            parent = block_hash(parent, self.token_ids[start : start + block_size])
            hashes.append(parent)

    @property
    def block_table(self) -> list[int]:
        """Its only block table, or that of the layers that attend to all tokens."""
        return self.tables[0]

    @property
    def num_entries(self) -> int:
        """Entries that all its block tables have."""
        return len(self.tables[-1])

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of its tables that it holds, in token order."""
        return held_blocks(self.tables, self.num_passed_blocks)

    @property
    def has_pending_copies(self) -> bool:
        """Whether no step has succeeded yet that fills its blocks from others."""
        return bool(self.cow_sources) or bool(self.loads)

    def admission(self, slot: int) -> Admission:
        """Return the contents of `slot`, which it has."""
        table, *windowed = self.tables
        # Positional arguments take half the time of keywords.
        return Admission(
            slot,
            self.id,
            self.request_id,
            self.choice,
            self.sampling,
            self.cache_salt,
            tuple(self.token_ids),
            self.num_prompt_tokens,
            tuple(table[: self.num_entries]),
            tuple(map(tuple, windowed)),
            self.adapter,
            self.adapter_place,
        )

    def blocks_at(self, index: int) -> tuple[int, ...]:
        """Return the blocks of entry `index`, which all tables have."""
        return tuple([table[index] for table in self.tables])

    def __str__(self) -> str:
        return (
            f"{self.request_id}/{self.choice} {self.status.name.lower()}: {self.num_prompt_tokens} prompt "
            f"+ {self.num_output_tokens} output tokens, {self.num_computed_tokens} computed, "
            f"{len(self.held_blocks)} blocks, {self.num_preemptions} preemptions"
        )


def held_blocks(tables: Items[list[int]], num_passed: int) -> list[int]:
    """Return the blocks of tables that are held, in token order; see `Sequence.num_passed_blocks`."""
    first, *windowed = tables
    if not windowed:
        return first[num_passed:]
    entries = zip_longest(first, *(chain(repeat(None, num_passed), table[num_passed:]) for table in windowed))
    return [block_id for entry in entries for block_id in entry if block_id is not None]


def launch(sequences: Items[Sequence], batch: Batch) -> None:
    """Note that a step in flight computes the rows of `batch`, which are of `sequences`."""
    for sequence, (_, _, _, num_tokens, samples) in zip(sequences, batch.rows, strict=True):
        sequence.num_launched_tokens += num_tokens
        sequence.num_drawn_tokens += samples
    for sequence in sequences if batch.drafts else ():
        sequence.num_launched_drafts += len(batch.drafts.get(sequence.id, ()))


def land(sequences: Items[Sequence], batch: Batch) -> None:
    """Note that a launched step has landed. What of it succeeded, `advance` has noted."""
    for sequence, (_, _, _, num_tokens, samples) in zip(sequences, batch.rows, strict=True):
        sequence.num_launched_tokens -= num_tokens
        sequence.num_drawn_tokens -= samples
    for sequence in sequences if batch.drafts else ():
        sequence.num_launched_drafts -= len(batch.drafts.get(sequence.id, ()))


def advance(sequences: Items[Sequence], batch: Batch, sampled: list[Sampled], block_size: int) -> list[Sequence]:
    """Note the tokens that a successful step computed and sampled; return the sequences that have tokens to publish."""
    results, published = iter(sampled), list[Sequence]()
    for sequence, (_, _, start, num_tokens, samples) in zip(sequences, batch.rows, strict=True):
        if samples:
            token_ids = next(results).token_ids
            sequence.token_ids += token_ids
            if len(token_ids) > 1:
                # All but the last were drafts of the step, and so are computed.
                num_tokens += len(token_ids) - 1
        sequence.num_computed_tokens = num_computed = start + num_tokens
        # A single token fills a block only at its end.
        if num_tokens > 1 or num_computed % block_size == 0:
            published.append(sequence)
    return published


def batch_of(parts: Iterable[tuple[Sequence, int, int, bool]]) -> Batch:
    """Return a step outside any scheduler: sequences, each with `start`, `num_tokens` and `samples` of its row.

    They are admitted with the step, to the slots from 0 on.
    """
    rows: list[ScheduledRow] = []
    admissions: list[Admission] = []
    for slot, (sequence, start, num_tokens, samples) in enumerate(parts):
        rows.append(ScheduledRow(slot, sequence.id, start, num_tokens, samples))
        admissions.append(sequence.admission(slot))
    return Batch(tuple(rows), admissions=tuple(admissions))


# Cached because requests often share a salt.
@lru_cache(maxsize=256)
def root_hash(salt: str) -> int:
    """Return the parent hash of the first block: prefixes under different salts never match."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"kv cache salt").digest(), "little")


def block_hash(parent: int, token_ids: Items[int]) -> int:
    """Hash a full block by its tokens and everything before them.

    128-bit BLAKE2b: collisions cannot be constructed, so token ids need not be kept for comparison.
    """
    content = parent.to_bytes(_HASH_BYTES, "little") + array("I", token_ids).tobytes()
    return int.from_bytes(blake2b(content, digest_size=_HASH_BYTES).digest(), "little")
