"""The process that forks workers, from its own side; `processes.prepared` is the parent's."""

import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from sluice.engine.execution.threads import limit_spinning
from sluice.worker.processes.prepared import MAX_REQUEST_BYTES, NO_WORKER, READY
from sluice.worker.signals import STARTUP_SIGNALS

LOADED = ("sluice.worker.serve.start", "sluice.engine.execution.start.model_loading", "sluice.engine.text.tokenizer")
"""Modules that import all others that a worker on the CPU needs."""

NAME = "sluice-worker"
"""The name of a forked worker in lists of processes."""

Run = Callable[[Sequence[str]], None]


def serve_forks(run: Run) -> None:
    """Import what a worker needs; then fork a worker for each request that comes in standard input, until it ends.

    Returns in this process at the end of its input. In each worker `run` is called with the arguments of its command.
    """
    _import_all()
    # Existing objects are never collected, so that no collection copies their pages into a worker.
    gc.freeze()
    requests = socket.socket(fileno=os.dup(0))
    requests.send(READY)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 1)
        if not request:
            return
        arguments, environ, cores = json.loads(request)
        [stdin] = descriptors
        pid = _fork_twice()
        if pid == 0:
            requests.close()
            _become(stdin, environ, cores)
            run(arguments)
            return
        os.close(stdin)
        requests.send(str(pid).encode())


def _import_all() -> None:
    limit_spinning()
    for name in LOADED:
        import_module(name)


def _fork_twice() -> int:
    """Return 0 in the worker, and its process id here, or `NO_WORKER`. The process between them has ended."""
    mine, theirs = os.pipe()
    try:
        between = os.fork()
    except OSError:
        _close(mine, theirs)
        return NO_WORKER
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            pid = NO_WORKER
        if pid == 0:
            _close(mine, theirs)
            return 0
        os.write(theirs, str(pid).encode())
        os._exit(0)
    os.close(theirs)
    with open(mine, "rb") as answer:
        pid = int(answer.read() or NO_WORKER)
    os.waitpid(between, 0)
    return pid


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _become(stdin: int, environ: dict[str, str], cores: Sequence[int]) -> None:
    """Make this fork a process as one that the parent has started: session, input, environment, cores, signals."""
    import torch

    os.setsid()
    # It has the command line of the process that forked it; `ps -o comm` distinguishes the two.
    Path("/proc/self/comm").write_text(NAME)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.environ.clear()
    os.environ.update(environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, STARTUP_SIGNALS)
    if cores:
        os.sched_setaffinity(0, cores)
    # As torch does when it is loaded.
    stated = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch.set_num_threads(int(stated) if stated.isdigit() and int(stated) else len(os.sched_getaffinity(0)))
