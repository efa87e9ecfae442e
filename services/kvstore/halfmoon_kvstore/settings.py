"""Define the settings of a kvstore node."""

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from halfmoon_runtime.observability.tracer_setup import TracedSettings
from halfmoon_scheduling.cache.eviction_policies import DEFAULT_EVICTION, EVICTION_POLICIES
from halfmoon_transfer.backends.backend_choices import check_backend_choices


class KvstoreSettings(TracedSettings):
    """Settings of one kvstore node: capacity, eviction, leases and drain."""

    worker_id: str = Field("kvstore-0", description="Stable name of this node in the cluster")
    capacity_mib: Annotated[int, Field(ge=1)] = Field(
        1024, description="Memory for blocks, in MiB, taken at the start"
    )
    disk_path: str = Field(
        "",
        description="Folder of this node's own for blocks that leave memory, and survive restarts;"
        " empty: blocks are kept in memory only",
    )
    disk_mib: Annotated[int, Field(ge=1)] = Field(
        10240, description="Size of that folder, in MiB, allocated when the block size is known"
    )
    promotion_wait_s: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="Seconds that a reader waits for blocks on the disk; then it gets those before"
        " them",
    )
    read_ahead: Annotated[int, Field(ge=0)] = Field(
        4, description="Blocks fetched from the disk beyond the last one that was asked for"
    )
    eviction: Annotated[str, AfterValidator(EVICTION_POLICIES.check)] = Field(
        DEFAULT_EVICTION,
        description=f"Which blocks go first when room is needed: {EVICTION_POLICIES.names}",
    )
    high_watermark: Annotated[float, Field(gt=0, le=1)] = Field(
        0.95, description="Share of blocks in use above which eviction starts ahead of demand"
    )
    low_watermark: Annotated[float, Field(gt=0, le=1)] = Field(
        0.90, description="Share of blocks in use at which eviction ahead of demand ends"
    )
    hard_pin_share: Annotated[float, Field(ge=0, le=0.9)] = Field(
        0.25, description="Share of the blocks that fit into memory that hard pins may hold"
    )
    tenant_quotas_mib: str = Field(
        "",
        description="What tenants may have here in MiB, memory and disk together:"
        " lab=4096,shop=512,*=256, where * is each tenant that is not named; empty: no limits",
    )
    event_tokens: bool = Field(
        False,
        description="Whether KV events carry the tokens of stored blocks, 100 times as many bytes:"
        " for listeners of other projects, Halfmoon's own do not read them",
    )
    reservation_ttl_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Seconds until a put that is not committed is discarded"
    )
    lease_ttl_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="Seconds until a lease that is not renewed ends"
    )

    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0,
        description="Seconds to write what only memory has to the disk, or without one to move it"
        " to other kvstores, after the signal to stop",
    )
    drain_mib_per_s: Annotated[float, Field(gt=0)] = Field(
        1024.0, description="No more than so many MiB a second are moved to other kvstores"
    )

    @field_validator("transfer_backends")
    @classmethod
    def _are_registered(cls, choices: str) -> str:
        return check_backend_choices(choices)

    @field_validator("tenant_quotas_mib")
    @classmethod
    def _can_be_read(cls, text: str) -> str:
        _quotas_bytes(text)
        return text

    @property
    def tenant_quotas_bytes(self) -> dict[str, int]:
        """Most bytes of blocks of each tenant."""
        return _quotas_bytes(self.tenant_quotas_mib)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory for blocks."""
        return self.capacity_mib * 1024 * 1024

    @property
    def disk_bytes(self) -> int:
        """Bytes of files for blocks."""
        return self.disk_mib * 1024 * 1024


def _quotas_bytes(text: str) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, mib = part.partition("=")
        name = name.strip()
        if not equals or not name or name in quotas:
            raise ValueError(f"{part!r} is not NAME=MIB, or names a tenant twice")
        try:
            n_bytes = float(mib) * 1024 * 1024
        except ValueError:
            n_bytes = -1.0
        if not 0 <= n_bytes < 2**60:
            raise ValueError(f"{part!r}: {mib!r} is no number of MiB")
        quotas[name] = int(n_bytes)
    return quotas
