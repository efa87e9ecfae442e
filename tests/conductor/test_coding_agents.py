"""Whole bodies as coding agents send them, over responses and over messages."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from halfmoon_conductor.settings import ConductorSettings
from tests.conductor.fronts import CHAT, COUNT, RESPONSES, Front

MESSAGES = "/v1/messages?beta=true"
pytestmark = pytest.mark.usefixtures("room")


def item(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": role, "content": content}


SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command and returns what it prints.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {**SHELL, "name": "update_plan", "parameters": {"type": "object", "properties": {}}}
#: Tools of a response that are no functions of the client's.
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": []}},
    {"type": "web_search_2025_08_26"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[^x]+/"}},
    {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [SHELL]},
]  # fmt: skip
#: A first turn over responses.
TASK: dict[str, Any] = {
    "model": "gpt-5-codex",
    "instructions": "You edit code.",
    "input": [
        item("developer", "Ask before you delete."),
        item("user", "<environment_context>/src</environment_context>"),
        item("user", "Fix it"),
    ],
    "tools": [SHELL, PLAN, *OTHERS],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-conversation",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0199", "x-codex-turn": json.dumps({"n": 1})},
}
CACHED = {"cache_control": {"type": "ephemeral"}}
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
    **CACHED,
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
#: A first turn over messages.
SESSION: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 3000,
    "system": [
        {"type": "text", "text": "You edit code."},
        {"type": "text", "text": "The folder is /src.", **CACHED},
    ],
    "messages": [{"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {"type": "text", "text": "Fix it", **CACHED},
    ]}],
    "tools": [BASH, WEB_SEARCH],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_a_account__session_b"},
    "temperature": 1,
}  # fmt: skip
FIRST = {RESPONSES: TASK, MESSAGES: SESSION}


@pytest.fixture
def model_aliases() -> tuple[str, ...]:
    """The names that agents have built in."""
    return "gpt-*", "claude-*", "o3"


def calls(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


LS = calls("shell", command=["ls"])


async def test_an_agent_over_responses_calls_a_function_and_goes_on_with_its_output(
    front: Front,
) -> None:
    front.says(f"I look. {LS}")
    last = (await front.stream(RESPONSES, TASK))[-1]
    assert last["type"] == "response.completed"
    message, call = last["response"]["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("shell", {"command": ["ls"]})
    assert [tool["name"] for tool in last["response"]["tools"]] == ["shell", "update_plan"]
    assert last["response"]["store"] is False

    front.says("Done.")
    turn = [
        *TASK["input"],
        {"type": "reasoning", "id": "rs", "summary": [], "content": None,
         "encrypted_content": None},
        {**message, "phase": "commentary"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"],
         "output": [{"type": "input_text", "text": "moon.py"}]},
        item("user", "Go on"),
    ]  # fmt: skip
    last = (await front.stream(RESPONSES, TASK, input=turn))[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == "Done."
    told, _, conversation = front.prompt().partition("system:")
    tools = json.loads(told.removeprefix("<tool_call>"))
    assert [each["function"]["name"] for each in tools] == ["shell", "update_plan"]
    assert conversation.startswith("You edit code.\n\nAsk before you delete.user:<environment")
    assert conversation.endswith("tool:moon.pyuser:Go onassistant:")
    assert '"command": ["ls"]' in conversation and call["call_id"] in conversation


async def test_an_agent_over_messages_calls_a_tool_and_goes_on_with_its_result(
    front: Front,
) -> None:
    front.says(f"I look. {calls('Bash', command='ls')}")
    events = await front.stream(MESSAGES, SESSION)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert "web_search" not in front.prompt()
    _, call = (await front.ask(MESSAGES, SESSION))["content"]
    assert (call["name"], call["input"]) == ("Bash", {"command": "ls"})

    front.says("Done.")
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {**call, "caller": {"type": "direct"}},
    ]
    given = [
        {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "is_error": False,
            "content": [{"type": "text", "text": "moon.py"}],
        },
        {"type": "text", "text": "<system-reminder>Go on.</system-reminder>", **CACHED},
    ]
    later = [{"role": "assistant", "content": said}, {"role": "user", "content": given}]
    body = {**SESSION, "messages": [*SESSION["messages"], *later]}
    events = await front.stream(MESSAGES, body)
    assert "".join(each["delta"].get("text", "") for each in events if "delta" in each) == "Done."
    prompt = front.prompt()
    assert "system:You edit code.\nThe folder is /src.user:<system-reminder>Be brief." in prompt
    assert prompt.endswith("tool:moon.pyuser:<system-reminder>Go on.</system-reminder>assistant:")
    assert '"arguments": {"command": "ls"}' in prompt and call["id"] in prompt
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    n_prompt = len(front.last.prompt_token_ids)
    assert await front.ask(COUNT, counted) == {"input_tokens": n_prompt}


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_a_tool_that_is_no_function_is_left_out_of_what_the_model_is_told(
    front: Front, choice: str
) -> None:
    prompts = set()
    for tools in ([SHELL], *([tool, SHELL] for tool in OTHERS)):
        answer = await front.ask(RESPONSES, TASK, tools=tools, tool_choice=choice)
        assert [each["name"] for each in answer["tools"]] == ["shell"]
        prompts.add(front.last.prompt_token_ids)
        assert choice != "required" or front.fits(LS)
    assert len(prompts) == 1
    for tool in OTHERS:
        answer = await front.post(RESPONSES, TASK, tools=[tool], tool_choice=choice)
        assert answer.status_code == (400 if choice == "required" else 200)


def formed(**form: Any) -> dict[str, Any]:
    """A turn whose answer has a form."""
    return {"tools": [], "output_config": {"format": form}}


APPLY_PATCH = {"type": "function", "name": "apply_patch"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
SHOWN = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, 'with the type "web_search"'),
        (RESPONSES, {"tool_choice": {"type": "custom", "name": "apply_patch"}}, '"custom"'),
        (RESPONSES, {"tools": OTHERS[2:3], "tool_choice": "required"},
         "a call, and image_generation in tools is not served"),
        (RESPONSES, {"tools": OTHERS, "tool_choice": APPLY_PATCH}, "apply_patch"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "web_search"}},
         "names web_search, which is not served"),
        (MESSAGES, {"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}},
         "a call, and web_search in tools is not served"),
        (RESPONSES, {"tools": [{"type": "web_serach"}]},
         'tools[0] is not supported with the type "web_serach"'),
        (RESPONSES, {"tools": [{"type": "computer_use_preview"}]}, '"computer_use_preview"'),
        (MESSAGES, {"tools": [{"type": "web_search", "name": "web_search"}]},
         'tools[0] is not supported with the type "web_search"'),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, '"bash_20250124"'),
        (MESSAGES, {"context_management": {"edits": [{"type": "compact_20260112"}]}},
         "context_management.edits[0].type is not supported with compact_20260112"),
        (MESSAGES, formed(type="json_schema", schema={"not": {}}), "output_config "),
        (MESSAGES, formed(type="regex"), "output_config.format.type: "),
        (MESSAGES, {"messages": [{"role": "user", "content": [SHOWN]}]},
         'messages[0].content[0].content[0].type is "image", which is not supported'),
    ],
)  # fmt: skip
async def test_what_is_not_served_and_demanded_is_refused_by_name(
    front: Front, path: str, fields: dict[str, Any], told: str
) -> None:
    assert told in (await front.refused(path, FIRST[path] | fields))["message"]


@pytest.mark.parametrize(
    ("instructions", "roles", "system"),
    [
        (None, [], None),
        ("A", [], "A"),
        (None, ["developer"], "0"),
        (None, ["system", "developer"], "0\n\n1"),
        ("A", ["developer", "developer"], "A\n\n0\n\n1"),
    ],
)
async def test_instructions_and_leading_messages_become_one_system_message(
    front: Front, instructions: str | None, roles: list[str], system: str | None
) -> None:
    turns = [item(role, str(place)) for place, role in enumerate(roles)]
    await front.ask(RESPONSES, instructions=instructions, input=[*turns, item("user", "Hi")])
    given = "" if system is None else f"system:{system}"
    assert front.prompt() == f"{given}user:Hiassistant:"


async def test_a_format_in_the_output_config_is_the_form_of_the_answer(front: Front) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    asked = SESSION | formed(type="json_schema", schema=schema)
    await front.stream(MESSAGES, asked)
    assert front.fits('{"title": "Moon"}')
    assert not front.fits("Moon")
    counted = {name: asked[name] for name in ("model", "messages", "system", "output_config")}
    n_prompt = len(front.last.prompt_token_ids)
    assert await front.ask(COUNT, counted) == {"input_tokens": n_prompt}


@pytest.mark.parametrize("name", ["o3", "claude-", "claude-sonnet-4-5", "lab/moon"])
async def test_a_name_that_is_insisted_on_is_served_under_that_name(
    front: Front, name: str
) -> None:
    for path in (CHAT, MESSAGES, RESPONSES):
        assert (await front.ask(path, model=name))["model"] == name
    assert (await front.get(f"/v1/models/{name}")).json()["id"] == "lab/moon"


async def test_other_names_are_not_found(front: Front) -> None:
    for name in ("o3-mini", "gpt", "my-claude-1", "claude", "claude*"):
        await front.error(CHAT, 404, model=name)


def test_names_are_separated_by_commas_and_a_star_is_at_the_end() -> None:
    settings = ConductorSettings(model="fake://tiny", model_aliases=" gpt-4o, claude-* ,")
    assert settings.other_model_names == ("gpt-4o", "claude-*")
    with pytest.raises(ValidationError, match="'a\\*b' has a \\* before its end"):
        ConductorSettings(model="fake://tiny", model_aliases="a*b")
