"""Small parts of the connector: its settings, the vLLM that it needs, the ends of loads."""

import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest

from halfmoon_vllm.connector_settings import ConnectorRefused, read_connector_settings
from halfmoon_vllm.load_results import LoadResults
from halfmoon_vllm.vllm_version import VLLM_VERSION, VllmUnavailable, check_vllm

LONG_S = 60.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "metadata"),
        ({"metadata": ""}, "metadata"),
        ({"metadata": "redis://h", "staging": 5}, "staging"),
        ({"metadata": "redis://h", "staging_mib": 0}, "staging_mib"),
        ({"metadata": "redis://h", "staging_mib": "many"}, "staging_mib"),
        ({"metadata": "redis://h", "tenant": "a b"}, "tenant"),
        ({"metadata": "redis://h", "load_timeout_s": 0}, "load_timeout_s"),
        ({"metadata": "redis://h", "transfer_backends": "pigeon"}, "pigeon"),
        ({"metadata": "redis://h", "cluster_key": "0123456789abcdef"}, "cluster_key"),
        ({"metadata": "gopher://h"}, "gopher"),
        ({"metadata": "redis://h", "host": "127.0.0.1:9999"}, "has a port"),
        ({"metadata": "redis://h", "advertise_host": "gpu1:9999"}, "has a port"),
    ],
)
def test_a_bad_setting_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConnectorRefused, match=named):
        read_connector_settings(extra)


def test_a_cluster_key_that_could_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "short")
    with pytest.raises(ConnectorRefused, match="16"):
        read_connector_settings({"metadata": "redis://h"})


def test_ends_are_taken_once_with_the_blocks_that_did_not_come() -> None:
    loads = LoadResults()
    loads.begin()
    loads.begin()
    assert loads.take() == loads.take(0.001) == (set(), set()), "it waits no longer than it may"
    loads.finish("a", [])
    loads.finish("b", [7, 8])
    assert loads.take(LONG_S) == ({"a", "b"}, {7, 8})
    assert loads.take(LONG_S) == (set(), set()), "nothing is under way: it does not wait"


def test_a_step_without_work_sleeps_until_a_load_is_over() -> None:
    loads = LoadResults()
    loads.begin()
    taken: list[set[str]] = []
    waiting = threading.Thread(target=lambda: taken.append(loads.take(LONG_S)[0]))
    waiting.start()
    loads.finish("a", [])
    waiting.join(LONG_S)
    assert taken == [{"a"}]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_connector_says_what_it_needs() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import halfmoon_vllm.connector"], capture_output=True, text=True
    )
    assert f"VllmUnavailable: HalfmoonConnector needs vllm {VLLM_VERSION}" in ran.stderr


def test_another_release_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon_vllm.vllm_version.version", lambda name: "0.33.0")
    with pytest.raises(
        VllmUnavailable, match=rf"HalfmoonConnector needs vllm {VLLM_VERSION}.*0\.33"
    ):
        check_vllm("HalfmoonConnector")
