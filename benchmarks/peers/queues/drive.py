"""Drive a peer in its own environment: `python drive.py PEER enqueue COUNT PREFIX` (answers in JSON), or `... work`.

A peer's module `with_PEER` has `enqueue(names)` (its fastest bulk submit) and `WORK` (the command of one worker).
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import ledger


def enqueue(peer: ModuleType, count: int, prefix: str) -> dict[str, float]:
    """Submit many; return seconds from the first to the last acknowledged, and of processor time."""
    names = [f"{prefix}{i:0{ledger.NAME_CHARS - len(prefix)}d}" for i in range(count)]
    began_s, used_s = time.perf_counter(), time.process_time()
    peer.enqueue(names)
    return {"seconds": time.perf_counter() - began_s, "processor_s": time.process_time() - used_s}


def main() -> None:
    """Run the command."""
    name, task, *arguments = sys.argv[1:]
    peer = importlib.import_module(f"with_{name}")
    if task == "work":
        # Become one worker process.
        program, *options = peer.WORK
        os.execv(sys.executable, [sys.executable, str(Path(sys.executable).parent / program), *options])
    print(json.dumps(enqueue(peer, int(arguments[0]), arguments[1])))


if __name__ == "__main__":
    main()
