"""Long prompts that make room for another tenant lose nothing by it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfmoon_conductor.tenants import add_tenant
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

#: Its tokens depend on every byte of KV; a step takes 10 ms, and 2 ms more for each token.
MODEL = "fake://shares?step_s=0.01&token_s=0.002&max_context=4096"
N_SHORT = 4
#: Prefilled in 4 s.
N_LONG_PROMPT = 2000
#: Answers at decode at once: the flood's.
N_RUNNING = 3


def prompt_of(number: int, n_tokens: int = 20) -> list[int]:
    return [10 + (i * 37 + number * 101) % 300 for i in range(n_tokens)]


def test_a_flood_of_long_prompts_makes_room_and_loses_no_token(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.toml"
    flood, lab = (add_tenant(tenants, name) for name in ("flood", "lab"))
    operator = add_tenant(tenants, "ops", operator=True)
    extra = {
        "conductor": ["--tenants", str(tenants)],
        "decode": ["--max-running", str(N_RUNNING)],
    }
    with (
        start_cluster(MODEL, key=operator, extra=extra) as live,
        ThreadPoolExecutor(N_RUNNING) as clients,
    ):

        def ask(key: str, prompt: list[int]) -> list[int]:
            return LiveCluster(live.cluster, key).stream(prompt, N_SHORT, model="shares")

        def ask_long(number: int) -> list[int]:
            return ask(flood, prompt_of(number, N_LONG_PROMPT))

        long = [clients.submit(ask_long, number) for number in range(N_RUNNING)]
        live.until(lambda: live.metrics(phase="prefilling").get("halfmoon_requests") == N_RUNNING)
        short = ask(lab, prompt_of(9))
        assert live.metrics()["halfmoon_requests_stopped_total"] > 0
        assert not any(answer.done() for answer in long), "it waited for an answer's end"
        tokens = [answer.result(timeout=240) for answer in long]
        assert [ask_long(number) for number in range(N_RUNNING)] == tokens
        assert ask(lab, prompt_of(9)) == short
    assert {len(each) for each in tokens} == {N_SHORT}
