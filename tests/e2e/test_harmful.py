"""A request that hangs its workers: stopped after three, others are served."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from halfmoon_runtime.worker.forward_watchdog import HUNG_STATUS
from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.e2e

#: A pass takes 10 ms for each of its tokens, so that 400 of them take longer than the limit.
MODEL = "fake://slow?token_s=0.01&max_context=8192"
LIMIT = ["--forward-limit-s", "1", "--chunk-tokens", "512"]
HANGS = [i % 900 for i in range(400)]


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
        tried = [
            each["placement"]["chosen"]["worker_id"]
            for each in cluster.decisions()
            if each["request_id"].split("~")[0] == bad_id and each["outcome"] == "placed"
        ]
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
