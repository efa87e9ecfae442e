"""Start vLLM's executor as its engine core does, without its scheduler."""

import logging
from typing import Any

from halfmoon_engine_vllm.rank_forward import CacheShape
from halfmoon_engine_vllm.vllm_options import VllmOptions

log = logging.getLogger(__name__)

#: Pages of vLLM's cache until a pool is attached.
_FIRST_PAGES = 2


def start_executor(
    folder: str, *, block_size: int, dtype: str, options: VllmOptions
) -> tuple[Any, CacheShape, Any, str]:
    """Load a model's weights, in this process or in one for each rank.

    Returns:
        The executor, the shape of its cache, vLLM's configuration, the name of its attention.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
    from vllm.v1.engine import core
    from vllm.v1.executor.abstract import Executor

    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=options.enforce_eager,
        use_tqdm_on_load=False,
        quantization=options.quantization or None,
        tensor_parallel_size=options.tensor_parallel_size,
        block_size=block_size,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        kv_cache_memory_bytes=1 << 20,
        worker_extension_cls="halfmoon_engine_vllm.rank_forward.RankForward",
    ).create_engine_config()
    n_ranks = options.tensor_parallel_size
    log.info("loading weights with vllm%s", f", {n_ranks} ranks" if n_ranks > 1 else "")
    executor: Any = Executor.get_class(config)(config)
    specs = executor.get_kv_cache_specs()
    layout = core.resolve_kv_cache_layout(
        config,
        executor.get_supported_kv_cache_layouts(),
        [spec for rank in specs for spec in rank.values()],
    )
    executor.set_kv_cache_layout(layout.name)
    executor.determine_available_memory()
    config.cache_config.num_gpu_blocks_override = _FIRST_PAGES
    caches = []
    for of_rank in specs:
        groups = get_kv_cache_groups(config, of_rank)
        n_bytes = _FIRST_PAGES * sum(spec.page_size_bytes for spec in of_rank.values())
        caches.append(get_kv_cache_config_from_groups(config, groups, n_bytes))
        caches[-1].kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = _FIRST_PAGES
    executor.initialize_from_config(caches)
    if not options.enforce_eager:
        log.info("compiling with vllm: minutes at the first start of a model, seconds later")
    executor.compile_or_warm_up_model()
    executor.collective_rpc("halfmoon_try_forward")
    executor.collective_rpc("halfmoon_leave_no_files")
    shape, backend = executor.collective_rpc("halfmoon_wrap_layers")[0]
    return executor, shape, config, backend
