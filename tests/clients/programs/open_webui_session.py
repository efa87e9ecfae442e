"""Sends what Open WebUI 0.12 sends to a server of its list, in the order of a first visit.

Its backend asks with aiohttp: the check of a connection, the list of models, a streamed chat with
the parameters of its settings, then title, tags and follow-ups of the same model. Then come further
turns, native tools, a stream that is stopped, and what goes wrong. `metadata`, `chat_id` and other
names of its own are taken out before a request leaves it, so none is sent here. With a direct
connection the browser asks, which first sends a preflight request.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
BASE = f"{url}/v1"
ORIGIN = os.environ["HALFMOON_PAGE_ORIGIN"]
#: What an administrator has set for the model, as the backend writes it into each chat.
PARAMETERS = {"temperature": 0.0, "top_p": 0.9, "max_tokens": 16, "seed": 7, "stop": ["\n\n\n"],
              "frequency_penalty": 0.0, "presence_penalty": 0.0}  # fmt: skip
#: The metric of generations that were given up, as their client closed the connection.
ABORTED = 'halfmoon_request_success_total{finished_reason="abort"} '
#: The end of a title's, tags' and follow-ups' prompts: the conversation's last messages.
HISTORY = "### Chat History:\n<chat_history>\n{}\n</chat_history>"
TASKS = {
    "title": "### Task:\nName this conversation in two to four words.\n### Output:\n"
    'JSON format: { "title": "the name" }\n',
    "tags": "### Task:\nGive one to three broad subjects of this conversation.\n\n### Output:\n"
    'JSON format: { "tags": ["one", "two"] }\n\n',
    "follow_ups": "### Task:\nGuess three things that the user may want to ask next.\n### Output:\n"
    'JSON format: { "follow_ups": ["first", "second"] }\n',
}
#: Task parameters that an administrator may add, so that any model's title can be read.
FORMS = {
    "title": {"type": "string", "maxLength": 40},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    "follow_ups": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 3},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at the moon.",
        "parameters": {
            "type": "object",
            "properties": {"phase": {"type": "string", "enum": ["half", "full"]}},
            "required": ["phase"],
            "additionalProperties": False,
        },
    },
}


def headers_with(token: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}


class Backend:
    """Asks as Open WebUI's backend does: one session, and a body that is JSON text."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def models(self, token: str = key) -> tuple[int, Any]:
        async with self.session.get(f"{BASE}/models", headers=headers_with(token)) as answer:
            return answer.status, await answer.json()

    async def whole(self, body: dict[str, Any], token: str = key) -> tuple[int, Any]:
        """Ask for an answer, or for a refusal: neither is a stream."""
        async with self.session.post(
            f"{BASE}/chat/completions", data=json.dumps(body), headers=headers_with(token)
        ) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.json()

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.session.post(
            f"{BASE}/chat/completions", data=json.dumps(body), headers=headers_with(key)
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                data = line.decode().strip().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    async def streamed(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Put a stream together: the assistant's message, and the usage."""
        text, usage = "", {}
        calls: dict[int, dict[str, Any]] = {}
        async for chunk in self.chunks(body):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                delta = choice["delta"]
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    known = calls.setdefault(
                        call["index"],
                        {"id": call["id"], "name": call["function"]["name"], "arguments": ""},
                    )
                    known["arguments"] += call["function"].get("arguments") or ""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
        return message, usage

    async def n_aborted(self) -> float:
        """Return the number of generations that the server gave up."""
        async with self.session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.removeprefix(ABORTED)) for line in lines if line.startswith(ABORTED))


def chat(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"stream": True, "model": model, "messages": messages,
            "stream_options": {"include_usage": True}, **PARAMETERS, **more}  # fmt: skip


async def connect(backend: Backend) -> None:
    """Check the connection, with a right key and a wrong one, and list the models."""
    for _ in range(2):
        status, listed = await backend.models()
        assert status == 200
        assert [(each["id"], each["object"]) for each in listed["data"]] == [(model, "model")]
        assert listed["data"][0]["owned_by"]
    status, refused = await backend.models("wrong")
    assert (status, refused["error"]["code"]) == (401, "invalid_api_key")


async def talk(backend: Backend) -> list[dict[str, Any]]:
    """Have a first turn, its title, tags and follow-ups, and a second turn with all of it."""
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    first, usage = await backend.streamed(chat(messages))
    assert 1 <= usage["completion_tokens"] <= 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = chat(messages, stream=False)
    del again["stream_options"]
    status, whole = await backend.whole(again)
    assert status == 200
    assert whole["choices"][0]["message"]["content"] == first["content"]
    assert whole["usage"]["completion_tokens"] == usage["completion_tokens"]

    messages.append(first)
    said = "\n".join(f"{each['role'].upper()}: {each['content']}" for each in messages[1:])
    for task, prompt in TASKS.items():
        asking = {
            "model": model,
            "messages": [{"role": "user", "content": prompt + HISTORY.format(said)}],
            "stream": False,
            "max_tokens": 40,
        }
        status, free = await backend.whole(asking)
        assert status == 200
        assert isinstance(free["choices"][0]["message"]["content"], str)
        schema = {"type": "object", "properties": {task: FORMS[task]}, "required": [task],
                  "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": task, "schema": schema}}
        status, formed = await backend.whole({**asking, "max_tokens": 600, "response_format": form})
        assert status == 200
        # The backend reads from the first brace to the last one.
        found = re.search(r"\{.*\}", formed["choices"][0]["message"]["content"], re.DOTALL)
        assert found
        assert isinstance(json.loads(found[0], strict=False)[task], str | list)

    # Texts of a user who attached something are lists of parts.
    messages.append({"role": "user", "content": [{"type": "text", "text": "And then?"}]})
    second, longer = await backend.streamed(chat(messages))
    assert longer["prompt_tokens"] > usage["prompt_tokens"]
    # To regenerate sends the same again; to continue leaves the answer last.
    assert (await backend.streamed(chat(messages)))[0] == second
    messages.append(second)
    await backend.streamed(chat(messages))
    return messages


async def use_tools(backend: Backend, messages: list[dict[str, Any]]) -> None:
    """Let the model call, which a small one must be made to do, and go on with the result."""
    turns = [*messages, {"role": "user", "content": "Look"}]
    asking = {"tools": [TOOL], "max_tokens": 300}
    calling, _ = await backend.streamed(
        chat(turns, **asking, tool_choice="required", parallel_tool_calls=False)
    )
    (call,) = calling["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["phase"] in ("half", "full")
    turns += [calling, {"role": "tool", "tool_call_id": call["id"], "content": "It is there."}]
    _, usage = await backend.streamed(chat(turns, tools=[TOOL]))
    assert usage["completion_tokens"] >= 1


async def stop(backend: Backend, messages: list[dict[str, Any]]) -> None:
    """Stop a stream: the backend closes the connection, and the server computes no further."""
    n_before = await backend.n_aborted()
    chunks = backend.chunks(chat(messages[:2], max_tokens=400, ignore_eos=True))
    seen = [await anext(chunks) for _ in range(3)]
    await chunks.aclose()
    assert len({chunk["id"] for chunk in seen}) == 1
    deadline = time.monotonic() + 30
    while await backend.n_aborted() == n_before:
        assert time.monotonic() < deadline, "the server has not noticed that its client left"
        await asyncio.sleep(0.1)


async def go_wrong(backend: Backend) -> None:
    """Read errors that a user is shown: their texts name what is wrong."""
    hello = [{"role": "user", "content": "Hello"}]
    status, refused = await backend.whole(chat(hello, model="other"))
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    assert "other" in refused["error"]["message"]
    status, refused = await backend.whole(chat(hello), "wrong")
    assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
    # Parameters of its settings that only other servers have.
    status, refused = await backend.whole(chat(hello, num_ctx=4096))
    assert (status, refused["error"]["param"]) == (400, "num_ctx")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    seeing = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}]
    status, refused = await backend.whole(chat(seeing))
    assert status == 400
    assert refused["error"]["param"].startswith("messages")


async def ask_from_a_browser(session: aiohttp.ClientSession) -> None:
    """Ask as a page does: the browser asks first whether the page may."""
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with session.options(f"{BASE}/chat/completions", headers=preflight) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        allowed = answer.headers["Access-Control-Allow-Headers"].lower()
        assert "authorization" in allowed
        assert "content-type" in allowed
    for token, status in ((key, 200), ("wrong", 401)):
        headers = {**headers_with(token), "Origin": ORIGIN}
        async with session.get(f"{BASE}/models", headers=headers) as answer:
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN


async def main() -> None:
    async with aiohttp.ClientSession(trust_env=False) as session:
        backend = Backend(session)
        await connect(backend)
        messages = await talk(backend)
        await use_tools(backend, messages)
        await stop(backend, messages)
        await go_wrong(backend)
        await ask_from_a_browser(session)


asyncio.run(main())
