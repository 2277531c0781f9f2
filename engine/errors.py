"""What can go wrong in the engine.

EngineError
├── RequestRejected          the caller's: fails the request, no retry
│   ├── InvalidSamplingParams
│   ├── PromptTooLong
│   ├── PromptEmpty
│   ├── UnknownToken         a token id that the model does not have
│   └── RequestTooLarge      its longest output can never fit the KV cache
├── ModelFolderError         the operator's: the model folder cannot be loaded
├── QuantizationUnavailable  the operator's: its weights cannot be kept as asked
├── NotEnoughMemory          the operator's: the KV cache cannot hold one sequence
├── OutOfMemory              nobody's: the device has no memory for this step now; a smaller one may do
└── EngineBroken             ours: the worker stops and its jobs return to the stream
"""


class EngineError(Exception):
    """Anything the engine raises on purpose."""


class RequestRejected(EngineError):
    """The request cannot run; the message is a sentence for whoever submitted it."""


class InvalidSamplingParams(RequestRejected):
    """A sampling parameter is out of its range."""


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for an answer within the model's context."""


class PromptEmpty(RequestRejected):
    """The prompt has no tokens."""


class UnknownToken(RequestRejected):
    """A token id is outside the model's vocabulary."""


class RequestTooLarge(RequestRejected):
    """Prompt and output together can never fit the KV cache."""


class ModelFolderError(EngineError):
    """The model folder is missing, incomplete, broken or of an unknown family."""


class QuantizationUnavailable(EngineError):
    """The weights of a good folder cannot be kept in the form that was asked for, or not on this machine."""


class NotEnoughMemory(EngineError):
    """The memory allowed for the KV cache does not hold one sequence."""


class OutOfMemory(EngineError):
    """The device, or this machine, had no memory for a step. Nothing of it counts; a smaller one may go well."""


class EngineBroken(EngineError):
    """The engine cannot go on: the process should hand its jobs back and exit."""
