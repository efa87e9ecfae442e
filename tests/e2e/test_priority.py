"""What a client says of itself in its HTTP request, down to the order in which work is done."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfmoon_conductor.tenants import add_tenant
from halfmoon_protocol.messages import PrefillDone, StartPrefill
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.conductor.journal import read_journal
from halfmoon_scheduling.events import MessageReceived, RequestArrived
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e


def test_an_urgent_prompt_is_computed_before_what_came_earlier_and_the_core_knows_the_tenant(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    journal, tenants = tmp_path / "conductor.journal", tmp_path / "tenants.toml"
    keys = {name: add_tenant(tenants, name) for name in ("lab", "shop")}
    operator = add_tenant(tenants, "ops", operator=True)
    extra = {
        "conductor": ["--journal-path", str(journal), "--tenants", str(tenants)],
        "prefill": ["--chunk-tokens", "16", "--max-chunk-tokens", "16"],
    }
    with (
        start_cluster(
            "fake://slow?step_s=0.01&max_context=8192", key=operator, n_kvstore=0, extra=extra
        ) as live,
        ThreadPoolExecutor(3) as clients,
    ):

        def ask(tenant: str, prompt: list[int], priority: int) -> int:
            body = {"model": "slow", "prompt": prompt, "max_tokens": 2, "priority": priority}
            return (
                LiveCluster(live.cluster, keys[tenant]).post("/v1/completions", **body).status_code
            )

        answers = []
        for tenant, n_tokens, priority in (("lab", 8000, 0), ("lab", 64, 5), ("shop", 64, -5)):
            n_placed = len(live.decisions())
            prompt = [i % 900 for i in range(n_tokens)]
            answers.append(clients.submit(ask, tenant, prompt, priority))
            live.until(lambda n=n_placed: len(live.decisions()) > n)
        assert [answer.result(timeout=60) for answer in answers] == [200, 200, 200]

    with journal.open("rb") as source:
        entries = list(read_journal(source)[1])
    requests = [e.event.request for e in entries if isinstance(e.event, RequestArrived)]
    # HTTP's priorities go first when they are small, as in vLLM; the core's when they are large.
    assert [(r.tenant, r.priority) for r in requests] == [("lab", 0), ("lab", -5), ("shop", 5)]
    long, plain, urgent = (r.request_id for r in requests)
    told, done = [], []
    for entry in entries:
        match entry.event:
            case MessageReceived(message=PrefillDone(request_id=request_id)):
                done.append(request_id)
        for command in entry.commands:
            if isinstance(command, Send) and isinstance(command.message, StartPrefill):
                assert not done, "the long prompt was over before the others were placed"
                told.append(command.message.request_id)
    assert told == [long, plain, urgent]
    assert done == [urgent, long, plain]
