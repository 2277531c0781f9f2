"""A `Core` without vLLM: it keeps what vLLM's workers keep, and insists on what they rely on.

Its cache holds for each token a hash of it and of what the cache has for the token before. The logits of a sequence are
made from the hash of its last token: they are wrong if a block is wrong, was not copied, or was given to two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import SampledLogprobs
from sluice.worker.engines.vllm.orders import BlockIds, CoreFacts, Drawing, Drawn, StepOrder
from sluice.worker.engines.vllm.sampling import Row, RowSampler

BAD_PROMPT = (255, 5, 6)
"""A prompt that has no finite logits. Too long to be drawn."""

MAX_NUM_SEQS = 6


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence as a worker keeps it."""

    prompt: list[int]
    drawing: Drawing
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

    def step(self, order: StepOrder) -> dict[str, Drawn]:
        """See `Core.step`."""
        self.orders.append(order)
        self._update(order)
        self.before_step(order)
        assert 0 < len(order.num_tokens) <= MAX_NUM_SEQS
        last = {name: self._compute(self._sequences[name], count) for name, count in order.num_tokens.items()}
        rows = [self._row(name) for name in order.num_tokens]
        self._sampler.keep(self._sequences)
        logits = torch.stack([self._logits(row, last[row.id]) for row in rows])
        drawing = [row for row in rows if self._sequences[row.id].is_computed]
        assert {row.id for row in drawing} == order.draws.sequences, "others are drawn than could be"
        results: dict[str, Drawn] = {}
        if (drawn := self._sampler.draw(logits, rows, order.draws)) is None:
            return results
        for row, sampled in zip(drawing, drawn.drawn.collect(), strict=True):
            sequence = self._sequences[row.id]
            token_id = sampled.token_ids[0] if sampled.error is None else None
            sequence.output.append(-1 if token_id is None else token_id)
            logprobs: SampledLogprobs | None = sampled.logprobs[0] if sampled.logprobs else None
            results[row.id] = Drawn(token_id, logprobs)
        return results

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
            self._sequences[new.id] = _Sequence(new.token_ids, new.drawing, new.block_ids, new.num_computed_tokens)
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
        for position in range(start, end):
            token = sequence.token_ids[position].to_bytes(4, "little")
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

    def _row(self, name: str) -> Row:
        sequence = self._sequences[name]
        return Row(name, sequence.drawing, sequence.prompt, sequence.output)

    def _logits(self, row: Row, last: bytes) -> torch.Tensor:
        if tuple(row.prompt[:3]) == BAD_PROMPT:
            return torch.full((self.facts.vocab_size,), float("nan"))
        generator = torch.Generator().manual_seed(int.from_bytes(last[:7], "little"))
        logits = torch.randn(self.facts.vocab_size, generator=generator) * 3
        # Letters, so that stop strings are found.
        logits[97:123] += 4
        return logits
