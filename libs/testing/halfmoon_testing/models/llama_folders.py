"""Write model folders byte by byte, without torch, for tests of their inspection."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "U32": 4}

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "dtype": "float32",
}


def llama_tensors() -> dict[str, tuple[str, list[int]]]:
    """Return types and shapes of the tensors of `LLAMA_CONFIG`."""
    layer = "model.layers.0"
    square = ("F32", [16, 16])
    return {
        "model.embed_tokens.weight": ("F32", [32, 16]),
        "lm_head.weight": ("F32", [32, 16]),
        "model.norm.weight": ("F32", [16]),
        f"{layer}.input_layernorm.weight": ("F32", [16]),
        f"{layer}.post_attention_layernorm.weight": ("F32", [16]),
        **{f"{layer}.self_attn.{name}_proj.weight": square for name in "qkvo"},
        **{f"{layer}.mlp.{name}_proj.weight": square for name in ("gate", "up", "down")},
    }


def safetensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return a safetensors file of these tensors, with small numbers in them."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape) in tensors.items():
        n = 1
        for size in shape:
            n *= size
        begin = len(data)
        if dtype == "F32":
            data += b"".join(struct.pack("<f", ((i * 37) % 17 - 8) / 20) for i in range(n))
        else:
            data += bytes(n * WIDTHS[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, len(data)]}
    return safetensors_with_header(header, data)


def safetensors_with_header(header: object, data: bytes) -> bytes:
    """Return a safetensors file of this header, an object or bytes, and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    n = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def write_files(folder: Path, **files: Any) -> Path:
    """Write files of text, bytes or JSON; a name has ``__`` in place of a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, content in files.items():
        path = folder / key.replace("__", ".")
        path.write_bytes(
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
    return folder


def make_llama(folder: Path, **changes: Any) -> Path:
    """Write the folder of a tiny model; `changes` are fields of its config.json."""
    return write_files(
        folder,
        config__json={**LLAMA_CONFIG, **changes},
        generation_config__json={"eos_token_id": 2},
        tokenizer__json={"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}},
        model__safetensors=safetensors_bytes(llama_tensors()),
    )
