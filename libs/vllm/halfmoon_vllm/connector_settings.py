"""Read the settings of the connector from `kv_connector_extra_config`."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from halfmoon_metadata import open_store
from halfmoon_metadata.cluster_key_source import cluster_key_from_environment
from halfmoon_metadata.cluster_namespace import CLUSTER_PATTERN, DEFAULT_CLUSTER
from halfmoon_metadata.tls_trust import tls_ca_from_environment
from halfmoon_runtime.own_address import check_dialled_host, resolve_own_address
from halfmoon_transfer.backends.backend_choices import check_backend_choices
from halfmoon_transfer.cluster_key import ClusterKey
from halfmoon_transfer.encryption_setting import encryption_from_environment

_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class ConnectorRefused(ValueError):
    """A server that can't share the pool: its settings, its model, or its version."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server's connector."""

    #: Metadata server of the cluster, as for Halfmoon's workers.
    metadata: Annotated[str, Meta(min_length=1, max_length=2048)]
    #: Name of the cluster, as for Halfmoon's workers.
    cluster: Annotated[str, Meta(pattern=CLUSTER_PATTERN)] = DEFAULT_CLUSTER
    #: Tokens of a block of the pool; 0: as many as in a block of vLLM.
    block_size: Annotated[int, Meta(ge=0, le=512)] = 0
    #: Memory for blocks on their way to and from kvstores.
    staging_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    #: The kvstore that keeps new blocks; empty: chosen by the prompt's first block.
    home_kvstore: Annotated[str, Meta(max_length=128)] = ""
    #: The tenant whose requests this server answers: part of the salt, and its quota counts.
    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    #: As the settings of Halfmoon's workers of these names.
    host: str = "127.0.0.1"
    advertise_host: str = ""
    transfer_host: str = ""
    transfer_backends: str = "shm,tcp"
    host_id: str = ""
    #: Seconds to wait for a kvstore's answer.
    kvstore_timeout_s: _Seconds = 2.0
    #: Seconds to wait for the next layers of blocks that are read.
    kvstore_read_s: _Seconds = 5.0
    #: Seconds that a request waits for its blocks; then vLLM computes them.
    load_timeout_s: _Seconds = 10.0

    @property
    def cluster_key(self) -> str:
        """The secret of transfers, which comes from the environment, or the file it names.

        Raises:
            ClusterKeyError: both are given, or the file can't be used.
        """
        return cluster_key_from_environment()

    @property
    def tls_ca(self) -> str:
        """The file of CAs to trust at the metadata server, from the environment only."""
        return tls_ca_from_environment()

    @property
    def encryption(self) -> bool:
        """Return whether TCP encrypts if there is a cluster key, from the environment too.

        Raises:
            ValueError: the variable is neither `on` nor `off`.
        """
        return encryption_from_environment()

    @property
    def transfer_bind(self) -> list[str]:
        """Addresses to listen on for KV payloads."""
        return [resolve_own_address(each.strip()) for each in self.transfer_host.split(",")]

    @property
    def transfer_paths(self) -> list[str]:
        """Backends of the transfer library, best first."""
        return [name.strip() for name in self.transfer_backends.split(",") if name.strip()]


def read_connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Read settings, from JSON.

    Raises:
        ConnectorRefused: one is missing, unknown or out of its limits.
    """
    try:
        read = msgspec.convert(dict(extra), ConnectorSettings)
        open_store(read.metadata, tls_ca=read.tls_ca).close()  # which connects to nothing
        check_backend_choices(read.transfer_backends)
        ClusterKey.given(read.cluster_key)
        encryption_from_environment()
        check_dialled_host(read.advertise_host)
        resolved = resolve_own_address(read.host)
        return msgspec.structs.replace(
            read, host=resolved, transfer_host=read.transfer_host or resolved
        )
    except (msgspec.ValidationError, ValueError) as error:
        names = ", ".join(ConnectorSettings.__struct_fields__)
        raise ConnectorRefused(
            f"kv_connector_extra_config of HalfmoonConnector: {error}; there are {names}"
        ) from None
