"""An `Executor` whose steps vLLM computes.

A sequence is new to vLLM when it is admitted to its slot, and after a failed step: then everything about it is sent,
under an id that was never used. Of a known one, only its news are sent.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from sluice.engine.adapters.catalogue import Catalogue
from sluice.engine.adapters.folder import AdapterFolder
from sluice.engine.adapters.table import AdapterTable
from sluice.engine.batch import Batch, Sampled, ScheduledRow
from sluice.engine.errors import EngineBroken
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.slots import Slot, Slots
from sluice.engine.executor import Computed, Launched, ModelLimits, blocks_needed
from sluice.worker.engines.vllm.orders import BlockIds, CoreFacts, Draws, KnownSequence, NewSequence, StepOrder


class Core(Protocol):
    """A loaded vLLM."""

    facts: CoreFacts
    why_lost: str | None
    """Why no step can be computed any more; None if one can."""

    def put_adapter(self, place: int, folder: AdapterFolder) -> None:
        """Put an adapter in a place, instead of the one that is there.

        Raises:
            AdapterError: vLLM refuses it, or cannot read it.
        """
        ...

    def step(self, order: StepOrder) -> dict[str, Sampled]:
        """Compute a step; return what it drew, by sequence, for those whose known tokens are all computed now.

        Raises:
            Exception: whatever vLLM, or a device, reports.
        """
        ...


@dataclass(slots=True, eq=False)
class _Known:
    """A sequence as vLLM knows it. Mutable: it gets blocks."""

    id: str
    slot: Slot
    num_tokens: int
    """When it was new."""

    blocks: list[int]


class VllmExecutor:
    """The executor. Mutable: it notes which sequences vLLM knows."""

    lag = 0

    def __init__(
        self,
        core: Core,
        catalogue: Catalogue,
        *,
        eos_token_ids: frozenset[int],
        fingerprint: str,
        max_num_seqs: int,
        max_loaded_adapters: int,
    ) -> None:
        facts = core.facts
        self._core = core
        self._num_groups = facts.num_groups
        limits = ModelLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=eos_token_ids,
            # Its first block stands for none, and ours has one more that nothing reads.
            num_blocks=(facts.num_blocks - 1) // facts.num_groups - 1,
            block_size=facts.block_size,
            block_bytes=facts.block_bytes,
        )
        self.limits = catalogue.limits_with(limits, of_model=fingerprint, max_loaded=max_loaded_adapters)
        self._adapters = AdapterTable(catalogue, core.put_adapter)
        self.fingerprint = fingerprint
        self._slots = Slots(2 * max_num_seqs, blocks_needed(facts.max_model_len, facts.block_size))
        self._known: dict[int, _Known] = {}
        """By slot."""

        self._forgotten: set[str] = set()
        self._names = count()

    def launch(self, batch: Batch) -> Launched:
        """See `Executor.launch`."""
        try:
            return guarded(lambda: self._launch(batch))
        except Exception:
            self._forget_all()
            if (why := self._core.why_lost) is not None:
                raise EngineBroken(f"vLLM can compute nothing more: {why}") from None
            raise

    def _launch(self, batch: Batch) -> Launched:
        self._adapters.load(batch.admissions)
        self._slots.write(batch)
        order, ids = self._order(batch)
        drawn = self._core.step(order)
        self._forgotten -= order.forgotten
        sampling = [row for row in batch.rows if row.samples]
        sampled = [drawn[ids[row.sequence_id]] for row in sampling]
        self._slots.add_tokens(sampling, sampled)
        return Computed(sampled)

    def _order(self, batch: Batch) -> tuple[StepOrder, dict[int, str]]:
        """Return the order of a step, and the ids by which it names the sequences."""
        admitted = {admission.slot for admission in batch.admissions}
        new: list[NewSequence] = []
        known: list[KnownSequence] = []
        ids: dict[int, str] = {}
        for row in batch.rows:
            slot, held = self._slots[row], self._known.get(row.slot)
            if held is None or held.slot is not slot or row.slot in admitted:
                held = self._begin(row, slot, held)
                # The sampler of vLLM's worker adds its tokens to its own copy.
                copy = replace(slot, token_ids=list(slot.token_ids))
                new.append(NewSequence(held.id, copy, row.start, self._grouped(held.blocks)))
            else:
                known.append(self._news(row, held))
            ids[row.sequence_id] = held.id
        order = StepOrder(
            new=new,
            known=known,
            num_tokens={ids[row.sequence_id]: row.num_tokens for row in batch.rows},
            forgotten=set(self._forgotten),
            copies=[
                pair
                for copy in batch.copies
                for pair in zip(self._all(copy.source), self._all(copy.destination), strict=True)
            ],
            draws=Draws(
                sequences=frozenset(ids[row.sequence_id] for row in batch.rows if row.samples),
                masks={ids[sequence_id]: mask for sequence_id, (mask, *_) in batch.masks.items() if sequence_id in ids},
            ),
        )
        return order, ids

    def _begin(self, row: ScheduledRow, slot: Slot, before: _Known | None) -> _Known:
        """Note a sequence that is new to vLLM, in the place of the one that had its slot."""
        if before is not None:
            self._forgotten.add(before.id)
        blocks = self._blocks(row.slot, 0, slot.num_blocks)
        self._known[row.slot] = known = _Known(
            f"{row.sequence_id}.{next(self._names)}", slot, len(slot.token_ids), blocks
        )
        return known

    def _news(self, row: ScheduledRow, held: _Known) -> KnownSequence:
        slot = held.slot
        blocks = self._blocks(row.slot, len(held.blocks), slot.num_blocks)
        held.blocks += blocks
        return KnownSequence(
            id=held.id,
            num_computed_tokens=row.start,
            num_drawn_tokens=len(slot.token_ids) - held.num_tokens,
            new_block_ids=self._grouped(blocks) if blocks else None,
            token_ids=slot.token_ids[row.start : row.start + row.num_tokens],
        )

    def _blocks(self, slot: int, first: int, end: int) -> list[int]:
        return self._slots.tables[slot, first:end].tolist()

    def _grouped(self, blocks: list[int]) -> BlockIds:
        """Return for each group the blocks of vLLM's pool that stand for ours."""
        return tuple([[self._all(block)[group] for block in blocks] for group in range(self._num_groups)])

    def _all(self, block: int) -> range:
        """Return the blocks of vLLM's pool, one for each group, that stand for one of ours."""
        first = 1 + block * self._num_groups
        return range(first, first + self._num_groups)

    def _forget_all(self) -> None:
        """Send everything anew with the next step: what vLLM has kept of a failed one is unknown."""
        self._forgotten |= {known.id for known in self._known.values()}
        self._known.clear()
