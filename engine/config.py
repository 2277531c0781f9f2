"""Batching settings. The engine reads no environment variables: its caller passes these values."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

POLICY_NAMES = ("fcfs", "priority")
"""Names of the scheduling policies in `sluice.engine.scheduling.policies`."""

ADMISSION_NAMES = ("watermark", "guaranteed")
"""Names of the admission modes in `sluice.engine.scheduling.admission`."""

DISCIPLINE_NAMES = ("continuous", "prefill-first", "slots", "orca", "dynamic", "static")
"""Names of the batching disciplines in `sluice.engine.scheduling.comparison`."""

WHOLE_PROMPT_DISCIPLINES = frozenset({"prefill-first", "orca", "dynamic", "static"})
"""Disciplines that compute a prompt in one step if the step's budget holds it."""

Quantization: TypeAlias = Literal["auto", "none", "int8", "int4"]
"""How weights are kept. auto: packed where a file has groups that the device multiplies, else in the model's dtype.
none: in that dtype. int8, int4: rounded while loading.
"""

CPU_MEMORY_FRACTION = 0.5
"""Default share of the memory that is free after loading the weights, on a CPU. Step memory is not measured there and
comes from the remainder.
"""

CPU_CACHE_BYTES = 4 * 2**30
"""Most memory of the KV cache on a CPU where no share is asked for. Other programs use the same memory, and other
workers count it as free: pages take memory only once they are written, and the prefix cache writes all in time.
"""

GPU_MEMORY_FRACTION = 0.9
"""Default share on a GPU, where the memory of the largest step is measured and taken from the share."""


class StepLimits(NamedTuple):
    """The largest step of a device."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def of_draft_model(self) -> "StepLimits":
        """The largest step of a model that guesses for one with these limits."""
        return StepLimits(self.max_num_seqs, max(self.max_num_seqs, DRAFT_STEP_TOKENS))

    @classmethod
    def of(cls, device: str, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> Self:
        """Return the limits for `device`; one not given is its default, or the most that the other one allows."""
        default = CPU_STEP if device == "cpu" else GPU_STEP
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(default.max_num_batched_tokens, max_num_seqs or 0)
        if max_num_seqs is None:
            max_num_seqs = min(default.max_num_seqs, max_num_batched_tokens)
        return cls(max_num_seqs, max_num_batched_tokens)


CPU_STEP = StepLimits(64, 2048)
"""Default limits of a step on a CPU."""

GPU_STEP = StepLimits(256, 8192)
"""On a GPU: 64 decodes leave its product units idle, and a prompt of 8,192 tokens fits one step."""


DRAFT_STEP_TOKENS = 256
"""Tokens of a step of a draft model: of prompts, and of the sequences that it guesses."""


MIXED_STEP_S = 0.1
"""Default limit of a step with decodes and prompts, where no latency is asked for: a reader takes a gap of a tenth of a
second for steady output.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTargets:
    """How long a step with decodes and prompts may take: by the latency that is wanted, or without one by itself."""

    mixed_step_s: float = MIXED_STEP_S
    """Without a target. Longer only while it takes less than 1.5 times its decodes alone."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def problems(self) -> list[str]:
        """Return one sentence per invalid setting."""
        given = {"mixed_step_s": self.mixed_step_s, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        return [
            f"{name} must be over 0, got {value:g}" for name, value in given.items() if value is not None and value <= 0
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one step and options of the scheduler."""

    max_num_seqs: int = 64
    """Maximum number of running sequences."""

    max_num_batched_tokens: int = 2048
    """Maximum number of tokens computed in one step, prefill and decode together."""

    step_targets: StepTargets | None = None
    """Limits the prompt tokens beside decodes by the time that a step takes. None: `max_num_batched_tokens` alone does.
    Only for the discipline `continuous`.
    """

    long_prefill_token_threshold: int = 0
    """Maximum prompt tokens of one sequence per step while others run. 0: limited only by the budget."""

    enable_prefix_caching: bool = True
    policy: str = "priority"
    """Order of sequences: a name in `sluice.engine.scheduling.policies`. With one class, all are the same."""

    admission: str = "watermark"
    """What a sequence reserves when it joins: a name in `sluice.engine.scheduling.admission`. Only for the discipline
    `continuous`.
    """

    discipline: str = "continuous"
    """When waiting sequences join, how many blocks they reserve and how prompts are split: a name in
    `engine.scheduling.comparison`.
    """

    batch_window_s: float = 0.1
    """For the discipline `dynamic`: seconds after its first sequence arrives at which a partial batch starts."""

    speculation: Literal["off", "suffix"] = "off"
    """suffix: draft a sequence's next tokens from its own text and recent outputs of its salt
    (`sluice.engine.speculation`). Tokens are the same. Only for the discipline `continuous`.
    """

    max_step_retries: int = 2
    """Retries of a failed step before the engine isolates the failing sequence."""

    def problems(self) -> list[str]:
        """Return one sentence per invalid setting; empty if the settings are valid."""
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
                self.admission in ADMISSION_NAMES,
                f"admission must be one of {', '.join(ADMISSION_NAMES)}, got {self.admission!r}",
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
            (
                self.speculation == "off" or self.discipline == "continuous",
                f"speculation must be off with the discipline {self.discipline}, got {self.speculation!r}",
            ),
            (self.batch_window_s >= 0, f"batch_window_s must be 0 or more, got {self.batch_window_s}"),
            (self.max_step_retries >= 0, f"max_step_retries must be 0 or more, got {self.max_step_retries}"),
        ]
        problems = [problem for holds, problem in checks if not holds]
        return problems + (self.step_targets.problems() if self.step_targets is not None else [])
