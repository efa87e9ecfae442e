"""Real clients against a real cluster with a real, if tiny, model."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.e2e

StartCluster = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, tiny_model: Path) -> Iterator[Any]:
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    # Landings take memory from the first one on: one of the tests counts copies.
    decode = [*fp32, "--transfer-grants", "off"]
    extra = {"prefill": fp32, "decode": decode, "conductor": ["--tool-call-parser", "hermes"]}
    with start_cluster(
        str(tiny_model), served_model_name="tiny", n_prefill=2, n_decode=2, n_kvstore=2, extra=extra
    ) as live:
        yield live


@pytest.fixture(scope="module")
def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def generated(tiny_model: Path) -> Callable[[list[int], int], str]:
    """What transformers itself says."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # our requests ignore it
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def generate(prompt: list[int], n_new: int) -> str:
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=n_new,
            pad_token_id=0,
        )
        text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    return generate


def prompt_of(n: int) -> list[int]:
    return [10 + (i * 37) % 300 for i in range(n)]


def bytes_moved(cluster: Any) -> dict[tuple[str, str], int]:
    """By path and direction, of all workers."""
    import httpx

    moved: Counter[tuple[str, str]] = Counter()
    for name, process in cluster.cluster.processes.items():
        if name.startswith("conductor"):
            continue
        page = httpx.get(f"{process.status['operators']}/metrics", timeout=10).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "halfmoon_transfer_bytes_total":
                    moved[sample.labels["path"], sample.labels["op"]] += int(sample.value)
    return dict(moved)


@pytest.mark.parametrize("n_tokens", [1, 16, 17, 300, 3000])
def test_greedy_text_is_that_of_transformers_cold_and_cached(
    cluster: Any, generated: Callable[[list[int], int], str], n_tokens: int
) -> None:
    prompt = prompt_of(n_tokens)
    expected = generated(prompt, 24)
    for _ in range(2):
        answer = cluster.complete(prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected


def test_a_prompt_on_one_host_is_copied_once_to_decode_and_once_to_its_kvstore(
    cluster: Any, tiny_model: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * config.head_dim
    block_bytes = config.num_hidden_layers * 2 * 16 * width * 4  # keys and values in float32
    before = bytes_moved(cluster)
    prompt = [11, *prompt_of(299)]  # 18 whole blocks and a part of one, none of them cached
    cluster.complete(prompt=prompt, max_tokens=1, temperature=0)
    n_bytes = (19 + 18) * block_bytes
    cluster.until(lambda: sum(bytes_moved(cluster).values()) - sum(before.values()) >= n_bytes)
    moved = {path: n - before.get(path, 0) for path, n in bytes_moved(cluster).items()}
    assert {path: n for path, n in moved.items() if n} == {("shm", "write"): n_bytes}


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


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    def complete(**more: Any) -> Any:
        answer = client.completions.create(
            model="tiny", prompt=prompt_of(50), max_tokens=30, temperature=0, **more
        )
        return answer.choices[0]

    whole = complete().text
    stop = whole[8:11]
    cut = complete(stop=stop)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.fixture(scope="module")
def logprobs_of(tiny_model: Path) -> Callable[[list[int]], torch.Tensor]:
    """What transformers itself thinks of each token after those before it."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    @torch.inference_mode()
    def score(tokens: list[int]) -> torch.Tensor:
        logprobs: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return logprobs

    return score


@pytest.mark.parametrize("n_tokens", [1, 40, 700])
def test_log_probabilities_of_prompt_and_answer_are_those_of_transformers(
    cluster: Any, logprobs_of: Callable[[list[int]], torch.Tensor], n_tokens: int
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
        expected = logprobs_of(tokens)
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


def test_a_bias_keeps_a_token_out_and_forces_another(cluster: Any) -> None:
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


def test_the_schema_and_the_metrics_are_served(cluster: Any) -> None:
    assert "/v1/chat/completions" in cluster.get("/openapi.json")["paths"]
    import httpx

    metrics = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    assert "halfmoon_time_to_first_token_seconds" in metrics


def test_a_real_model_goes_on_after_its_decode_process_is_killed(
    cluster: Any, generated: Callable[[list[int], int], str]
) -> None:
    import httpx

    prompt = prompt_of(100)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, n_events = "", 0
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            choice = json.loads(data)["choices"][0]
            text += choice["text"]
            n_events += 1
            if n_events == 30:
                victim = cluster.decisions()[-1]["placement"]["decode"]
                cluster.process(victim).signal(signal.SIGKILL)
    assert text == generated(prompt, 200)
    cluster.cluster.restart(victim)
    cluster.until(lambda: len(cluster.live()) == 6)
