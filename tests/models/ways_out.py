"""List the ways by which a file of a model's folder could lead transformers elsewhere.

Each was found by reading transformers 5.23: a field or a name of a file that reaches code, a file
that no check has read, the network, or another library. The functions that follow such a value
are in `transformers_places.txt`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon_testing.models.llama_folders import (
    LLAMA_CONFIG,
    llama_tensors,
    make_llama,
    safetensors_bytes,
    write_files,
)
from halfmoon_testing.models.tiny_models import make_tiny_model

#: What a row does to a folder; `outside` is a folder beside it, which nothing may open.
Build = Callable[[Path, Path], object]

_TOKENIZER = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []},
    "added_tokens": [],
}
_NEVER_RUN = "code from elsewhere and never run: remove the field"
_NEVER_FETCHED = "fetched from elsewhere or read from another file, and never here"
_LINK = "outside of the model's folder; put a copy"


@dataclass(frozen=True)
class Way:
    """One way out of a folder."""

    #: What it would lead to.
    leads_to: str
    build: Build
    #: Pattern of the worker's refusal; empty: the value is ignored, and the model loads.
    refused: str = ""
    #: The same of the conductor, which opens the tokenizer alone and without transformers.
    refused_by_conductor: str = ""
    #: A library or program of a fixed name that transformers looks for itself.
    looks_for: str = ""


def write_outside(outside: Path) -> None:
    """Write the files that hostile values name."""
    write_files(
        outside,
        evil__json="{}",
        evil__jinja="evil",
        evil__model=b"evil",
        evil__gguf=b"GGUF",
        evil__safetensors=safetensors_bytes(llama_tensors()),
        vocab__json={"a": 0},
        merges__txt="",
        generate__py="raise SystemExit('this must not run')",
    )
    (outside / "tokenizer.4.0.0.json").write_text(json.dumps(_TOKENIZER))


def _config(**fields: Any) -> Build:
    return lambda folder, _: make_llama(folder, **fields)


def _seeing(**vision: Any) -> Build:
    """Write a configuration for images and text, whose parts transformers chooses by type."""
    return _config(
        model_type="llava", architectures=None, text_config=LLAMA_CONFIG, vision_config=vision
    )


def _experts(name: str) -> Build:
    def build(folder: Path, _: Path) -> None:
        path = make_tiny_model("qwen3_moe", folder) / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "experts_implementation": name}))

    return build


def _text(folder: Path, **settings: Any) -> Path:
    return write_files(
        make_llama(folder), tokenizer__json=_TOKENIZER, tokenizer_config__json=settings
    )


def _tokenizer(**settings: Any) -> Build:
    return lambda folder, _: _text(folder, **settings)


def _vocabulary(settings: Callable[[Path], dict[str, Any]]) -> Build:
    """Write a tokenizer without a tokenizer.json, for which transformers reads more settings."""

    def build(folder: Path, outside: Path) -> None:
        _text(folder, tokenizer_class="GPT2Tokenizer", **settings(outside))
        (folder / "tokenizer.json").unlink()
        vocab = {"a": 0, "b": 1, "<|endoftext|>": 2}
        write_files(folder, vocab__json=vocab, merges__txt="#version: 0.2\n")

    return build


def _link(name: str, to: str) -> Build:
    def build(folder: Path, outside: Path) -> None:
        path = _text(folder) / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(outside / to)

    return build


def _versions(listed: Callable[[Path], object], *, linked: bool = False) -> Build:
    def build(folder: Path, outside: Path) -> None:
        _text(folder, fast_tokenizer_files=listed(outside))
        if linked:
            (folder / "tokenizer.4.0.0.json").symlink_to(outside / "tokenizer.4.0.0.json")

    return build


def _shard(folder: Path, outside: Path) -> None:
    tensors = llama_tensors()
    (make_llama(folder) / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(safetensors_bytes(tensors))
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "x": "../outside/evil.safetensors"}
    write_files(folder, **{"model.safetensors.index.json": {"weight_map": weight_map}})


#: The ways by their names in messages of tests.
WAYS = {
    # Code
    "attention": Way(
        "hub_kernels.load_and_register_attn_kernel: code from the hub",
        _config(attn_implementation="evil/kernel"), _NEVER_RUN,
    ),
    "attention, old name": Way(
        "the same", _config(_attn_implementation="evil/kernel@main:attention"), _NEVER_RUN,
    ),
    "attention, by part": Way(
        "the same", _config(attn_implementation={"": "evil/kernel"}), _NEVER_RUN,
    ),
    "attention of a nested part": Way(
        "the same",
        _seeing(model_type="clip_vision_model", x={"attn_implementation": "evil/kernel"}),
        r"vision_config\.x\.attn_implementation.*" + _NEVER_RUN,
    ),
    "attention that is not installed": Way(
        "a kernel of the hub in its place", _config(attn_implementation="flash_attention_2"),
    ),
    "experts": Way(
        "a kernel of that name", _config(experts_implementation="evil/kernel"), _NEVER_RUN,
    ),
    "experts of transformers' own names": Way(
        "hub_kernels.lazy_load_kernel: code from the hub", _experts("sonicmoe"),
    ),
    "experts, old name": Way("the same", _experts("deepgemm")),
    "code of a type that is known": Way(
        "dynamic_module_utils.get_class_from_dynamic_module: code of a repository",
        _config(auto_map={"AutoConfig": "evil/repo--m.C", "AutoModelForCausalLM": "m.M"}),
    ),
    "code of a type that is not known": Way(
        "the same", _config(model_type="evil", auto_map={"AutoConfig": "evil/repo--m.C"}),
        r"auto_map in config\.json.*never run",
    ),
    "code of a nested part": Way(
        # Transformers asks for it where it lists its own classes.
        "the same, with a question on the terminal",
        _seeing(model_type="rf_detr_dinov2", auto_map={"AutoModel": "evil/repo--m.M"}),
        "describes no model that can be made", looks_for="detectron2",
    ),
    "code of a tokenizer": Way(
        "the same", _tokenizer(auto_map={"AutoTokenizer": ["evil/repo--m.T", None]}),
    ),
    "a tokenizer that is none": Way(
        "from_pretrained of any class of transformers, on the folder",
        _tokenizer(tokenizer_class="AutoModel"),
    ),
    "a tokenizer that is none, in config.json": Way(
        "the same", _config(tokenizer_class="AutoProcessor"),
    ),
    "a tokenizer of another module": Way(
        "an import of that module, if it imported by full names",
        _tokenizer(tokenizer_class="generate.Tokenizer"),
    ),
    "a function that generates": Way(
        "code of the folder", _link("custom_generate/generate.py", "generate.py"),
    ),
    "a template that includes": Way(
        "another file, if the template had a loader",
        _tokenizer(chat_template="{% include '../outside/evil.jinja' %}"),
    ),
    # Other libraries
    "an activation of a library": Way(
        "the library xielu, by this name alone, where an operator installed it",
        _config(hidden_act="xielu"), "BrokenCheckpoint", looks_for="xielu",
    ),
    "an activation by a path": Way(
        "an import, if names were not from a table", _config(hidden_act="generate.Activation"),
        "describes no model that can be made",
    ),
    "a quantised model": Way(
        "libraries of quantisation, and their kernels from the hub",
        _config(quantization_config={"quant_method": "awq"}), "quantised with AWQ",
    ),
    "a quantised nested part": Way(
        "the same",
        _config(thinker_config={"text_config": {"quantization_config": {"quant_method": "hqq"}}}),
        r"quantised with HQQ \(thinker_config\.text_config\.quantization_config",
    ),
    "a fusion": Way(
        "patches of transformers' own, by names from a table",
        _config(fusion_config={"evil": True}), "Unknown fusion type",
    ),
    "kernels in place of layers": Way(
        "kernels from the hub",
        _config(use_kernels=True, kernel_config={"RMSNorm": "evil/kernel:RMSNorm"}),
    ),
    "a tower of timm": Way(
        "timm.create_model, which fetches hf_hub:NAME and opens local-dir:PATH",
        _seeing(model_type="timm_wrapper", architecture="hf_hub:evil/repo"),
        r"vision_config\.architecture.*" + _NEVER_FETCHED,
    ),
    "weights of timm": Way(
        "timm.create_model, which opens that file",
        _seeing(model_type="timm_wrapper", model_args={"checkpoint_path": "../outside/evil.json"}),
        r"model_args\.checkpoint_path.*" + _NEVER_FETCHED,
    ),
    "a tower with kernels of its own": Way(
        "a kernel of a fixed name, where CUDA and kernels are installed",
        _seeing(model_type="rwkv"), "BrokenCheckpoint", looks_for="ninja",
    ),
    # The network
    "a backbone": Way(
        "repo_exists and the configuration of that repository",
        _seeing(model_type="rf_detr", backbone="evil/repo"),
        r"vision_config\.backbone.*" + _NEVER_FETCHED,
    ),
    "a name of the model": Way(
        "a repository, if it stood for the folder",
        _config(_name_or_path="evil/repo", name_or_path="evil/repo", _commit_hash="evil"),
    ),
    "a name of the tokenizer": Way(
        "model_info of that repository, if it stood for the folder",
        _tokenizer(name_or_path="evil/repo", is_local=False, local_files_only=False),
    ),
    "an adapter": Way(
        "the base model, of the hub or another folder",
        lambda folder, _: write_files(
            make_llama(folder), adapter_config__json={"base_model_name_or_path": "evil/repo"}
        ),
        "holds an adapter beside a model",
    ),
    "functions of a generation": Way(
        "code of a repository, or of other libraries",
        lambda folder, _: write_files(
            make_llama(folder),
            generation_config__json={
                "eos_token_id": 2,
                "custom_generate": "evil/repo",
                "cache_implementation": "quantized",
            },
        ),
    ),
    # Other files
    "a second configuration": Way(
        "a configuration that was not inspected",
        _config(configuration_files=["../outside/evil.json"]),
        "configuration_files in config.json leads to",
    ),
    "other weights": Way(
        "weights that were not inspected",
        _config(transformers_weights="../outside/evil.safetensors"), "transformers_weights",
    ),
    "a shard": Way("any file", _shard, "a shard is a file of the same folder"),
    "shards of a distributed checkpoint": Way(
        "weights that were not inspected, in place of model.safetensors",
        _link("shard-00001-model-00001-of-00001.safetensors", "evil.safetensors"),
    ),
    "a GGUF file": Way(
        "any file, or one of a repository",
        _vocabulary(lambda outside: {"gguf_file": str(outside / "evil.gguf")}),
    ),
    "files of a vocabulary": Way(
        "any file",
        _vocabulary(
            lambda outside: {
                "vocab": str(outside / "vocab.json"),
                "merges": str(outside / "merges.txt"),
            }
        ),
    ),
    "arguments of a class": Way(
        "any file, where a class takes paths",
        _vocabulary(lambda outside: {"init_inputs": [str(outside / "vocab.json")]}),
    ),
    "a file of pieces": Way(
        "any file",
        lambda folder, outside: _text(
            folder, tokenizer_class="T5Tokenizer", vocab_file=str(outside / "evil.model"),
            merges_file=str(outside / "merges.txt"), tokenizer_file=str(outside / "evil.json"),
            spm_file=str(outside / "evil.model"),
        ),
        looks_for="google",
    ),
    "tokenizers of other releases": Way(
        "any file", _versions(lambda outside: [str(outside / "tokenizer.4.0.0.json")]),
        "fast_tokenizer_files in tokenizer_config.json names",
        "fast_tokenizer_files in tokenizer_config.json names",
    ),
    "tokenizers of other releases, as an object": Way(
        "any file", _versions(lambda outside: {str(outside / "tokenizer.4.0.0.json"): 1}),
    ),
    "a link of such a tokenizer": Way(
        "any file", _versions(lambda _: ["tokenizer.4.0.0.json"], linked=True), _LINK,
    ),
    "a link in the place of templates": Way(
        "any file", _link("additional_chat_templates/x.jinja", "evil.jinja"), _LINK, _LINK,
    ),
    "a link in the place of a folder of templates": Way(
        "any folder", _link("additional_chat_templates", "."), _LINK, _LINK,
    ),
    **{
        f"a link in the place of {name}": Way(
            # Of weights and processors, which are never made, the conductor reads nothing.
            "any file", _link(name, to), refused, refused if is_read_by_conductor else "",
        )
        for name, to, refused, is_read_by_conductor in (
            ("config.json", "evil.json", _LINK, True),
            ("model.safetensors", "evil.safetensors", _LINK, False),
            ("model.safetensors.index.json", "evil.json", _LINK, False),
            ("generation_config.json", "evil.json", _LINK, True),
            ("tokenizer.json", "evil.json", _LINK, True),
            ("tokenizer_config.json", "evil.json", _LINK, True),
            ("special_tokens_map.json", "evil.json", _LINK, True),
            ("added_tokens.json", "evil.json", _LINK, True),
            ("chat_template.jinja", "evil.jinja", _LINK, True),
            ("vocab.json", "vocab.json", _LINK, False),
            ("tekken.json", "evil.json", _LINK, False),
            ("tokenizer.model", "evil.model", _LINK, False),
            ("processor_config.json", "evil.json", "", False),
            ("preprocessor_config.json", "evil.json", "", False),
        )
    },
}  # fmt: skip
