"""Check what a prefill worker is told about its group, before it takes part in a prompt.

The wire's own bounds hold already. Every fault names the worker, the value and what is expected.
"""

from collections.abc import Sequence

from halfmoon_engine.interface import Engine
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlockPlaces,
    Stage,
    StageAddress,
    StartPrefill,
    StartShare,
    WorkerInfo,
)
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_workers.prefill.group_prompt import slots_fault
from halfmoon_workers.prefill.prefill_validation import start_failure

#: A share has no end of its own: stage 0 knows when the request is over.
_NO_STOPPING = Stopping(max_new_tokens=1)


def layers_fault(stage: Stage, engine: Engine) -> str:
    """Say why a model can't be cut into the stages of a group; empty if it can."""
    n_layers = engine.layout.n_layers
    if stage.n_stages > n_layers:
        return (
            f"stage is {stage.index}/{stage.n_stages}: {engine.name} has {n_layers} layers, and "
            f"each stage has a layer of its own; choose at most {n_layers} stages"
        )
    return ""


def stage_alone_failure(info: WorkerInfo) -> PrefillFailure:
    """Return why a worker with one stage's layers alone can't compute a whole prompt."""
    own = info.stage
    assert own is not None, "it has no stage"
    return PrefillFailure(
        f"{info.worker_id} has the layers of stage {own.index} of {own.n_stages} alone, and "
        f"computes prompts of group {own.group!r} only",
        retryable=True,
        culprit=info.worker_id,
        code=error_codes.UNSUPPORTED,
    )


def stages_fault(stages: Sequence[StageAddress], info: WorkerInfo) -> str:
    """Say why a worker can't be stage 0 before these stages; empty if it can.

    Args:
        stages: the workers of stages 1, 2, and so on; at least one.
        info: the record of the worker that was told so.
    """
    own = info.stage
    if own is None:
        return f"{info.worker_id} is in no group, and can't be stage 0 of one"
    if own.index != 0:
        return f"{info.worker_id} is stage {own.index} of group {own.group!r}, not stage 0"
    if len(stages) + 1 != own.n_stages:
        return (
            f"group {own.group!r} has {own.n_stages} stages, {len(stages) + 1} were named: each "
            "stage must be there, once"
        )
    names = [info.worker_id, *(stage.worker_id for stage in stages)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"{', '.join(twice)} can't be two stages of group {own.group!r}"
    return ""


def as_start(order: StartShare) -> StartPrefill:
    """Return an order as a start of a prompt whose cache and room are another worker's affair."""
    return StartPrefill(
        request_id=order.request_id,
        token_ids=order.token_ids,
        n_prompt=order.n_prompt,
        block_hashes=(),
        landing=order.landing,
        landing_expires_s=order.landing_expires_s,
        sampling=order.sampling,
        stopping=_NO_STOPPING,
        priority=order.priority,
        deadline_s=order.deadline_s,
        trace=order.trace,
        n_held_blocks=order.n_held_blocks,
    )


def share_failure(
    order: StartShare, info: WorkerInfo, engine: Engine, token_bytes: int
) -> PrefillFailure | None:
    """Return why a worker can't do a share; None when it can.

    Args:
        order: of stage 0.
        info: the record of this worker.
        engine: of this worker.
        token_bytes: bytes of one token's activations here.
    """
    if fault := stage_fault(order.stage, info):
        return PrefillFailure(
            fault, retryable=True, culprit=info.worker_id, code=error_codes.INVALID
        )
    try:
        engine.layout.require_same(order.layout, info.worker_id, "stage 0")
    except LayoutMismatch as error:
        return PrefillFailure(
            str(error), retryable=True, culprit=info.worker_id, code=error_codes.LAYOUT_MISMATCH
        )
    if (failure := start_failure(as_start(order), engine, info.worker_id)) is not None:
        return failure
    if fault := _order_fault(order, engine.layout, token_bytes):
        return PrefillFailure(fault, retryable=False, code=error_codes.INVALID)
    return None


def stage_fault(stage: Stage, info: WorkerInfo) -> str:
    """Say how a stage that a worker shall be differs from its record; empty if it does not."""
    own = info.stage
    if own is None:
        return f"{info.worker_id} is in no group, and can't be stage {stage.index} of one"
    for name in ("group", "index", "n_stages", "first_layer", "n_layers"):
        here, told = getattr(own, name), getattr(stage, name)
        if here != told:
            return f"the stage of {info.worker_id} has {name} {here!r}, stage 0 says {told!r}"
    if own.index == 0:
        return f"{info.worker_id} is stage 0 of group {own.group!r}, and takes prompts, not shares"
    return ""


def _order_fault(order: StartShare, layout: KvLayout, token_bytes: int) -> str:
    is_last = order.stage.index + 1 == order.stage.n_stages
    if is_last != (order.next_slots is None):
        return f"stage {order.stage.index} of {order.stage.n_stages}: " + (
            "next_slots were given to the last stage"
            if is_last
            else "next_slots are missing: its activations would go nowhere"
        )
    if order.next_slots is not None and (fault := slots_fault(order.next_slots, token_bytes)):
        return f"next_slots: {fault}"
    n_full = len(order.token_ids) // layout.block_size
    if order.cached is not None:
        n_cached = len(order.cached.blocks)
        if order.cached.blocks != tuple(range(n_cached)):
            return "cached: its blocks are not the first ones of the prompt"
        if n_cached * layout.block_size >= len(order.token_ids):
            return (
                f"cached: {n_cached} blocks of {layout.block_size} leave nothing to compute of "
                f"{len(order.token_ids)} tokens"
            )
    for name, places in (("cached", order.cached), ("room", order.room)):
        if places is not None and (fault := _places_fault(places, n_full, layout)):
            return f"{name}: {fault}"
    return ""


def _places_fault(places: BlockPlaces, n_full: int, layout: KvLayout) -> str:
    blocks, offsets = places.blocks, places.offsets
    if len(blocks) != len(offsets):
        return f"{len(blocks)} blocks have {len(offsets)} offsets"
    if len(set(blocks)) < len(blocks):
        return "a block is named twice"
    if blocks and max(blocks) >= n_full:
        return f"block {max(blocks)} is named, the prompt has {n_full} full blocks"
    if offsets and (end := max(offsets) + layout.block_bytes) > places.region.length:
        return f"a block ends at byte {end}, its region has {places.region.length}"
    return ""
