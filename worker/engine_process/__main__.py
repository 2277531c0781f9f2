"""The process of an engine: `python -m sluice.worker.engine_process SOCKET PARENT RELEASE`.

`process.py` alone starts it. It binds itself to the worker before it imports anything that takes time.
"""

import os
import signal
import sys

from sluice.worker.signals import STARTUP_SIGNALS, end_with_parent

# They are for the worker; a supervisor may signal all processes of its group.
FOR_THE_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *STARTUP_SIGNALS)


def main() -> None:
    """Bind this process to the worker, and run the engine."""
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):
        return  # the worker ended before that
    for number in FOR_THE_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTUP_SIGNALS)
    from sluice.worker.engine_process.child import run

    run(int(sys.argv[1]), release=sys.argv[3])


if __name__ == "__main__":
    main()
