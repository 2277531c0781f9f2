"""How a model writes calls of tools and its reasoning: as its chat template shows, or as the settings say."""

from sluice.protocol.outputs.formats import HERMES_CALL, MISTRAL_CALLS, PYTHON_TAG, THINK, CallFormat, OutputFormat
from sluice.worker.config import ModelConfig
from sluice.worker.model.chat_template import ChatTemplate

_OF_TEMPLATES: tuple[tuple[str, CallFormat], ...] = (
    # Of two that look alike and are other formats: the XML of Qwen3-Coder, and the later form of Mistral.
    ("<function=", ""),
    ("[ARGS]", ""),
    (HERMES_CALL, "hermes"),
    (MISTRAL_CALLS, "mistral"),
    (PYTHON_TAG, "llama3"),
    ('"parameters": dictionary of argument name and its value', "llama3"),
)
"""What a template with tools contains, and the format in which its model writes calls. The first that is found counts.
"""


def output_format_of(template: ChatTemplate | None, model: ModelConfig) -> OutputFormat:
    """Return how a model marks calls and reasoning."""
    if template is None:
        return OutputFormat()
    calls = _calls_of(template) if model.tool_format == "auto" else model.tool_format
    thinks = THINK in template.source if model.reasoning_format == "auto" else model.reasoning_format == "think"
    return OutputFormat(calls="" if calls == "none" else calls, reasoning="think" if thinks else "")


def _calls_of(template: ChatTemplate) -> CallFormat:
    found: list[CallFormat] = [calls for text, calls in _OF_TEMPLATES if text in template.source]
    return found[0] if found and template.takes_tools else ""


def format_of_answer(known: OutputFormat, prompt: str, *, has_tools: bool) -> OutputFormat:
    """Return the format of the answer to a prompt: of reasoning that the prompt has begun, it lacks the first mark."""
    is_begun = bool(known.reasoning) and prompt.rstrip().endswith(THINK)
    return OutputFormat(calls=known.calls if has_tools else "", reasoning="open_think" if is_begun else known.reasoning)
