"""Cases of `benchmarks disciplines` in virtual time, each with the published figure that it should reproduce.

Every case takes `size`: 1 gives the figures of docs/lab/disciplines.md, less is for quick runs and tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.disciplines.arrivals import constant, geometric, merged, poisson, uniform
from benchmarks.disciplines.capacity import largest_rate
from benchmarks.disciplines.figures import Simulation, percentile, summarise
from benchmarks.disciplines.runs import (
    LOOSE,
    CaseResult,
    Claim,
    Machine,
    Row,
    row,
    simulated,
    times,
)
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.worker.tune.figures import Target
from sluice.worker.tune.replay import Arrival

ORDER = tuple(reversed(DISCIPLINE_NAMES))
"""From the oldest to the newest."""


def one_every_50_ms(size: float) -> CaseResult:
    """Compare 20, 50 and 100 requests 0.05 s apart; a batch of 8 takes 0.5 s, an iteration 0.035 s (14 tokens)."""
    del size  # number of arrivals as in the source
    machine = Machine(step_time=StepTime(fixed_s=0.035), max_num_seqs=8)
    roomy = Machine(step_time=StepTime(fixed_s=0.035), max_num_seqs=256)
    rows: list[Row] = []
    claims: list[Claim] = []
    for count, published, predicted in ((20, "26x", "24x"), (50, "28x", "29x"), (100, "31x", "38x")):
        arrivals = [Arrival(at_s=0.05 * n, num_prompt_tokens=16, num_output_tokens=14) for n in range(count)]
        replays = {name: simulated(name, machine, arrivals) for name in ORDER}
        rows += [row(f"{count}: {name}", replays[name]) for name in ORDER]
        free = row(f"{count}: continuous, no limit", simulated("continuous", roomy, arrivals))
        rows.append(free)
        # A server that answers with the whole batch shows its first token only when the last exists.
        whole_s = rows[-1 - len(ORDER)].figures.e2e_mean_s
        same_s = row("", replays["continuous"]).figures.ttft_mean_s
        measured = (
            f"{times(whole_s, 0.035)}; {times(whole_s, free.figures.ttft_mean_s)}; {times(whole_s, same_s)} "
            "(against one iteration; without a limit of sequences; with the same limit)"
        )
        claims.append(
            Claim(what=f"mean TTFT, {count} requests", published=published, predicted=predicted, measured=measured)
        )
    return CaseResult(
        name="arrivals", setting="a step takes 35 ms whatever is in it; 8 slots", rows=rows, claims=claims
    )


def poisson_50(size: float) -> CaseResult:
    """Compare throughput and latency for Poisson arrivals at 50 per second, outputs of 512 tokens on average."""
    machine = Machine(max_model_len=4096)
    arrivals = poisson(50.0, _count(400, size), uniform(16, 256), geometric(512, most=2048))
    rows = [row(name, simulated(name, machine, arrivals)) for name in ORDER]
    static, ours = rows[0].figures, rows[-1].figures
    smaller = [
        row(f"static, {slots} slots", simulated("static", replace(machine, max_num_seqs=slots), arrivals))
        for slots in (8, 32)
    ]
    claims = [
        Claim(
            what="requests served a second in static batches of 8, 32 and 64",
            published="12.3, 38.7, 44.2",
            predicted="-",
            measured=", ".join(f"{one.requests_per_s:.2f}" for one in (*(each.figures for each in smaller), static)),
        ),
        Claim(
            what="slots of the batch that work, static batches of 8, 32 and 64, and continuous",
            published="25 %, 48 %, 31 %, 88 % (of memory)",
            predicted="-",
            measured=", ".join(f"{one.occupancy:.0%}" for one in (*(each.figures for each in smaller), static, ours)),
        ),
        Claim(
            what="requests served a second",
            published="44.2 -> 482 (10.9x)",
            predicted="5x",
            measured=f"{static.requests_per_s:.2f} -> {ours.requests_per_s:.2f} "
            f"({times(ours.requests_per_s, static.requests_per_s)})",
        ),
        Claim(
            what="time per output token, waiting included (E2E over tokens)",
            published="4,890 -> 187 ms (26x)",
            predicted="5x",
            measured=f"{static.normalised_mean_s * 1e3:,.0f} -> {ours.normalised_mean_s * 1e3:,.0f} ms "
            f"({times(static.normalised_mean_s, ours.normalised_mean_s)})",
        ),
    ]
    return CaseResult(
        name="poisson",
        setting="8B-like GPU, 64 slots, prompts 16-256, outputs mean 512",
        rows=[*rows, *smaller],
        claims=claims,
    )


def long_prompts(size: float) -> CaseResult:
    """Measure gaps in chats while prompts of 8,192 tokens arrive."""
    machine = Machine(num_blocks=16384, budget=512)
    seconds = 60.0 * size
    chats = poisson(4.0, _count(240, size), uniform(32, 96), constant(256), seed=1)
    longs = poisson(0.5, max(1, int(seconds / 2)), constant(8192), constant(32), seed=2)
    arrivals = merged(chats, longs)
    replays = {name: simulated(name, machine, arrivals) for name in ORDER}
    rows = [row(name, replays[name]) for name in ORDER]
    wide = Machine(num_blocks=16384, budget=2048)
    rows.append(row("continuous, 2,048", simulated("continuous", wide, arrivals)))
    full = _saturated(size, machine, wide)
    rows += full
    first, ours = summarise(replays["prefill-first"], LOOSE), summarise(replays["continuous"], LOOSE)
    tail = {name: _worst_chat_tpot_s(replays[name]) for name in ("prefill-first", "orca", "continuous")}
    claims = [
        Claim(
            what="the longest gap between two tokens, prompts first -> chunks of 512",
            published="TPOT 4,187 -> 204 ms (20x)",
            predicted="16x",
            measured=f"{first.itl_max_s * 1e3:,.0f} -> {ours.itl_max_s * 1e3:,.0f} ms "
            f"({times(first.itl_max_s, ours.itl_max_s)})",
        ),
        Claim(
            what="P99 TPOT of the chats, prompts first -> chunks of 512",
            published="TPOT 4,187 -> 204 ms (20x)",
            predicted="under 2x",
            measured=f"{tail['prefill-first'] * 1e3:,.0f} -> {tail['continuous'] * 1e3:,.0f} ms "
            f"({times(tail['prefill-first'], tail['continuous'])})",
        ),
        Claim(
            what="tokens a second of a burst, prompts first -> chunks of 512 and of 2,048",
            published="-3 %",
            predicted="0 to -5 %",
            measured=" and ".join(
                f"{one.figures.output_tokens_per_s / full[0].figures.output_tokens_per_s - 1:+.1%}" for one in full[1:]
            ),
        ),
    ]
    return CaseResult(
        name="long-prompts",
        setting="8B-like GPU; 4 chats/s of 64 + 256 tokens, a prompt of 8,192 every 2 s; budget 512",
        rows=rows,
        claims=claims,
    )


def _saturated(size: float, *machines: Machine) -> list[Row]:
    """Send the same mix at once: while slots are free, the arrivals cap the throughput."""
    chats = poisson(1e6, _count(240, size), uniform(32, 96), constant(256), seed=1)
    longs = poisson(1.25e5, _count(30, size), constant(8192), constant(32), seed=2)
    arrivals = merged(chats, longs)
    rows = [row("burst: prefill-first", simulated("prefill-first", machines[0], arrivals))]
    for machine in machines:
        label = f"burst: continuous, {machine.budget:,}"
        rows.append(row(label, simulated("continuous", machine, arrivals)))
    return rows


def _worst_chat_tpot_s(replayed: Simulation) -> float:
    return percentile((one.tpot_s for one in replayed.completed if one.arrival.num_output_tokens == 256), 99)


def equal_memory(size: float) -> CaseResult:
    """Compare disciplines with a burst and a cache of 32,768 tokens, with outputs far shorter than their limits."""
    machine = Machine(num_blocks=2048, max_model_len=2048, max_num_seqs=256)
    arrivals = poisson(1e6, _count(500, size), uniform(50, 450), geometric(200, most=1500), max_tokens=1500)
    rows = [row(name, simulated(name, machine, arrivals)) for name in ORDER]
    by_name = {one.label: one.figures for one in rows}
    ours = by_name["continuous"]
    small = Machine(num_blocks=2048, max_model_len=2048, max_num_seqs=8)
    alone = row("static, batches of 8", simulated("static", small, arrivals)).figures
    claims = [
        Claim(
            what="tokens a second at equal memory, reserved for the longest -> paged",
            published="2-4x",
            predicted="3x",
            measured=f"slots {times(ours.output_tokens_per_s, by_name['slots'].output_tokens_per_s)}, "
            f"orca {times(ours.output_tokens_per_s, by_name['orca'].output_tokens_per_s)}",
        ),
        Claim(what="KV slots held and empty", published="under 4 %", predicted="2 %", measured=f"{ours.kv_waste:.1%}"),
        Claim(
            what="all together: static -> continuous and paged",
            published="14-24x",
            predicted="10x",
            measured=f"{times(ours.output_tokens_per_s, by_name['static'].output_tokens_per_s)}; "
            f"{times(ours.output_tokens_per_s, alone.output_tokens_per_s)} over batches of 8",
        ),
    ]
    rows.insert(1, row("static, 8 slots", simulated("static", small, arrivals)))
    return CaseResult(
        name="memory",
        setting="8B-like GPU, 32,768 tokens of cache, prompts 50-450, outputs mean 200 of at most 1,500",
        rows=rows,
        claims=claims,
    )


def utilisation(size: float) -> CaseResult:
    """Measure batch slot utilisation with a queue that is never empty."""
    machine = Machine(num_blocks=65536, max_model_len=4096, max_num_seqs=32)
    arrivals = poisson(1e6, _count(640, size), uniform(16, 256), geometric(128, most=1024))
    rows = [row(name, simulated(name, machine, arrivals)) for name in ORDER]
    static, ours = rows[0].figures, rows[-1].figures
    tokens = Claim(
        what="tokens a second",
        published="1,000 -> 3,000-5,000",
        predicted="-",
        measured=f"{static.output_tokens_per_s:,.0f} -> {ours.output_tokens_per_s:,.0f} "
        f"({times(ours.output_tokens_per_s, static.output_tokens_per_s)})",
    )
    claim = Claim(
        what="slots of the batch that work",
        published="25 % -> 85-95 %",
        predicted="25 % (1/H(32)) -> 95 %",
        measured=f"{static.utilisation:.0%} -> {ours.utilisation:.0%}",
    )
    return CaseResult(
        name="utilisation",
        setting="8B-like GPU, 32 slots, a burst, outputs mean 128",
        rows=rows,
        claims=[tokens, claim],
    )


CHAT = Machine(num_blocks=16384, max_model_len=8192, budget=512)
SMOOTH = Target(ttft_s=1.0, tpot_s=0.025)


def _chat(rate: float, size: float) -> list[Arrival]:
    """Generate forty seconds of chats: long enough to see a queue grow."""
    count = max(40, round(rate * 40 * size))
    return poisson(rate, count, geometric(800, most=4000), geometric(150, most=1000), max_tokens=1000)


def capacity(size: float) -> CaseResult:
    """Find the largest rate with P99 time between tokens <= 50 ms and P99 scheduling delay <= 2 s."""

    def holds(discipline: str, rate: float) -> bool:
        figures = summarise(simulated(discipline, CHAT, _chat(rate, size)), LOOSE)
        return figures.itl_p99_s <= 0.05 and figures.queue_p99_s <= 2.0

    rates = {name: largest_rate(partial(holds, name), low=0.1, high=30.0) for name in ORDER}
    ours = rates["continuous"]
    rest = {name: rate for name, rate in rates.items() if name != "continuous"}
    return CaseResult(
        name="capacity",
        setting="8B-like GPU, 64 slots, prompts mean 800, outputs mean 150 of at most 1,000; budget 512",
        claims=[
            Claim(
                what=f"largest rate, {name} -> continuous",
                published="2.6x (Sarathi-Serve, Mistral 7B)" if name == "prefill-first" else "-",
                predicted={"prefill-first": "2-3x", "orca": "2-3x"}.get(name, "-"),
                measured=f"{rate:.2f} -> {ours:.2f} req/s ({times(ours, rate)})",
            )
            for name, rate in rest.items()
        ],
    )


def goodput(size: float) -> CaseResult:
    """Count requests per second that met TTFT <= 1 s and TPOT <= 25 ms, at rising rates."""
    rates = (0.5, 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24)
    best = {
        name: max(summarise(simulated(name, CHAT, _chat(rate, size)), SMOOTH).goodput_per_s for rate in rates)
        for name in ORDER
    }
    return CaseResult(
        name="goodput",
        setting="8B-like GPU, as in capacity; TTFT <= 1 s and TPOT <= 25 ms",
        claims=[
            Claim(
                what=f"best goodput, {name} -> continuous",
                published="-",
                predicted="-",
                measured=f"{best[name]:.1f} -> {best['continuous']:.1f} req/s",
            )
            for name in ORDER[:-1]
        ],
    )


def _count(full: int, size: float) -> int:
    return max(8, round(full * size))


CASES: dict[str, Callable[[float], CaseResult]] = {
    "arrivals": one_every_50_ms,
    "poisson": poisson_50,
    "long-prompts": long_prompts,
    "utilisation": utilisation,
    "memory": equal_memory,
    "capacity": capacity,
    "goodput": goodput,
}
