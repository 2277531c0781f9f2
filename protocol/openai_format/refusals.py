"""Why a request in OpenAI's format is not a valid job."""

from sluice.protocol.errors import Copyable

MAX_PARAM_CHARS = 100


class RequestRefused(Copyable):
    """A request is not a valid job."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        """Error code: invalid_request, unsupported, unknown_parameter …"""

        self.message = message
        self.param = None if param is None else param[:MAX_PARAM_CHARS].replace("\0", "\ufffd")
        """The client's name of the wrong parameter. It may be the client's own text, made safe for every database."""
