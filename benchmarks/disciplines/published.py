"""Published figures that no traffic of the other cases answers: short replays, and sums over what the text states."""

from random import Random
from statistics import mean

from benchmarks.disciplines.runs import CARD, CaseResult, Claim, Machine, Row, row, simulated, times
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.simulation.arrivals import Arrival

ITERATION_S = 0.035
STEADY = StepTime(fixed_s=ITERATION_S)
"""A step of 35 ms, whatever is in it."""

_KV_BYTES_PER_TOKEN_AND_LAYER = 32 * 128 * 2 * 2
"""32 heads of 128 values, keys and values, 2 bytes each: a model of 7 billion parameters, which has 32 layers."""


def published(size: float) -> CaseResult:
    """Answer the figures that a replay of some seconds or a product can answer."""
    rows, claims = _slots_of_100_tokens(size)
    more_rows, more_claims = _three_lengths(size)
    return CaseResult(
        name="published",
        setting="a step takes 35 ms whatever is in it",
        rows=rows + more_rows,
        claims=[
            _script_of_ttft(),
            _first_script(),
            *claims,
            *more_claims,
            *_padding_of_four(),
            _tail_of_four(),
            *_sums(),
        ],
    )


def _script_of_ttft() -> Claim:
    """Evaluate the published formula: a batch of 8 that come 0.05 s apart starts with its first and takes 0.5 s."""
    static_s = sum(0.5 - 0.05 * place for place in range(8)) / 8
    return Claim(
        what="mean TTFT by the published script itself, over one iteration, for 20, 50 and 100 requests alike",
        published="1.04 s, 26x",
        predicted="9x",
        measured=f"{static_s:.3f} s, {times(static_s, ITERATION_S)}",
    )


def _first_script() -> Claim:
    """Evaluate the first script with its misspelt name corrected: batches of 4 of ten requests in 2 s take 0.5 s.

    As written, a batch begins with its first request; as the text says, it waits until it is full, and for the batch
    before.
    """
    random = Random(42)
    arrivals_s = sorted(random.uniform(0, 2) for _ in range(10))
    written: list[float] = []
    waiting: list[float] = []
    ended_s = 0.0
    for batch in (arrivals_s[:4], arrivals_s[4:8]):
        written += [max(0.0, batch[0] + 0.5 - at_s) for at_s in batch]
        begun_s = max(batch[-1], ended_s)
        ended_s = begun_s + 0.5
        waiting += [ended_s - at_s for at_s in batch]
    return Claim(
        what="mean TTFT of the first script, which raises NameError: corrected; with batches that wait until full",
        published="1.04 s",
        predicted="-",
        measured=f"{mean(written):.2f} s; {mean(waiting):.2f} s (8 of 10 requests: two never start)",
    )


def _slots_of_100_tokens(size: float) -> tuple[list[Row], list[Claim]]:
    """Send a burst of outputs of 100 tokens to batches of 8, and to 64 slots."""
    arrivals = _burst([100], max(64, round(640 * size)))
    eight = row("100 tokens: static, 8", simulated("static", Machine(step_time=STEADY, max_num_seqs=8), arrivals))
    ours = row("100 tokens: continuous, 64", simulated("continuous", _roomy(64), arrivals))
    before, after = eight.figures.requests_per_s, ours.figures.requests_per_s
    claim = Claim(
        what="requests a second, batches of 8 -> 64 slots, 100 tokens each",
        published="0.29 -> 100 (345x)",
        predicted="2.3 -> 18 (8x)",
        measured=f"{before:.2f} -> {after:.2f} ({times(after, before)})",
    )
    return [eight, ours], [claim]


def _three_lengths(size: float) -> tuple[list[Row], list[Claim]]:
    """Send a burst of outputs of 50, 100 and 200 tokens, in turn, to three slots."""
    arrivals = _burst([50, 100, 200], max(30, round(300 * size)))
    rows = [
        row(f"50, 100, 200: {name}", simulated(name, Machine(step_time=STEADY, max_num_seqs=3), arrivals))
        for name in ("static", "continuous")
    ]
    before, after = (one.figures.requests_per_s for one in rows)
    claim = Claim(
        what="requests a second, outputs of 50, 100 and 200 tokens",
        published="100 -> 300 (3x)",
        predicted="1.7x (200 over the mean)",
        measured=f"{before:.2f} -> {after:.2f} ({times(after, before)})",
    )
    return rows, [claim]


def _tail_of_four() -> Claim:
    """Generate outputs of 5, 120, 500 and 2,000 tokens at once, at 6 ms a step."""
    arrivals = [Arrival(at_s=0.0, num_prompt_tokens=16, num_output_tokens=tokens) for tokens in (5, 120, 500, 2000)]
    machine = Machine(step_time=StepTime(fixed_s=0.006), max_num_seqs=4)
    ends_s = {name: row("", simulated(name, machine, arrivals)).figures for name in ("static", "continuous")}
    return Claim(
        what="four outputs of 5 to 2,000 tokens, each sent as it is generated: mean end, static and continuous",
        published="0.05 to 12 s, all 12 s",
        predicted="equal",
        measured=" and ".join(f"{one.e2e_mean_s:.2f} s" for one in ends_s.values()),
    )


def _padding_of_four() -> list[Claim]:
    arrivals = [Arrival(at_s=0.0, num_prompt_tokens=tokens, num_output_tokens=1) for tokens in (2, 6, 18, 25)]
    figures = row("", simulated("static", Machine(step_time=STEADY, max_num_seqs=4), arrivals)).figures
    return [
        Claim(
            what="padding of four prompts of 2, 6, 18 and 25 tokens",
            published="49 %",
            predicted="49 %",
            measured=f"{figures.padding:.0%}",
        ),
        Claim(what="the same, of the first row", published="92 %", predicted="92 %", measured=f"{(25 - 2) / 25:.0%}"),
    ]


def _sums() -> list[Claim]:
    tokens_per_s = 53.2 / 0.187
    layer_bytes = 32768 * 16 * _KV_BYTES_PER_TOKEN_AND_LAYER
    cache_bytes = 32 * layer_bytes
    memory_bytes_per_s = 3e12
    row_bytes = 1024 * 40 * 5120 * 2 * 2
    free_bytes = 48e9 * 0.9 - 26e9
    return [
        Claim(
            what="requests a second of 53.2 rows at 187 ms a token, 512 tokens each",
            published="482",
            predicted="-",
            measured=f"{tokens_per_s / 512:.2f} ({tokens_per_s:.0f} tokens/s)",
        ),
        Claim(
            what="moving 32,768 blocks of 16 tokens: GB in one layer and in 32; ms to read and write them at 3 TB/s",
            published="8.5 GB, 10 ms",
            predicted="-",
            measured=f"{layer_bytes / 1e9:.1f} -> {cache_bytes / 1e9:.0f} GB; "
            f"{2 * cache_bytes / memory_bytes_per_s * 1e3:.0f} ms",
        ),
        Claim(
            what="compaction of 10 ms every 1,000 steps of 187 ms, and at 183 ms: share of the time",
            published="0.001 %",
            predicted="-",
            measured=f"{0.010 / 187:.3%}, {2 * cache_bytes / memory_bytes_per_s / 187:.2%}",
        ),
        Claim(
            what="a prompt of 4,096 tokens in chunks of 512 at the published 0.5 ms",
            published="4 s",
            predicted="-",
            measured=f"{4096 // 512 * 0.5:.0f} ms",
        ),
        Claim(
            what="sequences of 1,024 tokens beside a model of 13 billion parameters in 90 % of 48 GB",
            published="18",
            predicted="-",
            measured=f"{int(free_bytes // row_bytes)}",
        ),
        Claim(
            what="rows at which the products of a decode take as long as reading the weights",
            published="256",
            predicted="-",
            measured=f"{CARD.fixed_s / CARD.token_s:.0f}",
        ),
    ]


def _roomy(max_num_seqs: int) -> Machine:
    return Machine(step_time=STEADY, max_num_seqs=max_num_seqs)


def _burst(lengths: list[int], count: int) -> list[Arrival]:
    return [
        Arrival(at_s=0.0, num_prompt_tokens=16, num_output_tokens=lengths[number % len(lengths)])
        for number in range(count)
    ]
