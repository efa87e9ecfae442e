"""How many of each thing a body may have: the limit is named, and what is below it is served."""

import json
from typing import Any

import pytest

from tests.conductor.fronts import CHAT, COMPLETIONS, COUNT, MESSAGES, RESPONSES, TOKENIZE, Front
from tests.nightly import by_day

pytestmark = pytest.mark.usefixtures("room")
USER = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def functions(n: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]


# The path, the field, the most of it, and a body with so many.
COUNTED: list[tuple[str, str, int, Any]] = [
    (CHAT, "messages", 4096, lambda n: {"messages": [USER] * n}),
    (CHAT, "messages[0].content", 1024, lambda n: {"messages": [{**USER, "content": [PART] * n}]}),
    (CHAT, "messages[0].tool_calls", 128,
     lambda n: {"messages": [{"role": "assistant", "tool_calls": [CALL] * n}, USER]}),
    (CHAT, "tools", 128, lambda n: {"tools": functions(n)}),
    (CHAT, "stop", 16, lambda n: {"stop": ["§"] * n}),
    (CHAT, "stop_token_ids", 128, lambda n: {"stop_token_ids": [400] * n}),
    (CHAT, "chat_template_kwargs", 64,
     lambda n: {"chat_template_kwargs": {f"v{i}": "" for i in range(n)}}),
    (COMPLETIONS, "prompt", 128, lambda n: {"prompt": ["a"] * n}),
    (COMPLETIONS, "prompt", 128, lambda n: {"prompt": [[5]] * n}),
    (COMPLETIONS, "logit_bias", 1024, lambda n: {"logit_bias": {str(i): 1 for i in range(n)}}),
    (RESPONSES, "input", 4095, lambda n: {"input": [USER] * n, "instructions": "a"}),
    (RESPONSES, "input[0].content", 1024,
     lambda n: {"input": [{**USER, "content": [{**PART, "type": "input_text"}] * n}]}),
    (MESSAGES, "messages", 4095, lambda n: {"messages": [USER] * n, "system": "a"}),
    (MESSAGES, "messages[0].content", 1024,
     lambda n: {"messages": [{**USER, "content": [PART] * n}]}),
    (MESSAGES, "system", 1024, lambda n: {"system": [PART] * n}),
    (COUNT, "messages", 4095, lambda n: {"messages": [USER] * n, "system": "a"}),
    (TOKENIZE, "messages", 4096, lambda n: {"messages": [USER] * n}),
]  # fmt: skip
SHORT = {RESPONSES: {"max_output_tokens": 2}, COUNT: {}, TOKENIZE: {}}


@pytest.mark.parametrize(("path", "param", "most", "body_of"), COUNTED)
async def test_a_count_is_bounded_and_its_limit_is_named(
    front: Front, path: str, param: str, most: int, body_of: Any
) -> None:
    short = SHORT.get(path, {"max_tokens": 2})
    if param != "logit_bias":  # there are no so many tokens here
        await front.ask(path, body_of(most), **short)
    refused = await front.refused(path, body_of(most + 1), **short)
    assert str(most) in refused["message"] and param in refused["message"]
    assert refused.get("param", param) == param  # Anthropic's errors have no place for it


async def test_all_objects_and_turns_that_are_many_messages_each_are_bounded(
    front: Front,
) -> None:
    turns = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT] * 1000}]
    message = (await front.refused(MESSAGES, messages=turns * 5))["message"]
    assert "5005" in message and "4095" in message
    many = [{**USER, "content": [PART] * 1000}] * 20
    assert "20000 objects" in (await front.refused(CHAT, messages=many))["message"]


#: A hundredth of the bytes of the largest bodies here, which are over what any part may have.
MANY = by_day(12_000, at_night=100_000)
LONG = "x" * 50 * MANY
HELLO = {"model": "lab/moon", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
HUGE = [
    b'{"model":"lab/moon","messages":[' + b"{}," * 3 * MANY + b"{}]}",
    b'{"model":"lab/moon","messages":[' + b"0," * 30 * MANY + b"0]}",
    b'{"model":"lab/moon",' + b",".join(b'"x%d":1' % i for i in range(3 * MANY)) + b"}",
    b'{"model":"lab/moon","prompt":"a","logit_bias":{'
    + b",".join(b'"%d":"x"' % i for i in range(3 * MANY)) + b"}}",
    b'{"model":"lab/moon","' + LONG.encode() + b'":1}',
    b'{"model":"lab/moon","prompt":"a","stop":"' + LONG.encode() + b'"}',
    b'{"model":"' + LONG.encode() + b'","prompt":"a"}',
    json.dumps({**HELLO, "messages": [{"role": LONG, "content": "a"}]}).encode(),
    json.dumps({**HELLO, "tool_choice": {LONG: 1}}).encode(),
    json.dumps({**HELLO, "response_format": {"type": LONG}}).encode(),
    b"[" * 50 * MANY,
    b'"' * 50 * MANY,
    LONG.encode(),
    b'{"model":"' + b"x" * 9_000 + b'","prompt":"a"}',
    b'{"model":"lab/moon","messages":[{"role":"system","content":"a"},'
    b'{"role":"system","content":"' + b"x" * 9_000 + b'"}]}',
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENIZE, "/detokenize"])
async def test_an_error_is_short_whatever_the_body(front: Front, path: str) -> None:
    for content in HUGE:
        answer = await front.send(path, content)
        assert 400 <= answer.status_code < 500, content[:60]
        assert len(answer.content) < 1500, answer.text[:300]
