"""Draw tokens in a worker of vLLM by our own sampler, so that they depend on the sequence alone. Knows no vLLM."""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from sluice.engine.batch import Sampled
from sluice.engine.execution.sampling.sampler import Sampler
from sluice.engine.execution.slots import Slot
from sluice.worker.engines.vllm.orders import Draws

NO_TOKEN = -1
"""The token of a row that draws none, and of one without a finite logit."""


class RowSampler:
    """A sampler of the rows of a step."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int], max_rows: int, device: torch.device) -> None:
        self._sampler = Sampler(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_rows=max_rows,
            max_sequences=max_rows,
            device=device,
        )
        self.sampled: dict[str, Sampled] = {}
        """What the step drew, by sequence."""

    def draw(self, logits: Tensor, rows: Items[tuple[str, Slot]], draws: Draws) -> Tensor:
        """Draw from `[R, V]` logits; return `[R, 1]` int32 tokens.

        Args:
            logits: a row per sequence.
            rows: the names of the sequences, and their slots. They get the tokens that are drawn.
            draws: which of them draw, and from what.
        """
        drawing = [row for row, (name, _) in enumerate(rows) if name in draws.sequences]
        token_ids = torch.full((len(rows), 1), NO_TOKEN, dtype=torch.int32, device=logits.device)
        self.sampled = {}
        if not drawing:
            return token_ids
        names, slots = zip(*(rows[row] for row in drawing), strict=True)
        positions = [len(slot.token_ids) - slot.num_prompt_tokens for slot in slots]
        masks = {row: draws.masks[name] for row, name in enumerate(names) if name in draws.masks}
        if len(drawing) < len(rows):
            logits = logits[drawing]
        drawn = self._sampler.sample(logits, self._sampler.prepare(list(slots), positions), masks=masks)
        token_ids[drawing, 0] = drawn.token_ids.to(torch.int32)
        self.sampled = dict(zip(names, drawn.collect(), strict=True))
        for name, slot in zip(names, slots, strict=True):
            slot.token_ids.extend(self.sampled[name].token_ids)
        return token_ids
