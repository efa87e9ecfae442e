"""Make tiny checkpoints that have the files, fields and tokens of published ones.

Their configurations name what the published ones name, in small numbers; their tokenizers have the
published form; their templates are `published_templates`. Weights are random, and the token that
ends a turn is likely, so that greedy answers end.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_testing.models.published_templates import templates_of

#: Texts from which tokenizers learn their merges.
_TEXTS = (
    "When is the tide low at Husum? The tide is low at six, and high at noon.",
    "The moon is half in light; the harbour is still, and a call brings the tides.",
    '{"type": "function", "function": {"name": "tides", "parameters": {"type": "object"}}}',
    "user assistant system tool model: Today Date, Größe, 半月, naïve.",
)
_N_MERGED = 340
_CONTEXT = 4096
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Form = Literal["fast", "fast with files", "gemma", "tekken"]


@dataclass(frozen=True)
class PublishedForm:
    """Describe what is published of one checkpoint."""

    template: str
    config: Mapping[str, Any]
    #: Special tokens in the order of their ids, and added ones that are not special.
    special: Sequence[str]
    added: Sequence[str] = ()
    #: Roles of special tokens, such as ``bos_token``.
    roles: Mapping[str, str | None] = field(default_factory=dict)
    #: Tokens that generation_config.json and config.json name as ends.
    ends: Sequence[str] = ()
    #: The token that ends a turn, and all tokens that end an answer.
    turn_end: str = ""
    stops: Sequence[str] = ()
    tokenizer_class: str = "PreTrainedTokenizerFast"
    form: Form = "fast"
    #: Where the template is.
    place: Literal["config", "file"] = "file"
    #: Whether special tokens stand only beside tokenizer.json, as fine-tunes have them.
    only_in_config: Sequence[str] = ()
    begins_with_bos: bool = False
    image_text: bool = False
    #: Factors of all embeddings, and of the row that gives the logit of the end of a turn.
    embedding_factor: float = 1.0
    end_factor: float = 2.5


def _tokens(texts: str) -> tuple[str, ...]:
    return tuple(texts.split(" "))


def _text(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.2,
        "use_cache": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **more,
    }


_LLAMA_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}
_LLAMA_TOKENS = _tokens(
    "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|>"
    " <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
)
_QWEN_ADDED = _tokens("<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>")
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}

#: The checkpoints by name.
PUBLISHED: Mapping[str, PublishedForm] = MappingProxyType(
    {
        "llama3.2": PublishedForm(
            template="llama3",
            config=_text(
                architectures=["LlamaForCausalLM"],
                model_type="llama",
                attention_bias=False,
                mlp_bias=False,
                head_dim=16,
                pretraining_tp=1,
                rope_theta=500000.0,
                rope_scaling=_LLAMA_ROPE,
                tie_word_embeddings=True,
            ),
            special=_LLAMA_TOKENS,
            roles={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            turn_end="<|eot_id|>",
            stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            place="config",
            begins_with_bos=True,
        ),
        "qwen3": PublishedForm(
            template="qwen3",
            config=_text(
                architectures=["Qwen3ForCausalLM"],
                model_type="qwen3",
                attention_bias=False,
                attention_dropout=0.0,
                head_dim=32,
                max_window_layers=2,
                rope_scaling=None,
                rope_theta=1000000,
                sliding_window=None,
                use_sliding_window=False,
                tie_word_embeddings=True,
            ),
            special=_tokens("<|endoftext|> <|im_start|> <|im_end|>"),
            added=_QWEN_ADDED,
            roles={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
            ends=("<|im_end|>", "<|endoftext|>"),
            turn_end="<|im_end|>",
            stops=("<|im_end|>", "<|endoftext|>"),
            tokenizer_class="Qwen2Tokenizer",
            form="fast with files",
            place="config",
        ),
        "qwen2.5-vl": PublishedForm(
            template="qwen2.5_vl",
            config=_text(
                architectures=["Qwen2_5_VLForConditionalGeneration"],
                model_type="qwen2_5_vl",
                attention_dropout=0.0,
                rope_theta=1000000.0,
                sliding_window=32768,
                use_sliding_window=False,
                max_window_layers=2,
                rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
                vision_config={
                    "depth": 1,
                    "hidden_size": 32,
                    "intermediate_size": 32,
                    "num_heads": 2,
                    "out_hidden_size": 64,
                    "fullatt_block_indexes": [0],
                },
            ),
            special=_tokens(
                "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|>"
                " <|vision_pad|> <|image_pad|> <|video_pad|>"
            ),
            added=_QWEN_ADDED[:2],
            roles={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
            ends=("<|im_end|>", "<|endoftext|>"),
            turn_end="<|im_end|>",
            stops=("<|im_end|>", "<|endoftext|>"),
            tokenizer_class="Qwen2Tokenizer",
            form="fast with files",
            place="config",
            image_text=True,
        ),
        "gemma3": PublishedForm(
            template="gemma3",
            config=_text(
                architectures=["Gemma3ForCausalLM"],
                model_type="gemma3_text",
                attention_bias=False,
                attn_logit_softcapping=None,
                final_logit_softcapping=None,
                head_dim=16,
                hidden_activation="gelu_pytorch_tanh",
                query_pre_attn_scalar=16,
                rope_local_base_freq=10000,
                rope_theta=1000000,
                sliding_window=64,
                sliding_window_pattern=2,
                tie_word_embeddings=True,
            ),
            special=_tokens(
                "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image>"
            ),
            roles={
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
            },
            ends=("<eos>", "<end_of_turn>"),
            turn_end="<end_of_turn>",
            stops=("<eos>", "<end_of_turn>"),
            tokenizer_class="GemmaTokenizer",
            form="gemma",
            embedding_factor=0.05,
            end_factor=4.0,
            place="config",
            begins_with_bos=True,
        ),
        "phi4": PublishedForm(
            template="phi4",
            config=_text(
                architectures=["Phi3ForCausalLM"],
                model_type="phi3",
                attention_bias=False,
                attention_dropout=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
                original_max_position_embeddings=_CONTEXT,
                partial_rotary_factor=1.0,
                rope_scaling=None,
                rope_theta=250000,
                sliding_window=None,
            ),
            special=_tokens("<|endoftext|> <|im_start|> <|im_end|> <|im_sep|> <|dummy_85|>"),
            roles={
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|dummy_85|>",
            },
            ends=("<|im_end|>",),
            turn_end="<|im_end|>",
            stops=("<|im_end|>",),
            tokenizer_class="GPT2Tokenizer",
            form="fast with files",
            place="config",
        ),
        "mistral-small": PublishedForm(
            template="mistral_small",
            config=_text(
                architectures=["MistralForCausalLM"],
                model_type="mistral",
                attention_dropout=0.0,
                head_dim=16,
                rope_theta=100000000.0,
                sliding_window=None,
            ),
            special=_tokens(
                "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
                " [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [SYSTEM_PROMPT]"
                " [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID]"
            ),
            roles={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
            ends=("</s>",),
            turn_end="</s>",
            stops=("</s>",),
            form="tekken",
        ),
        "glm4.5": PublishedForm(
            template="glm4.5",
            config=_text(
                architectures=["Glm4MoeForCausalLM"],
                model_type="glm4_moe",
                attention_bias=True,
                attention_dropout=0.0,
                head_dim=16,
                first_k_dense_replace=1,
                moe_intermediate_size=32,
                n_group=1,
                topk_group=1,
                n_routed_experts=4,
                n_shared_experts=1,
                num_nextn_predict_layers=1,
                partial_rotary_factor=0.5,
                rope_scaling=None,
                rope_theta=1000000,
                routed_scaling_factor=1.0,
                use_qk_norm=True,
                **_EXPERTS,
            ),
            special=_tokens(
                "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|>"
                " <|assistant|> <|observation|>"
            ),
            added=_tokens(
                "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
                " <arg_key> </arg_key> <arg_value> </arg_value> /nothink"
            ),
            roles={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
            ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
            turn_end="<|user|>",
            stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        ),
        "minimax-m2": PublishedForm(
            template="minimax_m2",
            config=_text(
                architectures=["MiniMaxM2ForCausalLM"],
                model_type="minimax_m2",
                head_dim=16,
                rotary_dim=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_theta=5000000,
                scoring_func="sigmoid",
                use_qk_norm=True,
                use_routing_bias=True,
                router_aux_loss_coef=0.001,
                sliding_window=None,
            ),
            special=_tokens("]!p~[ ]~!b[ [e~[ ]~b] ]!d~["),
            added=_tokens("<think> </think> <minimax:tool_call> </minimax:tool_call>"),
            roles={"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["},
            ends=("[e~[",),
            turn_end="[e~[",
            stops=("[e~[",),
            tokenizer_class="GPT2Tokenizer",
            form="fast with files",
        ),
        "smollm3": PublishedForm(
            template="smollm3",
            config=_text(
                architectures=["SmolLM3ForCausalLM"],
                model_type="smollm3",
                attention_bias=False,
                attention_dropout=0.0,
                mlp_bias=False,
                layer_types=["full_attention", "full_attention"],
                max_window_layers=2,
                no_rope_layer_interval=2,
                no_rope_layers=[1, 0],
                pretraining_tp=2,
                rope_scaling=None,
                rope_theta=5000000.0,
                sliding_window=None,
                use_sliding_window=False,
                tie_word_embeddings=True,
            ),
            special=_tokens("<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>"),
            added=_QWEN_ADDED,
            roles={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|end_of_text|>"},
            ends=("<|im_end|>",),
            turn_end="<|im_end|>",
            stops=("<|im_end|>",),
        ),
        "chatml-llama": PublishedForm(
            template="hermes",
            config=_text(
                architectures=["LlamaForCausalLM"],
                model_type="llama",
                attention_bias=False,
                mlp_bias=False,
                pretraining_tp=1,
                rope_theta=500000.0,
                rope_scaling=None,
            ),
            special=(*_LLAMA_TOKENS, "<|im_start|>", "<|im_end|>"),
            added=_tokens("<tool_call> </tool_call>"),
            roles={"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"},
            # The end of the model that it was made from.
            ends=("<|end_of_text|>",),
            turn_end="<|im_end|>",
            stops=("<|end_of_text|>", "<|im_end|>"),
            place="config",
            only_in_config=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
            begins_with_bos=True,
        ),
    }
)


def make_published_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the tiny checkpoint of this name into a folder, and return the folder.

    Args:
        name: one of `PUBLISHED`.
        folder: folder to create.
        seed: of the weights.
    """
    form = PUBLISHED[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(form, folder)
    _write_configs(form, folder, ids)
    _write_weights(form, folder, ids[form.turn_end], seed)
    return folder


def token_ids_of(folder: Path) -> dict[str, int]:
    """Return the ids of a made checkpoint's special and added tokens."""
    ids: dict[str, int] = json.loads((folder / _IDS_FILE).read_text())
    return ids


_IDS_FILE = "token_ids.txt"


def _write_tokenizer(form: PublishedForm, folder: Path) -> dict[str, int]:
    from tokenizers import AddedToken

    if form.form == "tekken":
        return _write_tekken(form, folder)
    tokenizer = _gemma_tokenizer(form) if form.form == "gemma" else _byte_level_tokenizer()
    for texts, special in ((form.special, True), (form.added, False)):
        for text in texts:
            if text not in form.only_in_config:
                tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    if form.begins_with_bos:
        _begin_with_bos(tokenizer, str(form.roles["bos_token"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in (*form.special, *form.added)}
    following = tokenizer.get_vocab_size()
    for text in form.only_in_config:
        ids[text], following = following, following + 1
    if form.form == "fast with files":
        model = json.loads(tokenizer.to_str())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
        lines = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    decoder = {
        str(ids[text]): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in form.special,
        }
        for text in (*form.special, *form.added)
    }
    _write_tokenizer_config(form, folder, {"added_tokens_decoder": decoder})
    return ids


def _write_tokenizer_config(form: PublishedForm, folder: Path, more: Mapping[str, Any]) -> None:
    templates = templates_of(form.template)
    config: dict[str, Any] = {
        **more,
        **form.roles,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
        "tokenizer_class": form.tokenizer_class,
    }
    if form.place == "file":
        (folder / "chat_template.jinja").write_text(templates["default"])
    elif len(templates) > 1:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        config["chat_template"] = named
    else:
        config["chat_template"] = templates["default"]
    if form.image_text:
        processor = {"chat_template": templates["default"]}
        (folder / "chat_template.json").write_text(json.dumps(processor))
    _write_json(folder / "tokenizer_config.json", config)
    set_roles = {role: text for role, text in form.roles.items() if text is not None}
    _write_json(folder / "special_tokens_map.json", set_roles)


def _byte_level_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_N_MERGED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    return tokenizer


def _gemma_tokenizer(form: PublishedForm) -> Any:
    """Return a BPE of characters with bytes for the rest, and special tokens in front."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=False)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=_N_MERGED + 100,
        special_tokens=[*form.special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    words = [word for text in _TEXTS for word in text.replace(" ", " ▁").split(" ")]
    tokenizer.train_from_iterator(words * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if not each["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(content))


def _begin_with_bos(tokenizer: Any, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def _write_tekken(form: PublishedForm, folder: Path) -> dict[str, int]:
    """Write ``tekken.json``: bytes of tokens by rank, with the special tokens in front."""
    model = json.loads(_byte_level_tokenizer().to_str())["model"]
    byte_of = _byte_of_characters()
    merged = [
        bytes(byte_of[character] for character in text)
        for text, _ in sorted(model["vocab"].items(), key=lambda item: item[1])
    ]
    pieces = [bytes([byte]) for byte in range(256)] + [each for each in merged if len(each) > 1]
    special = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(form.special)
    ]
    vocab = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(piece).decode(),
            "token_str": piece.decode(errors="ignore") or None,
        }
        for rank, piece in enumerate(pieces)
    ]
    config = {
        "pattern": _WORD,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v13",
    }
    content = {"config": config, "vocab": vocab, "special_tokens": special}
    _write_json(folder / "tekken.json", content)
    _write_tokenizer_config(form, folder, {})
    return {text: rank for rank, text in enumerate(form.special)}


def _byte_of_characters() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    characters = {chr(byte): byte for byte in visible}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _write_configs(form: PublishedForm, folder: Path, ids: Mapping[str, int]) -> None:
    # A multiple of 64, with rows to spare, as published embeddings have.
    n_vocab = -(-(_n_tokens(folder) + len(form.only_in_config)) // 64) * 64
    ends = [ids[text] for text in form.ends]
    config = {**form.config, "vocab_size": n_vocab, "transformers_version": "4.51.0"}
    config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    bos = form.roles.get("bos_token")
    config["bos_token_id"] = None if bos is None else ids[bos]
    config["pad_token_id"] = ids[form.roles.get("pad_token") or form.ends[0]]
    if form.image_text:
        for role, text in (
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
            ("vision_token_id", "<|vision_pad|>"),
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
        ):
            config[role] = ids[text]
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    _write_json(folder / "generation_config.json", generation)
    (folder / _IDS_FILE).write_text(json.dumps(dict(ids)))


def _n_tokens(folder: Path) -> int:
    if (path := folder / "tekken.json").is_file():
        return int(json.loads(path.read_text())["config"]["default_vocab_size"])
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])]
    return int(max(ids)) + 1


def _write_weights(form: PublishedForm, folder: Path, end: int, seed: int) -> None:
    limit_spin_waits()
    import torch
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = "AutoModelForImageTextToText" if form.image_text else "AutoModelForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    # Where a head is tied, answers would repeat their last token otherwise.
    model.get_input_embeddings().weight.data *= form.embedding_factor
    model.get_output_embeddings().weight.data[end] *= form.end_factor
    kept = {name: (folder / name).read_text() for name in ("config.json", "generation_config.json")}
    model.save_pretrained(folder)
    for name, text in kept.items():  # the published ones, and not what transformers makes of them
        (folder / name).write_text(text)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
