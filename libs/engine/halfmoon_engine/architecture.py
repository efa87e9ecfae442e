"""Which models a paged KV pool can hold: what a config says, then what the model does.

A config is read for what is known not to fit, so that the refusal names the reason and costs
nothing. Then the loaded model is probed: two short sequences side by side through our
attention must give what its own attention gives for each alone, with keys and values of one
shape in every layer. So an architecture that nobody thought of is refused too, rather than
served wrongly.
"""

from dataclasses import dataclass
from typing import Any

import torch

from halfmoon_engine.errors import UnsupportedModel
from halfmoon_engine.paged_attention import NAME, attending
from halfmoon_engine.plan import plan_probe

_PAGEABLE_LAYERS = {"full_attention", "sliding_attention"}
_PROBE_LENGTHS = (19, 13)
#: Root mean square of the logits' error over their spread. Sums in another order give 1e-5
#: and 0.05, a missing bias or a wrong position about 1.
_PROBE_TOLERANCE = {torch.float32: 0.01}
_PROBE_TOLERANCE_HALF = 0.3


@dataclass(frozen=True)
class KvShape:
    """One layer's keys of one token, and how many layers."""

    n_layers: int
    n_kv_heads: int
    head_dim: int


def check_config(config: Any) -> None:
    """Refuse what a transformers config already tells.

    Raises:
        UnsupportedModel: naming the model type and the reason.
    """
    text = config.get_text_config(decoder=True)
    kind = str(config.model_type)

    def refuse(reason: str) -> None:
        raise UnsupportedModel(
            f"a model of type {kind!r} can't be served: {reason}; served are decoder-only "
            "language models whose layers all keep keys and values of one shape"
        )

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        refuse("its layers have no attention heads, or not equally many")
    odd_layers = set(getattr(text, "layer_types", None) or ()) - _PAGEABLE_LAYERS
    if odd_layers:
        refuse(f"its layers of type {', '.join(sorted(odd_layers))} keep another kind of state")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse("some of its layers use another layer's keys and values")
    if getattr(text, "kv_lora_rank", None):
        refuse("multi-head latent attention has keys and values of different sizes")
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        refuse("its attention looks at later tokens")
    if "dynamic" in _rope_types(text):
        refuse("dynamic rotary scaling turns old keys by the longest sequence in the batch")
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        refuse("its config names no longest context (max_position_embeddings)")


def max_context(config: Any) -> int:
    """Tokens of the longest sequence whose keys never have to be turned again."""
    text = config.get_text_config(decoder=True)
    longest = int(text.max_position_embeddings)
    if "longrope" in _rope_types(text):
        # Beyond its original length this scaling swaps all frequencies, those of old keys too.
        for rope in _ropes(text):
            longest = min(longest, int(rope.get("original_max_position_embeddings", longest)))
    return longest


@torch.inference_mode()
def probe(model: Any) -> KvShape:
    """Run a model through our attention and its own, and compare.

    Leaves the model with our attention.

    Raises:
        UnsupportedModel: it can't be run so, or gives something else.
    """
    kind, config = str(model.config.model_type), model.config
    generator = torch.Generator().manual_seed(20)
    vocab = int(config.get_text_config(decoder=True).vocab_size)
    prompts = [torch.randint(vocab, (n,), generator=generator) for n in _PROBE_LENGTHS]
    model.set_attn_implementation("eager")
    device = model.device
    expected = torch.cat([model(p[None].to(device), use_cache=False).logits[0] for p in prompts])

    model.set_attn_implementation(NAME)
    plan = plan_probe(_PROBE_LENGTHS)
    positions = torch.cat([torch.arange(n) for n in _PROBE_LENGTHS])
    try:
        with attending(plan):
            tokens = torch.cat(prompts)[None].to(device)
            logits = model(tokens, position_ids=positions[None].to(device), use_cache=False).logits
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(
            f"a model of type {kind!r} does not run with paged attention: {error}"
        ) from error
    shape = _shape(kind, plan.seen)
    _check_windows(kind, config.get_text_config(decoder=True), plan.seen)
    spread = expected.float().std()
    off = (logits[0].float() - expected.float()).square().mean().sqrt() / spread
    tolerance = _PROBE_TOLERANCE.get(model.dtype, _PROBE_TOLERANCE_HALF)
    if not off <= tolerance:
        raise UnsupportedModel(
            f"a model of type {kind!r} computes something else with paged attention than with "
            f"its own: logits differ by {off:.3g} of their spread, allowed is {tolerance}"
        )
    return shape


def _shape(kind: str, seen: dict[int, tuple[Any, Any, int | None]]) -> KvShape:
    if not seen:
        raise UnsupportedModel(
            f"a model of type {kind!r} attends in code of its own, which can't be put over pages"
        )
    if sorted(seen) != list(range(len(seen))):
        raise UnsupportedModel(
            f"a model of type {kind!r} attends in layers {sorted(seen)}, not in each one once"
        )
    shapes = {shape for keys, values, _ in seen.values() for shape in (keys, values)}
    if len(shapes) != 1:
        listed = ", ".join(f"{heads} heads of {dim}" for _, heads, _, dim in sorted(shapes))
        raise UnsupportedModel(
            f"a model of type {kind!r} has keys and values of several shapes ({listed}); "
            "a KV block has one"
        )
    _, n_kv_heads, _, head_dim = shapes.pop()
    return KvShape(len(seen), n_kv_heads, head_dim)


def _check_windows(kind: str, text: Any, seen: dict[int, tuple[Any, Any, int | None]]) -> None:
    """A window that only a mask would carry is invisible to us, so it must not be there."""
    window = getattr(text, "sliding_window", None)
    if not window or not getattr(text, "use_sliding_window", True):
        return
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * len(seen)
    for layer, (_, _, seen_window) in seen.items():
        wanted = window if types[layer] == "sliding_attention" else None
        if seen_window != wanted:
            raise UnsupportedModel(
                f"a model of type {kind!r} asks for a window of {seen_window} in layer {layer}, "
                f"its config says {wanted}"
            )


def _ropes(text: Any) -> list[dict[str, Any]]:
    """A config's rotary parameters: one set, or one per type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]


def _rope_types(text: Any) -> set[str]:
    return {str(rope.get("rope_type", "default")) for rope in _ropes(text)}
