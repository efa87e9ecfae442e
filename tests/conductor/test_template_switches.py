"""How clients steer the chat template: where the text ends, names of its own, documents."""

from typing import Any

import httpx
import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer

HELLO = [{"role": "user", "content": "Hi"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "The moon"}]


async def text_of(client: httpx.AsyncClient, tokenizer: HubTokenizer, **body: Any) -> str:
    """The text that the chat template makes of a chat, special tokens included."""
    answer = await client.post(
        "/v1/chat/completions", json={"model": "lab/moon", "return_token_ids": True, **body}
    )
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["prompt_token_ids"]
    asked = {name: each for name, each in body.items() if name not in ("tools", "documents")}
    tokenized = (await client.post("/tokenize", json=asked)).json()["tokens"]
    assert tokenized == tokens
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


@pytest.mark.parametrize(
    "switch",
    [
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": False}},
    ],
)
async def test_a_turn_is_not_begun_by_the_field_or_its_name_among_the_templates(
    client: httpx.AsyncClient, tokenizer: HubTokenizer, switch: dict[str, Any]
) -> None:
    assert await text_of(client, tokenizer, messages=HELLO, **switch) == "<|turn|>user:Hi<|end|>"


@pytest.mark.parametrize(
    "switch",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"continue_final_message": True}},
    ],
)
async def test_the_last_message_is_continued(
    client: httpx.AsyncClient, tokenizer: HubTokenizer, switch: dict[str, Any]
) -> None:
    text = await text_of(client, tokenizer, messages=BEGUN, **switch)
    assert text == "<|turn|>user:Hi<|end|><|turn|>assistant:The moon"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {
                "add_generation_prompt": True,
                "chat_template_kwargs": {"add_generation_prompt": False},
            },
            "add_generation_prompt and that of chat_template_kwargs differ",
        ),
        ({"add_generation_prompt": True, "continue_final_message": True}, "send one of them"),
        ({"chat_template_kwargs": {"add_generation_prompt": "no"}}, "must be true or false"),
        ({"chat_template_kwargs": {"tools": []}}, "tools, which the template gets from"),
        ({"chat_template_kwargs": {"messages": []}}, "messages, which the template gets from"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template, which is not for"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_what_a_template_cannot_be_told_is_refused_by_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], told: str
) -> None:
    answer = await client.post(path, json={"model": "lab/moon", "messages": HELLO, **fields})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 40}),
    ],
)
async def test_other_apis_have_the_names_among_the_templates_too(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    async def n_tokens(**more: Any) -> int:
        answer = await client.post(path, json={"model": "lab/moon", **body, **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    without = {"add_generation_prompt": False}
    assert await n_tokens(chat_template_kwargs=without) < await n_tokens()


async def test_tools_are_shown_in_the_order_of_the_clients_fields(
    client: httpx.AsyncClient, tokenizer: HubTokenizer
) -> None:
    function = {"parameters": {"type": "object", "properties": {}}, "name": "tide"}
    body = {"messages": HELLO, "tools": [{"function": function, "type": "function"}]}
    answer = await client.post(
        "/v1/chat/completions", json={"model": "lab/moon", "return_token_ids": True, **body}
    )
    text = b"".join(map(tokenizer.token_bytes, answer.json()["prompt_token_ids"])).decode()
    assert '[{"function": {"parameters": {"type": "object", "properties": {}}, "name"' in text
