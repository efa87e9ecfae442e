"""A conversation into one text, by the model's own template."""

from collections.abc import Sequence
from typing import Any

import pytest

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.text.chat_template import ChatTemplate
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.named_templates import NamedTemplates
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Sequence[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


#: By what a template may rely on, and no published one of test_template_families.py does: the
#: template, and its text.
RENDERED = {
    "it may break out of a loop": (
        "{% for m in messages %}{% break %}{{ m.content }}{% endfor %}done", "done",
    ),
    "names that are set in text for training are unknown behind it": (
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}.", "1.",
    ),
    "it has dict": (
        "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['b']) | tojson }}", '{"a": 1}{"b": null}',
    ),
    "JSON may be all ASCII": ("{{ {'b': '半'} | tojson(True) }}", '{"b": "\\u534a"}'),
}  # fmt: skip


@pytest.mark.parametrize("what", RENDERED)
def test_a_template_finds_what_transformers_gives_it(what: str) -> None:
    source, expected = RENDERED[what]
    assert render(source) == expected


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
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.items() }}", "unsafe"),
        ("{{ ''.__class__.__base__ }}", "unsafe"),
        ("{{ dict.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore|unsafe"),
        ("{{ namespace(_a=1) }}", "underscore|unsafe"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_told(source: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(TokenizerUnavailable, match="line 2"):
        ChatTemplate("fine\n{% for %}", {})


# -- forms of messages -----------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("content", "source", "expected"),
    [
        (PARTS, "{{ m.content }}", "one\ntwo"),
        (PARTS, "{{ m.content | tojson }}", '"one\\ntwo"'),
        (PARTS, "{% if m.content is string %}{{ m.content }}{% else %}"
         "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}", "onetwo"),
        ("one", "{% for part in m.content %}{{ part.text }}{% endfor %}", "one"),
        ("one", "{{ m['content'][0]['text'] }}", "one"),
        (PARTS, "{{ m['content'][0]['text'] }}", "one\ntwo"),
    ],
)  # fmt: skip
def test_a_content_comes_in_the_form_that_the_template_reads(
    content: Any, source: str, expected: str
) -> None:
    source = f"{{% for m in messages %}}{source}{{% endfor %}}"
    assert render(source, [{"role": "user", "content": content}]) == expected


def calling(call_id: str = "call_1") -> list[dict[str, Any]]:
    arguments = {"arguments": {"at": "Husum"}, "arguments_text": '{"at":"Husum"}'}
    call = {"id": call_id, "type": "function", "function": {"name": "tide", **arguments}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "low"}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ f.name }}{{ f.arguments | tojson }}", 'tide{"at": "Husum"}'),
        ("{{ f.name + f.arguments }}", 'tide{"at":"Husum"}'),
        ("{{ f.name }}{{ f.arguments }}", 'tide{"at":"Husum"}'),
        ("{{ f | tojson }}", '{"name": "tide", "arguments": {"at": "Husum"}}'),
        ("{{ f.name }}{{ m.content is defined }}", "tideFalse"),
        ("{{ f.name + m.content }}", "tide"),
        ("{% if m.content is none %}{{ f.name }}{% endif %}", "tide"),
    ],
)
def test_a_call_comes_in_the_form_that_the_template_reads(written: str, expected: str) -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls %}{% set f = call.function %}"
        f"{written}{{% endfor %}}{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% endif %}}"
        "{% endfor %}"
    )
    assert render(source, calling()) == f"Hello{expected}"


def test_ids_of_calls_are_shortened_for_templates_that_refuse_long_ones() -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ m.role }}:{{ call.id }}:{{ call.function.name }} {% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    _, call_id, rest = render(source, calling("call_of_another_length")).split(":")
    assert len(call_id) == 9 and rest == f"tide {call_id}"
    assert render(source, calling("abcdefgh1")).endswith(":abcdefgh1:tide abcdefgh1")


def test_thoughts_have_both_names_that_templates_read() -> None:
    source = "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    said = [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    assert render(source, said) == "Hm.Hm."


# -- going on with the last message ----------------------------------------------------------------

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content WHAT }}</>{% endfor %}"


def continued(source: str, said: str) -> str:
    messages = [*HELLO, {"role": "assistant", "content": said}]
    return render(source, messages, continue_final_message=True, add_generation_prompt=False)


def test_a_message_that_is_changed_or_has_no_content_cannot_be_continued() -> None:
    for source in ("{{ messages[0].content }}", TURNS.replace("WHAT", "| upper")):
        with pytest.raises(InvalidRequest, match="does not write") as raised:
            continued(source, "The moon")
        assert raised.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="no content"):
        render("", calling()[:2], continue_final_message=True)


# -- several templates -----------------------------------------------------------------------------


def named(**sources: str) -> NamedTemplates:
    tokenizer = FakeTokenizer()
    tokenizer.chat_templates = sources
    return NamedTemplates(tokenizer)


def test_conversations_with_tools_have_the_template_for_them() -> None:
    templates = named(default="D", tool_use="T", rag="{% broken")
    assert templates.choose([]).render(HELLO) == "D"
    assert templates.choose([{}]).render(HELLO) == "T"
    assert named(default="D").choose([{}]).render(HELLO) == "D"


def test_a_missing_default_is_told_with_the_names_that_are_there() -> None:
    with pytest.raises(InvalidRequest, match="rag, tool_use"):
        named(tool_use="T", rag="R").choose([])
    with pytest.raises(InvalidRequest, match="no chat template"):
        named().choose([])
