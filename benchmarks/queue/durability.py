"""Cost of each durability level at submit: jobs accepted per second, one after another and in bulk.

    python -m benchmarks durability [--seconds 0.3] [--rounds 10]

Each level has a real server that supports it, on this machine, without a network. `memory` is measured on each kind of
server, since a server that syncs at each write is slower at every level. The cases alternate; printed are the best of
their rounds and the tenth percentile of the submit time, which other work on the machine disturbs least.
"""

import argparse
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from sluice.producer.client import Producer
from tests.chaos.faults.replicated import replicated
from tests.servers import redis_server

PROMPT = "x" * 400


@contextmanager
def alone(*extra: str, is_durable: bool = True) -> Generator[str]:
    """A single server."""
    with redis_server("valkey", is_durable=is_durable, extra=extra) as server:
        yield server.url


@contextmanager
def followed() -> Generator[str]:
    """A primary with one replica, both without files."""
    with replicated() as pair:
        yield pair.primary.url


def one_by_one(producer: Producer, seconds: float) -> list[float]:
    """Return milliseconds of each submit, one after another."""
    until_s, took_ms = time.perf_counter() + seconds, list[float]()
    while (began_s := time.perf_counter()) < until_s:
        producer.submit(PROMPT)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    return took_ms


def in_bulk(producer: Producer, seconds: float) -> float:
    """Return submits per second of `submit_many`."""
    began_s, num_jobs = time.perf_counter(), 0

    def prompts() -> Generator[str]:
        while time.perf_counter() - began_s < seconds:
            yield PROMPT

    for answer in producer.submit_many(prompts()):
        if isinstance(answer, Exception):
            raise answer
        num_jobs += 1
    return num_jobs / (time.perf_counter() - began_s)


Servers = dict[str, str]
"""Kind of server to URL."""

CASES = (
    ("no file", "memory"),
    ("appendfsync everysec", "memory"),
    ("appendfsync everysec", "aof"),
    ("appendfsync always", "memory"),
    ("appendfsync always", "fsync"),
    ("one replica", "memory"),
    ("one replica", "replica:1"),
)


@contextmanager
def servers() -> Generator[Servers]:
    """Start one server of each kind."""
    with ExitStack() as stack:
        yield {
            "no file": stack.enter_context(alone(is_durable=False)),
            "appendfsync everysec": stack.enter_context(alone("--appendfsync", "everysec")),
            "appendfsync always": stack.enter_context(alone("--appendfsync", "always")),
            "one replica": stack.enter_context(followed()),
        }


@dataclass(slots=True, eq=False)
class Measured:
    """Results of one case over all rounds. Mutable."""

    took_ms: list[float] = field(default_factory=list[float])
    singles: list[float] = field(default_factory=list[float])
    bulks: list[float] = field(default_factory=list[float])

    def measure(self, url: str, level: str, seconds: float) -> None:
        """Measure one round."""
        with Producer(url, durability=level) as producer:
            producer.submit(PROMPT)
            took_ms = one_by_one(producer, seconds)
            self.took_ms += took_ms
            self.singles.append(len(took_ms) / sum(took_ms) * 1000)
            self.bulks.append(in_bulk(producer, seconds))

    @property
    def fast_ms(self) -> float:
        """Tenth percentile of the submit time: nearly undisturbed by other work."""
        return sorted(self.took_ms)[len(self.took_ms) // 10]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each run (default 0.3)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of every case (default 10)")
    given = parser.parse_args()
    found = {case: Measured() for case in CASES}
    with servers() as urls:
        for _ in range(given.rounds):
            for (server, level), measured in found.items():
                measured.measure(urls[server], level, given.seconds)
    print(f"{'server':24} {'level':10} {'one by one/s':>12} {'fast, ms':>9} {'in bulk/s':>10}")
    for (server, level), measured in found.items():
        single, bulk = max(measured.singles), max(measured.bulks)
        print(f"{server:24} {level:10} {single:12,.0f} {measured.fast_ms:9.2f} {bulk:10,.0f}")


if __name__ == "__main__":
    main()
