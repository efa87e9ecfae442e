"""Real processes whose landings have keys of their own once no prefill worker shares their host."""

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.e2e


def test_without_a_setting_landings_have_keys_where_no_prefill_worker_shares_their_host(
    start_cluster: StartCluster,
) -> None:
    extra = {"decode": ["--host-id", "elsewhere"]}
    with start_cluster("fake://", extra=extra) as cluster:

        def own_keys() -> bool:
            """Whether decode has said so last; it begins without."""
            lines = cluster.process("decode-0").last_lines(200)
            said = [line for line in lines if "landing_keys" in line]
            return bool(said) and "of_their_own=True" in said[-1]

        cluster.until(own_keys)
        prompt = list(range(100))
        for _ in range(2):  # the second time from a kvstore
            assert cluster.ask(prompt, 20)[0] == FakeEngine().expected(prompt, 20)
