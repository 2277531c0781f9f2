"""How published chat templates show the format of calls and reasoning: reduced ones, written anew, with their marks.

Each case names the template whose marks it has, and keeps what that one demands of messages and tools.
"""

from typing import Any, NamedTuple

import pytest

from sluice.protocol.errors import InvalidJob
from sluice.protocol.tools import Function, ToolCall
from sluice.protocol.wire import Message
from sluice.worker.config import ModelConfig, load_config
from sluice.worker.errors import JobRejected
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.output_formats import format_of_answer, output_format_of
from sluice.worker.model.tool_prompts import JobTools, render_chat

QWEN25 = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = QWEN25.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
    """{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is defined %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}""",
) + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
QWEN3_THINKING = QWEN3.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")

HERMES = """
{%- if tools is iterable and tools | length > 0 %}
{%- for tool in tools %}{% set tool = tool.function %}
{{- '{"name": "' + tool.name + '", "description": "' + tool.description + '", "arguments": [' }}
{%- for name, about in tool.parameters.properties | items %}{{ name }}{% endfor %}{{ ']}' }}
{%- endfor %}{{ '<tool_call>\\n{"name": <function-name>, "arguments": <args-dict>}\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not message.name is defined %}{{ raise_exception("it needs the name of its function") }}{% endif %}
{{- '<tool_response>{"name": "' + message.name + '", "content": ' + message.content | tojson + '}</tool_response>' }}
{%- elif message.tool_calls is defined %}
{%- for tool_call in message.tool_calls %}{{ '<tool_call>' + tool_call.function | tojson + '</tool_call>' }}{% endfor %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{{ '<|im_start|>assistant\\n' }}"""

LLAMA32 = """
{%- set system = 'Tools can be called.' if tools is not none else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. ' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{{ system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{ raise_exception("only single tool-calls") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}{{ 'ipython' }}{{ {'output': message.content} | tojson }}
{%- else %}{{ message.role + message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""
LLAMA31 = LLAMA32.replace(
    "{%- set tool_call =", "{%- if builtin_tools is defined %}{{ '<|python_tag|>' }}{% endif %}{% set tool_call ="
)

_MISTRAL = """
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if tools is not none %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined %}CALLS
{%- elif message['role'] == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('IDs should have length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""
_MISTRAL_CALLS = """
{{- '[TOOL_CALLS]SPACE[' }}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.id | length != 9 %}{{ raise_exception('IDs should have length 9!') }}{% endif %}
{{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
{%- endfor %}{{ ']' + eos_token }}"""
MISTRAL_V3, MISTRAL_TEKKEN = (
    _MISTRAL.replace("CALLS\n", _MISTRAL_CALLS.replace("SPACE", space) + "\n", 1) for space in (" ", "")
)
MISTRAL_V7 = MISTRAL_TEKKEN.replace("\n", "{{- '[SYSTEM_PROMPT][/SYSTEM_PROMPT]' }}\n", 1)
MISTRAL_V13 = _MISTRAL.replace(
    "CALLS\n",
    "{% for tool_call in message.tool_calls %}{{ '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' }}"
    "{{ tool_call.function.arguments | tojson }}{% endfor %}\n",
    1,
)
QWEN3_CODER = QWEN25.replace('{"name": <function-name>', "<function=name><parameter=x>")
R1_DISTILL = """
{%- for message in messages %}{{ '<|User|>' + message.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}{{ '<|Assistant|><think>\\n' }}"""
CHATML = "{% for message in messages %}{{ message.role + message.content }}{% endfor %}"


class Published(NamedTuple):
    """A published template whose marks a reduced one has."""

    template: str
    known: str
    """The format of the model."""

    answer: str
    """That of the answer to a chat with tools."""


PUBLISHED: dict[str, Published] = {
    "Qwen/Qwen2.5-7B-Instruct": Published(QWEN25, "hermes", "hermes"),
    "Qwen/Qwen3-8B": Published(QWEN3, "think+hermes", "think+hermes"),
    "Qwen/Qwen3-4B-Thinking-2507": Published(QWEN3_THINKING, "think+hermes", "open_think+hermes"),
    "NousResearch/Hermes-3-Llama-3.1-8B, tool_use": Published(HERMES, "hermes", "hermes"),
    "meta-llama/Llama-3.1-8B-Instruct": Published(LLAMA31, "llama3", "llama3"),
    "meta-llama/Llama-3.2-3B-Instruct": Published(LLAMA32, "llama3", "llama3"),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(MISTRAL_V3, "mistral", "mistral"),
    "mistralai/Mistral-Nemo-Instruct-2407": Published(MISTRAL_TEKKEN, "mistral", "mistral"),
    "mistralai/Mistral-Small-Instruct-2409": Published(MISTRAL_V7, "mistral", "mistral"),
}
WITHOUT_CALLS: dict[str, Published] = {
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Published(MISTRAL_V13, "", ""),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Published(QWEN3_CODER, "", ""),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Published(R1_DISTILL, "think", "open_think"),
    "a template without tools": Published(CHATML, "", ""),
}
FUNCTIONS = [
    Function(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}}),
    Function(name="wait"),
]
CHAT = [
    Message(role="user", content="Look."),
    Message(role="assistant", content="", tool_calls=(ToolCall(id="call_0a1b2c3d", name="look", arguments="{}"),)),
    Message(role="tool", content="a cat", tool_call_id="call_0a1b2c3d"),
]


def model(**flags: Any) -> ModelConfig:
    """Settings of a model."""
    return load_config({}, flags={f"model.{name}": value for name, value in flags.items()}).model


class TestGivenAPublishedTemplate:
    @pytest.mark.parametrize("name", [*PUBLISHED, *WITHOUT_CALLS])
    def test_when_a_model_has_it_then_its_format_is_found(self, name: str) -> None:
        published = {**PUBLISHED, **WITHOUT_CALLS}[name]
        template = compile_template(published.template, {"eos_token": "</s>"})

        known = output_format_of(template, model())

        assert str(known) == published.known
        tools = JobTools(functions=FUNCTIONS if known.calls else ())
        text = render_chat(template, CHAT[:1], tools, known.calls, now_ms=0)
        assert str(format_of_answer(known, text, has_tools=True)) == published.answer

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_when_calls_and_their_results_are_in_a_chat_then_it_shows_them(self, name: str) -> None:
        template = compile_template(PUBLISHED[name].template, {"eos_token": "</s>"})
        known = output_format_of(template, model())

        text = render_chat(template, CHAT, JobTools(functions=FUNCTIONS), known.calls, now_ms=0)

        for shown in ("wait", "a cat", "Look.", '"name": "look"'):
            assert shown in text


class TestGivenSettings:
    def test_when_they_name_formats_then_the_template_is_not_asked(self) -> None:
        template = compile_template(QWEN3, {})

        named = output_format_of(template, model(tool_format="mistral", reasoning_format="none"))
        none = output_format_of(template, model(tool_format="none"))

        assert (str(named), str(none)) == ("mistral", "think")

    def test_when_there_is_no_template_then_nothing_is_marked(self) -> None:
        assert str(output_format_of(None, model(tool_format="hermes"))) == ""


class TestGivenATemplateThatDemandsAName:
    def test_when_no_call_has_the_id_of_a_result_then_the_chat_is_refused(self) -> None:
        template = compile_template(HERMES, {})
        lost = Message(role="tool", content="a cat", tool_call_id="call_other")

        with pytest.raises((JobRejected, InvalidJob), match="name of its function"):
            render_chat(template, [*CHAT[:2], lost], JobTools(), "hermes", now_ms=0)
