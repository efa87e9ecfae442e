"""Settings of the connector are read, or refused by name."""

import pytest

from halfmoon_vllm.connector_settings import ConnectorRefused, read_connector_settings


def test_only_the_metadata_server_must_be_named() -> None:
    settings = read_connector_settings({"metadata": "redis://127.0.0.1:6379/0"})
    assert settings.transfer_bind == ["127.0.0.1"]
    assert settings.transfer_paths == ["shm", "tcp"]


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
