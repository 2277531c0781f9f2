"""Serve a peer's engine: `python serve.py PEER WORK.json`; each input line runs all requests once.

WORK.json has `model` (a folder), `weights` (bf16 or int8), `max_num_seqs`, `max_num_batched_tokens`, and `requests`:
pairs of prompt ids and the number of tokens to generate, greedily and ignoring end-of-sequence. Prints `ready`, then
the seconds taken for each line.

A peer's module `with_PEER` has `open_engine(work)`, which returns a function that generates all requests and returns
the number of generated tokens.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Work:
    """The model, its settings and the requests."""

    model: str
    weights: str
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: list[tuple[list[int], int]]

    @property
    def num_tokens(self) -> int:
        """Tokens to generate."""
        return sum(count for _, count in self.requests)


def main() -> None:
    """Serve a peer's engine: `ready` once it is loaded, then the seconds of a run for each line of input.

    Raises:
        SystemExit: it generated fewer tokens, or more.
    """
    name, path = sys.argv[1:]
    work = Work(**json.loads(Path(path).read_text()))
    # Output of an engine goes to stderr; answers go to the original stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = importlib.import_module(f"with_{name}").open_engine(work)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        num_tokens = run()
        took_s = time.perf_counter() - began_s
        if num_tokens != work.num_tokens:
            raise SystemExit(f"{name} generated {num_tokens} tokens instead of {work.num_tokens}")
        print(took_s, file=answers, flush=True)


if __name__ == "__main__":
    main()
