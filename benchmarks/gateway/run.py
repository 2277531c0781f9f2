"""Costs of the HTTP gateway: time to the first token, processor time of a token, memory of an open stream.

    python -m benchmarks gateway [--sections first-token,tokens,silent] [--streams 64] [--requests 2000]
                                 [--rounds 3] [--silent 5000] [--realtime]

With the null model at a pace, on this machine, gateway without keys. The client is a process of its own with raw
sockets, and the kernel stamps what arrives, so its cost is in no figure. First token: for each request a second reader
waits on the channel of the same job; printed is the time from one arrival to the other. Tokens: processor time of the
gateway, from /proc. Silent: requests that no worker serves.
"""

import argparse

from benchmarks.gateway.figures import STEP_S, first_token, silent, tokens
from benchmarks.gateway.parts import machine

SECTIONS = ("first-token", "tokens", "silent")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of the first section (default 2000)")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream of the second (default 500)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the first two sections (default 3)")
    parser.add_argument("--silent", type=int, default=5000, help="streams of the last section (default 5000)")
    parser.add_argument("--realtime", action="store_true", help="run in the real-time class (needs root)")
    given = parser.parse_args()
    print(machine(), flush=True)
    sections = given.sections.split(",")
    for _ in range(given.rounds if "first-token" in sections else 0):
        print(first_token(given.streams, given.requests, is_realtime=given.realtime), flush=True)
    for _ in range(given.rounds if "tokens" in sections else 0):
        for round_s in ("0.08", "0"):  # of four steps, and of one
            found = tokens(given.streams, given.tokens, step_s=STEP_S, round_s=round_s, is_realtime=given.realtime)
            print(found, flush=True)
    if "silent" in sections:
        print(silent(given.silent), flush=True)


if __name__ == "__main__":
    main()
