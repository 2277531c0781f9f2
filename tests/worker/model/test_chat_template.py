"""Chat templates of model folders: each renders as `apply_chat_template` of transformers renders it.

But for one thing: messages of role `developer` are system messages to a template that does not know them.
"""

# The types of transformers are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json

import pytest

from sluice.protocol.wire import Message
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.folders import SMALL_MODEL

CHAT = (
    Message(role="system", content="Be <brief> & “kind”."),
    Message(role="user", content="Hé\n", name="ada"),
    Message(role="assistant", content="  Yes?  "),
    Message(role="user", content="Bye 😀"),
)

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"

TEMPLATES = {
    "turns": "{{ bos_token }}" + TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}",
    "tools is not none": "{% if tools is not none %}TOOLS {{ tools | tojson }}{% endif %}" + TURNS,
    "tools != none": "{% if tools != none %}{{ tools | length }} TOOLS{% endif %}" + TURNS,
    "tools is defined and true": "{% if tools is defined and tools %}TOOLS{% else %}NO TOOLS{% endif %}" + TURNS,
    "tools set if undefined": "{% if not tools is defined %}{% set tools = [] %}{% endif %}{{ tools is none }}",
    "documents is not none": "{% if documents is not none %}{% for d in documents %}{{ d }}{% endfor %}DOCS{% endif %}",
    "documents is none": "{% if documents is none %}NO DOCUMENTS{% endif %}{{ documents }}",
    "tojson": "{{ messages | tojson }}",
    "tojson with escapes": "{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson(true) }}",
    "tojson without escapes": "{{ messages[0] | tojson(ensure_ascii=False) }}",
    "tojson with sorted keys": "{{ messages[1] | tojson(sort_keys=True) }}",
    "tojson with an indent": "{{ messages[1] | tojson(indent=4) }}{{ messages[1] | tojson(false, 2) }}",
    "tojson with separators": "{{ messages[1] | tojson(separators=(',', ':')) }}",
    "blocks": "\n  {% if true %}\n  a\n  {% endif %}\n{%- if bos_token %} b {% endif -%}\n c",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macro and filters": (
        "{% macro turn(m) %}<{{ m.role | upper }}>{{ m.content | replace('\\n', ' ') }}{% endmacro %}"
        "{% for m in messages | rejectattr('role', 'equalto', 'system') %}{{ turn(m) }}{% endfor %}"
    ),
    "names and slices": "{{ messages[1].name }}{{ messages[0].name is defined }}{{ messages[1:] | length }}",
    "tool calls": "{% for m in messages %}{% if m.tool_calls %}CALL{% else %}{{ m.content }}{% endif %}{% endfor %}",
}


class TestGivenATemplateOfAModel:
    @pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
    def test_when_it_renders_a_chat_then_the_text_is_that_of_transformers(self, source: str) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template  # imports torch

        chat = [{"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in CHAT]
        (expected,), _ = render_jinja_template(
            [chat], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )

        text = compile_template(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(CHAT, now_ms=0)

        assert text == expected


ROLES_OF_QWEN = """
{%- if messages[0]['role'] == 'system' %}S:{{ messages[0]['content'] }};{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- message.role + ':' + message.content + ';' }}
    {%- endif %}
{%- endfor %}"""
DEVELOPER_FIRST = (Message(role="developer", content="Be brief."), Message(role="user", content="Hi"))


def rendered(source: str, *chat: Message) -> str:
    return compile_template(source, {}).render(chat, now_ms=0)


class TestGivenADevelopersMessage:
    def test_when_the_template_skips_unknown_roles_then_it_is_a_system_message(self) -> None:
        first, later = rendered(ROLES_OF_QWEN, *DEVELOPER_FIRST), rendered(ROLES_OF_QWEN, *reversed(DEVELOPER_FIRST))

        assert (first, later) == ("S:Be brief.;user:Hi;", "user:Hi;system:Be brief.;")

    def test_when_the_template_refuses_unknown_roles_then_it_is_a_system_message(self) -> None:
        source = json.loads((SMALL_MODEL / "tokenizer_config.json").read_text())["chat_template"]

        text = rendered(source, *DEVELOPER_FIRST)

        assert text == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"

    def test_when_the_template_only_mentions_developers_then_it_is_a_system_message(self) -> None:
        source = "Made by developers. {% for m in messages %}{{ m.role }} {% endfor %}"

        assert rendered(source, *DEVELOPER_FIRST) == "Made by developers. system user "

    def test_when_the_template_knows_the_role_then_it_keeps_it(self) -> None:
        source = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }} {% endfor %}"

        assert rendered(source, *DEVELOPER_FIRST) == "D user "
