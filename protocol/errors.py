"""Errors of the protocol. `sluice.producer.errors` has those of the client, and these.

ProducerError
├── InvalidJob           caller: the job is wrong; nothing was sent
│   └── InvalidPrompt    it is the prompt
├── InvalidSetting       caller: a URL, an environment variable or a file is wrong
├── EmbeddedServerError  the embedded server cannot be found, started or stopped
└── HistoryUnavailable   the job history cannot be read
WireError                the sender: bytes or an id cannot be read
"""

from collections.abc import Iterable
from difflib import get_close_matches


class Copyable(Exception):
    """An error that pickle and copy make again from its message and attributes, whatever its `__init__` takes.

    Exceptions do so by a call with the message alone: a worker process of `multiprocessing` that raises one whose
    `__init__` takes other arguments ends its whole pool.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), self.args), self.__dict__ or None


def _made_again(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    return kind.__new__(kind, *args)


class ProducerError(Copyable):
    """Base class of the client's errors. The message is a sentence that states what to do."""


class InvalidJob(ProducerError, ValueError):
    """The job is wrong; the message names the value."""


class InvalidPrompt(InvalidJob):
    """The prompt is empty, too large, or none."""


class InvalidSetting(ProducerError, ValueError):
    """A setting is wrong; the message names it."""


class EmbeddedServerError(ProducerError):
    """The embedded server cannot be found, started or stopped."""


class HistoryUnavailable(ProducerError):
    """The job history cannot be read."""


class WireError(ValueError):
    """The bytes are not a message of a known version, or exceed a limit."""


MAX_HINTED_CHARS = 64
"""Longer names are no typing errors, and comparing one of megabytes takes seconds."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the known name nearest to a wrong one, to be added to another, or nothing."""
    if len(name) > MAX_HINTED_CHARS:
        return ""
    nearest = get_close_matches(name, sorted(known), n=1)
    return f". Did you mean {nearest[0]!r}?" if nearest else ""
