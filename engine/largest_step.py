"""The largest steps that a model may be asked for, to measure the memory that a step takes. Nobody asked for them."""

from engine.batch import Batch, ScheduledSequence
from engine.request import MAX_LOGPROBS, SamplingParams
from engine.sequence import Sequence

LONGEST_CONTEXT = 4096
"""Memory of a step does not grow with contexts beyond this: attention divides longer ones among as many programs."""

_COSTLIEST = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=MAX_LOGPROBS,
)


def largest_batches(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[Batch]:
    """A step of prompts and one of decodes, each as large as a step can be, every row with all that sampling can do.

    All sequences lie in block 0: what they compute is nonsense, and as much as if it were not.
    """  # fmt: skip
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    shares = [max_num_batched_tokens // num_seqs] * num_seqs
    shares[0] += max_num_batched_tokens - sum(shares)
    context = min(max_model_len, LONGEST_CONTEXT)
    prompts = [_scheduled(index, 0, min(share, max_model_len), block_size) for index, share in enumerate(shares)]
    decodes = [_scheduled(num_seqs + index, context - 1, 1, block_size) for index in range(num_seqs)]
    return [Batch(tuple(prompts)), Batch(tuple(decodes))]


def _scheduled(index: int, start: int, num_tokens: int, block_size: int) -> ScheduledSequence:
    length = start + num_tokens
    sequence = Sequence(
        id=-2 - index,
        request_id="",
        choice=0,
        sampling=_COSTLIEST,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        block_table=[0] * -(-length // block_size),
    )
    return ScheduledSequence(sequence, start, num_tokens, True)
