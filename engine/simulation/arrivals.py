"""Requests to come: when, and how long they are. Those that are made are the same for the same seed."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Length = Callable[[Random], int]
"""Draws a number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request to come. It generates what is said here, whatever the model would say."""

    at_s: float
    """After the first moment of the replay."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int = 0
    """What it might have generated, as far as anyone knew before; as many as it does if 0."""


def constant(num_tokens: int) -> Length:
    """Always the same."""
    return lambda random: num_tokens


def uniform(low: int, high: int) -> Length:
    """Any from `low` to `high`, both included, each as likely."""
    return lambda random: random.randint(low, high)


def geometric(mean: int, *, most: int) -> Length:
    """As if each token were the last with the same chance: most are short, few are long. Cut at `most`."""
    return lambda random: min(most, 1 + int(random.expovariate(1 / mean)))


def poisson(
    rate: float, count: int, prompt: Length, output: Length, *, max_tokens: int = 0, seed: int = 0
) -> list[Arrival]:
    """`count` arrivals at `rate` a second, independent of each other.

    The gaps are scaled so that they take exactly `count / rate` seconds: one draw is as heavy as the next. An infinite
    rate is a burst.
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
    """Several streams as one, in the order in which they come."""
    return sorted((arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.at_s)
