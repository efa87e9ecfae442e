"""What a simulated cluster consists of: one frozen object, every field with its unit."""

import msgspec

from halfmoon_simulator.costs import CostFile


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers of which settings.

    Names and meanings are those of the live services' settings; where the default differs it
    is because a live default suits a laptop, or guards against faults that are not modelled.
    """

    n_prefill: int = 8
    n_decode: int = 8
    #: One kvstore on the host of each of the first so many prefill workers; None: on all.
    n_kvstore: int | None = None
    #: Tokens per block, page and slot.
    block_tokens: int = 512
    #: Tokens of one prefill pass at the most.
    chunk_tokens: int = 8192
    #: Requests held by a prefill worker at the most.
    max_requests: int = 100_000
    #: Requests in a decode batch at the most, landings included.
    max_running: int = 256
    #: New tokens that clients allow at the most; the true number is known to the engine alone.
    max_new_tokens: int = 2048
    #: Pages of a worker and slots of a kvstore; None: what the cost file's memory holds.
    n_pages: int | None = None
    n_slots: int | None = None
    eviction: str = "lru"
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    #: Seconds; leases are taken to be renewed, and nobody to be slow without being lost.
    lease_ttl_s: float = 1e9
    reservation_ttl_s: float = 1e9
    landing_ttl_s: float = 1e9
    quarantine_s: float = 2.0
    #: Seconds between a worker's reports of its load (live: 0.1).
    report_s: float = 0.5
    #: Seconds between looks at deadlines (live: 0.05).
    tick_s: float = 1.0
    #: Seconds between samples of the timeline.
    sample_s: float = 5.0

    def __post_init__(self) -> None:
        """Check counts.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        for name in ("n_prefill", "n_decode", "block_tokens", "chunk_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it is at least 1")
        if self.n_kvstore is not None and not 0 <= self.n_kvstore <= self.n_prefill:
            raise ValueError(
                f"n_kvstore is {self.n_kvstore}; kvstores stand on prefill hosts, of which there"
                f" are {self.n_prefill}"
            )
        for name in ("report_s", "tick_s", "sample_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be more than 0")

    def pages(self, costs: CostFile) -> int:
        """Pages of one worker."""
        if self.n_pages is not None:
            return self.n_pages
        return max(1, costs.device_kv_bytes // costs.layout(self.block_tokens).block_bytes)

    def slots(self, costs: CostFile) -> int:
        """Slots of one kvstore."""
        if self.n_slots is not None:
            return self.n_slots
        return max(1, costs.host_kv_bytes // costs.layout(self.block_tokens).block_bytes)
