"""Host tier of the prefix cache: full blocks that left the device and may be needed again, in host memory.

A block is saved when it is taken for new contents, and loaded into another one when a sequence that begins with it
joins. So a preempted sequence finds in host memory what running ones took from it.

A save reads the block before the step that carries it computes anything. It is made once, however often the step is
tried: after that the block holds something else. Its contents are found only when a step with it has succeeded.

A step carries a bounded number of saves that no step had before. The others wait while their blocks hold what is to be
saved: a sequence takes the blocks of a long prompt at once and fills them step by step. A block that the step fills,
and for which no save is left, is not saved.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from itertools import count, islice, takewhile
from typing import NamedTuple

from sluice.engine.batch import BlockSave

MAX_STEP_SAVES = 32
"""Most new saves of a step: 3 ms at 20 GB/s with blocks of 2 MiB (16 tokens of a model of 8 billion parameters). With
those that a step in flight or a failed one has, a step carries twice as many at most."""


class _Wish(NamedTuple):
    """A save that no step has carried."""

    key: int
    source: int
    destination: int


class HostTier:
    """Which block of host memory has the contents of a hash. Mutable. The least recently used is replaced first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._let_go: set[int] = set()
        """Blocks without contents that are still being loaded: free when that is over."""

        self._blocks: dict[int, int] = {}
        """By hash, the least recently used first."""

        self._num_loads: Counter[int] = Counter()
        """Sequences that load a block, by block. It keeps its contents meanwhile."""

        self._wishes: deque[_Wish] = deque()
        """In the order in which the blocks were taken."""

        self._pending: dict[int, tuple[int, BlockSave]] = {}
        """Saves of which no step has succeeded, with their hashes; by number."""

        self._numbers = count(1)

    def saves(self, filled: Callable[[], Set[int]]) -> tuple[BlockSave, ...]:
        """Return the saves that the next step carries, in their order: those of unsuccessful steps, and new ones.

        Args:
            filled: returns the blocks of the device that the step writes. Called only if there are more new saves than
                a step may have.
        """
        most = min(MAX_STEP_SAVES, 2 * MAX_STEP_SAVES - len(self._pending))
        if len(self._wishes) > most:
            self._put_urgent_first(filled(), most)
        for _ in range(min(most, len(self._wishes))):
            key, source, destination = self._wishes.popleft()
            number = next(self._numbers)
            self._pending[number] = key, BlockSave(number, source, destination)
        return tuple(save for _, save in self._pending.values())

    def leading(self, keys: Iterable[int]) -> list[int]:
        """Return the blocks of the first of `keys`, up to one that is not here."""
        return [self._blocks[key] for key in takewhile(self._blocks.__contains__, keys)]

    def save(self, key: int, block_id: int) -> None:
        """Plan to save `block_id` of the device, which has the contents of `key` and is about to lose them."""
        if key in self._blocks:
            self._use(key)
            return
        block = self._place()
        if block is not None:
            self._wishes.append(_Wish(key, block_id, block))

    def confirm(self, saves: Iterable[BlockSave]) -> None:
        """Note that a step with `saves` has succeeded: their contents can be found."""
        for save in saves:
            if save.number not in self._pending:
                continue
            key, _ = self._pending.pop(save.number)
            if key in self._blocks:
                self._free.append(save.destination)
            else:
                self._blocks[key] = save.destination

    def give_up_saves(self) -> None:
        """Make none of the saves that no step has made: memory is short, and a cache may forget."""
        self._free.extend(save.destination for _, save in self._pending.values())
        self._pending.clear()
        self._drop(set(self._wishes))

    def begin_load(self, keys: Iterable[int], blocks: Iterable[int]) -> None:
        """Keep `blocks`, with the contents of `keys`, until `end_load`."""
        for key in keys:
            self._use(key)
        for block in blocks:
            self._num_loads[block] += 1

    def end_load(self, blocks: Iterable[int]) -> None:
        """Note that a sequence needs `blocks` no more."""
        self._num_loads.subtract(blocks)
        self._num_loads = +self._num_loads
        idle = self._let_go - self._num_loads.keys()
        self._let_go -= idle
        self._free.extend(idle)

    def forget(self, keys: Iterable[int]) -> None:
        """Remove the contents of `keys`: they may be wrong."""
        forgotten = set(keys)
        for key in forgotten & self._blocks.keys():
            block = self._blocks.pop(key)
            if block in self._num_loads:
                self._let_go.add(block)
            else:
                self._free.append(block)
        self._drop({wish for wish in self._wishes if wish.key in forgotten})
        for number, (key, save) in list(self._pending.items()):
            if key in forgotten:
                del self._pending[number]
                self._free.append(save.destination)

    def check_invariants(self, num_loads: Counter[int]) -> None:
        """Check that each block is in one place, and that `num_loads` are those noted.

        Raises:
            AssertionError: an invariant is violated.
        """
        saved = (*(save for _, save in self._pending.values()), *self._wishes)
        places = [*self._free, *self._let_go, *self._blocks.values(), *(save.destination for save in saved)]
        assert sorted(places) == list(range(self._num_blocks)), "a block of the host tier is lost, or in two places"
        assert num_loads == self._num_loads, "loads differ from those of the sequences"

    def _put_urgent_first(self, filled: Set[int], most: int) -> None:
        """Order the waiting saves: first those of blocks about to be filled, of which the step carries `most`."""
        urgent = [wish for wish in self._wishes if wish.source in filled]
        others = [wish for wish in self._wishes if wish.source not in filled]
        self._wishes = deque((*urgent, *others))
        self._drop(set(islice(urgent, most, None)))

    def _drop(self, wishes: Set[_Wish]) -> None:
        """Plan these saves no more."""
        self._free.extend(wish.destination for wish in wishes)
        self._wishes = deque(wish for wish in self._wishes if wish not in wishes)

    def _use(self, key: int) -> None:
        self._blocks[key] = self._blocks.pop(key)

    def _place(self) -> int | None:
        """Return a block for new contents; None while all are being loaded or saved."""
        if self._free:
            return self._free.popleft()
        key = next((key for key, block in self._blocks.items() if block not in self._num_loads), None)
        return None if key is None else self._blocks.pop(key)
