"""Connect a stock vLLM server to Halfmoon's KV pool: the class that vLLM loads; imports vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HalfmoonConnector",
        "kv_connector_module_path": "halfmoon_vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"metadata": "redis://127.0.0.1:6379/0"}}'

vLLM makes one object in its scheduler and one in its worker. Here calls of vLLM become calls of
`SchedulerSide` and `WorkerSide`, and nothing is decided.
"""

# ruff: noqa: E402 - another release may lack what is imported here: its version is checked before
from halfmoon_vllm.vllm_version import check_vllm

check_vllm("HalfmoonConnector")

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from halfmoon_metadata import open_store
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_vllm.cache_layout import CacheLayout, find_cache_layout
from halfmoon_vllm.connector_settings import (
    ConnectorRefused,
    ConnectorSettings,
    read_connector_settings,
)
from halfmoon_vllm.connector_stats import HalfmoonPromMetrics, HalfmoonStats
from halfmoon_vllm.kvstore_follower import KvstoreFollower
from halfmoon_vllm.layer_tap import keeps_plain_rows, layers_in_order
from halfmoon_vllm.loop_thread import LoopThread
from halfmoon_vllm.scheduler_side import RequestPart, SchedulerSide
from halfmoon_vllm.step_orders import StepOrders
from halfmoon_vllm.worker_side import WorkerSide

log = logging.getLogger("vllm.halfmoon")


@dataclass
class HalfmoonMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, as vLLM carries them from the scheduler to the worker."""

    orders: StepOrders = field(default_factory=StepOrders)


class HalfmoonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the connector, by its role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Open the side of this role.

        Raises:
            ConnectorRefused: settings or a model that can't share the pool.
            ModelError: the model's folder can't be read.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_to_vllm()
        config = vllm_config.kv_transfer_config
        settings = read_connector_settings(config.kv_connector_extra_config)
        cache = find_cache_layout(vllm_config, kv_cache_config, settings.block_size)
        self._settings, self._cache = settings, cache
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._following: LoopThread | None = None
        #: Blocks of the loads that `get_finished` returned last, to be returned by the next call.
        self._failed_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            if config.kv_load_failure_policy != "recompute":
                # "fail" would answer requests with errors when a kvstore is lost.
                log.warning("kv_load_failure_policy is set to recompute")
                config.kv_load_failure_policy = "recompute"
            self._open_scheduler(settings, cache)

    def _open_scheduler(self, settings: ConnectorSettings, cache: CacheLayout) -> None:
        store = open_store(
            settings.metadata,
            cluster_key=settings.cluster_key,
            tls_ca=settings.tls_ca,
            cluster=settings.cluster,
        )
        network = ZmqNetwork(cluster_key=settings.cluster_key)
        follower = KvstoreFollower(network, store, cache.layout)
        self._scheduler = SchedulerSide(
            cache,
            follower,
            tenant=settings.tenant,
            home=settings.home_kvstore,
            loads=self._kv_transfer_config.is_kv_consumer,
            stores=self._kv_transfer_config.is_kv_producer,
        )

        async def follow() -> None:
            try:
                await follower.run()
            finally:
                await network.close()
                store.close()

        self._following = LoopThread("halfmoon-index", follow)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is computed again later."""
        return False

    # -- the scheduler's side ------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Compute the hashes of a prompt."""
        scheduler = self._scheduler_side()
        if reason := _left_out(request):
            scheduler.counts.add("requests_left_out", 1, reason)
        else:
            scheduler.on_request(request.request_id, request.prompt_token_ids, request.cache_salt)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further tokens can be loaded, and that loads are asynchronous."""
        if request.skip_reading_prefix_cache:
            return 0, False
        n = self._scheduler_side().lookup(request.request_id, num_computed_tokens)
        return n, n > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order a load into allocated blocks."""
        if num_external_tokens:
            (vllm_blocks,) = blocks.get_block_ids()
            # vLLM sets `num_computed_tokens` after this call.
            self._scheduler_side().on_allocated(
                request.request_id, vllm_blocks, num_external_tokens
            )

    def build_connector_meta(self, scheduler_output: Any) -> HalfmoonMetadata:
        """Return the orders of a step."""
        dropped = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        orders = self._scheduler_side().build_orders([*_parts(scheduler_output)], dropped)
        return HalfmoonMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of loads that are over."""
        self._scheduler_side().on_loads_over(
            connector_output.finished_recving or (), connector_output.invalid_block_ids or set()
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        self._scheduler_side().on_finished(request.request_id)
        return False, None

    # -- the worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Tap the layers and connect to the pool."""
        context = self._vllm_config.compilation_config.static_forward_context
        layers = layers_in_order(context, self._cache.layer_names)
        for layer in layers:
            if not keeps_plain_rows(layer):
                raise ConnectorRefused(
                    f"HalfmoonConnector can't serve {type(layer).__name__}: it keeps no plain "
                    "keys and values"
                )
        self._worker = WorkerSide(self._settings, self._cache, layers)

    def bind_connector_metadata(self, connector_metadata: HalfmoonMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is computed when all of its blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: rows are taken on their way into the cache."""

    def wait_for_save(self) -> None:
        """Hand captured blocks on; wait for nothing."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load is over."""
        if self._worker is None:
            return None, None
        over, failed = self._worker.take_loads()
        self._failed_blocks |= failed
        return None, over or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not come, of the requests that `get_finished` returned."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        """Disconnect from the pool."""
        if self._worker is not None:
            self._worker.close()
        if self._following is not None:
            self._following.close()

    # -- metrics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> HalfmoonStats | None:
        """Take the counts of this side since the last call."""
        side = self._worker or self._scheduler
        counts = {} if side is None else side.counts.take()
        return HalfmoonStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HalfmoonStats:
        """Make stats of counts that came from another process."""
        return HalfmoonStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HalfmoonPromMetrics:
        """Register the counters."""
        return HalfmoonPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call of the scheduler's to the worker's side"
        return self._scheduler


def _left_out(request: Any) -> str:
    """Return why a request is neither looked up nor stored; empty if it is."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return "not_tokens"
    return ""


def _parts(output: Any) -> Iterator[RequestPart]:
    """Yield what a step computes, by request."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        start = new.num_computed_tokens
        stop = start + scheduled[new.req_id]
        yield RequestPart(new.req_id, new.block_ids[0], True, start, stop)
    cached = output.scheduled_cached_reqs
    for i, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        start = cached.num_computed_tokens[i]
        yield RequestPart(
            request_id,
            () if blocks is None else blocks[0],
            request_id in cached.resumed_req_ids,
            start,
            start + scheduled[request_id],
        )


def _log_to_vllm() -> None:
    """Write log lines of Halfmoon's libraries as vLLM writes its own."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=lambda *_: logging.getLogger("vllm.halfmoon"),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
