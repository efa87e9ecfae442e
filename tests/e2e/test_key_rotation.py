"""A cluster's key is changed under load, as docs/operating.md says, and no request is lost.

Every process is restarted for each step, and all requests are answered at the first try. There is
one exception: the cluster has one conductor, and while that is restarted, its clients' connections
are refused. They repeat those requests, and no others.
"""

import re
from collections import Counter
from pathlib import Path

import httpx
import pytest

from halfmoon_runtime.observability.operator_tokens import operator_token
from tests.e2e.conftest import StartCluster
from tests.e2e.redis_server import RedisServer
from tests.e2e.steady_load import Load, restart_in_turn
from tests.installed_programs import needs_programs

pytestmark = [
    pytest.mark.e2e,
    needs_programs("redis-server"),
    pytest.mark.timeout(600),
]

OLD = "the moon is made of green cheese"
NEW = "the moon is made of blue cheese"
#: Text of the key file at each step; every process is restarted after each.
STEPS = (f"{OLD}\n{NEW}", f"{NEW}\n{OLD}", NEW)
#: What a log would say if two neighbouring steps did not know each other, or a key itself.
FAULTS = (
    "cluster key",
    "unknown_key",
    "stranger",
    "Untrusted",
    "did not accept this",
    "cheese",
)

_BAD_HANDSHAKE = re.compile(r"reason=handshake\b.* where=(\S+)")


def refused_peers(log: str) -> list[str]:
    """Addresses where handshakes failed again: one may fail as its peer ends, a key fails on."""
    tried = Counter(_BAD_HANDSHAKE.findall(log))
    return [address for address, n_failures in tried.items() if n_failures > 1]


def test_a_cluster_whose_key_is_changed_step_by_step_loses_no_request(
    start_cluster: StartCluster, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster-key"
    file.touch(0o600)
    file.write_text(OLD)
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", str(file))
    tcp = ["--transfer-backends", "tcp", "--block-size", "16"]
    extra = {"prefill": tcp, "decode": tcp, "kvstore": tcp[:2]}
    with start_cluster(
        "fake://moon?step_s=0.01",
        metadata=redis.url,
        n_prefill=2,
        n_decode=2,
        served_model_name="moon",
        extra=extra,
    ) as cluster:
        with Load(cluster.url) as load:
            for text in STEPS:
                file.write_text(text)
                restart_in_turn(cluster, load)
        assert load.all_ended, cluster.last_words()
        assert not load.faults
        for key, status in ((OLD, 401), (NEW, 200)):
            shown = {"authorization": f"Bearer {operator_token(key)}"}
            url = f"{cluster.url}/debug/cluster"
            assert httpx.get(url, headers=shown, timeout=10).status_code == status
        for log in cluster.cluster.folder.glob("*.log"):
            said = log.read_text()
            faults = [fault for fault in FAULTS if fault in said] + refused_peers(said)
            assert not faults, f"{log.name}\n{faults}\n{said[-4000:]}"
