"""What a conductor says below `/debug`, as far as a terminal shows it.

Everything has a default and unknown fields are passed over, so that a conductor of another age
is shown as far as it goes; a cluster without workers is no cluster's answer at all.
"""

from typing import Any

import msgspec


class StatusMemory(msgspec.Struct, frozen=True):
    """Blocks in a kvstore's memory, or on its disk."""

    n_stored: int = 0
    n_blocks: int = 0


class StatusLookups(msgspec.Struct, frozen=True):
    """Blocks that were asked for since a kvstore began."""

    memory: int = 0
    disk: int = 0
    missing: int = 0

    @property
    def n_found(self) -> int:
        """Those that were there."""
        return self.memory + self.disk


class StatusLoad(msgspec.Struct, frozen=True):
    """What a worker said last, what waits for it, and what is predicted; by its role."""

    n_requests: int = 0
    #: Of prefill workers.
    queue_s: float = 0.0
    queued_tokens: int = 0
    #: Of decode workers.
    n_running: int = 0
    n_reserved: int = 0
    context_tokens: int = 0
    step_s: float = 0.0
    tbt_s: float = 0.0
    #: Of both.
    free_pages: int = 0
    n_pages: int = 0
    #: Of kvstores.
    n_readers: int = 0
    memory: StatusMemory = StatusMemory()
    disk: StatusMemory = StatusMemory()
    lookups: StatusLookups = StatusLookups()


class StatusWorker(msgspec.Struct, frozen=True):
    """One worker, used or refused."""

    worker_id: str
    role: str
    draining: bool = False
    refused: str = ""
    heard_s_ago: float | None = None
    home: str | None = None
    load: StatusLoad = StatusLoad()


class StatusDepartedWorker(msgspec.Struct, frozen=True):
    """One that was here."""

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
    """Prompt tokens since the conductor began."""

    n_prompts: int = 0
    n_tokens: int = 0
    n_cached: int = 0
    n_transferred: int = 0


class StatusLayout(msgspec.Struct, frozen=True):
    """What a block is."""

    block_size: int = 0


class StatusConductor(msgspec.Struct, frozen=True):
    """Who was asked."""

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
    gone: list[StatusDepartedWorker] = []
    hot_prefixes: list[StatusHotPrefix] = []


class StatusPrefillChoice(msgspec.Struct, frozen=True):
    """Where a request's prefill went, and what was predicted of it."""

    worker_id: str = ""
    queue_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


class StatusPlacement(msgspec.Struct, frozen=True):
    """A whole placement."""

    chosen: StatusPrefillChoice = StatusPrefillChoice()
    decode: str | None = None
    tbt_s: float = 0.0


class StatusRequestResult(msgspec.Struct, frozen=True):
    """What came of it."""

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
    """Of one second's samples."""

    n: int = 0
    p50_s: float = 0.0
    p90_s: float = 0.0


class StatusSecond(msgspec.Struct, frozen=True):
    """One second in which there was a token."""

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
    """All of it."""

    cluster: StatusCluster
    decisions: StatusDecisions = StatusDecisions()
    latencies: StatusLatencies = StatusLatencies()
