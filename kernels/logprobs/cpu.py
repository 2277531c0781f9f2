"""Log-probabilities with torch's operators: for the CPU, and for a GPU whose kernel does not work.

On the CPU torch computes each row alone; on a GPU it chooses by the number of rows.
"""

from torch import Tensor


def logprobs_cpu(logits: Tensor, token_ids: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sluice.kernels.logprobs.logprobs`; among equal logits the order is torch's."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)  # [A, 1]
    top = (logits - normaliser).topk(count, dim=-1)
    return logits.gather(1, token_ids[:, None]) - normaliser, top.values, top.indices
