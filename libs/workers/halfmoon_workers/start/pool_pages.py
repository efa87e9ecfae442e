"""Choose the pages of a worker's pool: as its settings say, or by its model and its memory."""

import structlog

from halfmoon_engine.interface import Engine
from halfmoon_models.machine_memory import MachineMemory, process_memory_bytes, read_memory
from halfmoon_models.pool_size import (
    DECODE_CONTEXTS,
    MIB,
    PREFILL_CONTEXTS,
    USUAL_BYTES,
    room_bytes,
    wanted_bytes,
)
from halfmoon_protocol.messages import Role
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.lifecycle import CannotStart

log = structlog.get_logger()


def choose_pages(
    settings: EngineSettings,
    engine: Engine,
    role: Role,
    *,
    memory: MachineMemory | None = None,
    process_bytes: int | None = None,
) -> int:
    """Return the pages of a worker's pool, and log how many tokens they hold.

    Args:
        settings: with the size of the pool, or what the worker may take.
        engine: with its weights loaded, and without a pool.
        role: that needs the larger pool, of those that the worker can have.
        memory: of the machine; None: as it is now.
        process_bytes: of this process; None: as they are now.

    Raises:
        CannotStart: not one page fits into the pool that is set.
    """
    layout, longest = engine.layout, engine.max_context
    if settings.pool_mib:
        n_pages = settings.pool_mib * MIB // layout.block_bytes
        if n_pages == 0:
            raise CannotStart(
                f"pool_mib is {settings.pool_mib}: not one page of {layout.block_bytes} bytes fits;"
                f" at least {-(-layout.block_bytes // MIB)} MiB are needed"
            )
    else:
        n_contexts = PREFILL_CONTEXTS if role == "prefill" else DECODE_CONTEXTS
        wanted = wanted_bytes(layout.block_bytes, layout.block_size, longest, n_contexts)
        room = room_bytes(
            engine.pool_room(),
            read_memory() if memory is None else memory,
            process_bytes=process_memory_bytes() if process_bytes is None else process_bytes,
            memory_bytes=settings.memory_mib * MIB,
            device_share=settings.device_share,
        )
        chosen = min(wanted, USUAL_BYTES if room is None else room)
        n_pages = max(1, chosen // layout.block_bytes)
    tokens = n_pages * layout.block_size
    pool_mib = n_pages * layout.block_bytes // MIB
    log.info("pool", pool_mib=pool_mib, kv_tokens=tokens, max_context=longest)
    if tokens < longest:
        needed = -(-layout.blocks_for(longest) * layout.block_bytes // MIB)
        log.warning(
            "pool_is_less_than_a_context",
            kv_tokens=tokens,
            max_context=longest,
            hint=f"longer requests are refused; one of {longest} tokens needs --pool-mib {needed}",
        )
    return n_pages
