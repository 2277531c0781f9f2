"""Places of loaded adapters, for the sequences that run with them. Knows no weights: the executor loads what is placed.

An adapter keeps its place after its last sequence, until another one needs the place: then the one that was used least
recently leaves. None leaves while a sequence has it, so a sequence whose adapter finds no place waits.
"""

from collections import OrderedDict

from sluice.engine.sequence import Sequence


class AdapterPlaces:
    """Which adapter has which place. Mutable."""

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places - 1, -1, -1))
        self._places: OrderedDict[str, int] = OrderedDict()
        """By adapter, the one used least recently first."""

        self._users: dict[str, int] = {}
        """Sequences that have each, of those that any has."""

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether the adapter of a sequence, if it has one, has a place or can get one."""
        name = sequence.adapter
        return not name or name in self._places or bool(self._free) or len(self._users) < len(self._places)

    def hold(self, sequence: Sequence) -> None:
        """Give the adapter of a sequence a place, which it keeps while it runs. `has_room` says that there is one."""
        if not (name := sequence.adapter):
            return
        if name not in self._places:
            self._places[name] = self._free.pop() if self._free else self._evicted()
        self._places.move_to_end(name)
        self._users[name] = self._users.get(name, 0) + 1
        sequence.use_adapter(self._places[name])

    def release(self, sequence: Sequence) -> None:
        """Note that a sequence does not run any more, and no step in flight has it."""
        if not (name := sequence.adapter):
            return
        sequence.use_adapter(-1)
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]

    def _evicted(self) -> int:
        """Free the place of the adapter that was used least recently, of those that no sequence has."""
        name = next(name for name in self._places if name not in self._users)
        return self._places.pop(name)

    def check_invariants(self, holders: list[Sequence]) -> None:
        """Check that exactly `holders` have their adapters in places.

        Raises:
            AssertionError: an invariant is violated.
        """
        held: dict[str, int] = {}
        for sequence in holders:
            if sequence.adapter:
                held[sequence.adapter] = held.get(sequence.adapter, 0) + 1
                assert sequence.adapter_place == self._places[sequence.adapter], "an adapter is not in its place"
        assert held == self._users, "the adapters in use are not those of sequences"
        assert len({*self._places.values(), *self._free}) == len(self._places) + len(self._free), "two share a place"
