"""Whole bodies as coding agents send them, over responses and over messages."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages?beta=true", "/v1/messages/count_tokens"


def item(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


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
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[^x]+/"},
    },
    {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [SHELL]},
]
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
    "stream": True,
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
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                {"type": "text", "text": "Fix it", **CACHED},
            ],
        }
    ],
    "tools": [BASH, WEB_SEARCH],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_a_account__session_b"},
    "temperature": 1,
    "stream": True,
}


@pytest.fixture
def card() -> ModelCard:
    """One with room for tools in its context."""
    return ModelCard(name="lab/moon", max_context=100_000, created=1_700_000_000)


@pytest.fixture
def model_aliases() -> tuple[str, ...]:
    """The names that agents have built in."""
    return "gpt-*", "claude-*"


def says(gateway: ScriptedGateway, tokenizer: HubTokenizer, text: str) -> None:
    gateway.script = [*tokenizer.encode(text, add_special_tokens=False), 0]


def calls(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def last_prompt(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> str:
    return tokenizer.decode(gateway.requests[-1].prompt_token_ids)


async def streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(block.split("data: ")[1]) for block in answer.text.split("\n\n")[:-1]]


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# -- responses -------------------------------------------------------------------------------------


async def test_an_agent_over_responses_calls_a_function_and_goes_on_with_its_output(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"I look. {calls('shell', command=['ls'])}")
    last = (await streamed(client, RESPONSES, TASK))[-1]
    assert last["type"] == "response.completed"
    message, call = last["response"]["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("shell", {"command": ["ls"]})
    assert [tool["name"] for tool in last["response"]["tools"]] == ["shell", "update_plan"]
    assert last["response"]["store"] is False

    says(gateway, tokenizer, "Done.")
    turn = [
        *TASK["input"],
        {"type": "reasoning", "id": "rs", "summary": [], "content": None,
         "encrypted_content": None},
        {**message, "phase": "commentary"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "moon.py"},
        item("user", "Go on"),
    ]  # fmt: skip
    last = (await streamed(client, RESPONSES, {**TASK, "input": turn}))[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == "Done."
    prompt = last_prompt(gateway, tokenizer)
    told, _, conversation = prompt.partition("system:")
    assert [each["function"]["name"] for each in json.loads(told.removeprefix("<tool_call>"))] == [
        "shell", "update_plan",
    ]  # fmt: skip
    assert conversation.startswith("You edit code.\n\nAsk before you delete.user:<environment")
    assert conversation.endswith("tool:moon.pyuser:Go onassistant:")
    assert '"command": ["ls"]' in conversation


async def test_bodies_that_are_too_long_for_the_event_loop_are_no_other_matter(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    long = "Rain drew slow lines. " * 1000
    says(gateway, tokenizer, calls("shell", command=["ls"]))
    last = (await streamed(client, RESPONSES, {**TASK, "instructions": long}))[-1]
    assert last["response"]["output"][0]["name"] == "shell"
    assert [tool["name"] for tool in last["response"]["tools"]] == ["shell", "update_plan"]
    assert f"system:{long}\n\nAsk before" in last_prompt(gateway, tokenizer)

    says(gateway, tokenizer, calls("Bash", command="ls"))
    answer = await whole(client, MESSAGES, {**SESSION, "system": long})
    assert answer["content"][0]["name"] == "Bash"
    assert "web_search" not in last_prompt(gateway, tokenizer)


@pytest.mark.parametrize("tool", OTHERS, ids=lambda tool: tool["type"])
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_a_tool_that_is_no_function_is_left_out_of_what_the_model_is_told(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    tool: dict[str, Any],
    choice: str,
) -> None:
    body = {**TASK, "tool_choice": choice}
    for tools in ([SHELL], [tool, SHELL]):
        answer = await whole(client, RESPONSES, {**body, "tools": tools})
        assert [each["name"] for each in answer["tools"]] == ["shell"]
    plain, beside = gateway.requests
    assert beside.prompt_token_ids == plain.prompt_token_ids
    if choice == "required":
        assert accepts(beside.sampling.grammar, calls("shell", command=["ls"]))
    answer = await client.post(RESPONSES, json={**body, "tools": [tool]})
    assert answer.status_code == (400 if choice == "required" else 200)


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, 'with the type "web_search"'),
        (RESPONSES, {"tool_choice": {"type": "custom", "name": "apply_patch"}}, '"custom"'),
        (RESPONSES, {"tools": OTHERS[2:3], "tool_choice": "required"},
         "a call, and image_generation in tools is not served"),
        (RESPONSES, {"tools": OTHERS, "tool_choice": {"type": "function", "name": "apply_patch"}},
         "apply_patch"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "web_search"}},
         "names web_search, which is not served"),
        (MESSAGES, {"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}},
         "a call, and web_search in tools is not served"),
    ],
)  # fmt: skip
async def test_a_choice_that_demands_a_tool_that_is_left_out_is_refused_by_name(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    path: str,
    fields: dict[str, Any],
    told: str,
) -> None:
    body = TASK if path == RESPONSES else SESSION
    assert told in await refusal(client, path, {**body, **fields})
    assert not gateway.requests


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (RESPONSES, {"type": "web_serach"}),
        (RESPONSES, {"type": "computer_use_preview"}),
        (MESSAGES, {"type": "web_search", "name": "web_search"}),
        (MESSAGES, {"type": "bash_20250124", "name": "bash"}),
    ],
)
async def test_a_tool_of_another_type_is_refused_by_its_type(
    client: httpx.AsyncClient, path: str, tool: dict[str, Any]
) -> None:
    body = TASK if path == RESPONSES else SESSION
    told = await refusal(client, path, {**body, "tools": [tool]})
    assert f'tools[0] is not supported with the type "{tool["type"]}"' in told


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
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    instructions: str | None,
    roles: list[str],
    system: str | None,
) -> None:
    turns = [item(role, str(place)) for place, role in enumerate(roles)]
    body = {"model": "gpt-5-codex", "instructions": instructions}
    await whole(client, RESPONSES, {**body, "input": [*turns, item("user", "Hi")]})
    given = "" if system is None else f"system:{system}"
    assert last_prompt(gateway, tokenizer) == f"{given}user:Hiassistant:"


# -- messages --------------------------------------------------------------------------------------


async def test_an_agent_over_messages_calls_a_tool_and_goes_on_with_its_result(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"I look. {calls('Bash', command='ls')}")
    events = await streamed(client, MESSAGES, SESSION)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert "web_search" not in last_prompt(gateway, tokenizer)
    _, call = (await whole(client, MESSAGES, SESSION))["content"]
    assert (call["name"], call["input"]) == ("Bash", {"command": "ls"})

    says(gateway, tokenizer, "Done.")
    turns = [
        *SESSION["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {**call, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": "moon.py",
                 "is_error": False},
                {"type": "text", "text": "<system-reminder>Go on.</system-reminder>", **CACHED},
            ],
        },
    ]  # fmt: skip
    body = {**SESSION, "messages": turns}
    events = await streamed(client, MESSAGES, body)
    assert "".join(each["delta"].get("text", "") for each in events if "delta" in each) == "Done."
    prompt = last_prompt(gateway, tokenizer)
    assert "system:You edit code.\nThe folder is /src.user:<system-reminder>Be brief." in prompt
    assert prompt.endswith("tool:moon.pyuser:<system-reminder>Go on.</system-reminder>assistant:")
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    n_prompt = len(gateway.requests[-1].prompt_token_ids)
    answer = await client.post(COUNT, json=counted)
    assert answer.json() == {"input_tokens": n_prompt}


@pytest.mark.parametrize(
    "edits",
    [
        None,
        [],
        [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 100_000},
                "keep": {"type": "tool_uses", "value": 3},
                "clear_at_least": {"type": "input_tokens", "value": 5_000},
                "exclude_tools": ["web_search"],
                "clear_tool_inputs": False,
            },
        ],
    ],
)
async def test_edits_that_clear_are_taken_and_nothing_is_cleared(
    client: httpx.AsyncClient, gateway: ScriptedGateway, edits: Any
) -> None:
    for given in (None, {"edits": edits}):
        await whole(client, MESSAGES, {**SESSION, "context_management": given})
    without, beside = gateway.requests
    assert beside.prompt_token_ids == without.prompt_token_ids


async def test_an_edit_that_would_write_a_summary_is_refused(client: httpx.AsyncClient) -> None:
    given = {"edits": [{"type": "compact_20260112"}]}
    told = await refusal(client, MESSAGES, {**SESSION, "context_management": given})
    assert "context_management.edits[0].type is not supported with compact_20260112" in told


async def test_a_format_in_the_output_config_is_the_form_of_the_answer(
    client: httpx.AsyncClient, gateway: ScriptedGateway, accepts: Callable[[str, str], bool]
) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {**SESSION, "tools": [], "output_config": config}
    await streamed(client, MESSAGES, asked)
    grammar = gateway.requests[-1].sampling.grammar
    assert accepts(grammar, '{"title": "Moon"}')
    assert not accepts(grammar, "Moon")
    counted = {name: asked[name] for name in ("model", "messages", "system", "output_config")}
    answer = await client.post(COUNT, json=counted)
    assert answer.json() == {"input_tokens": len(gateway.requests[-1].prompt_token_ids)}
    config = {"format": {"type": "json_schema", "schema": {"not": {}}}}
    told = await refusal(client, MESSAGES, {**asked, "output_config": config})
    assert told.startswith("output_config ")
    config = {"format": {"type": "regex"}}
    told = await refusal(client, MESSAGES, {**asked, "output_config": config})
    assert told.startswith("output_config.format.type: ")


async def test_an_image_in_a_result_is_refused_as_only_text_is_served(
    client: httpx.AsyncClient,
) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "aa"}
    turns = [
        *SESSION["messages"],
        {"role": "assistant",
         "content": [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {}}]},
        {"role": "user",
         "content": [{"type": "tool_result", "tool_use_id": "t1",
                      "content": [{"type": "image", "source": image}]}]},
    ]  # fmt: skip
    told = await refusal(client, MESSAGES, {**SESSION, "messages": turns})
    assert 'messages[2].content[0].content[0].type is "image", which is not supported' in told
