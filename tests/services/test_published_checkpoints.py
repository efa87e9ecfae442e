"""Ten checkpoints as they are published, made tiny: chats of three turns, from HTTP to the tokens
of a real engine, are those of transformers' template, tokenizer and model, and end where they
should.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers as untyped_transformers
from prometheus_client import CollectorRegistry

from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.tokenizer_loader import open_tokenizer
from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_testing.models.published_checkpoints import (
    PUBLISHED,
    make_published_checkpoint,
    token_ids_of,
)

transformers: Any = untyped_transformers
Message = dict[str, Any]

N_NEW = 24
#: Seeds of weights, of which the first whose answers end by themselves is taken.
SEEDS = range(24)
#: Checkpoints whose templates know no tools, and leave them out, or write calls in a form that the
#: conductor does not read. It takes tools where it is told of a form.
TOLD_OF_CALLS = {"qwen2.5-vl", "gemma3", "phi4"}
#: Checkpoints whose templates refuse calls too.
WITHOUT_CALLS = {"gemma3", "phi4"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tides",
            "description": "Gezeiten – low & high",
            "parameters": {
                "type": "object",
                "properties": {"harbour": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["harbour"],
            },
        },
    }
]
ARGUMENTS = {"harbour": "Büsum", "days": 2}


def turns_of(name: str) -> list[list[Message]]:
    """The conversation up to each of its three questions."""
    call = {
        "id": "husum0001",
        "type": "function",
        "function": {"name": "tides", "arguments": ARGUMENTS},
    }
    calling: list[Message] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "husum0001", "content": '{"low": "06:12"}'},
    ]
    system: list[Message] = [{"role": "system", "content": "Sei knapp – 简短."}]
    questions = ["When is the tide low? ", "And high, 半?", "Thanks!"]
    first: list[Message] = [*system, {"role": "user", "content": questions[0]}]
    answer: list[Message] = [{"role": "assistant", "content": "At six."}]
    between = answer if name in WITHOUT_CALLS else [*calling, *answer]
    second: list[Message] = [*first, *between, {"role": "user", "content": questions[1]}]
    third: list[Message] = [
        *second,
        {"role": "assistant", "content": "At noon."},
        {"role": "user", "content": questions[2]},
    ]
    return [first, second, third]


def as_sent(message: Message) -> Message:
    """The message as clients send it: arguments of calls are texts."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(ARGUMENTS)}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": None, "tool_calls": calls}


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        form, ids = PUBLISHED[name], token_ids_of(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = "AutoModelForImageTextToText" if form.image_text else "AutoModelForCausalLM"
        self.model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
        self.stops = [ids[text] for text in form.stops]

    def prompt(self, messages: list[Message]) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(encoded)

    def answer(self, prompt: list[int]) -> list[int]:
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=N_NEW,
            eos_token_id=self.stops,
            pad_token_id=0,
        )
        return list(out[0, len(prompt) :].tolist())


def make_ending(name: str, folder: Path) -> tuple[Reference, list[list[int]], list[list[int]]]:
    """Make a checkpoint whose last answer ends by itself; with its prompts and answers."""
    for seed in SEEDS:
        reference = Reference(name, make_published_checkpoint(name, folder, seed))
        prompts = [reference.prompt(messages) for messages in turns_of(name)]
        last = reference.answer(prompts[-1])
        if 2 <= len(last) < N_NEW:
            answers = [*map(reference.answer, prompts[:-1]), last]
            return reference, prompts, answers
    raise AssertionError(f"no answer of {name} ends within {N_NEW} tokens")


@pytest.mark.parametrize("name", PUBLISHED)
async def test_a_chat_has_the_tokens_of_transformers_and_ends_where_it_should(
    local_cluster: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    reference, prompts, answers = make_ending(name, folder)

    def engine() -> Engine:
        return open_engine(
            str(folder), block_size=16, dtype="float32", device="cpu", threads=1, served_name="m"
        )

    async with local_cluster(engine, n_kvstore=0, n_pages=128) as cluster:
        app = create_app(
            cluster.gateway,
            open_tokenizer(str(folder)),
            registry=CollectorRegistry(),
            tool_call_parser="hermes" if name in TOLD_OF_CALLS else "auto",
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            for messages, prompt, tokens in zip(turns_of(name), prompts, answers, strict=True):
                body = {
                    "messages": list(map(as_sent, messages)),
                    "tools": TOOLS,
                    "temperature": 0,
                    "max_tokens": N_NEW,
                    "return_token_ids": True,
                }
                answered = await client.post("/v1/chat/completions", json={"model": "m", **body})
                assert answered.status_code == 200, answered.text
                (choice,) = answered.json()["choices"]
                assert answered.json()["prompt_token_ids"] == prompt
                assert choice["token_ids"] == tokens
                ended = tokens[-1] in reference.stops
                assert choice["finish_reason"] == ("stop" if ended else "length")
                content = choice["message"]["content"] or ""  # none: it is all thought
                assert all(text not in content for text in PUBLISHED[name].stops)
