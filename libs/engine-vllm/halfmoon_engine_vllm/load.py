"""Load a model with vLLM into an engine."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from halfmoon_engine.checkpoints.model_folder import open_model_folder
from halfmoon_engine.interface import Device, Engine
from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_engine_vllm.no_stages import no_stages
from halfmoon_engine_vllm.vllm_environment import (
    check_device,
    import_quietly,
    prepare_environment,
)
from halfmoon_engine_vllm.vllm_options import read_options
from halfmoon_models.errors import UnsupportedModel, one_line
from halfmoon_models.machine_cores import machine_cores
from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.kv_layout import DType, KvLayout
from halfmoon_vllm.model_identity import model_identity
from halfmoon_vllm.vllm_version import check_vllm

if TYPE_CHECKING:
    from halfmoon_engine.runners.model_runner import ModelRunner

log = logging.getLogger(__name__)

_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def load_vllm_engine(
    path_or_hub_id: str,
    *,
    block_size: int,
    dtype: DType | Literal["auto"] = "auto",
    device: Device = "auto",
    threads: int | None = None,
    served_name: str | None = None,
    options: Mapping[str, str] = _NO_OPTIONS,
    stage_index: int = 0,
    n_stages: int = 1,
) -> Engine:
    """Load a causal language model with vLLM and prepare it for a paged pool.

    Args:
        path_or_hub_id: of the model.
        block_size: tokens per page; what vLLM's attention can have, on CPUs multiples of 32.
        dtype: of weights and KV; "auto" is the checkpoint's, but vLLM's choice for float32.
        device: where this build of vLLM computes; "auto" is wherever that is.
        threads: CPU threads; None is one per core of the process's quota.
        served_name: the model's name in requests, rather than its own.
        options: see `VllmOptions`.
        stage_index: 0; see `n_stages`.
        n_stages: 1; this engine computes all layers.

    Raises:
        BadEngineStage: a stage is asked for.
        VllmUnavailable: not installed, or another release.
        BadEngineOption: see `read_options`, or a device that vLLM was not built for.
        ModelError: see `halfmoon_engine.load.open_engine`; vLLM's own refusals in one line.
        ProtocolError: a block size out of range.
    """
    if n_stages > 1:
        raise no_stages(stage_index, n_stages)
    chosen = read_options(options)
    release = check_vllm("--engine vllm")
    check_block_size(block_size)
    inspected = open_model_folder(path_or_hub_id, dtype=dtype, quantised=True)
    n_threads = threads or machine_cores()
    n_ranks = chosen.tensor_parallel_size
    prepare_environment(n_threads, n_ranks)
    log.info("importing vllm %s, some 10 s", release)
    limit_spin_waits()
    import torch

    torch.set_num_threads(n_threads)
    import_quietly()
    check_device(device)
    from halfmoon_engine.attention.kv_pool import DTYPE_NAMES
    from halfmoon_engine.checkpoints.model_tokenizer import read_model_tokenizer
    from halfmoon_engine.paged_engine import PagedEngine
    from halfmoon_engine.sampling.grammar_masks import GrammarMasks
    from halfmoon_engine_vllm.start_executor import start_executor
    from halfmoon_engine_vllm.vllm_runner import VllmRanksRunner, VllmRunner

    try:
        executor, shape, config, backend = start_executor(
            str(inspected.folder), block_size=block_size, dtype=dtype, options=chosen
        )
    except Exception as error:  # vLLM has no common kind for its refusals
        lines = [line for line in map(str.strip, str(error).splitlines()) if line]
        reason = one_line(" ".join(lines[:3]) or type(error).__name__, 300)
        raise UnsupportedModel(
            f"{inspected.folder} can't be computed by vllm {release} "
            f"({type(error).__name__}: {reason})"
        ) from error
    layout = KvLayout(
        model=model_identity(inspected.folder, config.model_config),
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=DTYPE_NAMES[shape.dtype],
        block_size=block_size,
    )
    tokenizer = read_model_tokenizer(inspected.folder, inspected.config)
    eos_token_ids = tuple(tokenizer.end_tokens if tokenizer else ()) or _eos_token_ids(
        config.model_config
    )
    n_vocab = int(config.model_config.get_vocab_size())
    runner: ModelRunner = (
        VllmRunner(executor, layout, f"vllm {release}, {backend}")
        if n_ranks == 1
        else VllmRanksRunner(
            executor, n_ranks, layout, f"vllm {release}, {backend}, {n_ranks} ranks"
        )
    )
    log.info("computing with %s", runner.description)
    return PagedEngine(
        runner,
        layout,
        name=served_name or inspected.folder.resolve().name,
        n_vocab=n_vocab,
        max_context=int(config.model_config.max_model_len),
        eos_token_ids=eos_token_ids,
        grammars=(
            GrammarMasks.for_model(tokenizer.definition, n_vocab, eos_token_ids)
            if tokenizer is not None
            else None
        ),
    )


def _eos_token_ids(model_config: Any) -> tuple[int, ...]:
    ids = model_config.try_get_generation_config().get("eos_token_id")
    if ids is None:
        ids = model_config.hf_text_config.eos_token_id
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)
