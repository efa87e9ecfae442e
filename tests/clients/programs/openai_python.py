"""The openai package, its older and its newer API."""

import json
import os
import re
from typing import Literal

from openai import (
    AuthenticationError,
    BadRequestError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
    pydantic_function_tool,
)
from pydantic import BaseModel

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
hello = [{"role": "user", "content": "Hello"}]
assert [each.id for each in client.models.list()] == [model]
assert client.models.retrieve(model).id == model

# Chats, whole and streamed.
said = client.chat.completions.create(
    model=model, messages=hello, max_completion_tokens=8, n=2, logprobs=True, top_logprobs=2
)
assert len(said.choices) == 2
assert all(len(token.top_logprobs) == 2 for token in said.choices[0].logprobs.content)
greedy = {"model": model, "messages": hello, "max_completion_tokens": 8, "temperature": 0}
whole = client.chat.completions.create(**greedy)
*chunks, last = client.chat.completions.create(
    **greedy, stream=True, stream_options={"include_usage": True}
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text == whole.choices[0].message.content
assert not last.choices
assert last.usage.completion_tokens == whole.usage.completion_tokens
raw = client.chat.completions.with_raw_response.create(
    **greedy, extra_headers={"X-Request-Id": "openai-python-1"}
)
assert raw.headers["x-request-id"] == "openai-python-1"

# Answers of a given form, and calls of tools.
schema = {
    "type": "object",
    "properties": {"phase": {"enum": ["half", "full"]}, "lit": {"type": "boolean"}},
    "required": ["phase", "lit"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "moon", "schema": schema, "strict": True}}
formed = client.chat.completions.create(
    model=model, messages=hello, max_completion_tokens=600, response_format=form
)
assert formed.choices[0].finish_reason == "stop"
moon = json.loads(formed.choices[0].message.content)
assert moon["phase"] in ("half", "full")
assert isinstance(moon["lit"], bool)
vllms = client.completions.create(
    model=model, prompt="A", max_tokens=20, extra_body={"guided_regex": "[a-c]{3}"}
)
assert re.fullmatch("[a-c]{3}", vllms.choices[0].text)
tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
calling = {**greedy, "max_completion_tokens": 600, "tools": [tool], "tool_choice": "required",
           "parallel_tool_calls": False}  # fmt: skip
called = client.chat.completions.create(**calling).choices[0]
assert called.finish_reason == "tool_calls"
(call,) = called.message.tool_calls
assert call.function.name == "look"
assert json.loads(call.function.arguments)["phase"] in ("half", "full")
with client.chat.completions.stream(**calling) as stream:
    streamed = stream.get_final_completion().choices[0]
assert streamed.finish_reason == "tool_calls"
assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


# Strict tools made of a class, and answers read into one.
class Moon(BaseModel):
    """What is to be said of the moon."""

    phase: Literal["half", "full"]
    lit: bool


for choice in ("required", "auto"):
    parsed = client.chat.completions.parse(
        model=model, messages=hello, max_completion_tokens=600, temperature=0, tool_choice=choice,
        tools=[pydantic_function_tool(Moon)], parallel_tool_calls=False, metadata={"a": "b"},
        store=True, service_tier="flex", reasoning_effort="low", verbosity="low",
        prediction={"type": "content", "content": "full"},
    ).choices[0].message  # fmt: skip
    calls = parsed.tool_calls or []
    assert calls or (choice == "auto" and parsed.content)
    assert all(isinstance(call.function.parsed_arguments, Moon) for call in calls)
read = client.chat.completions.parse(
    model=model, messages=hello, max_completion_tokens=600, response_format=Moon
)
assert isinstance(read.choices[0].message.parsed, Moon)
try:
    client.chat.completions.parse(
        model=model, messages=hello, max_completion_tokens=40, tools=[pydantic_function_tool(Moon)],
        tool_choice="required",
    )  # fmt: skip
except LengthFinishReasonError as error:
    (call,) = error.completion.choices[0].message.tool_calls
    assert call.function.name == "Moon"
else:
    raise AssertionError("a call that was cut off was read as a whole one")

# Completions.
batch = client.completions.create(
    model=model, prompt=[[70, 71, 72], [73, 74]], max_tokens=4, logprobs=1, echo=True, seed=1
)
assert len(batch.choices) == 2
assert batch.choices[0].logprobs.token_logprobs[0] is None
assert len(batch.choices[1].logprobs.tokens) <= 6

# Responses, whole and as events.
asked = {"model": model, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
response = client.responses.create(**asked)
assert response.usage.output_tokens >= 1
events = list(client.responses.create(**asked, stream=True))
assert [event.sequence_number for event in events] == list(range(len(events)))
assert events[0].type == "response.created"
assert events[-1].type in ("response.completed", "response.incomplete")
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
assert "".join(deltas) == response.output_text == events[-1].response.output_text
shaped = client.responses.create(
    model=model,
    input="Hello",
    max_output_tokens=600,
    text={"format": {"type": "json_schema", "name": "moon", "schema": schema, "strict": True}},
)
assert json.loads(shaped.output_text)["phase"] in ("half", "full")
made = client.responses.parse(
    model=model, input="Hello", max_output_tokens=600, temperature=0, tool_choice="required",
    tools=[pydantic_function_tool(Moon, name="moon")["function"] | {"type": "function"}],
    parallel_tool_calls=False, metadata={"a": "b"}, store=True, reasoning={"effort": "low"},
)  # fmt: skip
assert made.metadata == {"a": "b"}
(call,) = made.output
Moon.model_validate_json(call.arguments)

tool = {
    "type": "function",
    "name": "tide",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"spring": {"type": "boolean"}},
        "required": ["spring"],
        "additionalProperties": False,
    },
}
named = {"type": "function", "name": "tide"}
with client.responses.stream(model=model, input="Hello", tools=[tool], tool_choice=named) as stream:
    kinds = [event.type for event in stream]
    (call,) = stream.get_final_response().output
assert "response.function_call_arguments.delta" in kinds
assert (call.type, call.name) == ("function_call", "tide")


# Errors.
def error_of(kind, ask):
    """Return the error that a call raises."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


stranger = OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
assert error_of(AuthenticationError, stranger.models.list).code == "invalid_api_key"
error = error_of(NotFoundError, lambda: client.embeddings.create(model=model, input="Hello"))
assert "/v1/embeddings" in error.message
asked = {"model": model, "prompt": "A", "suffix": "end"}
error = error_of(BadRequestError, lambda: client.completions.create(**asked))
assert (error.param, error.code) == ("suffix", "not_supported")
