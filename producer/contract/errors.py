"""Errors of the contract. `sluice.producer.errors` has those of the client, and these.

ProducerError
├── InvalidJob           caller: the job is wrong; nothing was sent
├── InvalidSetting       caller: a URL, an environment variable or a file is wrong
└── EmbeddedServerError  the embedded server cannot be found, started or stopped
WireError                the sender: bytes or an id cannot be read
"""


class ProducerError(Exception):
    """Base class of the client's errors. The message is a sentence that states what to do."""


class InvalidJob(ProducerError, ValueError):
    """The job is wrong; the message names the value."""


class InvalidSetting(ProducerError, ValueError):
    """A setting is wrong; the message names it."""


class EmbeddedServerError(ProducerError):
    """The embedded server cannot be found, started or stopped."""


class WireError(ValueError):
    """The bytes are not a message of a known version, or exceed a limit."""
