"""Slots of running sequences in the executor: writes may be repeated, in any state that a failed step leaves."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow, TableWrite
from sluice.engine.execution.slots import Slots
from sluice.engine.request import Sampling


def admission(slot: int, sequence_id: int, num_tokens: int, blocks: list[int]) -> Admission:
    return Admission(
        slot=slot,
        sequence_id=sequence_id,
        request_id="",
        choice=0,
        sampling=Sampling(),
        cache_salt="",
        token_ids=tuple(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=tuple(blocks),
    )


def state_of(slots: Slots, slot: int, sequence_id: int) -> tuple[list[int], list[int]]:
    held = slots[ScheduledRow(slot, sequence_id, 0, 1, samples=True)]
    return held.token_ids, slots.tables[slot, : held.num_blocks].tolist()


class TestGivenASequenceThatWasAdmitted:
    def test_when_it_samples_and_grows_then_the_slot_has_both(self) -> None:
        slots = Slots(2, max_blocks_per_seq=4)
        slots.write(Batch((), admissions=(admission(1, 7, 3, [5]),)))

        slots.write(Batch((), table_writes=(TableWrite(1, 7, 1, (6, 2)),)))
        slots.add_tokens([ScheduledRow(1, 7, 0, 3, samples=True)], [Sampled((9,))])

        assert state_of(slots, 1, 7) == ([0, 1, 2, 9], [5, 6, 2])

    def test_when_it_is_admitted_again_then_what_it_sampled_meanwhile_stays(self) -> None:
        slots = Slots(2, max_blocks_per_seq=4)
        first = Batch((), admissions=(admission(1, 7, 3, [5]),))
        slots.write(first)
        slots.add_tokens([ScheduledRow(1, 7, 0, 3, samples=True)], [Sampled((9,))])

        slots.write(first)

        assert state_of(slots, 1, 7) == ([0, 1, 2, 9], [5])

    def test_when_another_gets_its_slot_then_late_writes_for_it_change_nothing(self) -> None:
        slots = Slots(2, max_blocks_per_seq=4)
        slots.write(Batch((), admissions=(admission(1, 7, 3, [5]),)))
        slots.write(Batch((), admissions=(admission(1, 8, 2, [4]),)))

        slots.write(Batch((), table_writes=(TableWrite(1, 7, 1, (6,)),)))
        slots.add_tokens([ScheduledRow(1, 7, 0, 3, samples=True)], [Sampled((9,))])

        assert state_of(slots, 1, 8) == ([0, 1], [4])


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 30), min_size=1, max_size=3)), min_size=1, max_size=8
    ),
    st.data(),
)
def test_repeated_writes_leave_what_they_leave_once(grown: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    """Each sequence is admitted to the slot of its number and grows; every write may be repeated at once."""
    once, repeated = (Slots(6, max_blocks_per_seq=64) for _ in range(2))
    lengths: dict[int, int] = {}
    for slot, blocks in grown:
        if slot in lengths:
            batch = Batch((), table_writes=(TableWrite(slot, slot, lengths[slot], tuple(blocks)),))
        else:
            batch = Batch((), admissions=(admission(slot, slot, 3, blocks),))
        lengths[slot] = lengths.get(slot, 0) + len(blocks)
        once.write(batch)
        for _ in range(data.draw(st.integers(1, 3))):
            repeated.write(batch)

    for slot in lengths:
        assert state_of(once, slot, slot) == state_of(repeated, slot, slot)
