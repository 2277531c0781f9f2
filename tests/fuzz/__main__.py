"""`make fuzz`: a million inputs through every decoder. Prints its seed; each failing case is small and can be repeated.

python -m tests.fuzz [--count N] [--seed S] [--only TARGET] [--replay TARGET:SEED:NUMBER]
"""

import argparse
import faulthandler
import gc
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS, Target

HANG_S = 10.0
"""One input may take this long; then where it hangs is printed, and the run ends."""

SLOW_S = 1.0
"""Of the processor's time; another program's work is no fault of an input."""

MAX_FAILURES = 5
"""Of one target: then it is left alone."""

MAX_GROWTH_MIB = 16.0
"""Memory may differ by this much between a tenth of the inputs and all of them: what the allocator keeps."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that set off what it must not."""

    case: str
    data: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.case}: {self.what}\n  input: {self.data!r}\n  again: python -m tests.fuzz --replay {self.case}"


def input_of(name: str, seed: str, number: int) -> bytes:
    """The input of a case, made anew."""
    return TARGETS[name].make(random.Random(f"{name}:{seed}:{number}"))


def problem_with(target: Target, data: bytes) -> str | None:
    """What is wrong with how a target takes an input; None: nothing."""
    began_s = time.process_time()
    try:
        target.run(data)
    except target.allowed:
        pass
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"{type(error).__name__}: {str(error)[:200]}"
    took_s = time.process_time() - began_s
    return f"took {took_s:.1f} s" if took_s > SLOW_S else None


def shrunk(target: Target, data: bytes) -> bytes:
    """A smaller input with the same kind of problem: pieces are left out as long as it stays."""
    kind = (problem_with(target, data) or "").partition(":")[0]
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if (problem_with(target, shorter) or "").partition(":")[0] == kind:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def fuzz(name: str, seed: str, numbers: range) -> list[Failure]:
    """Run these inputs through one target."""
    target, failures = TARGETS[name], list[Failure]()
    for number in numbers:
        if number % 256 == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        data = input_of(name, seed, number)
        if problem := problem_with(target, data):
            failures.append(Failure(f"{name}:{seed}:{number}", _small(target, data), problem))
            if len(failures) == MAX_FAILURES:
                break
    faulthandler.cancel_dump_traceback_later()
    return failures


def _small(target: Target, data: bytes) -> bytes:
    faulthandler.cancel_dump_traceback_later()
    return shrunk(target, data)


def memory_mib() -> float:
    """What this process has in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def say(text: str) -> None:
    """A line for the person who watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(names: list[str], seed: str, count: int) -> bool:
    """Run `count` inputs, shared among targets; whether all went well."""
    each = -(-count // len(names))
    failures = [failure for name in names for failure in fuzz(name, seed, range(each // 10))]
    before_mib, began_s = memory_mib(), time.monotonic()
    for name in names:
        found = fuzz(name, seed, range(each // 10, each))
        say(f"{name}: {each} inputs, {len(found)} bad")
        failures += found
    growth_mib = memory_mib() - before_mib
    for failure in failures[:20]:
        say(str(failure))
    took_s = time.monotonic() - began_s
    say(f"seed {seed}: {each * len(names)} inputs, {len(failures)} bad, memory {growth_mib:+.1f} MiB, {took_s:.0f} s")
    return not failures and growth_mib <= MAX_GROWTH_MIB


def replay(case: str) -> bool:
    """Run one case again."""
    name, seed, number = case.split(":")
    data = input_of(name, seed, int(number))
    problem = problem_with(TARGETS[name], data)
    say(str(Failure(case, shrunk(TARGETS[name], data), problem)) if problem else f"{case} is well: {data!r}")
    return problem is None


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", default=f"{random.SystemRandom().getrandbits(32):08x}")
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--replay", metavar="TARGET:SEED:NUMBER")
    arguments = parser.parse_args()
    faulthandler.enable()
    if arguments.replay:
        return 0 if replay(arguments.replay) else 1
    say(f"seed {arguments.seed}")
    names = [arguments.only] if arguments.only else list(TARGETS)
    return 0 if run(names, arguments.seed, arguments.count) else 1


if __name__ == "__main__":
    sys.exit(main())
