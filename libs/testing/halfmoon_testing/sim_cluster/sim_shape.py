"""Draw the shape of one simulated cluster: its size, its limits and its load."""

import random
from dataclasses import dataclass, replace

from halfmoon_engine.fake_engine import FakeModelSpec
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_transfer.grant_lender import GrantChoice

BLOCK_SIZE = 16
#: Seconds that pages of landings in doubt rest at a decode worker. Pools here are so small that
#: there may be no other pages.
QUARANTINE_S = 6.0
#: Seconds in which workers have written again what a metadata server lost: a third of a lease, and
#: what joining takes.
RECOVERY_OF_RECORDS_S = 6.0
#: 512 bytes a block, the least that a kvstore takes.
MODEL = FakeModelSpec(
    name="m", layers=2, kv_heads=1, head_dim=2, max_context=512, step_s=0.004, token_s=0.0002
)


@dataclass(frozen=True)
class ClusterShape:
    """State what one seed simulates, without faults."""

    n_prefill: int
    n_decode: int
    n_kvstore: int
    #: Pages of each prefill and decode worker.
    n_pages: int
    #: Blocks that fit into a kvstore's memory, and onto its disk; 0: it has no disk.
    n_kvstore_blocks: int
    n_disk_blocks: int
    chunk_tokens: int
    #: Whether decode keeps the KV of answers, and pages of earlier requests.
    keeps_answers: bool
    keeps_pages: bool
    n_requests: int
    #: Seconds between two arrivals, in the mean.
    arrival_s: float
    #: Groups of prompts with the same beginning.
    n_families: int
    cancel_rate: float
    #: Requests that wait for their first token at the most; None: no limit.
    max_queued: int | None
    #: Puts of blocks outside of requests; 0 where blocks may be evicted.
    n_puts: int
    #: Bytes of a batch of a transfer: less than a block's cut a write into parts.
    batch_bytes: int
    #: Whether landings, leases and reservations have keys of their own.
    grants: GrantChoice
    #: Longest uncached prompt that decode prefills itself; 0: none.
    local_prefill_tokens: int
    #: Whether all prefill workers are the stages of one group.
    is_group: bool
    #: Whether workers may change between prefill and decode.
    changes_roles: bool
    #: Whether every request is traced.
    traces: bool

    def scheduling(self) -> SchedulingConfig:
        """Return the choices of the conductor."""
        return SchedulingConfig(
            request_timeout_s=20.0,
            reserve_timeout_s=2.0,
            landing_margin_s=2.0,
            snapshot_timeout_s=1.0,
            max_queued_requests=self.max_queued,
            replication_bytes_per_s=1e6,
            replication_hot_uses=2.0,
            group_least_gain=1.0,
        )


def draw_shape(dice: random.Random) -> ClusterShape:
    """Draw a shape."""
    roomy = dice.random() < 0.6
    shape = ClusterShape(
        n_prefill=dice.choice((1, 2, 2)),
        n_decode=dice.choice((1, 2, 2)),
        n_kvstore=dice.choice((1, 2, 2)),
        n_pages=dice.choice((32, 64, 192)),
        n_kvstore_blocks=512 if roomy else dice.choice((24, 64)),
        n_disk_blocks=dice.choice((0, 0, 128) if roomy else (0, 128, 128)),
        chunk_tokens=dice.choice((16, 32, 128)),
        keeps_answers=dice.random() < 0.7,
        keeps_pages=dice.random() < 0.7,
        n_requests=dice.randrange(6, 16),
        arrival_s=dice.choice((0.02, 0.1, 0.4)),
        n_families=dice.choice((1, 2, 4)),
        cancel_rate=dice.choice((0.0, 0.0, 0.2)),
        max_queued=dice.choice((None, None, 3)),
        n_puts=dice.choice((0, 6)) if roomy else 0,
        batch_bytes=dice.choice((256, 512, 4096)),
        grants=dice.choice(("on", "on", "off")),
        local_prefill_tokens=dice.choice((0, 0, 32, 128)),
        is_group=False,
        changes_roles=dice.random() < 0.5,
        traces=dice.random() < 0.5,
    )
    if shape.n_prefill > 1 and dice.random() < 0.3:
        return replace(shape, is_group=True, changes_roles=False)
    return shape
