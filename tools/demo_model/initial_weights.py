"""Make the demo model before its training: a small Llama with two prepared layers.

Recall is two steps of attention: a token notes the tokens before it (so a digit knows whose
number it is), then a question looks for the token that noted its name and copies what it is.
From random weights neither step pays without the other, and training waits for long until
chance brings both. So they are sketched here, faintly, and training makes them sharp,
general and robust:

* The residual stream has two halves. Embeddings lie in the first; the second is for notes.
* Layer 0: head h attends to the token h + 1 before, by position alone. A feature that is the
  same in every token becomes a key, and the same key turned back by h + 1 steps of the rotary
  embedding is the query. It writes 64 coordinates of what it finds into the notes.
* Layer 1: the queries are those coordinates of the token itself (even heads) or of its notes
  (odd heads), the keys are notes; what is found is copied to the first half.

The rest is random. The idea of weights that begin as what training is known to find is that
of mimetic initialisation (Trockman and Kolter, "Mimetic Initialization of Self-Attention
Layers", 2023).
"""

from typing import Any

import torch
import transformers as untyped_transformers

from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from tools.demo_model.make_tokenizer import VOCAB_SIZE

transformers: Any = untyped_transformers

MAX_CONTEXT = 16384
_WIDTH = 128
_LAYERS = 4
_HEADS = 2
_HEAD_DIM = 64
#: Most coordinates turn slowly, so that names match over many thousands of tokens.
_ROPE_THETA = 2_000_000.0
_EMBEDDING_STD = 0.2
_MATRIX_STD = 0.06
#: Gains found by trying; training changes all of them.
_POSITION_GAIN = 1.3
_NOTE_GAIN = 0.15
_MATCH_GAIN = 2.0
_COPY_GAIN = 0.3


def make_model() -> Any:
    """Make a `LlamaForCausalLM` in float32, ready for training; draw from torch's generator."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        initializer_range=_MATRIX_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(EOS_TOKEN_IDS),
        pad_token_id=EOS_TOKEN_IDS[0],
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(EOS_TOKEN_IDS), pad_token_id=EOS_TOKEN_IDS[0]
    )
    with torch.no_grad():
        _sketch(model)
    return model


def _sketch(model: Any) -> None:
    half, notes, same = _WIDTH // 2, slice(_WIDTH // 2, _WIDTH // 2 + _HEAD_DIM), _WIDTH - 1
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0, _EMBEDDING_STD)
    embeddings[:, half:] *= 0.1
    embeddings[:, same] = 5 * _EMBEDDING_STD
    look_back, match = (layer.self_attn for layer in model.model.layers[:2])
    for attention in (look_back, match):
        for each in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            each.weight *= 0.3
    pairs = _HEAD_DIM // 2
    turn = _ROPE_THETA ** (-torch.arange(pairs) / pairs)
    name = _directions(half)
    for head in range(_HEADS):
        rows = slice(head * _HEAD_DIM, (head + 1) * _HEAD_DIM)
        angle = -(head + 1) * turn
        look_back.k_proj.weight[rows, same] = _POSITION_GAIN * torch.cat([turn**0, turn * 0])
        look_back.q_proj.weight[rows, same] = _POSITION_GAIN * torch.cat([angle.cos(), angle.sin()])
        look_back.v_proj.weight[rows, :half] += name
        look_back.o_proj.weight[notes, rows] += _NOTE_GAIN * torch.eye(_HEAD_DIM)
        if head % 2 == 0:
            match.q_proj.weight[rows, :half] += _MATCH_GAIN * name
        else:
            match.q_proj.weight[rows, notes] += _MATCH_GAIN * torch.eye(_HEAD_DIM)
        match.k_proj.weight[rows, notes] += _MATCH_GAIN * torch.eye(_HEAD_DIM)
        value = _directions(half)
        match.v_proj.weight[rows, :half] += value
        match.o_proj.weight[:half, rows] += _COPY_GAIN * value.T


def _directions(width: int) -> torch.Tensor:
    """Draw orthogonal rows in a space of `width`: [head_dim, width]."""
    columns: torch.Tensor = torch.linalg.qr(torch.randn(width, _HEAD_DIM))[0]
    return columns.T
