"""transformers `generate` in static batches of 16, sorted by length, which favours it; bf16, sdpa."""

from collections.abc import Callable

import torch
from serve import Work
from transformers import AutoModelForCausalLM

BATCH = 16


def open_engine(work: Work) -> Callable[[], int]:
    """Load the model."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    ordered = sorted(work.requests, key=lambda request: request[1])
    size = min(BATCH, work.max_num_seqs)
    batches = [ordered[at : at + size] for at in range(0, len(ordered), size)]

    def run() -> int:
        for batch in batches:
            _generate(model, batch)
        return work.num_tokens

    return run


@torch.inference_mode()
def _generate(model: torch.nn.Module, batch: list[tuple[list[int], int]]) -> None:
    longest = max(len(prompt) for prompt, _ in batch)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
    steps = max(count for _, count in batch)
    done = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
    assert done.shape[1] == longest + steps
