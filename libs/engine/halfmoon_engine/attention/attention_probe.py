"""Probe a loaded model before it serves, and refuse an architecture that does not fit.

Two short sequences go through the model side by side with our attention. It must

1. give what its own attention gives for each alone;
2. attend, in each layer by itself, as its own attention does. Logits alone don't show it: where
   attention adds little to a layer's input, as in small random models, an encoder's logits are
   almost those of a causal model;
3. give the same logits for a token whatever comes after it, and whatever stands beside it;
4. give the same logits when the end of a sequence is run by itself over the kept keys and
   values of its beginning;
5. have keys and values of one shape in every layer, and a logit for each word it knows.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfmoon_engine.attention.device_pool import DeviceKvPool
from halfmoon_engine.attention.forward_plan import (
    ForwardPlan,
    SeenAttention,
    plan_forward,
    plan_probe,
)
from halfmoon_engine.attention.kv_pool import TORCH_DTYPES, HostKvPool, KvPool
from halfmoon_engine.attention.paged_attention import ATTENTION_NAME, use_forward_plan
from halfmoon_engine.interface import Run
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_engine.stages.stage_probe import probe_incoming
from halfmoon_models.errors import BrokenCheckpoint, UnsupportedModel, one_line
from halfmoon_models.model_kinds import unsupported_kind
from halfmoon_protocol.kv_layout import KvLayout

_LENGTHS = (19, 13)
#: Tokens of the first sequence that are run before the rest of it.
_FIRST_CHUNK = 11
#: Root mean square of the logits' error over their spread. Sums in another order give 1e-5
#: and 0.05, a missing bias or a wrong position about 1.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_HALF = 0.3
#: The same where our attention runs a sequence in parts and whole.
_CHUNKED = {torch.float32: 1e-3}
#: The same for one layer's attention, which is computed in float32 whatever the model is in.
#: Both ways differ by 1e-6; a causal and a bidirectional one by 0.5.
_ATTENTION_TOLERANCE = 1e-3
#: Change of the logits that must not change, over the change of those that must. Experts that
#: take their tokens together make sums of other lengths, and so a change.
_LEAK = {torch.float32: 1e-5}
_LEAK_HALF = 0.1

#: Options that models pass on to attention and that change nothing of it, or that the probe sees
#: in the results whatever the prompt's length.
_HARMLESS_OPTIONS = frozenset(
    (
        "cache_position", "dropout", "is_causal", "logits_to_keep", "num_items_in_batch",
        "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
        "position_ids", "return_dict", "use_cache",
    )
)  # fmt: skip


@dataclass(frozen=True)
class KvShape:
    """Number of layers, and the shape of one token's keys in one layer."""

    n_layers: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ProbedModel:
    """Result of a probe: shapes, and logits that another way to compute the model must give."""

    shape: KvShape
    #: How each layer calls attention.
    seen: dict[int, SeenAttention]
    prompts: list[torch.Tensor]
    #: [tokens of all prompts, vocabulary]; activations before the last stage.
    logits: torch.Tensor
    #: Activations that each prompt came with; None at the first stage.
    incoming: list[torch.Tensor] | None
    #: Whether `logits` are activations for another stage.
    leaves: bool


@dataclass(frozen=True)
class _Call:
    """One call of a layer's module by the model."""

    module: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@torch.inference_mode()
def probe_attention(staged: StageModel) -> ProbedModel:
    """Run a model, or its stage, through our attention and its own, and compare.

    Leaves the model with our attention. A stage has activations in place of logits, or in place
    of embedded tokens.

    Raises:
        UnsupportedModel: it can't be run so, or gives something else.
        BrokenCheckpoint: it gives no numbers, or not one for each word.
    """
    model = staged.model
    kind, text = str(model.config.model_type), model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(20)
    vocab = int(text.vocab_size)
    prompts = [torch.randint(vocab, (n,), generator=generator) for n in _LENGTHS]
    model.set_attn_implementation("eager")
    expected, calls = _own_logits(staged, prompts)
    _check_logits(kind, expected, vocab if staged.stage.is_last else staged.hidden_size)

    model.set_attn_implementation(ATTENTION_NAME)
    plan = plan_probe(_LENGTHS, staged.first_layer)
    try:
        logits = _packed_logits(staged, torch.cat(prompts), plan)
    except Exception as error:
        _shape(kind, plan)  # layers of other shapes are a better reason than what torch says
        said = one_line(error, 200)
        raise unsupported_kind(
            kind, f"it does not run with paged attention ({type(error).__name__}: {said})"
        ) from error
    shape = _shape(kind, plan)
    _check_options(kind, plan.options)
    _check_windows(kind, text, plan.seen, staged.first_layer)
    off = "with paged attention than with its own"
    _compare(kind, logits, expected, off, _TOLERANCE.get(model.dtype, _TOLERANCE_HALF))
    _check_attention(kind, calls, set(plan.seen), staged.first_layer)
    _check_leaks(kind, staged, torch.cat(prompts), logits, vocab)
    chunked = _chunked_logits(staged, prompts[0], shape)
    off = "from kept keys and values than from all tokens"
    whole = logits[: len(prompts[0])]
    _compare(kind, chunked, whole, off, _CHUNKED.get(model.dtype, _TOLERANCE_HALF))
    came = [probe_incoming(staged, prompt) for prompt in prompts]
    incoming = [rows for rows in came if rows is not None] or None
    return ProbedModel(shape, plan.seen, prompts, logits, incoming, not staged.stage.is_last)


def logits_error(logits: torch.Tensor, probed: ProbedModel) -> float:
    """Return the root mean square error of a probe's logits, over their spread."""
    expected = probed.logits.float()
    return _rms(logits.float() - expected) / float(expected.std())


def allowed_error(dtype: torch.dtype) -> float:
    """Return the largest `logits_error` of the same sums in another order."""
    return _CHUNKED.get(dtype, _TOLERANCE_HALF)


def _own_logits(
    staged: StageModel, prompts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, _Call]]:
    """Compute logits of each prompt alone, and record the layers' calls for the first one."""
    calls: dict[str, _Call] = {}

    def record(name: str) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            calls.setdefault(name, _Call(module, arguments, dict(options)))

        return hook

    handles = [
        module.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, module in staged.model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    try:
        rows = [staged.run(p, None, probe_incoming(staged, p)) for p in prompts]
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(rows), calls


def _packed_logits(staged: StageModel, tokens: torch.Tensor, plan: ForwardPlan) -> torch.Tensor:
    """Compute logits of the prompts side by side in one row, with our attention."""
    positions = torch.cat([torch.arange(n) for n in _LENGTHS])
    return _logits(staged, tokens, positions, plan)


def _logits(
    staged: StageModel, tokens: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan
) -> torch.Tensor:
    with use_forward_plan(plan):
        return staged.run(tokens, positions, probe_incoming(staged, tokens))


def _check_logits(kind: str, logits: torch.Tensor, vocab: int) -> None:
    if tuple(logits.shape) != (sum(_LENGTHS), vocab):
        raise BrokenCheckpoint(
            f"a model of type {kind!r} gives logits of shape {list(logits.shape)} for "
            f"{sum(_LENGTHS)} tokens and a vocabulary of {vocab}: its config.json and weights "
            "don't belong together; fetch both once more"
        )
    if not bool(logits.isfinite().all()) or not float(logits.float().std()) > 0:
        raise BrokenCheckpoint(
            f"a model of type {kind!r} gives NaN, infinite or equal logits: its weights are "
            "damaged, or too large for their precision; fetch it once more, or try another --dtype"
        )


def _compare(
    kind: str, logits: torch.Tensor, expected: torch.Tensor, how: str, tolerance: float
) -> None:
    off = _rms(logits.float() - expected.float()) / float(expected.float().std())
    if not off <= tolerance:
        raise UnsupportedModel(
            f"a model of type {kind!r} computes something else {how}: logits differ by {off:.3g} "
            f"of their spread, allowed is {tolerance}"
        )


def _check_attention(
    kind: str, calls: dict[str, _Call], layers: set[int], first_layer: int
) -> None:
    """Compare the layers one by one, each with the inputs that its own model gave it."""
    compared: set[int] = set()
    for name, call in calls.items():
        # A copy in float32: what differs is then what is computed, not how it is rounded.
        module = copy.deepcopy(call.module).float()
        if not hasattr(getattr(module, "config", None), "_attn_implementation"):
            continue
        arguments, options = _as_float((call.arguments, call.options))
        module.config._attn_implementation = "eager"
        own = _first_tensor(module(*arguments, **options))
        module.config._attn_implementation = ATTENTION_NAME
        plan = plan_probe(_LENGTHS[:1], first_layer)
        with use_forward_plan(plan):
            ours = _first_tensor(module(*arguments, **options))
        if not plan.seen:
            continue
        compared.update(plan.seen)
        off = _rms(ours - own) / max(_rms(own), 1e-30)
        if not off <= _ATTENTION_TOLERANCE:
            raise UnsupportedModel(
                f"a model of type {kind!r} attends otherwise than a causal language model in "
                f"{name}: outputs differ by {off:.3g} of their size, allowed is "
                f"{_ATTENTION_TOLERANCE}; encoders, which see later tokens, are not served"
            )
    if missing := sorted(layers - compared):
        raise UnsupportedModel(
            f"a model of type {kind!r} attends in layers {missing} in a way that can't be compared "
            "with its own, so it is not served"
        )


def _check_leaks(
    kind: str, staged: StageModel, tokens: torch.Tensor, logits: torch.Tensor, vocab: int
) -> None:
    """Check that a token affects no logits of earlier tokens or of another sequence."""
    first = _LENGTHS[0]
    for changed, same in ((first - 1, [*range(first - 1), *range(first, sum(_LENGTHS))]),
                          (first, [*range(first)])):  # fmt: skip
        others = tokens.clone()
        others[changed] = (others[changed] + 1) % vocab
        plan = plan_probe(_LENGTHS, staged.first_layer)
        moved = _packed_logits(staged, others, plan).float() - logits.float()
        leak = _rms(moved[same]) / max(_rms(moved[changed]), 1e-30)
        if not leak <= _LEAK.get(staged.model.dtype, _LEAK_HALF):
            raise UnsupportedModel(
                f"a model of type {kind!r} is no causal language model: a token's logits depend "
                f"on tokens that come later or of other sequences (by {leak:.3g} of what they "
                "depend on their own)"
            )


def _chunked_logits(staged: StageModel, prompt: torch.Tensor, shape: KvShape) -> torch.Tensor:
    """Compute logits of a prompt in two chunks and a last token by itself, over pages."""
    model = staged.model
    layout = KvLayout(
        model="probe",
        n_layers=staged.first_layer + shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype={dtype: name for name, dtype in TORCH_DTYPES.items()}[model.dtype],
        block_size=16,
    )
    n_pages = layout.blocks_for(len(prompt))
    memory = memoryview(bytearray(n_pages * layout.block_bytes))
    pool: KvPool = (
        HostKvPool(memory, layout)
        if model.device.type == "cpu"
        else DeviceKvPool(memory, layout, model.device)
    )
    rows: list[torch.Tensor] = []
    # The pages in reverse: a model that reads memory in order would not go unnoticed.
    pages = range(n_pages)[::-1]
    for start, end in ((0, _FIRST_CHUNK), (_FIRST_CHUNK, len(prompt) - 1), (len(prompt) - 1, None)):
        part = prompt[start:end]
        run = Run(part.tolist(), start, pages, None, continues=True)
        plan = plan_forward([run], layout, pool, model.device, model.dtype, staged.first_layer)
        positions = torch.arange(start, start + len(part))
        rows.append(_logits(staged, part, positions, plan))
    return torch.cat(rows)


def _as_float(value: Any) -> Any:
    """Convert all floating-point tensors of a value to float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_as_float(part) for part in value)
    if isinstance(value, dict):
        return {key: _as_float(part) for key, part in value.items()}
    return value


def _first_tensor(value: Any) -> torch.Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a layer gave a {type(value).__name__}, not a tensor")
    return value


def _rms(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def _shape(kind: str, plan: ForwardPlan) -> KvShape:
    seen = plan.seen
    if not seen:
        raise UnsupportedModel(
            f"a model of type {kind!r} attends in code of its own, which can't be put over pages; "
            "choose one whose class in transformers leaves attention to a function"
        )
    if sorted(seen) != list(range(len(seen))):
        raise unsupported_kind(
            kind, f"it attends in layers {sorted(seen)[:20]}, not in each one once"
        )
    if plan.n_calls != len(seen):
        raise unsupported_kind(
            kind,
            f"it attends {plan.n_calls} times in {len(seen)} layers, each time with other keys "
            "and values, and a KV block has room for one time",
        )
    shapes = {shape for call in seen.values() for shape in (call.key_shape, call.value_shape)}
    if len(shapes) != 1:
        listed = ", ".join(f"{heads} heads of {dim}" for _, heads, _, dim in sorted(shapes))
        raise unsupported_kind(
            kind, f"it has keys and values of several shapes ({listed}), and a KV block has one"
        )
    _, n_kv_heads, _, head_dim = shapes.pop()
    return KvShape(len(seen), n_kv_heads, head_dim)


def _check_options(kind: str, options: set[str]) -> None:
    """Refuse options of attention that ours does not know: short prompts may not show them."""
    if unknown := sorted(options - _HARMLESS_OPTIONS):
        raise unsupported_kind(
            kind, f"its attention takes {', '.join(unknown)[:200]}, which ours does not read"
        )


def _check_windows(kind: str, text: Any, seen: dict[int, SeenAttention], first_layer: int) -> None:
    """Refuse a sliding window that only a mask would carry, which we never see."""
    window = getattr(text, "sliding_window", None)
    if not window or not getattr(text, "use_sliding_window", True):
        return
    types = getattr(text, "layer_types", None)
    for own, call in seen.items():
        layer = first_layer + own
        slides = not types or types[layer] == "sliding_attention"
        wanted = window if slides else None
        if call.window != wanted:
            raise UnsupportedModel(
                f"a model of type {kind!r} asks for a window of {call.window} in layer {layer}, "
                f"its config says {wanted}"
            )
