"""Run one benchmark: `python -m benchmarks NAME [OPTIONS]`. Without a name, list them."""

import sys
from importlib import import_module

BENCHMARKS = {
    "adapters": ("engine.adapters", "what adapters cost a step, on this CPU"),
    "calls": ("queue.calls", "how long each script holds the server at most, on a crowded queue"),
    "chains": ("queue.chains", "what jobs that wait for others cost the queue"),
    "disciplines": ("disciplines.run", "batching disciplines compared with published figures"),
    "engine": ("engine.run", "the bare engine compared with its bound, on this CPU"),
    "engines": ("engine.peers", "the service and the bare engine compared with other engines, on this CPU"),
    "features": ("engine.features", "what each option of a job costs, on this CPU"),
    "gate": ("gate", "compare with the recorded figures; fails if something became slower"),
    "gateway": ("gateway.run", "what the HTTP gateway adds to a token's way and cost"),
    "grammars": ("engine.grammars", "what grammars cost a step, on this CPU"),
    "gpu": ("gpu.run", "all GPU measurements"),
    "instructions": ("queue.instructions", "instructions of the queue's server for each job, by callgrind"),
    "places": ("service.places", "for how many steps a place that a job leaves stays empty"),
    "quality": ("quality.run", "a real model's distributions in each form of quantized weights, on this CPU"),
    "queue": ("queue.peers", "the queue compared with other queues"),
    "schemas": ("schemas.run", "JSON schemas of others: compiled, valid, beside another decoder"),
    "service": ("service.run", "the service compared with the bare engine"),
    "turns": ("turns.run", "models that take turns on one device: policies on a day of arrivals, in virtual time"),
    "tools": ("tools.run", "calls of functions by a real model: valid, right, with and without a grammar"),
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
