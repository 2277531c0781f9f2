"""Errors that the engine raises.

EngineError
├── RequestRejected          the caller must act: the request fails and is not retried
│   ├── PromptTooLong
│   ├── PromptEmpty
│   ├── UnknownToken         a token id outside the model's vocabulary
│   ├── RequestTooLarge      its longest output cannot fit the KV cache
│   ├── OptionRefused        this engine does not implement an option that it states; another may
│   ├── UnknownAdapter       this engine does not have the adapter that it names
│   └── InvalidGrammar       its grammar cannot be compiled, or contradicts its other options
├── ModelFolderError         the operator must act: the model folder cannot be loaded
├── AdapterError             the operator must act: an adapter cannot be used with the model
├── QuantizationUnavailable  the operator must act: the requested quantization is not supported
├── DeterminismUnavailable   the operator must act: this model has no form here that is independent of the batch
├── KernelsUnavailable       the operator must act: a Triton kernel does not work here, and no other may be used
├── NotEnoughMemory          the operator must act: the KV cache cannot hold one sequence
├── OutOfMemory              temporary: the device lacks memory for this step; a smaller one may succeed
└── EngineBroken             fatal: the worker stops and its jobs return to the stream
"""


class EngineError(Exception):
    """Base class of the engine's errors."""


class RequestRejected(EngineError):
    """The request cannot run; the message is a sentence for its producer."""


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for an answer within the model's context."""


class PromptEmpty(RequestRejected):
    """The prompt has no tokens."""


class UnknownToken(RequestRejected):
    """A token id is outside the model's vocabulary."""


class RequestTooLarge(RequestRejected):
    """Prompt and output together cannot fit the KV cache."""


class OptionRefused(RequestRejected):
    """The request states an option that this engine does not implement. Another engine may."""


class UnknownAdapter(RequestRejected):
    """The request names an adapter that this engine does not have."""


class InvalidGrammar(RequestRejected):
    """The grammar cannot be compiled, or contradicts other options."""


class ModelFolderError(EngineError):
    """The model folder is missing, incomplete, corrupt or of an unknown family."""


class AdapterError(EngineError):
    """An adapter is missing, damaged or changed, asks for what is not supported, or is of another model."""


class QuantizationUnavailable(EngineError):
    """The weights cannot be stored in the requested form, or not on this machine."""


class DeterminismUnavailable(EngineError):
    """The model cannot be computed on this device so that no result depends on the batch."""


class KernelsUnavailable(EngineError):
    """A kernel does not work on this machine, and the settings allow no other."""


class NotEnoughMemory(EngineError):
    """The memory allowed for the KV cache does not hold one sequence."""


class OutOfMemory(EngineError):
    """The device or host lacked memory for a step. The step has no effect; a smaller one may succeed."""


class EngineBroken(EngineError):
    """The engine cannot continue: the process should return its jobs and exit."""
