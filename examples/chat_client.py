"""Stream an answer over the REST API with httpx alone: `python examples/chat_client.py QUESTION`.

HALFMOON_URL names the endpoint; `halfmoon up` starts one at the default.
"""

import json
import os
import sys

import httpx

URL = os.environ.get("HALFMOON_URL", "http://127.0.0.1:8000")
QUESTION = "Ada's room is 417. Bo's room is 203. What is Ada's room?"

with httpx.Client(base_url=f"{URL}/v1", timeout=60.0) as client:
    model = client.get("/models").raise_for_status().json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(sys.argv[1:]) or QUESTION}],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", "/chat/completions", json=body) as answer:
        if answer.status_code == 429:
            sys.exit(f"busy: try again in {answer.headers['Retry-After']} s")
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
            if usage := event.get("usage"):
                print(f"\n{usage['prompt_tokens']} prompt tokens")
