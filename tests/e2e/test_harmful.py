"""A request that hangs or takes down its workers: stopped after three, others are served."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from halfmoon_runtime.worker.forward_watchdog import HUNG_STATUS
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

#: A pass takes 10 ms for each of its tokens, so that 400 of them take longer than the limit.
MODEL = "fake://slow?token_s=0.01&max_context=8192"
LIMIT = ["--forward-limit-s", "1", "--chunk-tokens", "512"]
HANGS = [i % 900 for i in range(400)]


def prefills_of(cluster: LiveCluster, request_id: str) -> list[str]:
    """The prefill workers that a client's request was placed at, in turn."""
    return [
        decision["placement"]["chosen"]["worker_id"]
        for decision in cluster.decisions()
        if decision["request_id"].split("~")[0] == request_id and decision["outcome"] == "placed"
    ]


def test_a_request_that_hangs_workers_is_tried_alone_and_reaches_no_other(
    start_cluster: StartCluster,
) -> None:
    with (
        start_cluster(MODEL, n_prefill=4, extra={"prefill": LIMIT}) as cluster,
        ThreadPoolExecutor(1) as client,
    ):
        model = cluster.model
        bad = client.submit(
            lambda: cluster.post("/v1/completions", model=model, prompt=HANGS, max_tokens=5)
        )
        cluster.until(lambda: bool(cluster.decisions()))
        bad_id = cluster.decisions()[0]["request_id"].split("~")[0]
        n_served = 0
        while not bad.done():
            cluster.complete(prompt=[n_served, 1, 2], max_tokens=2)
            n_served += 1
        answer = bad.result()
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "harmful_request"
        tried = prefills_of(cluster, bad_id)
        assert len(tried) == len(set(tried)) == 3
        for name in tried:
            process = cluster.process(name)
            cluster.until(lambda process=process: process.exit_code is not None)
            assert process.exit_code == HUNG_STATUS
            assert name in error["message"]
            assert any("in forward" in line for line in process.last_lines(200))
        (last,) = {f"prefill-{n}" for n in range(4)} - set(tried)
        assert cluster.process(last).exit_code is None
        assert n_served > 0
        assert cluster.complete(prompt=[7, 8], max_tokens=3)["usage"]["completion_tokens"] == 3
        # The last one: nothing is computed any more, and the conductor says so.
        refused = cluster.post("/v1/completions", model=model, prompt=HANGS[::-1], max_tokens=5)
        assert refused.status_code in (500, 503)
        assert httpx.get(f"{cluster.url}/ready", timeout=10).status_code == 503


def test_a_request_whose_decode_workers_die_is_stopped_after_three(
    start_cluster: StartCluster,
) -> None:
    """Each try brings a token, from prefill; a kill before decode's first is its try's end."""
    slow_steps = "fake://slow?step_s=1.5&max_context=8192"
    with start_cluster(slow_steps, n_decode=4) as cluster, ThreadPoolExecutor(1) as client:
        model = cluster.model
        bad = client.submit(
            lambda: cluster.post("/v1/completions", model=model, prompt=[1, 2, 3], max_tokens=50)
        )
        killed: list[str] = []
        while len(killed) < 3:
            cluster.until(lambda: cluster.get("/debug/cluster")["requests"]["decoding"] == 1)
            decode = cluster.decisions()[-1]["placement"]["decode"]
            cluster.process(decode).signal(signal.SIGKILL)
            cluster.process(decode).wait(10)
            killed.append(decode)
            n_tries = len(killed)
            cluster.until(
                lambda n_tries=n_tries: bad.done() or len(cluster.decisions()) == n_tries + 1
            )
        answer = bad.result(timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "harmful_request"
        assert {d["placement"]["decode"] for d in cluster.decisions()} == set(killed)
        assert len(set(killed)) == 3
        assert cluster.complete(prompt=[7, 8], max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_decode_worker_whose_step_hangs_ends_itself(start_cluster: StartCluster) -> None:
    slow_steps = "fake://slow?step_s=1.5&max_context=8192"
    limit = {"decode": ["--forward-limit-s", "0.5"]}
    with start_cluster(slow_steps, n_decode=4, extra=limit) as cluster:
        answer = cluster.post(
            "/v1/completions", model=cluster.model, prompt=[1, 2, 3], max_tokens=50
        )
        assert answer.status_code == 400, answer.text
        tried = {d["placement"]["decode"] for d in cluster.decisions()}
        assert len(tried) == 3
        for name in (f"decode-{n}" for n in range(4)):
            process = cluster.process(name)
            if name in tried:
                process.wait(10)
            assert process.exit_code == (HUNG_STATUS if name in tried else None)
