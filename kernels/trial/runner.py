"""The parent's side of a trial: gives the cases of all operations to several processes, and judges their answers.

A process that fails, hangs or is killed counts against the operation of its case; another takes the other cases.
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from threading import Lock
from typing import NamedTuple, cast

import torch

from sluice.kernels.chain import OPERATIONS
from sluice.kernels.trial.cases import cases_of
from sluice.kernels.trial.sizes import ModelSizes

CASE_LIMIT_S = 60.0
"""Longest time for one case, which may compile a kernel."""

START_LIMIT_S = 120.0
"""Longest time for a process to import torch and to open the device."""

_COMMAND = (sys.executable, "-m", "sluice.kernels.trial")


class Task(NamedTuple):
    """One case."""

    operation: str
    number: int


@dataclass(slots=True, eq=False)
class Verdict:
    """Outcome of a trial; grows while it runs."""

    problems: dict[str, str] = field(default_factory=dict[str, str])
    """By operation that must not be used: why."""

    untried: dict[str, str] = field(default_factory=dict[str, str])
    """By operation that could not be tried completely: why. This does not disqualify its kernels."""

    num_cases: int = 0
    """Cases that ended well."""


class _Died(Exception):
    """The process ended without an answer."""


class _Process:
    """A process that tries cases, one at a time."""

    def __init__(self, command: Sequence[str], sizes: ModelSizes, device: str) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # One thread each: they share the cores with each other and with the loading of weights.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        try:
            self.ask({"sizes": asdict(sizes), "device": device}, START_LIMIT_S)
        except _Died:
            self.close()
            raise

    def ask(self, request: object, limit_s: float) -> dict[str, str]:
        """Send a request and return the answer.

        Raises:
            _Died: there is none in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it has ended: the answer is empty
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        if not wait([self._process.stdout.fileno()], limit_s):
            self._process.kill()
            raise _Died(f"no answer within {limit_s:g} s")
        if line := self._process.stdout.readline():
            return cast("dict[str, str]", json.loads(line))
        raise _Died(f"its process ended with code {self._process.wait()}")

    def kill(self) -> None:
        """End the process; an answer that is waited for does not come."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and wait until its memory is free."""
        self._process.kill()
        self._process.communicate()


class KernelTrial:
    """A trial of all operations of a model on one device."""

    def __init__(
        self, sizes: ModelSizes, device: str, tasks: Sequence[Task], *, command: Sequence[str] = _COMMAND
    ) -> None:
        self._sizes = sizes
        self._device = device
        self._tasks = deque(tasks)
        self._command = command
        self._lock = Lock()
        self._verdict = Verdict()
        self._alive: set[_Process] = set()

    @property
    def num_waiting(self) -> int:
        """Cases that no process has begun."""
        return len(self._tasks)

    def stop(self) -> None:
        """Let `run` return soon: end its processes, and try nothing more. For another thread."""
        with self._lock:
            self._tasks.clear()
            for process in self._alive:
                process.kill()

    def run(self, num_processes: int) -> Verdict:
        """Try all cases in up to `num_processes` processes, which have ended when this returns."""
        with ThreadPoolExecutor(num_processes, thread_name_prefix="trial") as threads:
            for running in [threads.submit(self._work) for _ in range(min(num_processes, len(self._tasks)))]:
                running.result()
        for task in self._tasks:
            self._verdict.untried.setdefault(task.operation, "no process could open the device")
        return self._verdict

    def _work(self) -> None:
        """Try cases until none is left, in one process after another."""
        while self._tasks:
            try:
                process = _Process(self._command, self._sizes, self._device)
            except (_Died, OSError):
                # Another thread's may work; untried cases are reported.
                return
            with self._lock:
                self._alive.add(process)
            try:
                self._try_until_one_dies(process)
            finally:
                with self._lock:
                    self._alive.remove(process)
                process.close()

    def _try_until_one_dies(self, process: _Process) -> None:
        while (task := self._next()) is not None:
            try:
                answer = process.ask(list(task), CASE_LIMIT_S)
            except _Died as error:
                self._note(task, {"problem": str(error)})
                return
            self._note(task, answer)
            if "problem" in answer:
                return

    def _next(self) -> Task | None:
        """Take the next case of an operation that has not failed."""
        with self._lock:
            while self._tasks:
                task = self._tasks.popleft()
                if task.operation not in self._verdict.problems:
                    return task
            return None

    def _note(self, task: Task, answer: dict[str, str]) -> None:
        with self._lock:
            if "problem" in answer:
                self._verdict.problems.setdefault(task.operation, answer["problem"])
            elif "untried" in answer:
                self._verdict.untried.setdefault(task.operation, answer["untried"])
            else:
                self._verdict.num_cases += 1


def tasks_of(sizes: ModelSizes, device: str) -> list[Task]:
    """Return all cases, those of operations with many variants first, since they take longest."""
    num_cases = {operation: len(cases_of(operation, sizes, torch.device(device))) for operation in OPERATIONS}
    ordered = sorted(num_cases, key=lambda operation: -num_cases[operation])
    return [Task(operation, number) for operation in ordered for number in range(num_cases[operation])]
