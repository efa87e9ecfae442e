"""Describe a simulated cluster: one frozen object, every field with its unit."""

from math import inf

import msgspec

from halfmoon_protocol.messages import Stage
from halfmoon_scheduling.cache.eviction_policies import DEFAULT_EVICTION, EVICTION_POLICIES
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_simulator.costs.cost_file import CostFile

_AT_LEAST_1 = (
    "n_prefill",
    "n_decode",
    "block_tokens",
    "chunk_tokens",
    "max_chunk_tokens",
    "group_size",
    "group_chunk_tokens",
    "max_new_tokens",
)

_AT_LEAST_0 = (
    "disk_bytes",
    "disk_latency_s",
    "read_ahead",
    "local_prefill_step_s",
    "local_prefill_tbt_s",
)

_ABOVE_0 = (
    "max_chunk_s",
    "report_s",
    "tick_s",
    "sample_s",
    "disk_bytes_per_s",
    "promotion_wait_s",
)


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of workers, and their settings.

    Names and meanings are those of the live services' settings; where the default differs it
    is because a live default suits a laptop, or guards against faults that are not modelled.
    """

    n_prefill: int = 8
    n_decode: int = 8
    #: One kvstore on each of the first so many hosts, those of prefill workers before those of
    #: decode workers; None: on those of all prefill workers.
    n_kvstore: int | None = None
    #: Tokens per block, page and slot.
    block_tokens: int = 512
    #: Tokens at the most of a prefill pass that several prompts share.
    chunk_tokens: int = 8192
    #: Tokens at the most of a pass of one prompt, and its predicted seconds.
    max_chunk_tokens: int = 32768
    max_chunk_s: float = 0.5
    #: Order of a prefill queue among equal priorities: a name in `QUEUE_ORDERS`.
    queue_order: str = "arrival"
    #: Prefill workers that compute long prompts together, in stages; 1: each by itself. Those
    #: left over when they are counted off are in no group.
    group_size: int = 1
    #: Tokens of a chunk that goes through a group's stages, at the most.
    group_chunk_tokens: int = 2048
    #: Longest uncached rest of a prompt that decode workers prefill; 0: none.
    local_prefill_tokens: int = 0
    #: They compute it in parts: the most predicted seconds of a step with a part of it. 0: in one
    #: step.
    local_prefill_step_s: float = 0.0
    #: Mean seconds between tokens that parts leave to running requests; 0: no bound.
    local_prefill_tbt_s: float = 0.0
    #: Whether decode workers put the blocks of answers into kvstores. It matters to workloads with
    #: sessions alone: no other request is known to go on from an answer.
    keep_answers: bool = True
    #: Requests held by a prefill worker at the most.
    max_requests: int = 100_000
    #: Requests in a decode batch at the most, landings included.
    max_running: int = 256
    #: New tokens that clients allow at the most; the true number is known to the engine alone.
    max_new_tokens: int = 2048
    #: Pages of a worker and slots of a kvstore; None: what the cost file's memory holds.
    n_pages: int | None = None
    n_slots: int | None = None
    #: Bytes of the disk below a kvstore's memory, 0: none; bytes per second that its reads and
    #: writes share, and seconds until one of them begins.
    disk_bytes: float = 0.0
    disk_bytes_per_s: float = 6e9
    disk_latency_s: float = 1e-4
    #: Seconds that a reader waits for blocks on the disk, and blocks read ahead of it.
    promotion_wait_s: float = 1.0
    read_ahead: int = 4
    #: Which blocks of a kvstore go first: a name in `EVICTION_POLICIES`.
    eviction: str = DEFAULT_EVICTION
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    #: Seconds; leases are taken to be renewed, and no worker to be slow without being lost.
    lease_ttl_s: float = 1e9
    reservation_ttl_s: float = 1e9
    landing_ttl_s: float = 1e9
    quarantine_s: float = 6.0
    #: Seconds from a worker's leaving to its being back in another role.
    role_change_s: float = 30.0
    #: Seconds between a worker's reports of its load (live: 0.1).
    report_s: float = 0.5
    #: Seconds between looks at deadlines (live: 0.05).
    tick_s: float = 1.0
    #: Seconds between samples of the timeline.
    sample_s: float = 5.0

    def __post_init__(self) -> None:
        """Check counts and names.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        QUEUE_ORDERS.check(self.queue_order)
        EVICTION_POLICIES.check(self.eviction)
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it is at least 1")
        n_hosts = self.n_prefill + self.n_decode
        if self.n_kvstore is not None and not 0 <= self.n_kvstore <= n_hosts:
            raise ValueError(
                f"n_kvstore is {self.n_kvstore}; one kvstore stands on a host, of which there are"
                f" {n_hosts}"
            )
        for name in _ABOVE_0:
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be more than 0")
        for name in _AT_LEAST_0:
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 0")

    def stage(self, index: int, costs: CostFile) -> Stage | None:
        """Return the stage of the prefill worker of this number; None: it is in no group."""
        group, stage = divmod(index, self.group_size)
        if self.group_size == 1 or (group + 1) * self.group_size > self.n_prefill:
            return None
        n_bytes = self.group_chunk_tokens * costs.activation_bytes
        return Stage(
            f"group-{group}",
            stage,
            self.group_size,
            chunk_tokens=self.group_chunk_tokens,
            hop_s=n_bytes / costs.network_bytes_per_s,
        )

    @property
    def long_chunk_limits(self) -> LongChunkLimits:
        """Return the bounds of a pass of one prompt."""
        return LongChunkLimits(self.max_chunk_tokens, self.max_chunk_s, self.block_tokens)

    def pages(self, costs: CostFile) -> int:
        """Return the number of pages of one worker."""
        if self.n_pages is not None:
            return self.n_pages
        return max(1, costs.device_kv_bytes // costs.layout(self.block_tokens).block_bytes)

    def slots(self, costs: CostFile) -> int:
        """Return the number of slots of one kvstore."""
        if self.n_slots is not None:
            return self.n_slots
        return max(1, costs.host_kv_bytes // costs.layout(self.block_tokens).block_bytes)
