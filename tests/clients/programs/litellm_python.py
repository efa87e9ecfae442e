"""litellm, by both names that it has for servers like this one."""

import os

import litellm

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
for provider in ("openai", "hosted_vllm"):
    asked = {
        "model": f"{provider}/{model}",
        "api_base": f"{url}/v1",
        "api_key": key,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = litellm.completion(**asked)
    assert answer.usage.completion_tokens >= 1
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    )
    assert streamed == (answer.choices[0].message.content or "")
