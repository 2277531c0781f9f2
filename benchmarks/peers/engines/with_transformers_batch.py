"""transformers `generate_batch` (its continuous batching), bf16, sdpa, paged cache."""

from collections.abc import Callable

import torch
from serve import Work
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig


def open_engine(work: Work) -> Callable[[], int]:
    """Load the model."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=work.max_num_batched_tokens)

    def run() -> int:
        num_tokens, num_done = 0, 0
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            for prompt, count in work.requests:
                manager.add_request(prompt, max_new_tokens=count)
            while num_done < len(work.requests):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise SystemExit("generate_batch stopped without an answer")
                if result.is_finished():
                    num_done += 1
                    num_tokens += len(result.generated_tokens)
        return num_tokens

    return run
