"""The anthropic package."""

import os

import anthropic

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
#: Newer versions have no argument for it.
GREEDY = {"extra_body": {"temperature": 0}}
messages = [{"role": "user", "content": "Hello"}]
for client in (
    anthropic.Anthropic(base_url=url, api_key=key, max_retries=0),
    anthropic.Anthropic(base_url=url, auth_token=key, api_key=None, max_retries=0),
):
    answer = client.messages.create(
        model=model, max_tokens=8, system="Be brief", messages=messages, **GREEDY
    )
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(
        model=model, max_tokens=8, system="Be brief", messages=messages, **GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == answer.content[0].text == last.content[0].text
    assert last.usage.output_tokens == answer.usage.output_tokens
    events = list(
        client.messages.create(
            model=model, max_tokens=8, system="Be brief", messages=messages, stream=True, **GREEDY
        )
    )
    kinds = [event.type for event in events if event.type != "ping"]
    n_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * n_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == text
    assert events[-2].usage.output_tokens == answer.usage.output_tokens
    counted = client.messages.count_tokens(model=model, system="Be brief", messages=messages)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)

stopped = client.messages.create(
    model=model, max_tokens=200, messages=messages, stop_sequences=list("aeiou "), **GREEDY
)
assert (stopped.stop_reason == "stop_sequence") == (stopped.stop_sequence is not None)

tool = {
    "name": "tide",
    "input_schema": {
        "type": "object",
        "properties": {"spring": {"type": "boolean"}},
        "required": ["spring"],
        "additionalProperties": False,
    },
}
#: A model that likes to call would go on until there are no tokens left.
CALL_ONE = {"type": "any", "disable_parallel_tool_use": True}
asked = {"model": model, "max_tokens": 600, "tools": [tool], **GREEDY}
answer = client.messages.create(messages=messages, tool_choice=CALL_ONE, **asked)
assert answer.stop_reason == "tool_use"
assert {(block.type, block.name) for block in answer.content} == {("tool_use", "tide")}
assert all(isinstance(block.input["spring"], bool) for block in answer.content)
given = [
    {"type": "tool_result", "tool_use_id": block.id, "content": "high"} for block in answer.content
]
turns = [
    *messages,
    {"role": "assistant", "content": answer.content},
    {"role": "user", "content": given},
]
named = {"type": "tool", "name": "tide", "disable_parallel_tool_use": True}
with client.messages.stream(messages=turns, tool_choice=named, **asked) as stream:
    kinds = [event.type for event in stream]
    last = stream.get_final_message()
assert "input_json" in kinds
(block,) = last.content
assert isinstance(block.input["spring"], bool)
assert last.stop_reason == "tool_use"
counted = client.messages.count_tokens(model=model, messages=turns, tools=[tool])
assert counted.input_tokens > 0

try:
    client.messages.create(model="other", max_tokens=8, messages=messages)
except anthropic.NotFoundError as error:
    assert "other" in str(error)
else:
    raise AssertionError("another model was served")
try:
    anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
        model=model, max_tokens=8, messages=messages
    )
except anthropic.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was taken")
