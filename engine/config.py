"""How the engine batches. Read nowhere from the environment: whoever builds the engine passes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one step, and what the scheduler may do."""

    max_num_seqs: int = 64
    """Most sequences running at once."""

    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step, prompts and decodes together."""

    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one sequence in a step while others run. 0: no limit but the budget."""

    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    """Who goes first among those waiting: a name in `engine.policies`."""

    max_waiting_tokens: int = 0
    """Prompt tokens that `room` offers beyond the next step's budget. 0: one step's budget."""

    max_step_retries: int = 2
    """How often a failed step is tried again before its culprit is looked for."""
