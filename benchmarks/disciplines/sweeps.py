"""One setting of `continuous` at many values: how many sequences run at once, and how long a block is."""

from itertools import pairwise

from benchmarks.disciplines.runs import CaseResult, Claim, Curve, Machine, Row, row, simulated, times
from sluice.engine.simulation.arrivals import geometric, poisson, uniform

_LEAST_GAIN = 1.5
"""Throughput of twice the sequences, up to the knee."""


def concurrency(size: float) -> CaseResult:
    """Measure throughput and latency with 1 to 256 sequences at once, while others wait."""
    rows: list[Row] = []
    counts = [2**power for power in range(9)]
    for count in counts:
        arrivals = poisson(1e6, max(8, round(4 * count * size)), uniform(64, 192), uniform(64, 192))
        rows.append(row(f"{count}", simulated("continuous", Machine(max_num_seqs=count), arrivals)))
    rates = [one.figures.output_tokens_per_s for one in rows]
    points = list(zip((float(count) for count in counts), rates, strict=True))
    return CaseResult(
        name="concurrency",
        setting="8B-like card, a burst, prompts and outputs 64-192; rows are sequences at once",
        rows=rows,
        claims=[knee_of(counts, rows, predicted="64")],
        curves=[Curve(label="continuous", points=points)],
    )


def knee_of(counts: list[int], rows: list[Row], *, predicted: str) -> Claim:
    """Return the number of sequences at once from which twice as many gain little."""
    rates = [one.figures.output_tokens_per_s for one in rows]
    gains = [after / before for before, after in pairwise(rates)]
    knee = next((counts[index] for index, gain in enumerate(gains) if gain < _LEAST_GAIN), counts[-1])
    return Claim(
        what=f"sequences at once from which twice as many gain less than {_LEAST_GAIN}x; the gain before; at last",
        published="linear, then flat",
        predicted=predicted,
        measured=f"{knee}; {times(rates[1], rates[0])}; {times(rates[-1], rates[-2])}",
    )


def fragmentation(size: float) -> CaseResult:
    """Measure slots that are held but empty, for blocks of 1 to 256 tokens, with the same memory."""
    arrivals = poisson(1e6, max(16, round(200 * size)), uniform(50, 450), geometric(200, most=1500), max_tokens=1500)
    rows = [
        row(f"{block_size}", simulated("continuous", _of_blocks(block_size), arrivals))
        for block_size in (1, 8, 16, 32, 64, 128, 256)
    ]
    return CaseResult(
        name="fragmentation",
        setting="8B-like card, 32,768 tokens of cache, prompts 50-450, outputs mean 200; rows are tokens of a block",
        rows=rows,
    )


def _of_blocks(block_size: int) -> Machine:
    return Machine(num_blocks=32768 // block_size, block_size=block_size, max_model_len=2048, max_num_seqs=256)
