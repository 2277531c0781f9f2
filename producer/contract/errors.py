"""Errors of the contract.

ValueError
├── InvalidJob    the caller's: a job asks for something that cannot be sent; nothing was sent
└── WireError     the sender's: bytes or an id cannot be read
"""


class InvalidJob(ValueError):
    """A value of a job is out of range, too large or of the wrong type; the message names it."""


class WireError(ValueError):
    """The bytes are not a message of a known version, or exceed a limit."""
