"""A chat template comes with a model folder from the net: it renders text, and reaches nothing else."""

import os

import pytest

from sluice.producer.contract.wire import Message
from sluice.worker.errors import JobRejected
from sluice.worker.model.chat_template import compile_template

CHAT = [Message(role="user", content="{{ 7 * 7 }} {% include '/etc/passwd' %}")]

WAYS_OUT = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.append(1) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 'x' * 2000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{{ range(10000000000) | list }}",
    "{{ '%s' | format(''.__class__) }}{{ ''.__class__ }}",
]


@pytest.mark.parametrize("template", WAYS_OUT)
def test_when_a_template_reaches_out_or_for_the_enormous_then_only_the_job_fails(template: str) -> None:
    os.environ["SLUICE_TEST_SENTINEL"] = "do-not-tell"
    try:
        said = compile_template(template, {}).render(CHAT, now_ms=0)
    except JobRejected:
        return
    finally:
        del os.environ["SLUICE_TEST_SENTINEL"]
    # jinja2 renders what it forbids as nothing where that is all that is asked.
    assert said == ""


def test_when_a_message_looks_like_a_template_then_it_is_text() -> None:
    said = compile_template("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(CHAT, now_ms=0)

    assert said == CHAT[0].content


def test_when_a_template_multiplies_as_real_ones_do_then_it_may() -> None:
    assert compile_template("{{ '-' * 20 }}{{ 3 * 4 }}", {}).render(CHAT, now_ms=0) == "-" * 20 + "12"
