"""Real clients against a real cluster with a real, if tiny, model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoConfig

from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, tiny_model: Path) -> Iterator[LiveCluster]:
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    # Landings take memory from the first one on: one of the tests counts copies.
    decode = [*fp32, "--transfer-grants", "off"]
    extra = {"prefill": fp32, "decode": decode, "conductor": ["--tool-call-parser", "hermes"]}
    with start_cluster(
        str(tiny_model), served_model_name="tiny", n_prefill=2, n_decode=2, n_kvstore=2, extra=extra
    ) as live:
        yield live


@pytest.fixture(scope="module")
def client(cluster: LiveCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def prompt_of(n: int) -> list[int]:
    return [10 + (i * 37) % 300 for i in range(n)]


def bytes_moved(cluster: LiveCluster, **labels: str) -> int:
    """Of all workers."""
    names = [name for name in cluster.cluster.processes if not name.startswith("conductor")]
    metric = "halfmoon_transfer_bytes_total"
    return sum(int(cluster.metrics(name, **labels).get(metric, 0)) for name in names)


@pytest.mark.parametrize("n_tokens", [1, 17, 3000])
def test_greedy_tokens_are_those_of_transformers_cold_and_cached(
    cluster: LiveCluster, alone: Any, n_tokens: int
) -> None:
    prompt = prompt_of(n_tokens)
    expected = alone.generate(prompt, 24)
    for _ in range(2):
        assert cluster.ask(prompt, 24)[0] == expected


def test_a_prompt_on_one_host_is_copied_once_to_decode_and_once_to_its_kvstore(
    cluster: LiveCluster, tiny_model: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * config.head_dim
    block_bytes = config.num_hidden_layers * 2 * 16 * width * 4  # keys and values in float32
    copies = {"path": "shm", "op": "write"}
    before = bytes_moved(cluster), bytes_moved(cluster, **copies)
    prompt = [11, *prompt_of(299)]  # 18 whole blocks and a part of one, none of them cached
    cluster.complete(prompt=prompt, max_tokens=1, temperature=0)
    n_bytes = (19 + 18) * block_bytes
    cluster.until(lambda: bytes_moved(cluster) - before[0] >= n_bytes)
    assert bytes_moved(cluster) - before[0] == n_bytes
    assert bytes_moved(cluster, **copies) - before[1] == n_bytes


def test_openai_streams_a_chat_completion(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "The moon rises over the harbour."}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None
    assert 1 <= usage.completion_tokens <= 12
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] in ("stop", "length")
    whole = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "The moon rises over the harbour."}],
        max_tokens=12,
        temperature=0,
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == streamed


def test_openai_streams_a_completion_and_reports_what_was_cached(
    client: openai.OpenAI,
) -> None:
    prefix = prompt_of(2000)
    cached = []
    for tail in (11, 12):
        stream = client.completions.create(
            model="tiny",
            prompt=[*prefix, tail],
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = [chunk.usage for chunk in stream if chunk.usage][-1]
        assert usage.prompt_tokens == 2001
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[1] >= 1984


def test_openai_gets_its_own_error_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model="tiny", prompt=prompt_of(8192), max_tokens=16)


@pytest.mark.parametrize("n_tokens", [1, 40, 700])
def test_log_probabilities_of_prompt_and_answer_are_those_of_transformers(
    cluster: LiveCluster, alone: Any, n_tokens: int
) -> None:
    prompt = prompt_of(n_tokens)
    for _ in range(2):  # the second time blocks of the prompt are cached
        answer = cluster.complete(
            prompt=prompt, max_tokens=6, temperature=0, ignore_eos=True, echo=True, logprobs=3,
            return_token_ids=True, return_tokens_as_token_ids=True,
        )  # fmt: skip
        (choice,) = answer["choices"]
        tokens = prompt + choice["token_ids"]
        told = choice["logprobs"]
        assert told["tokens"] == [f"token_id:{token}" for token in tokens]
        assert told["token_logprobs"][0] is None
        expected = alone.logprobs(tokens)
        for place, token in enumerate(tokens[1:], 1):
            row = expected[place - 1]
            assert told["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-3)
            best = told["top_logprobs"][place]
            likeliest = row.topk(3)
            for value, index in zip(*likeliest, strict=True):
                assert best[f"token_id:{int(index)}"] == pytest.approx(float(value), abs=1e-3)


def test_a_batch_of_prompts_with_several_answers_each_is_what_each_gives_alone(
    client: openai.OpenAI,
) -> None:
    def ask(prompts: Any, n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=prompts, n=n, max_tokens=8, seed=seed, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    prompts = [prompt_of(30), prompt_of(45)]
    together = ask(prompts, 2, 5)
    assert together == [*ask(prompts[0], 1, 5), *ask(prompts[0], 1, 6),
                        *ask(prompts[1], 1, 5), *ask(prompts[1], 1, 6)]  # fmt: skip
    assert together[0] != together[1]


def test_a_bias_keeps_a_token_out_and_forces_another(cluster: LiveCluster) -> None:
    def ask(**more: Any) -> list[int]:
        answer = cluster.complete(
            prompt=prompt_of(20), max_tokens=5, ignore_eos=True, return_token_ids=True, **more
        )
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    plain = ask(temperature=0)
    assert plain[0] not in ask(temperature=0, logit_bias={str(plain[0]): -100})
    assert ask(temperature=1.0, logit_bias={"77": 100}) == [77] * 5


def test_openai_reads_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "The tide comes in."}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for place in choice.logprobs.content:
        assert place.logprob <= 0
        assert place.top_logprobs[0].token == place.token  # greedy: the likeliest one


TIDE: dict[str, Any] = {
    "name": "tide",
    "parameters": {
        "type": "object",
        "properties": {"spring": {"type": "boolean"}, "at": {"enum": ["Cork", "Brest"]}},
        "required": ["spring", "at"],
        "additionalProperties": False,
    },
}


def is_tide(arguments: str) -> bool:
    given = json.loads(arguments)
    return given.keys() == {"spring", "at"} and given["at"] in ("Cork", "Brest")


def test_openai_calls_a_function_by_way_of_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False, **TIDE}
    asked: Any = {"role": "user", "content": "How is the tide?"}
    more: Any = {"model": "tiny", "tools": [tool], "temperature": 0}
    answer = client.responses.create(input=[asked], tool_choice="required", **more)
    called = [item for item in answer.output if item.type == "function_call"]
    assert len(called) == len(answer.output) >= 1
    assert all(item.name == "tide" and is_tide(item.arguments) for item in called)
    # What was called goes back with what it gave.
    given = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "high"}
        for item in called
    ]
    back: Any = [asked, *answer.output, *given]
    named: Any = {"type": "function", "name": "tide"}
    events = list(client.responses.create(input=back, tool_choice=named, stream=True, **more))
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert is_tide(done.arguments)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ""
    (item,) = last.response.output
    assert item.type == "function_call"
    assert item.arguments == done.arguments
