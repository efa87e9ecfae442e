"""A conversation into one text, by the model's own template."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.text.chat_template import ChatTemplate
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Sequence[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_blocks_leave_no_lines_or_indents_behind() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}!\n  {% endfor %}\n"
    assert render(source) == "<s>\nHello!\n"


def test_a_template_may_break_out_of_a_loop() -> None:
    source = "{% for m in messages %}{% break %}{{ m.content }}{% endfor %}done"
    assert render(source) == "done"


def test_json_is_written_as_models_know_it() -> None:
    source = "{{ value | tojson }} {{ value | tojson(indent=1) }}"
    text = render(source, variables={"value": {"a<b": "半 & 'x'"}})
    assert text == '{"a<b": "半 & \'x\'"} {\n "a<b": "半 & \'x\'"\n}'


def test_a_template_knows_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_text_marked_for_training_is_kept() -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}."
    assert render(source) == "Hello."


def test_tools_and_documents_are_none() -> None:
    source = "{% if tools is not none or documents is not none %}tools{% endif %}plain"
    assert render(source) == "plain"


def test_a_client_cannot_replace_the_conversation_by_a_variable() -> None:
    source = "{{ messages[0].content }}{{ add_generation_prompt }}{{ enable_thinking }}"
    variables = {"messages": "x", "add_generation_prompt": "x", "enable_thinking": False}
    assert render(source, variables=variables, add_generation_prompt=False) == "HelloFalseFalse"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(source: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as raised:
        render(source)
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ ''.__class__.__base__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        render(source)


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(TokenizerUnavailable, match="line 2"):
        ChatTemplate("fine\n{% for %}", {})


def test_fake_models_have_a_template() -> None:
    fake = FakeTokenizer()
    assert fake.chat_template is not None
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = ChatTemplate(fake.chat_template, fake.special_tokens).render(messages)
    assert text == "system: Be brief.\nuser: Hello\nassistant:"
