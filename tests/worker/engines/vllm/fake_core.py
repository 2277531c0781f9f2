"""A `Core` without vLLM: it keeps what vLLM's workers keep, and insists on what they rely on.

Its cache holds for each token a hash of it and of what the cache has for the token before. The logits of a sequence are
made from the hash of its last token: they are wrong if a block is wrong, was not copied, or was given to two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from sluice.engine.adapters.folder import AdapterFolder
from sluice.engine.batch import Sampled
from sluice.engine.errors import AdapterError
from sluice.engine.execution.slots import Slot
from sluice.engine.null_model import NullTokenizer
from sluice.worker.engines.vllm.orders import BlockIds, CoreFacts, StepOrder
from sluice.worker.engines.vllm.sampling import NO_TOKEN, RowSampler

BAD_PROMPT = (255, 5, 6)
"""A prompt that has no finite logits. Too long to be drawn."""

MAX_NUM_SEQS = 6


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence as a worker keeps it."""

    prompt: list[int]
    slot: Slot
    blocks: BlockIds
    num_computed: int
    output: list[int] = field(default_factory=list[int])

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.token_ids)


class FakeCore:
    """The fake. `lost` says why it can compute nothing more."""

    def __init__(self, *, num_groups: int = 1, num_blocks: int = 400, block_size: int = 4) -> None:
        self.facts = CoreFacts(
            version="0",
            description="fake",
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=num_groups,
            vocab_size=NullTokenizer.vocab_size,
            max_model_len=256,
            block_bytes=0,
            dtype="float32",
            quantization=None,
        )
        self.why_lost: str | None = None
        self.orders: list[StepOrder] = []
        self.adapters: dict[int, str] = {}
        """Names by place."""

        self.refused_adapters: set[str] = set()
        self.num_puts = 0
        self.before_step: Callable[[StepOrder], None] = lambda _order: None
        self._sampler = RowSampler(
            vocab_size=NullTokenizer.vocab_size,
            eos_token_ids=NullTokenizer.eos_token_ids,
            max_rows=MAX_NUM_SEQS,
            device=torch.device("cpu"),
        )
        self._sequences: dict[str, _Sequence] = {}
        self._seen: set[str] = set()
        self._cache: dict[tuple[int, int], bytes] = {}
        """Hashes by block and offset."""

    def put_adapter(self, place: int, folder: AdapterFolder) -> None:
        """See `Core.put_adapter`."""
        if folder.name in self.refused_adapters:
            raise AdapterError(f"vLLM cannot use the adapter {folder.name!r}.")
        self.adapters[place] = folder.name
        self.num_puts += 1

    def step(self, order: StepOrder) -> dict[str, Sampled]:
        """See `Core.step`."""
        self.orders.append(order)
        self._update(order)
        self.before_step(order)
        assert 0 < len(order.num_tokens) <= MAX_NUM_SEQS
        sequences = [self._sequences[name] for name in order.num_tokens]
        last = [
            self._compute(sequence, count) for sequence, count in zip(sequences, order.num_tokens.values(), strict=True)
        ]
        computed = {name for name in order.num_tokens if self._sequences[name].is_computed}
        assert computed == order.draws.sequences, "others are drawn than could be"
        logits = torch.stack([self._logits(sequence, one) for sequence, one in zip(sequences, last, strict=True)])
        rows = [(name, self._sequences[name].slot) for name in order.num_tokens]
        token_ids = self._sampler.draw(logits, rows, order.draws)
        for name, drawn in zip(order.num_tokens, token_ids, strict=True):
            token_id = int(drawn.item())
            if name in computed:
                self._sequences[name].output.append(token_id)
            else:
                assert token_id == NO_TOKEN, "a token is drawn amid known ones"
        return self._sampler.sampled

    def _update(self, order: StepOrder) -> None:
        for name in order.forgotten:
            self._sequences.pop(name, None)
        for source, destination in order.copies:
            for offset in range(self.facts.block_size):
                if (held := self._cache.get((source, offset))) is not None:
                    self._cache[destination, offset] = held
        for new in order.new:
            assert new.id not in self._seen, "an id is used twice"
            self._seen.add(new.id)
            prompt = list(new.slot.token_ids)
            self._sequences[new.id] = _Sequence(prompt, new.slot, new.block_ids, new.num_computed_tokens)
        for known in order.known:
            sequence = self._sequences[known.id]
            assert known.num_computed_tokens == sequence.num_computed, "it continues elsewhere than it was"
            assert known.num_drawn_tokens == len(sequence.output), "it has other tokens"
            for blocks, more in zip(sequence.blocks, known.new_block_ids or (), strict=False):
                blocks += more
            end = known.num_computed_tokens + order.num_tokens[known.id]
            assert known.token_ids == sequence.token_ids[known.num_computed_tokens : end], "it has other tokens"

    def _compute(self, sequence: _Sequence, count: int) -> bytes:
        """Compute tokens; return the hash of the last one."""
        start, end = sequence.num_computed, sequence.num_computed + count
        assert count > 0
        assert end <= len(sequence.token_ids), "more tokens than it has"
        before = b"".join(self._read(sequence, start - 1)) if start else b"begin"
        place = sequence.slot.adapter_place
        adapter = self.adapters[place].encode() if place >= 0 else b""
        for position in range(start, end):
            token = adapter + sequence.token_ids[position].to_bytes(4, "little")
            before = blake2b(before + token, digest_size=8).digest()
            for group in range(self.facts.num_groups):
                self._cache[self._place(sequence, position, group)] = before
            before *= self.facts.num_groups
        sequence.num_computed = end
        return before

    def _read(self, sequence: _Sequence, position: int) -> list[bytes]:
        return [self._cache[self._place(sequence, position, group)] for group in range(self.facts.num_groups)]

    def _place(self, sequence: _Sequence, position: int, group: int) -> tuple[int, int]:
        block = sequence.blocks[group][position // self.facts.block_size]
        assert 0 < block < self.facts.num_blocks, "a block outside the pool, or the one that stands for none"
        return block, position % self.facts.block_size

    def _logits(self, sequence: _Sequence, last: bytes) -> torch.Tensor:
        if tuple(sequence.prompt[:3]) == BAD_PROMPT:
            return torch.full((self.facts.vocab_size,), float("nan"))
        generator = torch.Generator().manual_seed(int.from_bytes(last[:7], "little"))
        logits = torch.randn(self.facts.vocab_size, generator=generator) * 3
        # Letters, so that stop strings are found.
        logits[97:123] += 4
        return logits
