"""How many threads a step has on the CPU, and how they wait for each other. Imports no torch before it is asked to."""

import os
import sys

from sluice.engine.execution.cgroups import num_usable_cores

SPINS = "5000"
"""0.1 to 0.25 ms: longer than a synchronization in a quiet step, shorter than a scheduler's time slice."""


def limit_spinning() -> bool:
    """Make threads that wait for others in a step spin briefly, then yield their core.

    By default OpenMP's threads spin for milliseconds at each of a step's hundred synchronizations. If another process
    (a server, a recorder) needs the core, the thread being waited for does not run: on two cores with five busy
    processes a step took 240 ms with spinning and 38 ms without. Not spinning at all costs a quiet machine a quarter
    of its speed (docs/lab/service.md). Variables that the operator has set are not changed. A step in one native call
    has its own threads (kernels/team), which wait in the same way and ignore these variables.

    Returns:
        Whether it takes effect: torch, which reads the variables once, is not imported yet.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    return "torch" not in sys.modules


def default_num_threads() -> int:
    """Return torch's number of threads, within the quota of the process's cgroups unless OMP_NUM_THREADS is set.

    torch counts the cores of the affinity only. More threads than the quota use it up early in each period, and all of
    them stand still for the rest.
    """
    import torch

    num_threads = torch.get_num_threads()
    return num_threads if "OMP_NUM_THREADS" in os.environ else min(num_threads, num_usable_cores())
