"""Changes of one sequence's logits: biases, bans and penalties, each token once. Knows no tensors."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.engine.execution.slots import Slot
from sluice.kernels.penalties import NO_BIAS


@dataclass(slots=True, eq=False)
class TokenEdits:
    """Tokens of one sequence whose logits change, with their changes. Grows with the tokens seen."""

    index: dict[int, int] = field(default_factory=dict[int, int])
    # Arrays, since each step reads all of them: of int32 and float32.
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    biases: "array[float]" = field(default_factory=lambda: array("f"))
    early_biases: "array[float]" = field(default_factory=lambda: array("f"))
    """Biases while the output is shorter than `min_tokens`: tokens that would end it are banned."""

    repetition: "array[float]" = field(default_factory=lambda: array("f"))
    """1 until the token is seen."""

    counts: "array[float]" = field(default_factory=lambda: array("f"))
    """Occurrences in the output."""

    num_counted: int = 0

    def entry(self, token: int) -> int:
        """Return the index of `token`, adding it without changes if it is new."""
        at = self.index.setdefault(token, len(self.token_ids))
        if at == len(self.token_ids):
            self.token_ids.append(token)
            self.biases.append(NO_BIAS)
            self.early_biases.append(NO_BIAS)
            self.repetition.append(1.0)
            self.counts.append(0.0)
        return at

    def see(self, slot: Slot, end: int) -> None:
        """Count the tokens of `slot` before `end` that were not counted yet."""
        for position in range(self.num_counted, end):
            at = self.entry(slot.token_ids[position])
            self.counts[at] += position >= slot.num_prompt_tokens
            self.repetition[at] = slot.sampling.repetition_penalty
        self.num_counted = max(self.num_counted, end)


NO_EDITS = TokenEdits()


def edits_of(slot: Slot, position: int, *, vocab_size: int, eos_token_ids: Iterable[int]) -> TokenEdits:
    """Return the changes for the next token of `slot`, which is at `position` of its output."""
    params = slot.sampling
    if not (params.has_penalties or params.logit_bias or position < params.min_tokens):
        return NO_EDITS
    if slot.edits is None:
        slot.edits = _begin(slot, vocab_size, eos_token_ids)
    if params.has_penalties:
        slot.edits.see(slot, slot.num_prompt_tokens + position)
    return slot.edits


def _begin(slot: Slot, vocab_size: int, eos_token_ids: Iterable[int]) -> TokenEdits:
    """Return the biases and bans of a sequence, built once for all its steps."""
    params = slot.sampling
    endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    bans = dict.fromkeys(endings, -float("inf")) if params.min_tokens else {}
    edits = TokenEdits()
    for token, bias in {**params.logit_bias, **bans}.items():
        if 0 <= token < vocab_size:
            at = edits.entry(token)
            edits.early_biases[at] = bias
            edits.biases[at] = params.logit_bias.get(token, NO_BIAS)
    return edits
