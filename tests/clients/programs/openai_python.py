"""The openai package, its older and its newer API."""

import os

from openai import AuthenticationError, NotFoundError, OpenAI

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
assert [each.id for each in client.models.list()] == [model]
assert client.models.retrieve(model).id == model

said = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Hello"}],
    max_completion_tokens=8,
    n=2,
    logprobs=True,
    top_logprobs=2,
)
assert len(said.choices) == 2
assert said.choices[0].logprobs is not None
chunks = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Hello"}],
    max_completion_tokens=8,
    stream=True,
    stream_options={"include_usage": True},
)
*_, last = chunks
assert last.usage is not None
assert not last.choices

batch = client.completions.create(
    model=model, prompt=[[10, 11, 12], [13, 14]], max_tokens=4, logprobs=1, echo=True, seed=1
)
assert len(batch.choices) == 2
assert batch.choices[0].logprobs is not None

response = client.responses.create(model=model, input="Hello", max_output_tokens=8)
assert response.output_text is not None
assert response.usage is not None
kinds = [
    event.type
    for event in client.responses.create(
        model=model, input="Hello", max_output_tokens=8, stream=True
    )
]
assert kinds[0] == "response.created"
assert kinds[-1] in ("response.completed", "response.incomplete")

try:
    OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
except AuthenticationError as error:
    assert error.code == "invalid_api_key"
else:
    raise AssertionError("a wrong key was taken")
try:
    client.embeddings.create(model=model, input="Hello")
except NotFoundError as error:
    assert "/v1/embeddings" in error.message
else:
    raise AssertionError("there are no embeddings here")
