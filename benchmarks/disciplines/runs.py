"""Building blocks of the cases of `benchmarks disciplines`: runs of one discipline, rows of figures, claims."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.disciplines.figures import Figures, Simulation, observe, summarise
from benchmarks.tables import table
from sluice.engine.config import WHOLE_PROMPT_DISCIPLINES, EngineConfig
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.worker.tune.figures import Target
from sluice.worker.tune.replay import Arrival

CARD = StepTime(fixed_s=5e-3, token_s=3e-5, kv_token_s=4.4e-8, pair_s=1.3e-9, row_s=1e-6)
"""Roughly a model of 8 billion parameters on one H100: 5 ms to read the weights, 16 GFLOP per token at 500 TFLOP/s, 128
KiB of keys and values per token at 3 TB/s, 0.5 MFLOP per pair at 400 TFLOP/s.
"""

LOOSE = Target(ttft_s=2.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The simulated machine of a case: a step time, a cache, and the limits of a step."""

    step_time: StepTime = CARD
    num_blocks: int = 8192
    block_size: int = 16
    max_model_len: int = 16384
    max_num_seqs: int = 64
    budget: int = 2048
    """For disciplines that split prompts. Others get a budget that holds their prompts: see `config_for`."""

    @property
    def cache(self) -> NullModelConfig:
        """Its limits, for the simulated executor."""
        return NullModelConfig(num_blocks=self.num_blocks, block_size=self.block_size, max_model_len=self.max_model_len)


def config_for(discipline: str, machine: Machine, arrivals: Iterable[Arrival]) -> EngineConfig:
    """Return the settings under which a discipline behaves as defined.

    A discipline that computes prompts whole gets a budget that holds the longest of them; one that pads them, a budget
    that holds the rectangle. A small budget would split prompts and batches.
    """
    longest = max(arrival.num_prompt_tokens for arrival in arrivals)
    budget = machine.budget
    if discipline in WHOLE_PROMPT_DISCIPLINES:
        is_padded = discipline in ("static", "dynamic")
        rows = machine.max_num_seqs if is_padded else 1
        budget = max(budget, rows * longest + machine.max_num_seqs)
    return EngineConfig(
        discipline=discipline,
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )


def simulated(discipline: str, machine: Machine, arrivals: Sequence[Arrival]) -> Simulation:
    """Replay `arrivals` under one discipline in virtual time."""
    return observe(arrivals, machine.step_time, config_for(discipline, machine, arrivals), machine.cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table."""

    label: str
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published figure, the prediction made before the run, and the measured value."""

    what: str
    published: str
    predicted: str
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Result of a case."""

    name: str
    setting: str
    rows: list[Row] = field(default_factory=list[Row])
    claims: list[Claim] = field(default_factory=list[Claim])


def row(label: str, simulation: Simulation, target: Target = LOOSE) -> Row:
    """Return the figures of a simulation, under a name."""
    return Row(label=label, figures=summarise(simulation, target))


def times(more: float, less: float) -> str:
    """Format the ratio of two numbers."""
    return f"{more / less:.1f}x" if less else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


COLUMNS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("req/s", lambda f: f"{f.requests_per_s:.2f}"),
    ("tokens/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
    ("good/s", lambda f: f"{f.goodput_per_s:.2f}"),
    ("TTFT p50", lambda f: _ms(f.ttft_p50_s)),
    ("p99 ms", lambda f: _ms(f.ttft_p99_s)),
    ("TPOT ms", lambda f: _ms(f.tpot_mean_s)),
    ("ITL p50", lambda f: _ms(f.itl_p50_s)),
    ("p99", lambda f: _ms(f.itl_p99_s)),
    ("max ms", lambda f: _ms(f.itl_max_s)),
    ("queue p50", lambda f: _ms(f.queue_p50_s)),
    ("p99 ms", lambda f: _ms(f.queue_p99_s)),
    ("occup.", lambda f: f"{f.occupancy:.0%}"),
    ("util.", lambda f: f"{f.utilisation:.0%}"),
    ("padding", lambda f: f"{f.padding:.0%}"),
    ("KV held", lambda f: f"{f.kv_use:.0%}"),
    ("wasted", lambda f: f"{f.kv_waste:.1%}"),
    ("preempt.", lambda f: f"{f.num_preemptions}"),
)


def table_of(rows: Sequence[Row]) -> str:
    """Format the rows as text, a column for each figure."""
    heads = ["", *(head for head, _ in COLUMNS)]
    return table([heads, *([row.label, *(text(row.figures) for _, text in COLUMNS)] for row in rows)])
