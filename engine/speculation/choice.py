"""The source of drafts that the settings name."""

from collections.abc import Callable

from sluice.engine.config import EngineConfig, StepLimits
from sluice.engine.executor import Executor
from sluice.engine.speculation.model_drafts import ModelDrafts
from sluice.engine.speculation.source import DraftSource, Fallback


def make_source(
    config: EngineConfig, draft_model: Executor | None, vocab_size: int, clock: Callable[[], float]
) -> DraftSource | None:
    """Make the source of guesses; None if there is to be none.

    Args:
        config: of the engine.
        draft_model: guesses where earlier text does not, with the limits of `StepLimits.of_draft_model`.
        vocab_size: of the model whose tokens are guessed.
        clock: seconds, monotonic.
    """
    if config.speculation == "off":
        return None
    # Imported here so that a worker with the null model, which guesses nothing, does without numpy.
    from sluice.engine.speculation.suffix_drafts import SuffixDrafts

    if draft_model is None:
        return SuffixDrafts()
    limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens).of_draft_model
    return Fallback(SuffixDrafts(), ModelDrafts(draft_model, limits, vocab_size=vocab_size, clock=clock))
