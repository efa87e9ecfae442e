"""Services without a cluster key: on loopback alone, unless their operator says otherwise."""

import os
import subprocess
import sys

import pytest

from halfmoon_conductor.settings import ConductorSettings

pytestmark = pytest.mark.e2e

#: No machine has it: it is for documentation.
FAR = "192.0.2.1"
KEY_VARIABLES = ("HALFMOON_CLUSTER_KEY", "HALFMOON_CLUSTER_KEY_FILE", "HALFMOON_ALLOW_OPEN_NETWORK")


def start(role: str, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a service that ends by itself, at the latest where it can't listen."""
    environment = {k: v for k, v in os.environ.items() if k not in KEY_VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", f"halfmoon_{role}", *flags],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("role", ["kvstore", "conductor", "decode"])
def test_a_service_without_a_key_refuses_to_listen_beyond_loopback(role: str) -> None:
    model = [] if role == "kvstore" else ["--model", "fake://tiny"]
    ended = start(role, *model, "--host", FAR)
    assert ended.returncode == 2
    assert f"--host (HALFMOON_HOST) is '{FAR}'" in ended.stderr
    for way_out in ("HALFMOON_CLUSTER_KEY_FILE", "127.0.0.1", "--allow-open-network"):
        assert way_out in ended.stderr


def test_payloads_are_not_served_there_either() -> None:
    ended = start("kvstore", HALFMOON_TRANSFER_HOST=f"127.0.0.1,{FAR}")
    assert ended.returncode == 2
    assert f"--transfer-host (HALFMOON_TRANSFER_HOST) is '{FAR}'" in ended.stderr


def test_who_allows_it_is_warned_in_the_log_and_who_has_a_key_is_not() -> None:
    flags = ["--host", FAR, "--metrics-port", "-1", "--metadata", "memory://of-its-own"]
    allowed = start("kvstore", *flags, HALFMOON_ALLOW_OPEN_NETWORK="True")
    assert "open network" in allowed.stderr and FAR in allowed.stderr
    keyed = start("kvstore", *flags, HALFMOON_CLUSTER_KEY="a key of this cluster")
    assert "open network" not in keyed.stderr
    # Both went on, as far as to listen.
    assert allowed.returncode == keyed.returncode == 1


def test_the_rest_api_is_for_clients_and_may_listen_anywhere() -> None:
    flags = ["--model", "m", "--host", "0.0.0.0", "--metadata", "redis://10.0.0.9:6379/0"]
    assert ConductorSettings.from_args(flags).open_addresses == {}
