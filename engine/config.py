"""How the engine batches. Read nowhere from the environment: whoever builds the engine passes it."""

from dataclasses import dataclass

POLICY_NAMES = ("fcfs", "priority")
"""Who goes first: the names in `engine.policies`."""

DISCIPLINE_NAMES = ("continuous", "prefill-first", "slots", "orca", "dynamic", "static")
"""Ways of batching: the names in `engine.policies.disciplines`."""

WHOLE_PROMPT_DISCIPLINES = frozenset({"prefill-first", "orca", "dynamic", "static"})
"""Those that compute a prompt in one step wherever the step's budget holds it."""

CPU_MEMORY_FRACTION = 0.5
"""Of what is free once the weights are loaded: the share that a model takes unless told otherwise. Here steps are not
measured, and come out of the rest."""

GPU_MEMORY_FRACTION = 0.9
"""The same on a GPU, where the largest step is measured and comes out of the share."""


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

    discipline: str = "continuous"
    """When those waiting join, what they hold, how prompts are cut: a name in `engine.policies.disciplines`."""

    batch_window_s: float = 0.1
    """With the discipline `dynamic`: a batch that is not full begins this long after its first sequence came."""

    max_waiting_tokens: int = 0
    """Prompt tokens that `room` offers beyond the next step's budget. 0: one step's budget."""

    priority_age_step_s: float = 60.0
    """With the policy `priority`: waiting this long is worth one point of priority, so that nothing waits for ever."""

    max_step_retries: int = 2
    """How often a failed step is tried again before its culprit is looked for."""

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each; empty when they can work."""
        checks = [
            (self.max_num_seqs >= 1, f"max_num_seqs must be 1 or more, got {self.max_num_seqs}"),
            (
                self.max_num_batched_tokens >= self.max_num_seqs,
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence computes a token in each step",
            ),
            (
                self.long_prefill_token_threshold >= 0,
                f"long_prefill_token_threshold must be 0 (no limit) or more, got {self.long_prefill_token_threshold}",
            ),
            (
                self.policy in POLICY_NAMES,
                f"policy must be one of {', '.join(POLICY_NAMES)}, got {self.policy!r}",
            ),
            (
                self.discipline in DISCIPLINE_NAMES,
                f"discipline must be one of {', '.join(DISCIPLINE_NAMES)}, got {self.discipline!r}",
            ),
            (
                not (self.long_prefill_token_threshold and self.discipline in WHOLE_PROMPT_DISCIPLINES),
                f"long_prefill_token_threshold must be 0 with the discipline {self.discipline}, which computes prompts "
                f"whole; got {self.long_prefill_token_threshold}",
            ),
            (self.batch_window_s >= 0, f"batch_window_s must be 0 or more, got {self.batch_window_s}"),
            (self.max_waiting_tokens >= 0, f"max_waiting_tokens must be 0 or more, got {self.max_waiting_tokens}"),
            (self.priority_age_step_s > 0, f"priority_age_step_s must be over 0, got {self.priority_age_step_s}"),
            (self.max_step_retries >= 0, f"max_step_retries must be 0 or more, got {self.max_step_retries}"),
        ]
        return [problem for holds, problem in checks if not holds]
