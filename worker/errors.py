"""Errors of the worker, and the exit codes that they map to.

WorkerError
├── ConfigError          settings are wrong; an operator must act (exit 2)
├── NotReady             a server is unreachable; restart later (exit 3)
└── WorkerBroken         the worker failed and handed its jobs back; restart now (exit 1)
    └── ComponentDied    a thread that the loop depends on has ended
JobRejected              one job cannot run; its producer must act
└── JobDeclined          this worker's engine cannot run it; another engine may
"""

from collections.abc import Sequence
from enum import IntEnum

from sluice.protocol.errors import Copyable


class ExitCode(IntEnum):
    """Exit codes of the process, as in docs/reference/errors.md."""

    DONE = 0
    """Stopped on request; all jobs were finished or handed back."""

    BROKEN = 1
    """The worker failed; its jobs return to the queue. Restart now."""

    MISUSED = 2
    """Flags, settings, model folder or schema are wrong. Do not restart."""

    NOT_READY = 3
    """Redis or the database did not answer in time. Restart later."""


class WorkerError(Copyable):
    """Base of the worker's errors. The message is for the operator."""

    exit_code = ExitCode.BROKEN


class ConfigError(WorkerError):
    """Wrong settings; `problems` has one sentence for each."""

    exit_code = ExitCode.MISUSED

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 setting is" if len(self.problems) == 1 else f"{len(self.problems)} settings are"
        super().__init__("\n  ".join([f"{count} wrong:", *self.problems]))


class NotReady(WorkerError):
    """A server that the worker needs is unreachable."""

    exit_code = ExitCode.NOT_READY


class WorkerBroken(WorkerError):
    """The process cannot continue and should be restarted."""


class ComponentDied(WorkerBroken):
    """A thread that the loop depends on ended with an error, which is the cause of this one."""

    def __init__(self, component: str, cause: BaseException) -> None:
        self.component = component
        super().__init__(f"the {component} ended with {type(cause).__name__}: {cause}")
        # Another thread raises this one, so `from` has no place.
        self.__cause__ = cause


INVALID_REQUEST = "invalid_request"
"""Code of a rejection without a more specific one."""


class JobRejected(Copyable):
    """One job cannot run. The message is for its producer."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class JobDeclined(JobRejected):
    """This worker's engine does not have what the job needs. Another engine may."""
