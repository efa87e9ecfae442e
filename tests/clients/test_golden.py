"""Stock vLLM serves the same model beside us: equal questions have equal answers, field by field.

Both compute in float32, and greedily, so tokens and texts are equal and log probabilities are
within rounding. What differs on purpose is written down here, and in docs/api.md.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound

pytestmark = [pytest.mark.timeout(1800)]

_START_S = 1500.0
#: Names and times; what computes; where the prompt's KV came from; a rank counts ties in vLLM, and
#: not here.
INCOMPARABLE = {
    "system_fingerprint", "id", "created", "created_at", "prompt_tokens_details", "rank",
}  # fmt: skip
#: Largest difference of two log probabilities.
ROUNDING = 2e-3

TEXT = "The moon rises over the harbour, and the tide comes in."
HELLO = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello there"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: The names that docs/api.md answers for.
LISTED_FIELDS = Path(__file__).parents[1] / "conductor" / "vllm_fields.json"


@pytest.fixture(scope="module")
def stock(
    vllm: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of vLLM's own server of the same model."""
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    settings = {
        "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    with log.open("wb") as output:
        server = start_bound(
            [
                vllm / "vllm", "serve", model_folder, "--served-model-name", "tiny",
                "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                "--max-num-seqs", "8", "--enforce-eager",
            ],
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not _healthy(url):
            assert server.poll() is None, f"vLLM ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"vLLM does not answer: {log.read_text()[-3000:]}"
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
    return COMPLETIONS, {**asked, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    return CHAT, {**asked, **fields}


def ask(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=300)


def differences(theirs: Any, ours: Any, place: str = "") -> list[str]:
    """Where two answers differ. What is null for one may be missing for the other."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: list[str] = []
        for name in sorted({*theirs, *ours} - INCOMPARABLE):
            found += differences(theirs.get(name), ours.get(name), f"{place}.{name}")
        return found
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [each for i, (a, b) in pairs for each in differences(a, b, f"{place}[{i}]")]
    if isinstance(theirs, float) and isinstance(ours, float) and abs(theirs - ours) < ROUNDING:
        return []
    return [] if theirs == ours else [f"{place}: vLLM {theirs!r}, Halfmoon {ours!r}"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        completion(),
        completion(logprobs=3),
        completion(logprobs=0),
        completion(echo=True),
        completion(return_token_ids=True),
        completion(prompt_logprobs=2),
        completion(prompt=[TEXT, "A request comes in"], max_tokens=5),
        completion(stop=["e"], max_tokens=40),
        completion(ignore_eos=True, max_tokens=40),
        completion(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        completion(logit_bias={"70": 100.0}, max_tokens=3),
        chat(),
        chat(logprobs=True, top_logprobs=2),
        chat(return_token_ids=True),
        chat(stop=["a"], max_tokens=40),
        ("/tokenize", {"model": "tiny", "prompt": TEXT}),
        ("/tokenize", {"model": "tiny", "messages": HELLO}),
        ("/detokenize", {"model": "tiny", "tokens": [70, 71, 72, 73]}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_an_answer_has_the_same_fields_and_values(
    stock: str, served: Any, path: str, body: dict[str, Any]
) -> None:
    theirs, ours = ask(stock, path, body), ask(served.open_url, path, body)
    assert (theirs.status_code, ours.status_code) == (200, 200), theirs.text + ours.text
    assert differences(theirs.json(), ours.json()) == []


def test_an_echo_with_log_probabilities_says_the_same_of_the_prompt(
    stock: str, served: Any
) -> None:
    path, body = completion(echo=True, logprobs=2, max_tokens=1)
    (theirs,), (ours,) = (
        ask(url, path, body).json()["choices"] for url in (stock, served.open_url)
    )
    # The prompt's log probabilities are there twice in vLLM's answer.
    assert theirs.pop("prompt_logprobs") is not None
    assert differences(theirs, ours) == []


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """A stream's chunks, `[DONE]` being the last event; those that say nothing are left out.

    The last one with a text has the reason of its end, as vLLM has it; ours, as OpenAI's, has it
    in a chunk of its own in chats.
    """
    assert response.status_code == 200, response.text
    *events, done = [
        line.removeprefix("data: ") for line in response.text.splitlines() if line.strip()
    ]
    assert done == "[DONE]"
    told: list[dict[str, Any]] = []
    prompt: list[int] | None = None
    for chunk in map(json.loads, events):
        if chunk["choices"]:
            (choice,) = chunk["choices"]
            if choice.get("token_ids") == [] and not choice.get("text"):
                prompt = choice["prompt_token_ids"]  # ours come before the first piece
                continue
            if prompt is not None:
                choice["prompt_token_ids"], prompt = prompt, None
            if choice.get("delta") == {} and choice["finish_reason"]:
                told[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
                continue
            says = choice.get("text") or choice.get("delta", {}).get("content")
            begins = "role" in choice.get("delta", {})
            if not (says or begins or choice["finish_reason"] or choice.get("token_ids")):
                continue
        told.append(chunk)
    return told


def streams_of_both(
    stock: str, ours: str, path: str, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """vLLM's chunks and ours.

    Where the machine keeps vLLM's server from writing, it puts tokens that have come meanwhile
    into one piece (its output collector does); then it is asked again, a few times.
    """
    our_chunks = chunks_of(ask(ours, path, body))
    for _ in range(5):
        their_chunks = chunks_of(ask(stock, path, body))
        if len(their_chunks) >= len(our_chunks):
            break
    return their_chunks, our_chunks


@pytest.mark.parametrize(
    ("path", "body"),
    [
        completion(),
        completion(stream_options={"include_usage": True}),
        completion(logprobs=1, return_token_ids=True, max_tokens=4),
        chat(),
        chat(stream_options={"include_usage": True}),
        chat(logprobs=True, top_logprobs=1, return_token_ids=True, max_tokens=4),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_stream_says_the_same_in_the_same_pieces(
    stock: str, served: Any, path: str, body: dict[str, Any]
) -> None:
    theirs, ours = streams_of_both(stock, served.open_url, path, {**body, "stream": True})
    assert len({chunk["id"] for chunk in ours}) == 1
    assert differences(theirs, ours) == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (*completion(model="other"), "model"),
        (*completion(max_tokens="many"), "max_tokens"),
        (*completion(max_tokens=-1), "max_tokens"),
        (*completion(temperature=-1), "temperature"),
        (*completion(top_p=0), "top_p"),
        (*completion(top_p=2), "top_p"),
        (*completion(n=0), "n"),
        (CHAT, {"model": "tiny"}, "messages"),
        (*completion(prompt=None), "prompt"),
        (*chat(top_logprobs=2), "top_logprobs"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_vllm_refuses_is_refused_with_the_same_status_and_names_the_field(
    stock: str, served: Any, path: str, body: dict[str, Any], param: str
) -> None:
    theirs, ours = ask(stock, path, body), ask(served.open_url, path, body)
    assert theirs.status_code == ours.status_code >= 400
    their_error, our_error = theirs.json()["error"], ours.json()["error"]
    assert set(their_error) == set(our_error)
    assert param in our_error["message"]


def test_the_other_apis_say_the_same(stock: str, served: Any) -> None:
    question = {"model": "tiny", "temperature": 0}
    hello = {"messages": [{"role": "user", "content": "Hello"}], "system": "Be brief"}
    theirs, ours = (
        ask(url, "/v1/messages", {**question, **hello, "max_tokens": 8}).json()
        for url in (stock, served.open_url)
    )
    for name in ("type", "role", "model", "content", "stop_reason"):
        assert differences(theirs[name], ours[name]) == []
    assert theirs["usage"]["output_tokens"] == ours["usage"]["output_tokens"]
    counted = [
        ask(url, "/v1/messages/count_tokens", {"model": "tiny", **hello}).json()["input_tokens"]
        for url in (stock, served.open_url)
    ]
    assert counted[0] == counted[1]
    asked = {**question, "input": "Hello", "instructions": "Be brief", "max_output_tokens": 8}
    theirs, ours = (ask(url, "/v1/responses", asked).json() for url in (stock, served.open_url))
    text = [each["output"][0]["content"][0]["text"] for each in (theirs, ours)]
    assert text[0] == text[1]
    for name in ("object", "status", "incomplete_details", "instructions", "max_output_tokens"):
        assert theirs[name] == ours[name]
    assert theirs["usage"]["total_tokens"] == ours["usage"]["total_tokens"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/v1/models"])
def test_what_watches_vllm_can_watch_us(stock: str, served: Any, path: str) -> None:
    theirs, ours = httpx.get(stock + path), httpx.get(served.open_url + path)
    assert theirs.status_code == ours.status_code == 200
    if theirs.content:
        assert set(theirs.json()) <= set(ours.json())


def test_the_list_of_vllms_fields_is_complete_and_of_the_version_that_is_installed(
    run_client: Callable[..., Any], vllm: Path, program: Callable[[str], Path]
) -> None:
    done = run_client(vllm / "python", program("vllm_fields.py"), within_s=600)
    assert json.loads(LISTED_FIELDS.read_text()) == json.loads(done.stdout.splitlines()[-1])
