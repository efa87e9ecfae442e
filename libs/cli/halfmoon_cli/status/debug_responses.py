"""Define the fields of a conductor's `/debug` responses that a terminal shows.

All fields have defaults and unknown ones are ignored: conductors of other versions are shown as far
as they agree. Only `workers` is required.
"""

from typing import Any

import msgspec


class StatusMemory(msgspec.Struct, frozen=True):
    """Blocks in a kvstore's memory, or on its disk."""

    n_stored: int = 0
    n_blocks: int = 0


class StatusLookups(msgspec.Struct, frozen=True):
    """Counts of block lookups since a kvstore started."""

    memory: int = 0
    disk: int = 0
    missing: int = 0

    @property
    def n_found(self) -> int:
        """Lookups that found their block."""
        return self.memory + self.disk


class StatusLoad(msgspec.Struct, frozen=True):
    """A worker's last report, its queue, and predictions; the fields depend on its role."""

    n_requests: int = 0
    #: Fields of prefill workers.
    queue_s: float = 0.0
    queued_tokens: int = 0
    #: Fields of decode workers.
    n_running: int = 0
    n_reserved: int = 0
    context_tokens: int = 0
    step_s: float = 0.0
    tbt_s: float = 0.0
    #: Fields of both.
    free_pages: int = 0
    n_pages: int = 0
    #: Fields of kvstores.
    n_readers: int = 0
    memory: StatusMemory = StatusMemory()
    disk: StatusMemory = StatusMemory()
    lookups: StatusLookups = StatusLookups()


class StatusWorker(msgspec.Struct, frozen=True):
    """A worker, used or refused."""

    worker_id: str
    role: str
    draining: bool = False
    refused: str = ""
    heard_s_ago: float | None = None
    home: str | None = None
    load: StatusLoad = StatusLoad()
    #: What computes its model; empty where it has none.
    computes_with: str = ""


class StatusUnreachableWorker(msgspec.Struct, frozen=True):
    """A worker that is registered and that the conductor can't reach."""

    worker_id: str
    address: str = ""
    for_s: float = 0.0
    reason: str = ""
    advice: str = ""


class StatusDepartedWorker(msgspec.Struct, frozen=True):
    """A worker that has left."""

    worker_id: str
    reason: str = ""
    s_ago: float = 0.0


class StatusHotPrefix(msgspec.Struct, frozen=True):
    """A prefix that many prompts begin with."""

    prefix: str
    n_tokens: int = 0
    uses: float = 0.0
    holders: list[str] = []


class StatusReuse(msgspec.Struct, frozen=True):
    """Counts of prompt tokens since the conductor started."""

    n_prompts: int = 0
    n_tokens: int = 0
    n_cached: int = 0
    n_transferred: int = 0


class StatusLayout(msgspec.Struct, frozen=True):
    """The size of a block."""

    block_size: int = 0


class StatusConductor(msgspec.Struct, frozen=True):
    """The conductor that answered."""

    conductor_id: str = "conductor"
    metadata: str = ""


class StatusCluster(msgspec.Struct, frozen=True):
    """`/debug/cluster`."""

    workers: list[StatusWorker]
    model: str | None = None
    conductor: StatusConductor = StatusConductor()
    layout: StatusLayout | None = None
    block_bytes: int = 0
    scheduling: dict[str, Any] = {}
    requests: dict[str, int] = {}
    pools: dict[str, float] = {}
    reuse: StatusReuse = StatusReuse()
    unreachable: list[StatusUnreachableWorker] = []
    gone: list[StatusDepartedWorker] = []
    hot_prefixes: list[StatusHotPrefix] = []


class StatusPrefillChoice(msgspec.Struct, frozen=True):
    """The prefill worker of a request, and its predicted times."""

    worker_id: str = ""
    queue_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


class StatusPlacement(msgspec.Struct, frozen=True):
    """Prefill and decode workers of a request."""

    chosen: StatusPrefillChoice = StatusPrefillChoice()
    decode: str | None = None
    tbt_s: float = 0.0


class StatusRequestResult(msgspec.Struct, frozen=True):
    """The measured result of a request."""

    n_tokens: int = 0
    n_cached: int = 0
    ttft_s: float | None = None
    tbt_s: float | None = None
    end: str = ""


class StatusDecision(msgspec.Struct, frozen=True):
    """One placement, deferral or refusal."""

    request_id: str
    at_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    why: str = ""
    placement: StatusPlacement = StatusPlacement()
    course: StatusRequestResult | None = None


class StatusDecisions(msgspec.Struct, frozen=True):
    """`/debug/decisions`."""

    now_s: float = 0.0
    decisions: list[StatusDecision] = []
    refusals: dict[str, int] = {}


class StatusQuantiles(msgspec.Struct, frozen=True):
    """Quantiles of the samples of one second."""

    n: int = 0
    p50_s: float = 0.0
    p90_s: float = 0.0


class StatusSecond(msgspec.Struct, frozen=True):
    """Latencies of one second that had a token."""

    at_s: float
    ttft: StatusQuantiles | None = None
    tbt: StatusQuantiles | None = None


class StatusLatencies(msgspec.Struct, frozen=True):
    """`/debug/latencies`."""

    now_s: float = 0.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    seconds: list[StatusSecond] = []


class ClusterStatus(msgspec.Struct, frozen=True):
    """The state of a cluster, from three routes."""

    cluster: StatusCluster
    decisions: StatusDecisions = StatusDecisions()
    latencies: StatusLatencies = StatusLatencies()
