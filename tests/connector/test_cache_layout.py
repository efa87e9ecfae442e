"""Which servers can share the pool, and what their blocks look like."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

from halfmoon_engine.checkpoints.fingerprint import fingerprint
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_testing.models.tiny_models import make_tiny_model
from halfmoon_vllm.cache_layout import find_cache_layout
from halfmoon_vllm.connector_settings import ConnectorRefused

LONG = {"rope_type": "longrope", "short_factor": [1.0]}
COHERE2 = Namespace(model_type="cohere2", sliding_window=512)


#: Stand-ins for vLLM's classes, which are told by their names; the last one it may add.
KINDS: dict[str, Any] = {
    name: type(name, (Namespace,), {})
    for name in (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",  # has tuples, and no heads
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "UniformTypeKVCacheSpecs",  # has a spec for each layer, and no heads of its own
        "NewSpec",
    )
}
STATE = KINDS["MambaSpec"](block_size=64, shapes=((3, 160),), dtypes=(torch.float32,))
Change = Callable[[Any, Any], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def server(model: Path) -> tuple[Any, Any]:
    """The configuration of a server and of its cache."""
    config = Namespace(
        parallel_config=Namespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=Namespace(
            model=str(model), hf_overrides={}, use_mla=False, max_model_len=4096
        ),
        speculative_config=None,
    )
    spec = KINDS["FullAttentionSpec"](
        block_size=64, num_kv_heads=2, head_size=16, head_size_v=16, dtype=torch.bfloat16
    )
    group = Namespace(layer_names=["layers.0", "layers.1"], kv_cache_spec=spec)
    return config, Namespace(kv_cache_groups=[group])


def test_the_layout_is_that_of_halfmoons_workers(model: Path) -> None:
    found = find_cache_layout(*server(model), 32)
    assert found.layout == KvLayout(
        model=fingerprint(model),
        n_layers=2,
        n_kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        block_size=32,
    )
    assert found.per_vllm_block == 2
    assert find_cache_layout(*server(model), 0).layout.block_size == 64


def _set(config: str, name: str, value: object) -> Change:
    return lambda server, _: setattr(getattr(server, config), name, value)


def _groups(change: Callable[[list[Any]], list[Any]]) -> Change:
    return lambda _, cache: setattr(cache, "kv_cache_groups", change(cache.kv_cache_groups))


def _is(kind: str) -> Change:
    def change(_: Any, cache: Any) -> None:
        group = cache.kv_cache_groups[0]
        group.kv_cache_spec = KINDS[kind](**vars(group.kv_cache_spec))

    return change


def _spec(name: str, value: object) -> Change:
    return lambda _, cache: setattr(cache.kv_cache_groups[0].kv_cache_spec, name, value)


def _has_layers_of(*changes: dict[str, Any], kind: str = "FullAttentionSpec") -> Change:
    """A group with a spec for each layer: the plain one, and others of `kind`."""

    def change(_: Any, cache: Any) -> None:
        plain = cache.kv_cache_groups[0].kv_cache_spec
        others = [KINDS[kind](**{**vars(plain), **fields}) for fields in changes]
        layers = {f"layers.{i}": spec for i, spec in enumerate([plain, *others])}
        cache.kv_cache_groups[0].kv_cache_spec = KINDS["UniformTypeKVCacheSpecs"](
            block_size=64, kv_cache_specs=layers
        )

    return change


STATEFUL = Namespace(layer_names=["layers.2"], kv_cache_spec=STATE)
RECURRENT = r"a recurrent state .*\(MambaSpec\).*without the connector"
REFUSED: list[tuple[Change, str]] = [
    (_groups(lambda _: [STATEFUL]), RECURRENT),
    (_groups(lambda groups: [*groups, STATEFUL]), RECURRENT),
    (_groups(lambda _: []), "keep no keys and values"),
    (_groups(lambda groups: groups * 2), "2 groups of differing layers"),
    (_is("SlidingWindowSpec"), r"sliding window \(SlidingWindowSpec\).*--disable-hybrid"),
    (_is("ChunkedLocalAttentionSpec"), r"in chunks \(ChunkedLocal.*--disable-hybrid"),
    (_is("NewSpec"), r"another kind \(NewSpec\)"),
    (_is("MLAAttentionSpec"), "MLAAttentionSpec"),
    (
        _has_layers_of({"head_size": 512, "head_size_v": 512}),
        "2 shapes of KV .2 heads of 16, blocks of 64; 2 heads of 512, blocks of 64",
    ),
    (_has_layers_of({}, kind="MLAAttentionSpec"), r"latent attention \(MLAAttentionSpec\)"),
    (
        _set("model_config", "hf_text_config", Namespace(num_kv_shared_layers=20)),
        "another layer's keys and values .num_kv_shared_layers 20",
    ),
    (_spec("num_kv_heads", (2, 4)), r"num_kv_heads is \(2, 4\)"),
    (_spec("dtype", [torch.float32]), "KV cache of .*float32.*--kv-cache-dtype"),
    (_set("parallel_config", "tensor_parallel_size", 2), "tensor_parallel_size 2"),
    (_set("parallel_config", "pipeline_parallel_size", 4), "pipeline_parallel_size 4"),
    (_set("model_config", "hf_overrides", {"rope_theta": 1}), "hf_overrides"),
    (_set("model_config", "use_mla", True), "latent attention"),
    (lambda server, _: setattr(server, "speculative_config", Namespace()), "speculative decoding"),
    (_spec("dtype", torch.uint8), "uint8.*--kv-cache-dtype"),
    (_spec("head_size_v", 8), "heads of 16 and values with heads of 8"),
    (_spec("block_size", 48), "48 tokens, the pool's 32.*multiple"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(change: Change, named: str, model: Path) -> None:
    config, cache = server(model)
    change(config, cache)
    with pytest.raises(ConnectorRefused, match=named):
        find_cache_layout(config, cache, 32)


def test_a_block_size_that_no_pool_has_is_refused(model: Path) -> None:
    with pytest.raises(ConnectorRefused, match="block_size is 8"):
        find_cache_layout(*server(model), 8)


@pytest.mark.parametrize(
    "change",
    [
        _set("model_config", "quantization", "fp8"),
        _set("model_config", "hf_text_config", COHERE2),
        _set("model_config", "hf_text_config", Namespace(rope_parameters=LONG)),
        _set("model_config", "hf_text_config", Namespace(rope_parameters={"full": LONG})),
    ],
)
def test_kv_that_is_vllms_own_is_kept_apart(change: Change, model: Path) -> None:
    config, cache = server(model)
    change(config, cache)
    own = find_cache_layout(config, cache, 32).layout
    assert own.model != fingerprint(model)
    again, cache = server(model)
    change(again, cache)
    assert find_cache_layout(again, cache, 32).layout == own


def test_kv_of_a_longrope_depends_on_the_servers_context_beyond_its_first(model: Path) -> None:
    config, cache = server(model)
    config.model_config.hf_text_config = Namespace(rope_parameters=LONG)
    short = find_cache_layout(config, cache, 32).layout
    config.model_config.max_model_len = 8192
    assert find_cache_layout(config, cache, 32).layout != short
    config, cache = server(model)
    rope = {**LONG, "original_max_position_embeddings": 4096}
    config.model_config.hf_text_config = Namespace(rope_parameters=rope)
    assert find_cache_layout(config, cache, 32).layout.model == fingerprint(model)


def test_a_checkpoint_that_is_quantised_itself_has_its_fingerprint(model: Path) -> None:
    config, cache = server(model)
    config.model_config.quantization = "gptq"
    config.model_config.hf_config = Namespace(quantization_config={"quant_method": "gptq"})
    assert find_cache_layout(config, cache, 32).layout.model == fingerprint(model)
