"""Errors of the protocol. `sluice.producer.errors` exports them with the client's.

ProducerError
├── InvalidJob           caller: the job is wrong; nothing was sent
│   ├── InvalidPrompt    the prompt is wrong
│   └── InvalidSchedule  the rule of a schedule is wrong
├── InvalidSetting       caller: a URL, an environment variable or a file is wrong
├── EmbeddedServerError  the embedded server cannot be found, started or stopped
└── HistoryUnavailable   the job history cannot be read
WireError                the sender: bytes or an id cannot be read
"""

from collections.abc import Iterable
from difflib import get_close_matches


class Copyable(Exception):
    """An error that can be pickled and copied, whatever the arguments of its `__init__`.

    By default, exceptions are unpickled by a call with the message alone: if a worker process of `multiprocessing`
    raises one whose `__init__` takes other arguments, its whole pool ends.
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
    """The prompt is empty, too large, or not a prompt."""


class InvalidSchedule(InvalidJob):
    """The schedule is wrong; the message names the value."""


class InvalidSetting(ProducerError, ValueError):
    """A setting is wrong; the message names it."""


class EmbeddedServerError(ProducerError):
    """The embedded server cannot be found, started or stopped."""


class HistoryUnavailable(ProducerError):
    """The job history cannot be read."""


class WireError(ValueError):
    """The bytes are not a message of a known version, or exceed a limit."""


MAX_HINTED_CHARS = 64
"""Longest name to which a suggestion is made: longer ones are not typing errors, and slow to compare."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message that suggests the most similar of these names; empty if none is similar."""
    if len(name) > MAX_HINTED_CHARS:
        return ""
    nearest = get_close_matches(name, sorted(names), n=1)
    return f". Did you mean {nearest[0]!r}?" if nearest else ""
