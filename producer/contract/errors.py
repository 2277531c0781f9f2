"""What can be wrong with what a producer asks for.

ValueError
└── InvalidJob           the caller's: nothing was sent
"""


class InvalidJob(ValueError):
    """A job asks for something out of range, too large or of the wrong type; the message names it."""
