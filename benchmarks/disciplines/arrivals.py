"""Arrivals: times and lengths of requests. The same seed generates the same arrivals."""

from collections.abc import Callable
from random import Random

from sluice.worker.tune.replay import Arrival

Length = Callable[[Random], int]
"""Draws a number of tokens."""


def constant(num_tokens: int) -> Length:
    """Return a constant length."""
    return lambda random: num_tokens


def uniform(low: int, high: int) -> Length:
    """Draw uniformly from `low` to `high`, both included."""
    return lambda random: random.randint(low, high)


def geometric(mean: int, *, most: int) -> Length:
    """Draw from a geometric distribution, cut at `most`: most are short, few are long."""
    return lambda random: min(most, 1 + int(random.expovariate(1 / mean)))


def poisson(
    rate: float, count: int, prompt: Length, output: Length, *, max_tokens: int = 0, seed: int = 0
) -> list[Arrival]:
    """Generate `count` Poisson arrivals at `rate` per second.

    The gaps are scaled so that they take exactly `count / rate` seconds, which gives every seed the same load. An
    infinite rate is a burst.
    """
    random = Random(seed)
    gaps = [random.expovariate(1.0) for _ in range(count)]
    scale = count / rate / sum(gaps)
    at_s = 0.0
    arrivals: list[Arrival] = []
    for gap in gaps:
        arrivals.append(
            Arrival(
                at_s=at_s,
                num_prompt_tokens=prompt(random),
                num_output_tokens=output(random),
                max_tokens=max_tokens,
            )
        )
        at_s += gap * scale
    return arrivals


def merged(*streams: list[Arrival]) -> list[Arrival]:
    """Merge several streams in order of arrival."""
    return sorted((arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.at_s)
