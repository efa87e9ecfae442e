"""What a conductor says below `/debug`, as far as a terminal shows it.

Everything has a default and unknown fields are passed over, so that a conductor of another age
is shown as far as it goes; a cluster without workers is no cluster's answer at all.
"""

from typing import Any

import msgspec


class Memory(msgspec.Struct, frozen=True):
    """Blocks in a kvstore's memory, or on its disk."""

    n_stored: int = 0
    n_blocks: int = 0


class Lookups(msgspec.Struct, frozen=True):
    """Blocks that were asked for since a kvstore began."""

    memory: int = 0
    disk: int = 0
    missing: int = 0

    @property
    def n_found(self) -> int:
        """Those that were there."""
        return self.memory + self.disk


class Load(msgspec.Struct, frozen=True):
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
    memory: Memory = Memory()
    disk: Memory = Memory()
    lookups: Lookups = Lookups()


class Worker(msgspec.Struct, frozen=True):
    """One worker, used or refused."""

    worker_id: str
    role: str
    draining: bool = False
    refused: str = ""
    heard_s_ago: float | None = None
    home: str | None = None
    load: Load = Load()


class Gone(msgspec.Struct, frozen=True):
    """One that was here."""

    worker_id: str
    reason: str = ""
    s_ago: float = 0.0


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix that many prompts begin with."""

    prefix: str
    n_tokens: int = 0
    uses: float = 0.0
    holders: list[str] = []


class Reuse(msgspec.Struct, frozen=True):
    """Prompt tokens since the conductor began."""

    n_prompts: int = 0
    n_tokens: int = 0
    n_cached: int = 0
    n_transferred: int = 0


class Layout(msgspec.Struct, frozen=True):
    """What a block is."""

    block_size: int = 0


class About(msgspec.Struct, frozen=True):
    """Who was asked."""

    conductor_id: str = "conductor"
    metadata: str = ""


class Cluster(msgspec.Struct, frozen=True):
    """`/debug/cluster`."""

    workers: list[Worker]
    model: str | None = None
    conductor: About = About()
    layout: Layout | None = None
    block_bytes: int = 0
    scheduling: dict[str, Any] = {}
    requests: dict[str, int] = {}
    pools: dict[str, float] = {}
    reuse: Reuse = Reuse()
    gone: list[Gone] = []
    hot_prefixes: list[HotPrefix] = []


class Chosen(msgspec.Struct, frozen=True):
    """Where a request's prefill went, and what was predicted of it."""

    worker_id: str = ""
    queue_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


class Placement(msgspec.Struct, frozen=True):
    """A whole placement."""

    chosen: Chosen = Chosen()
    decode: str | None = None
    tbt_s: float = 0.0


class Course(msgspec.Struct, frozen=True):
    """What came of it."""

    n_tokens: int = 0
    n_cached: int = 0
    ttft_s: float | None = None
    tbt_s: float | None = None
    end: str = ""


class Decision(msgspec.Struct, frozen=True):
    """One placement, deferral or refusal."""

    request_id: str
    at_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    why: str = ""
    placement: Placement = Placement()
    course: Course | None = None


class Decisions(msgspec.Struct, frozen=True):
    """`/debug/decisions`."""

    now_s: float = 0.0
    decisions: list[Decision] = []
    refusals: dict[str, int] = {}


class Quantiles(msgspec.Struct, frozen=True):
    """Of one second's samples."""

    n: int = 0
    p50_s: float = 0.0
    p90_s: float = 0.0


class Second(msgspec.Struct, frozen=True):
    """One second in which there was a token."""

    at_s: float
    ttft: Quantiles | None = None
    tbt: Quantiles | None = None


class Latencies(msgspec.Struct, frozen=True):
    """`/debug/latencies`."""

    now_s: float = 0.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    seconds: list[Second] = []


class Status(msgspec.Struct, frozen=True):
    """All of it."""

    cluster: Cluster
    decisions: Decisions = Decisions()
    latencies: Latencies = Latencies()
