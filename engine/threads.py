"""How the threads of a step wait for each other on the CPU. Imports no torch: it must come first."""

import os
import sys

SPINS = "5000"
"""A tenth to a quarter of a millisecond: longer than a joint of a quiet step, shorter than a scheduler's slice."""


def limit_spinning() -> bool:
    """Let a thread that waits for the others of its step spin for a moment, then give up its core.

    OpenMP's threads spin by default for milliseconds at each of a step's hundred joints. Where another process (a
    server, a recorder) needs the core, the thread that is waited for is then the one that does not run: on two cores
    with five busy processes a step took 240 ms spinning and 38 ms not. Not to spin at all costs a quiet machine a
    quarter of its speed (docs/performance.md). Nothing is changed that the operator has set. A step in one native call
    has threads of its own (kernels/team), which wait likewise and are not told by these variables.

    Returns:
        Whether it can take effect: torch, which reads it once, is not imported yet.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    return "torch" not in sys.modules
