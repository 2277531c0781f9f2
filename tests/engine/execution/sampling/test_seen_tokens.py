"""Places of the tokens that sequences with penalties have seen: how many there are, and what follows if one is lost."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch

from sluice.engine.execution.sampling.seen_tokens import SeenTokens
from sluice.engine.execution.slots import Slot
from sluice.engine.request import Sampling

VOCAB_SIZE = 8


def make_seen(max_places: int) -> SeenTokens:
    return SeenTokens(VOCAB_SIZE, torch.device("cpu"), max_places)


def slot_of(index: int, output: list[int]) -> Slot:
    """A sequence with the prompt 1, 2."""
    return Slot(
        index=index,
        sequence_id=index,
        choice=0,
        sampling=Sampling(repetition_penalty=1.3),
        num_prompt_tokens=2,
        token_ids=[1, 2, *output],
        num_blocks=1,
    )


def counts_of(seen: SeenTokens, *slots: Slot) -> list[list[int]]:
    seen.count([(slot, len(slot.token_ids)) for slot in slots])
    assert seen.listed is not None
    for slot in slots:
        place = seen.place_of(slot)
        tokens, lengths = seen.listed
        listed = tokens[place, : int(lengths[place])].tolist()
        assert sorted(listed) == seen.table[place].nonzero().flatten().tolist()
    return [seen.table[seen.place_of(slot)].tolist() for slot in slots]


class TestGivenMoreRowSlotsThanAStepHasSequences:
    def test_when_more_of_them_had_penalties_then_memory_stays_that_of_a_step(self) -> None:
        seen = make_seen(2)

        for index in range(4):
            counts_of(seen, slot_of(index, [3]), slot_of((index + 1) % 4, [3]))

        assert seen.table.shape == (2, VOCAB_SIZE)

    def test_when_all_places_are_taken_then_the_least_recently_used_is_next(self) -> None:
        seen = make_seen(2)
        ended, running, joining = slot_of(0, []), slot_of(1, [5]), slot_of(2, [3, 3])
        counts_of(seen, running, ended)
        place = seen.place_of(ended)
        counts_of(seen, running)

        assert counts_of(seen, joining, running) == [[0, 1, 1, 4, 0, 0, 0, 0], [0, 1, 1, 0, 0, 2, 0, 0]]
        assert seen.place_of(joining) == place

    def test_when_a_sequence_had_lost_its_place_then_its_tokens_are_counted_again(self) -> None:
        seen = make_seen(1)
        sequence = slot_of(0, [5, 2])
        before = counts_of(seen, sequence)
        counts_of(seen, slot_of(1, [3]))

        assert counts_of(seen, sequence) == before == [[0, 1, 3, 0, 0, 2, 0, 0]]


class TestGivenNoSequenceWithPenalties:
    def test_when_nothing_was_counted_then_no_memory_is_taken(self) -> None:
        assert make_seen(2).table.numel() == 0
