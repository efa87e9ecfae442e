"""What an operator may choose about scheduling: one frozen object, read once."""

from typing import Literal, get_args

import msgspec

from halfmoon_protocol.blocks import check_block_size

PlacementMode = Literal["random", "load_balance", "cache_aware", "kvcache_centric", "min_ttft"]
AdmissionMode = Literal["none", "early"]


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice of the scheduling core, with unit and reason."""

    #: How a prefill worker is chosen, see `placement`.
    placement: PlacementMode = "kvcache_centric"
    #: Ratio of the best prefix anywhere to the local one. Up to it the local one is good
    #: enough; above it the blocks are transferred, which also spreads hot ones. At least 1.
    kvcache_balancing_threshold: float = 1.5
    #: Makes the choices of placement "random", and nothing else.
    seed: int = 0
    #: Whether a request that would miss its SLO is refused before anything is spent on it.
    admission: AdmissionMode = "none"
    #: Time to first token, seconds, for requests that state none; None: no limit.
    ttft_slo_s: float | None = None
    #: Time between tokens, seconds, for requests that state none; None: no limit.
    tbt_slo_s: float | None = None
    #: Seconds in which a decode worker answers a reservation, and a prefill worker a
    #: cancellation. They do no computing for it, so longer means that something is wrong.
    reserve_timeout_s: float = 5.0
    #: Seconds that a request may wait for pages, and seconds that it may then be with a
    #: prefill worker, queue included. Past it the worker is taken to have lost it.
    request_timeout_s: float = 300.0
    #: Seconds before a landing's end at which prefill stops writing to it: covers the
    #: messages' ways and clocks that run apart.
    landing_margin_s: float = 5.0
    #: Seconds after which a kvstore's missing snapshot is asked for again.
    snapshot_timeout_s: float = 5.0
    #: Tries in a row at one request that bring no token. More than the workers that a rolling
    #: restart takes away at once.
    max_attempts: int = 4
    #: Requests that wait for decode pages at the most; past it they are refused.
    max_waiting: int = 256
    #: Tokens per block that workers must have; None: as the first worker says.
    block_size: int | None = None
    #: Bytes per second of a path that nobody has used, for the first estimates.
    prior_bandwidth: float = 1e9
    #: Placements that are kept to explain recent choices.
    kept_decisions: int = 256

    def __post_init__(self) -> None:
        """Check ranges, since an operator wrote these.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        for name, mode in (("placement", PlacementMode), ("admission", AdmissionMode)):
            if getattr(self, name) not in get_args(mode):
                known = ", ".join(get_args(mode))
                raise ValueError(f"{name} is {getattr(self, name)!r}, there are: {known}")
        if self.kvcache_balancing_threshold < 1:
            raise ValueError(
                f"kvcache_balancing_threshold is {self.kvcache_balancing_threshold}, "
                "it is at least 1 (then any longer prefix is transferred)"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, it must be more than 0")
        if self.max_waiting < 0 or self.kept_decisions < 0 or self.landing_margin_s < 0:
            raise ValueError(
                f"max_waiting {self.max_waiting}, kept_decisions {self.kept_decisions} and "
                f"landing_margin_s {self.landing_margin_s} must be at least 0"
            )
        if self.block_size is not None:
            check_block_size(self.block_size)


_POSITIVE = (
    "ttft_slo_s",
    "tbt_slo_s",
    "reserve_timeout_s",
    "request_timeout_s",
    "snapshot_timeout_s",
    "max_attempts",
    "prior_bandwidth",
)
