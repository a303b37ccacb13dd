"""Chat templates of strangers: whatever they do ends soon, as a ChatError."""

from __future__ import annotations

import pytest

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Chat
from lockstep.errors import ChatError
from tests.chat.toy_tokenizers import CHATML, chatml

ENDLESS = {
    "nested loops": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "a loop over literals": "{% for a in 'xxxxxxxxxx' %}" * 12 + "{% endfor %}" * 12,
    "a long text": "{{ 'a' * 10000000000 }}",
    "doubled": "{% set ns = namespace(s='a') %}{% for i in range(50) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "padded": "{{ 'a'.ljust(9999999999) }}",
    "formatted": "{{ '%9999999999d' % 1 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
}
RAISING = {
    "zero": "{{ 1 / 0 }}",
    "none": "{{ messages[99].content.text }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "value": "{{ 'a'.index('b') }}",
    "cycler": "{{ cycler() }}",
    "lookup": "{{ {}['a']['b'] }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_all_time_or_memory_is_given_up(name: str) -> None:
    with pytest.raises(
        ChatError, match=r"rendering the chat template exceeded the limits: it (renders|takes) .*more than"
    ):
        ChatFormat(chatml(ENDLESS[name] + CHATML), Chat())


@pytest.mark.parametrize("name", RAISING)
def test_whatever_a_template_raises_is_a_chat_error(name: str) -> None:
    with pytest.raises(ChatError, match="the chat template refused turns of user"):
        ChatFormat(chatml(RAISING[name] + CHATML), Chat())


def test_a_template_of_many_megabytes_is_not_compiled() -> None:
    with pytest.raises(ChatError, match=r"2,000,\d+ characters"):
        ChatFormat(chatml("{# " + "x" * 2_000_000 + " #}" + CHATML), Chat())


def test_a_date_in_no_format_is_a_chat_error() -> None:
    with pytest.raises(ChatError, match="not a date format"):
        ChatFormat(chatml("{{ strftime_now('\ud800') }}" + CHATML), Chat())
