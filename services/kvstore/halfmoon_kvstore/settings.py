"""Settings of a kvstore node."""

from typing import Annotated, Literal

from pydantic import Field

from halfmoon_runtime.settings import ServiceSettings


class KvstoreSettings(ServiceSettings):
    """One kvstore node: how much it holds and how it lets go."""

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
    eviction: Literal["lru", "lfu", "fifo", "length_aware", "length_aware_later", "patience"] = (
        Field("lru", description="Which blocks go first when room is needed")
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
    reservation_ttl_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Seconds until a put that is not committed is discarded"
    )
    lease_ttl_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="Seconds until a lease that is not renewed ends"
    )

    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0,
        description="Seconds to write what only memory has to the disk, or without one to move it"
        " to other kvstores, after being told to stop",
    )
    drain_mib_per_s: Annotated[float, Field(gt=0)] = Field(
        1024.0, description="No more than so many MiB a second are moved to other kvstores"
    )

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory for blocks."""
        return self.capacity_mib * 1024 * 1024

    @property
    def disk_bytes(self) -> int:
        """Bytes of files for blocks."""
        return self.disk_mib * 1024 * 1024
