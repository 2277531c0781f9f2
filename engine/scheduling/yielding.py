"""Running sequences give way to waiting ones of a higher class. Which does is the policy's choice.

A sequence of a higher class joins before the running ones are scheduled, so that its prompt is computed before theirs.
If it lacks a place or blocks, the policy names victims, one at a time, until it would join; only then are they
preempted. If it would not join even without all of them, none is. So a victim never loses its place for nothing.

A victim waits at its place in the order and is computed again when there is room; the prefix cache keeps most of it.
While a step in flight still uses the blocks of victims, the sequence that needs them waits for it to land.
"""

from bisect import insort
from itertools import takewhile

from sluice.engine.request import NO_ROOM, Room
from sluice.engine.scheduling.blocks.manager import CachedPrefix
from sluice.engine.scheduling.prefix_sharing import PrefixSharing
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence

_OFFER_FOR = 16
"""Steps for which an offer holds while the same sequences run, and those of higher classes only decode."""


class YieldingScheduler(Scheduler):
    """A scheduler whose running sequences give way. Mutable."""

    _offer: Room | None = None
    """What the lowest class was last found to give up."""

    _offered_at: int | None = None
    """`num_changes` when it was."""

    _num_offers_left = 0

    def room(self) -> Room:
        """Return the room of the next steps: free room, or if there is none, that of a lower class that gives it up."""
        room = super().room()
        is_some = room is not NO_ROOM and room.is_some
        return room if is_some else self._yielded_room() or room

    def _join_higher(self) -> None:
        """Let waiting sequences join that go before a running one; others give way if necessary."""
        while self.waiting and self._policy.outranks(self.waiting.head, self.running):
            sequence = self.waiting.head
            if self._is_full and (self._is_place_coming or self._policy.victim(sequence, self.running) is None):
                return
            prefix = self.blocks.lookup(sequence)
            computing = [
                other for other in self.running if max(other.num_uncomputed_tokens, other.num_launched_tokens) > 1
            ]
            if PrefixSharing(self.blocks.block_size, computing).is_better_held_back(sequence, prefix):
                return
            if self._displace(sequence, prefix):
                prefix = self.blocks.lookup(sequence)  # a victim may have published more of it
            # Its first tokens are scheduled with those of the running ones.
            if self._is_full or self._try_join(sequence, prefix, 1) is None:
                return
            self.waiting.pop()

    def _displace(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Preempt the victims that `sequence` needs to join; return False if it needs none, or all would not do."""
        victims: list[Sequence] = []
        while not self._would_join(sequence, prefix, victims):
            victim = self._policy.victim(sequence, self.running)
            if victim is None:
                for spared in victims:
                    insort(self.running, spared, key=self._policy.order)
                return False
            self.running.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._preempt(victim, sequence)
        return bool(victims)

    def _would_join(self, sequence: Sequence, prefix: CachedPrefix, victims: list[Sequence]) -> bool:
        """Return whether `sequence` has a place and blocks once `victims`, not in `running` any more, are gone."""
        if self._is_full or not self._adapters.has_room(sequence):
            return False
        num_lacking = self.blocks.num_lacking(
            sequence,
            prefix,
            num_spare=self._admission.num_spare_blocks(self.running),
            num_held=self._admission.num_held_tokens(sequence),
        )
        # Sequences that are leaving release blocks when their step lands: wait for these.
        is_coming = bool(self.leaving) and not victims
        return num_lacking <= 0 or is_coming or num_lacking <= self.blocks.num_released_by(victims, prefix)

    def _yielded_room(self) -> Room | None:
        """Return the room that the lowest class would give up; None while one waits that would take it.

        What it holds grows as the free blocks shrink, so while all decode, an offer hardly changes.
        """
        if self._num_offers_left and self._offered_at == self.num_changes and not self.waiting:
            self._num_offers_left -= 1
            return self._offer
        yielding = self._policy.yielding(self.running)
        if not yielding or (self.waiting and self._policy.outranks(self.waiting.head, yielding)):
            return None
        # Prompts of a higher class go before those of lower ones, and are before them in the order.
        lowest = yielding[0].priority
        higher = takewhile(lambda other: other.priority > lowest, self.running)
        num_owed = [other.num_uncomputed_tokens for other in higher]
        self._offer = self._room.given_up(self.running, yielding, sum(num_owed))
        self._num_offers_left, self._offered_at = _OFFER_FOR * (max(num_owed, default=1) == 1), self.num_changes
        return self._offer

    @property
    def _is_place_coming(self) -> bool:
        """Whether those of higher classes have places after this step anyway, as they may when room is offered ahead.

        To wait one step costs them less than another sequence to be computed again.
        """
        if self._ahead.num_steps == 1:
            return False
        higher = list(takewhile(lambda one: self._policy.outranks(one, self.running), self.waiting.in_order()))
        return sum([other.ends_within(1) for other in self.running]) >= len(higher)

    @property
    def _is_full(self) -> bool:
        """Whether every place is taken. A running sequence must find a token in each step's budget."""
        return len(self.running) >= min(self._config.max_num_seqs, self.max_tokens)
