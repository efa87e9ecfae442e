"""How clients steer the chat template: where the text ends, names of its own, documents."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, HELLO, RESPONSES, TOKENIZE, Front, open_front

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


async def test_tools_are_shown_in_the_order_of_the_clients_fields(front: Front) -> None:
    function = {"parameters": {"type": "object", "properties": {}}, "name": "tide"}
    await front.ask(CHAT, tools=[{"function": function, "type": "function"}])
    shown = '[{"function": {"parameters": {"type": "object", "properties": {}}, "name"'
    assert shown in front.prompt()


EFFORT = "{% for message in messages %}{{ message.content }}{% endfor %}[{{ reasoning_effort }}]"
SWITCH = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}[quick]{% endif %}"
)


def with_template(template: str, model: Path, folder: Path) -> HubTokenizer:
    """The model with another chat template."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    changed = json.dumps({**config, "chat_template": template})
    (folder / "tokenizer_config.json").write_text(changed)
    return HubTokenizer(folder)


LOW, NONE = {"reasoning_effort": "low"}, {"reasoning_effort": "none"}


def variable(**variables: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": variables}


@pytest.mark.parametrize(
    ("path", "template", "fields", "prompt"),
    [
        (CHAT, EFFORT, LOW, "Hi[low]"),
        (CHAT, EFFORT, {}, "Hi[]"),
        (CHAT, EFFORT, LOW | variable(reasoning_effort="high"), "Hi[high]"),
        (CHAT, SWITCH, NONE, "Hi[quick]"),
        (CHAT, SWITCH, LOW, "Hi"),
        (CHAT, SWITCH, NONE | variable(enable_thinking=True), "Hi"),
        (RESPONSES, EFFORT, {"reasoning": {"effort": "low"}}, "Hi[low]"),
        (RESPONSES, SWITCH, {"reasoning": {"effort": "none"}}, "Hi[quick]"),
        (CHAT, SWITCH, {"enable_thinking": None}, "Hi"),
        (CHAT, SWITCH, {"enable_thinking": False} | variable(mood="calm"), "Hi[quick]"),
        (CHAT, SWITCH, {"enable_thinking": True} | NONE, "Hi"),
    ],
)
async def test_a_template_is_told_of_the_effort_and_of_the_switch_for_thoughts(
    gateway: ScriptedGateway,
    model_folder: Path,
    tmp_path: Path,
    path: str,
    template: str,
    fields: dict[str, Any],
    prompt: str,
) -> None:
    tokenizer = with_template(template, model_folder, tmp_path)
    async with open_front(gateway, tokenizer) as front:
        await front.ask(path, fields)
        assert front.prompt() == prompt
