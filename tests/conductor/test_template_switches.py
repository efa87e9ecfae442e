"""How clients steer the chat template: where the text ends, names of its own, documents."""

from typing import Any

import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from tests.conductor.fronts import CHAT, HELLO, MESSAGES, RESPONSES, TOKENIZE, Front

BEGUN = [*HELLO, {"role": "assistant", "content": "The moon"}]
NO_TURN = {"add_generation_prompt": False}
GOING_ON = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("messages", "switch"),
    [
        (HELLO, NO_TURN),
        (HELLO, {"chat_template_kwargs": NO_TURN}),
        (HELLO, {**NO_TURN, "chat_template_kwargs": NO_TURN}),
        (BEGUN, GOING_ON),
        (BEGUN, {**GOING_ON, **NO_TURN}),
        (BEGUN, {"chat_template_kwargs": GOING_ON}),
    ],
)
async def test_no_turn_is_begun_or_the_last_one_goes_on_by_a_field_or_its_name_for_the_template(
    front: Front, tokenizer: HubTokenizer, messages: Any, switch: dict[str, Any]
) -> None:
    await front.ask(CHAT, switch, messages=messages)
    tokens = front.last.prompt_token_ids
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode()
    begun = "" if messages == HELLO else "<|turn|>assistant:The moon"
    assert text == f"<|turn|>user:Hi<|end|>{begun}"
    answer = await front.ask(TOKENIZE, switch, messages=messages)
    assert tuple(answer["tokens"]) == tokens


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"add_generation_prompt": True, "chat_template_kwargs": NO_TURN},
         "add_generation_prompt and that of chat_template_kwargs differ"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "send one of them"),
        ({"chat_template_kwargs": {"add_generation_prompt": "no"}}, "must be true or false"),
        ({"chat_template_kwargs": {"tools": []}}, "tools, which the template gets from"),
        ({"chat_template_kwargs": {"messages": []}}, "messages, which the template gets from"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template, which is not for"),
    ],
)  # fmt: skip
async def test_what_a_template_cannot_be_told_is_refused_by_name(
    front: Front, fields: dict[str, Any], told: str
) -> None:
    for path in (CHAT, TOKENIZE):
        assert told in (await front.refused(path, fields, messages=HELLO))["message"]


async def test_other_apis_have_the_names_among_the_templates_too(front: Front) -> None:
    for path in (RESPONSES, MESSAGES):
        lengths = []
        for switch in ({}, NO_TURN):
            answer = await front.ask(path, chat_template_kwargs=switch)
            lengths.append(answer["usage"]["input_tokens"])
        assert lengths[1] < lengths[0]


async def test_tools_are_shown_in_the_order_of_the_clients_fields(front: Front) -> None:
    function = {"parameters": {"type": "object", "properties": {}}, "name": "tide"}
    await front.ask(CHAT, tools=[{"function": function, "type": "function"}])
    shown = '[{"function": {"parameters": {"type": "object", "properties": {}}, "name"'
    assert shown in front.prompt()
