"""Define the settings of a transfer engine, read once and handed down."""

import msgspec

from halfmoon_transfer.cluster_key import ClusterKey

KIB = 1024
MIB = 1024 * KIB


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and names under which Mooncake peers find this engine."""

    #: "P2PHANDSHAKE" (none), or the URL of the metadata server of all peers: http, redis, etcd.
    metadata: str = "P2PHANDSHAKE"
    #: The segment's name there; empty: the engine's. With P2PHANDSHAKE it is "host:port".
    name: str = ""
    #: The value of MC_METADATA_CLUSTER_ID at Mooncake peers; it becomes part of the keys.
    cluster: str = ""
    #: Ports to listen at; 0 takes free ones.
    data_port: int = 0
    handshake_port: int = 0
    #: Capacity of the queue of received messages; the next one is refused.
    max_notifications: int = 1024


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, bounds and timeouts. Every default is meant for a few peers on fast links."""

    #: Bytes of a slice, the unit of retry, over wires.
    slice_bytes: int = 256 * KIB
    #: Bytes of a slice where bytes are copied in memory: no wire, so fewer and larger ones.
    copy_slice_bytes: int = 4 * MIB
    #: A copy in memory of at most so many bytes runs in the thread that submits it.
    copy_here_bytes: int = 256 * KIB
    #: A transfer of at most so many bytes goes over an idle TCP connection without a plan.
    express_bytes: int = 64 * KIB
    #: Bytes given to one lane at a time; a transfer of more is spread over the lanes.
    batch_bytes: int = 8 * MIB
    #: Slices given to one lane at a time.
    batch_slices: int = 1024
    #: Batches (and so connections) in flight per peer; no fewer than addresses it listens at.
    lanes: int = 2
    #: Threads in all; one peer that hangs holds at most `lanes` of them.
    threads: int = 16
    #: Live transfers at the most; the next one ends in `Overloaded`.
    max_live: int = 16_384
    #: Capacity of the queue of notifications; the next one is refused.
    max_notifications: int = 1024
    #: Tries of a slice on one path before the next path is taken.
    tries_per_path: int = 3
    #: Timeout of dialling a peer, if the deadline is not earlier.
    connect_timeout_s: float = 3.0
    #: Timeout of a rail (one of several addresses of a peer) on which nothing moves.
    rail_stall_s: float = 2.0
    #: The first pause of a rail that failed, and the longest: each is twice the one before.
    rail_cooldown_s: float = 1.0
    rail_cooldown_max_s: float = 60.0
    #: Timeout of a peer that stops in the middle of a frame, at the serving side.
    stall_timeout_s: float = 30.0
    #: Connections that an engine accepts; the next one is turned away with the reason.
    max_connections: int = 256
    #: Connections kept open while unused.
    max_idle_connections: int = 64
    #: Whether memory of this host's processes that can't be mapped is reached through the kernel.
    cross_memory_attach: bool = True
    #: Bytes of pinned host memory per device, for staging between device and wire.
    staging_bytes: int = 64 * MIB
    #: Bytes of a part of a batch; one part is copied while another is on the wire.
    staging_part_bytes: int = 2 * MIB
    #: Regions of other processes kept mapped.
    max_mappings: int = 128
    #: Seconds that our record in the metadata store outlives this process.
    lease_s: float = 10.0
    #: Secret that TCP and RDMA peers must prove to know; None: no proof is needed.
    cluster_key: ClusterKey | None = None
    #: Whether TCP encrypts if there is a cluster key. Both ends of a connection must agree.
    encryption: bool = True
    #: Whether bytes that cross a wire carry checksums, unless a transfer asks for none.
    #: In-memory copies cross none; they are compared where a transfer asks for it (`verify`).
    checksums: bool = True
    #: Whether TCP and shared memory use the extension in C where that is built; see
    #: `docs/transfer/native.md`.
    native: bool = True
    #: Seconds that the extension polls for the next small frame before its thread sleeps.
    spin_s: float = 50e-6
    #: Addresses and names under which Mooncake peers find this engine.
    mooncake: MooncakeSettings = MooncakeSettings()
    #: Names of the RDMA devices to use; empty: all that have an address.
    rdma_devices: tuple[str, ...] = ()
    #: Port for the side channels of RDMA; 0 takes a free one.
    rdma_port: int = 0
