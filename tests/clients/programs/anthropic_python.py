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
    counted = client.messages.count_tokens(model=model, system="Be brief", messages=messages)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)

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
