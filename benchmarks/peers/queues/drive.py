"""Drive a peer in its own environment: `python drive.py PEER enqueue|wake|work ...`; answers in JSON.

A peer's module `with_PEER` has `enqueue(names)` (its fastest bulk submit), `open_single()` (which returns a function
that submits one job now) and `WORK` (the command of one worker process) or `work()`.
"""

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from types import ModuleType

import ledger

Peer = ModuleType
GIVE_UP_S = float(os.environ.get("PEER_GIVE_UP_S", "30"))


def names(count: int, prefix: str) -> list[str]:
    """Return payloads of 16 bytes, all different."""
    return [f"{prefix}{i:0{ledger.NAME_CHARS - len(prefix)}d}" for i in range(count)]


def enqueue(peer: Peer, count: int, prefix: str) -> dict[str, float]:
    """Submit many; return seconds from the first to the last acknowledged, and of processor time."""
    wanted = names(count, prefix)
    began_s, used_s = time.perf_counter(), time.process_time()
    peer.enqueue(wanted)
    return {"seconds": time.perf_counter() - began_s, "processor_s": time.process_time() - used_s}


def wake(peer: Peer, count: int, prefix: str) -> dict[str, dict[str, int]]:
    """Submit one at a time to an idle worker; return when each was submitted.

    Raises:
        TimeoutError: a job did not run.
    """
    submit, submitted_ns = peer.open_single(), dict[str, int]()
    for name in names(count, prefix):
        size = Path(ledger.PATH).stat().st_size
        submitted_ns[name] = time.monotonic_ns()
        submit(name)
        _wait_for_growth(size)
        time.sleep(random.uniform(0.005, 0.02))
    return {"submitted_ns": submitted_ns}


def _wait_for_growth(size: int) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while Path(ledger.PATH).stat().st_size == size:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"a job that was submitted did not run within {GIVE_UP_S:g} s")
        time.sleep(0.001)


def work(peer: Peer) -> None:
    """Become one worker process."""
    if hasattr(peer, "WORK"):
        folder = Path(sys.executable).parent
        os.execv(sys.executable, [sys.executable, str(folder / peer.WORK[0]), *peer.WORK[1:]])
    peer.work()


def main() -> None:
    """Run the command."""
    name, task, *arguments = sys.argv[1:]
    peer = importlib.import_module(f"with_{name}")
    if task == "work":
        work(peer)
        return
    doing = {"enqueue": enqueue, "wake": wake}[task]
    print(json.dumps(doing(peer, int(arguments[0]), arguments[1])))


if __name__ == "__main__":
    main()
