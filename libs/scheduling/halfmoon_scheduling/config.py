"""Hold the operator's choices about scheduling in one frozen object, which is read once."""

import msgspec

from halfmoon_protocol.blocks import check_block_size
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES

#: Default limit of deferred requests in admission modes that wait for decode.
DEFAULT_MAX_DEFERRED = 1000
#: A larger quantile takes more observations than a bucket of recent requests has.
MAX_QUANTILE = 0.99


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice of the scheduling core, with unit and reason."""

    #: How a prefill worker is chosen: a name in `PLACEMENT_MODES`.
    placement: str = "kvcache_centric"
    #: Ratio of the best prefix anywhere to the local one. Up to it the local prefix is used;
    #: above it the blocks are transferred, which also spreads hot ones. At least 1.
    kvcache_balancing_threshold: float = 1.5
    #: A prompt goes to a group of prefill workers, all of which it keeps busy, if the best single
    #: worker takes so many times as long. At least 1.
    group_least_gain: float = 1.2
    #: Seed of placement "random" alone.
    seed: int = 0
    #: By which predictions requests must meet their SLOs: a name in `ADMISSION_MODES`.
    admission: str = "none"
    #: Time to first token, seconds, for requests that state none; None: no limit, or the
    #: multiple below.
    ttft_slo_s: float | None = None
    #: Time between tokens, seconds, for requests that state none; None: as above.
    tbt_slo_s: float | None = None
    #: The same limits as multiples of the times on idle workers with nothing cached. They apply
    #: to requests without a limit in seconds.
    ttft_slo_multiple: float | None = None
    tbt_slo_multiple: float | None = None
    #: Share of requests that shall keep each limit, by the errors of earlier predictions: that
    #: quantile of a time is compared with its limit, see `limit_bounds`. 0: the mean prediction.
    admission_quantile: float = 0.0
    #: Whether decode's load is checked again when a prefill is done, in the modes that check it
    #: at arrival. A refusal then has wasted the prefill. Mode "baseline" always checks, mode
    #: "none" never does; "lookahead" lets the request wait before it refuses.
    double_check: bool = False
    #: Seconds that every request decodes (t_d) by the forecast of modes "predicted" and
    #: "lookahead"; None: the mean of recent requests.
    decode_time_s: float | None = None
    #: Requests that are deferred at the most, rather than refused, while decode is too busy;
    #: 0: none is. None: `DEFAULT_MAX_DEFERRED` in modes that wait for decode, and 0 in the others.
    max_deferred: int | None = None
    #: Seconds from arrival that a request is deferred at the most, unless it states its own
    #: limit. Its time to first token may end that sooner.
    defer_s: float = 10.0
    #: Seconds in which a decode worker answers a reservation, and a prefill worker a
    #: cancellation. Neither computes for it, so a longer time means a fault.
    reserve_timeout_s: float = 5.0
    #: Seconds that a request may wait for pages, and seconds that it may then be at a prefill
    #: worker, queue included. Past it the worker counts as having lost the request. If it has
    #: finished no other request meanwhile, it counts as hung (`max_casualties`).
    request_timeout_s: float = 300.0
    #: Seconds before a landing's end at which prefill stops writing to it. They cover messages
    #: under way and clocks that differ.
    landing_margin_s: float = 5.0
    #: Seconds after which a kvstore's missing snapshot is asked for again.
    snapshot_timeout_s: float = 5.0
    #: Bytes per second that are copied at the most to give hot prefixes more holders, see
    #: `replication`; 0: none are. Only kvstores whose record says `replicates` copy.
    replication_bytes_per_s: float = 0.0
    #: Uses within a half-life for which a prefix gets one more holder.
    replication_hot_uses: float = 8.0
    #: Seconds after which a use counts half.
    replication_half_life_s: float = 60.0
    #: Whether able workers are told to change between prefill and decode, see `role_policy`.
    role_changes: bool = False
    #: The least load of the busier role, and its least ratio to the other role's load.
    role_busy_load: float = 0.8
    role_ratio: float = 1.5
    #: Seconds that this must last, and seconds without a further change after one.
    role_lasting_s: float = 60.0
    role_rest_s: float = 300.0
    #: Tries of one request in a row that bring no token. More than the workers that a rolling
    #: restart stops at once.
    max_attempts: int = 4
    #: Workers that may be lost, or hang, while they compute one request, without a token from
    #: decode in between. Then the request is not tried on another. At one, every request of a
    #: batch would fail with its worker.
    max_casualties: int = 2
    #: Whether a request of the tenant with the most at decode is stopped, and tried again later,
    #: for a request of another tenant that finds no room, see `decode_shares`.
    shares_decode: bool = True
    #: Requests that wait for decode pages at the most; past it they are refused.
    max_waiting: int = 256
    #: Requests that wait for their first token at the most, wherever they are; past it they are
    #: refused. None: no limit.
    max_queued_requests: int | None = None
    #: Predicted seconds until its prefill would start, and seconds that it may wait for pages,
    #: above which a request is refused. None: no limit. An idle cluster refuses none for it.
    max_queue_s: float | None = None
    #: Tokens per block that workers must have; None: as the first worker says.
    block_size: int | None = None
    #: Bytes per second of a path that has not been used, for the first estimates.
    prior_bandwidth: float = 1e9
    #: Placements that are kept to explain recent choices.
    kept_decisions: int = 256
    #: Bytes of them at the most: each may have a row for each worker.
    kept_decision_bytes: int = 64 * 2**20

    @property
    def deferred_at_most(self) -> int:
        """Requests that are deferred at the most, in this mode."""
        if self.max_deferred is not None:
            return self.max_deferred
        waits = ADMISSION_MODES[self.admission].waits_for_decode
        return DEFAULT_MAX_DEFERRED if waits else 0

    def __post_init__(self) -> None:
        """Check ranges, since an operator wrote these.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        PLACEMENT_MODES.check(self.placement)
        ADMISSION_MODES.check(self.admission)
        if self.kvcache_balancing_threshold < 1:
            raise ValueError(
                f"kvcache_balancing_threshold is {self.kvcache_balancing_threshold}, "
                "it is at least 1 (then any longer prefix is transferred)"
            )
        if self.group_least_gain < 1:
            raise ValueError(
                f"group_least_gain is {self.group_least_gain}, it is at least 1 (then a group "
                "is taken as soon as it is not slower)"
            )
        if not 0 <= self.admission_quantile <= MAX_QUANTILE:
            raise ValueError(
                f"admission_quantile is {self.admission_quantile}, it is 0 (compare the mean"
                f" prediction) to {MAX_QUANTILE}"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, it must be more than 0")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, it must be at least 0")
        if self.block_size is not None:
            check_block_size(self.block_size)


_POSITIVE = (
    "ttft_slo_s",
    "tbt_slo_s",
    "ttft_slo_multiple",
    "tbt_slo_multiple",
    "decode_time_s",
    "replication_hot_uses",
    "replication_half_life_s",
    "role_busy_load",
    "role_ratio",
    "reserve_timeout_s",
    "request_timeout_s",
    "snapshot_timeout_s",
    "max_queued_requests",
    "max_queue_s",
    "max_attempts",
    "max_casualties",
    "prior_bandwidth",
)
_NOT_NEGATIVE = (
    "max_waiting",
    "max_deferred",
    "defer_s",
    "kept_decisions",
    "kept_decision_bytes",
    "landing_margin_s",
    "replication_bytes_per_s",
    "role_lasting_s",
    "role_rest_s",
)
