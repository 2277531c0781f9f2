"""What can go wrong in the worker, and what its exit codes tell a supervisor.

WorkerError
├── ConfigError          the operator's: settings are wrong; starting again would not help (exit 2)
├── NotReady             the surroundings': a server is away; start again later (exit 3)
└── WorkerBroken         ours: jobs were handed back; start again now (exit 1)
    └── PartDied         a thread the loop depends on has ended
JobRejected              the producer's: this job cannot run; the others go on
"""

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """How the process ends; documented in docs/operations.md."""

    DONE = 0
    """Asked to stop, and everything was finished or handed back."""

    BROKEN = 1
    """Something broke; its jobs return to the stream. Restart."""

    MISUSED = 2
    """Flags, settings, model folder or schema are wrong. Do not restart: a person must act."""

    NOT_READY = 3
    """Redis or the database did not answer within the patience. Restart later."""


class WorkerError(Exception):
    """Anything the worker raises on purpose; the message is a sentence for the operator."""

    exit_code = ExitCode.BROKEN


class ConfigError(WorkerError):
    """Settings are wrong; `problems` has one sentence each."""

    exit_code = ExitCode.MISUSED

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 setting is" if len(self.problems) == 1 else f"{len(self.problems)} settings are"
        super().__init__("\n  ".join([f"{count} wrong:", *self.problems]))


class NotReady(WorkerError):
    """Something the worker needs is away for now."""

    exit_code = ExitCode.NOT_READY


class WorkerBroken(WorkerError):
    """The process cannot go on and should be started again."""


class PartDied(WorkerBroken):
    """A part that the loop depends on ended with an error."""

    def __init__(self, part: str, cause: BaseException) -> None:
        self.part = part
        super().__init__(f"the {part} ended with {type(cause).__name__}: {cause}")


INVALID_REQUEST = "invalid_request"
"""The code of a rejection that has no more special one."""


class JobRejected(Exception):
    """One job cannot run. The message is a sentence for whoever submitted it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)
