"""A chat template comes with a model folder from the net: it renders text, and reaches nothing else."""

import os
import tracemalloc

import pytest

from sluice.protocol.wire import Message
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
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%(a)999999999d' % {'a': 1} }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%*d' | format(999999999, 1) }}",
    "{{ '{:999999999d}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ '{a:999999999d}'.format_map({'a': 1}) }}",
    "{{ ('{:999999999d}' | attr('format'))(1) }}",
    "{{ '{:999999999d}'['format'](1) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.center(width=999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x\ny' | indent(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ {'a': 1} | tojson(999999999) }}",
    "{{ lipsum(n=999999999) }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ strftime_now('%999999999d') }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ [0][5] | length }}{{ ('x' * 1000) | int(base=99) }}{{ [][0].x }}",
    "{{ '{5}'.format(1) }}",
    "{{ '%s' | format(''.__class__) }}{{ ''.__class__ }}",
]


MAX_BYTES = 100 * 2**20
"""What no rendering may take: a width of 999,999,999 takes ten times as much."""


@pytest.mark.parametrize("template", WAYS_OUT)
def test_when_a_template_reaches_out_or_for_the_enormous_then_only_the_job_fails(template: str) -> None:
    os.environ["SLUICE_TEST_SENTINEL"] = "do-not-tell"
    tracemalloc.start()
    try:
        text = compile_template(template, {}).render(CHAT, now_ms=0)
    except JobRejected:
        return
    finally:
        del os.environ["SLUICE_TEST_SENTINEL"]
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < MAX_BYTES
    # jinja2 renders what it forbids as nothing where that is all that is asked.
    assert text == ""


def test_when_a_message_looks_like_a_template_then_it_is_text() -> None:
    text = compile_template("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(CHAT, now_ms=0)

    assert text == CHAT[0].content


@pytest.mark.parametrize("error", [MemoryError, RecursionError, LookupError, IndexError])
def test_when_rendering_fails_in_any_of_these_ways_then_the_job_is_rejected(error: type[Exception]) -> None:
    class Failing(str):
        def __str__(self) -> str:
            raise error

    template = compile_template("{{ bos_token }}", {"bos_token": Failing()})

    with pytest.raises(JobRejected, match="cannot render these messages"):
        template.render(CHAT, now_ms=0)


def test_when_a_template_formats_as_real_ones_do_then_it_may() -> None:
    template = "{{ '%05.1f' % 2 }} {{ '{:>4}'.format(7) }} {{ '%s-%s' | format('a', 'b') }} {{ 'x' | center(3) }}"

    assert compile_template(template, {}).render(CHAT, now_ms=0) == "002.0    7 a-b  x "


def test_when_a_template_multiplies_as_real_ones_do_then_it_may() -> None:
    assert compile_template("{{ '-' * 20 }}{{ 3 * 4 }}", {}).render(CHAT, now_ms=0) == "-" * 20 + "12"
