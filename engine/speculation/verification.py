"""Verification of drafts: which of the tokens that a step sampled are those that it would have without drafts.

A step samples a token after the last known one of a sequence, and after each of its drafts. A token is sampled with the
noise of its position, so it is a function of the tokens before it: it holds if the drafts before it are right. So the
tokens are those of a run without drafts, greedy or not. Speculative decoding by rejection sampling (Leviathan et al.,
ICML 2023) keeps only their distribution, and accepts a draft that comes without probabilities as often.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from sluice.engine.batch import Drafts, Sampled, ScheduledRow


def verified_rows(rows: Iterable[ScheduledRow], drafts: Drafts, sampled: Iterable[Sampled]) -> list[Sampled]:
    """Return the tokens that each of `rows` sampled: its own token, then one after each right draft.

    Args:
        rows: all of which sample.
        drafts: of the step.
        sampled: of each row in turn, its own token and one after each of its drafts.
    """
    coming = iter(sampled)
    verified: list[Sampled] = []
    for row in rows:
        guesses = drafts.get(row.sequence_id, ())
        verified.append(_verified(guesses, list(islice(coming, 1 + len(guesses)))))
    return verified


def _verified(guesses: tuple[int, ...], sampled: Sequence[Sampled]) -> Sampled:
    num_right = 0
    for guess, (result, after) in zip(guesses, pairwise(sampled), strict=True):
        # What failed is computed again without drafts, and fails then.
        if result.token_ids != (guess,) or after.error is not None:
            break
        num_right += 1
    if num_right == 0:
        return sampled[0]
    kept = sampled[: 1 + num_right]
    logprobs = [token.logprobs for token in kept if token.logprobs is not None]
    return Sampled(
        tuple(token_id for token in kept for token_id in token.token_ids),
        tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
        prompt=sampled[0].prompt,
    )
