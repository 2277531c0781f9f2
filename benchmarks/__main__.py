"""Run one benchmark: `python -m benchmarks NAME [OPTIONS]`. Without a name, list them."""

import sys
from importlib import import_module

BENCHMARKS = {
    "admission": ("engine.admission", "admission modes under a load that overcommits the cache"),
    "beside": ("service.beside", "processor time of everything but the step, by part"),
    "budgets": ("engine.budgets", "goodput under fixed token budgets of a step, and under a budget of time"),
    "chat": ("engine.chat", "time to first token of a later chat turn"),
    "classes": ("service.classes", "interactive jobs beside a batch: first tokens and throughput"),
    "cpu": ("engine.peers", "the service and the bare engine compared with other engines, on this CPU"),
    "disciplines": ("disciplines.run", "batching disciplines compared with published figures"),
    "durability": ("queue.durability", "cost of each durability level at submit"),
    "engine": ("engine.bare", "the bare engine compared with its bound, on this CPU"),
    "engine-process": ("service.engine_process", "what serving the queue costs a fast step, by where the engine runs"),
    "gate": ("gate", "compare with the recorded figures; fails if something became slower"),
    "gpu": ("gpu.run", "all GPU measurements"),
    "gateway": ("gateway.run", "what the HTTP gateway adds to a token's way and cost"),
    "growth": ("growth.run", "how cost grows with queue, streams, context and history"),
    "history": ("queue.history", "queries on a large history"),
    "neighbours": ("engine.neighbours", "throughput beside busy processes, compared with other engines, on this CPU"),
    "penalties": ("engine.penalties", "what penalties cost a step, and a row on a device that lags"),
    "profile": ("engine.profile", "time per operation of a step, compared with its bound"),
    "quality": ("engine.quality", "quality loss of reduced precision"),
    "queue": ("queue.peers", "the queue compared with other queues"),
    "recorder": ("queue.recorder", "events per second from the outbox into SQL"),
    "scaling": ("scaling.run", "workers that follow the backlog in tokens, compared with the number of jobs"),
    "scheduler": ("engine.scheduler", "Python time per step outside the executor"),
    "scattered": ("kernels.scattered", "attention over scattered block tables, compared with contiguous ones"),
    "speculation": ("engine.speculation", "speculation compared with none, by the kind of text, on this CPU"),
    "service": ("service.run", "the service compared with the bare engine"),
    "start-gpu": ("kernels.start", "seconds until an engine on a GPU is ready, and drills with broken kernels"),
    "takeover": ("service.takeover", "time until another worker has a dead worker's jobs"),
    "trace": ("trace.run", "a trace of a whole worker"),
    "wakeups": ("queue.wakeups", "the server's work for one submit, by number of idle workers"),
    "tune-kernels": ("kernels.tune", "search for kernel configurations on a GPU"),
}


def main() -> None:
    """Run the benchmark named first on the command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print("\n".join(["usage: python -m benchmarks NAME [OPTIONS]", *map(_line, BENCHMARKS)]), file=sys.stderr)
        sys.exit(2)
    name = sys.argv[1]
    # argparse shows the first argument as the program's name.
    sys.argv[:2] = [f"python -m benchmarks {name}"]
    sys.exit(import_module(module_of(name)).main())


def module_of(name: str) -> str:
    """Return the module whose `main` runs the benchmark `name`."""
    return f"benchmarks.{BENCHMARKS[name][0]}"


def _line(name: str) -> str:
    return f"  {name:<14}{BENCHMARKS[name][1]}"


if __name__ == "__main__":
    main()
