"""langchain-openai."""

import os

from langchain_openai import ChatOpenAI

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=8, stream_usage=True
)
answer = chat.invoke("Hello")
assert answer.usage_metadata["output_tokens"] >= 1
parts = list(chat.stream("Hello"))
assert "".join(part.text for part in parts) == answer.text
assert any(part.usage_metadata for part in parts)
