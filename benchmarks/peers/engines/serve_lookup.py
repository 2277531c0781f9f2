"""Serve a peer's lookup decoding: `python serve_lookup.py PEER WORK.json`; each input line runs all jobs, one by one.

WORK.json has `model` (a folder), `weights` (bf16), `num_guesses` (tokens guessed in a step; 0: no lookup decoding) and
`jobs`: pairs of prompt ids and of the ids that the engine is made to generate, whatever the model computes. No two
jobs have an id in common. Prints `ready`, then for each line the seconds taken and the number of steps.

A peer's module `with_PEER` has `open_engine(work)`, which returns a function that generates one job, greedily and
without a prefix cache, and returns its token ids and the number of steps, with that of the prompt.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve import serve

Generate = Callable[[list[int], list[int]], tuple[list[int], int]]
"""From a job's prompt and output to what was generated and the number of steps."""


@dataclass(frozen=True)
class LookupWork:
    """The model, the number of guesses and the jobs."""

    model: str
    weights: str
    num_guesses: int
    jobs: list[tuple[list[int], list[int]]]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest job, with a step's guesses that go beyond its end."""
        return max(len(prompt) + len(output) for prompt, output in self.jobs) + self.num_guesses + 1


def run(name: str, generate: Generate, work: LookupWork) -> str:
    """Generate all jobs; return seconds and steps."""
    began_s = time.perf_counter()
    done = [generate(prompt, output) for prompt, output in work.jobs]
    took_s = time.perf_counter() - began_s
    if [token_ids for token_ids, _ in done] != [output for _, output in work.jobs]:
        raise SystemExit(f"{name} did not generate the given outputs")
    return f"{took_s} {sum(num_steps for _, num_steps in done)}"


def main() -> None:
    """Serve a peer's lookup decoding."""
    name, path = sys.argv[1:]
    work = LookupWork(**json.loads(Path(path).read_text()))

    def open_answer() -> Callable[[], str]:
        generate = importlib.import_module(f"with_{name}").open_engine(work)
        return lambda: run(name, generate, work)

    serve(open_answer)


if __name__ == "__main__":
    main()
