"""List the ways by which a file of a model's folder could lead transformers elsewhere.

Each was found by reading transformers 5.23: a field or a name of a file that reaches code, a file
that no check has read, the network, or another library.
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

    #: What stands in the folder, and where.
    place: str
    #: Function of transformers that reads it.
    read_in: str
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
        "config.json: attn_implementation",
        "modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation",
        "hub_kernels.load_and_register_attn_kernel: code from the hub",
        _config(attn_implementation="evil/kernel"), _NEVER_RUN,
    ),
    "attention, old name": Way(
        "config.json: _attn_implementation", "configuration_utils.PreTrainedConfig.__init__",
        "the same", _config(_attn_implementation="evil/kernel@main:attention"), _NEVER_RUN,
    ),
    "attention, by part": Way(
        'config.json: attn_implementation = {"": …}',
        "configuration_utils.PreTrainedConfig._attn_implementation", "the same",
        _config(attn_implementation={"": "evil/kernel"}), _NEVER_RUN,
    ),
    "attention of a nested part": Way(
        "config.json: vision_config.x.attn_implementation",
        "configuration_utils.PreTrainedConfig.__init__", "the same",
        _seeing(model_type="clip_vision_model", x={"attn_implementation": "evil/kernel"}),
        r"vision_config\.x\.attn_implementation.*" + _NEVER_RUN,
    ),
    "attention that is not installed": Way(
        "config.json: attn_implementation = flash_attention_2",
        "modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation",
        "a kernel of the hub in its place", _config(attn_implementation="flash_attention_2"),
    ),
    "experts": Way(
        "config.json: experts_implementation",
        "modeling_utils.PreTrainedModel.get_correct_experts_implementation",
        "a kernel of that name", _config(experts_implementation="evil/kernel"), _NEVER_RUN,
    ),
    "experts of transformers' own names": Way(
        "config.json: experts_implementation = sonicmoe",
        "integrations.sonicmoe._load_sonicmoe_kernel",
        "hub_kernels.lazy_load_kernel: code from the hub", _experts("sonicmoe"),
    ),
    "experts, old name": Way(
        "config.json: experts_implementation = deepgemm",
        "integrations.deepgemm._load_deepgemm_kernel", "the same", _experts("deepgemm"),
    ),
    "code of a type that is known": Way(
        "config.json: auto_map", "models.auto.auto_factory._BaseAutoModelClass.from_config",
        "dynamic_module_utils.get_class_from_dynamic_module: code of a repository",
        _config(auto_map={"AutoConfig": "evil/repo--m.C", "AutoModelForCausalLM": "m.M"}),
    ),
    "code of a type that is not known": Way(
        "config.json: model_type and auto_map",
        "models.auto.configuration_auto.AutoConfig.from_pretrained", "the same",
        _config(model_type="evil", auto_map={"AutoConfig": "evil/repo--m.C"}),
        r"auto_map in config\.json.*never run",
    ),
    "code of a nested part": Way(
        "config.json: vision_config.auto_map",
        "models.auto.auto_factory._BaseAutoModelClass.from_config",
        "the same, with a question on the terminal",
        _seeing(model_type="rf_detr_dinov2", auto_map={"AutoModel": "evil/repo--m.M"}),
        "describes no model that can be made",
        # Transformers asks for it where it lists its own classes.
        looks_for="detectron2",
    ),
    "code of a tokenizer": Way(
        "tokenizer_config.json: auto_map",
        "models.auto.tokenization_auto.AutoTokenizer.from_pretrained", "the same",
        _tokenizer(auto_map={"AutoTokenizer": ["evil/repo--m.T", None]}),
    ),
    "a tokenizer that is none": Way(
        "tokenizer_config.json: tokenizer_class = AutoModel",
        "models.auto.tokenization_auto.tokenizer_class_from_name",
        "from_pretrained of any class of transformers, on the folder",
        _tokenizer(tokenizer_class="AutoModel"),
    ),
    "a tokenizer that is none, in config.json": Way(
        "config.json: tokenizer_class = AutoProcessor",
        "models.auto.tokenization_auto.AutoTokenizer.from_pretrained", "the same",
        _config(tokenizer_class="AutoProcessor"),
    ),
    "a tokenizer of another module": Way(
        "tokenizer_config.json: tokenizer_class = generate.Tokenizer",
        "models.auto.tokenization_auto.tokenizer_class_from_name",
        "an import of that module, if it imported by full names",
        _tokenizer(tokenizer_class="generate.Tokenizer"),
    ),
    "a function that generates": Way(
        "custom_generate/generate.py", "generation.utils.GenerationMixin.load_custom_generate",
        "code of the folder", _link("custom_generate/generate.py", "generate.py"),
    ),
    "a template that includes": Way(
        "tokenizer_config.json: chat_template", "utils.chat_template_utils._compile_jinja_template",
        "another file, if the template had a loader",
        _tokenizer(chat_template="{% include '../outside/evil.jinja' %}"),
    ),
    # Other libraries
    "an activation of a library": Way(
        "config.json: hidden_act = xielu", "activations.XIELUActivation.__init__",
        "the library xielu, by this name alone, where an operator installed it",
        _config(hidden_act="xielu"), "BrokenCheckpoint", looks_for="xielu",
    ),
    "an activation by a path": Way(
        "config.json: hidden_act", "activations.ACT2FN",
        "an import, if names were not from a table", _config(hidden_act="generate.Activation"),
        "describes no model that can be made",
    ),
    "a quantised model": Way(
        "config.json: quantization_config", "quantizers.auto.get_hf_quantizer",
        "libraries of quantisation, and their kernels from the hub",
        _config(quantization_config={"quant_method": "awq"}), "quantised with AWQ",
    ),
    "a quantised nested part": Way(
        "config.json: thinker_config.text_config.quantization_config",
        "quantizers.auto.get_hf_quantizer", "the same",
        _config(thinker_config={"text_config": {"quantization_config": {"quant_method": "hqq"}}}),
        r"quantised with HQQ \(thinker_config\.text_config\.quantization_config",
    ),
    "a fusion": Way(
        "config.json: fusion_config", "fusion_mapping.register_fusion_patches",
        "patches of transformers' own, by names from a table",
        _config(fusion_config={"evil": True}), "Unknown fusion type",
    ),
    "kernels in place of layers": Way(
        "config.json: use_kernels, kernel_config",
        "modeling_utils.PreTrainedModel.from_pretrained, by arguments alone",
        "kernels from the hub",
        _config(use_kernels=True, kernel_config={"RMSNorm": "evil/kernel:RMSNorm"}),
    ),
    "a tower of timm": Way(
        "config.json: vision_config.architecture",
        "models.timm_wrapper.modeling_timm_wrapper._create_timm_model_with_error_handling",
        "timm.create_model, which fetches hf_hub:NAME and opens local-dir:PATH",
        _seeing(model_type="timm_wrapper", architecture="hf_hub:evil/repo"),
        r"vision_config\.architecture.*" + _NEVER_FETCHED,
    ),
    "weights of timm": Way(
        "config.json: vision_config.model_args.checkpoint_path",
        "models.timm_wrapper.modeling_timm_wrapper._create_timm_model_with_error_handling",
        "timm.create_model, which opens that file",
        _seeing(model_type="timm_wrapper", model_args={"checkpoint_path": "../outside/evil.json"}),
        r"model_args\.checkpoint_path.*" + _NEVER_FETCHED,
    ),
    "a tower with kernels of its own": Way(
        "config.json: vision_config.model_type = rwkv", "models.rwkv.modeling_rwkv",
        "a kernel of a fixed name, where CUDA and kernels are installed",
        _seeing(model_type="rwkv"), "BrokenCheckpoint", looks_for="ninja",
    ),
    # The network
    "a backbone": Way(
        "config.json: vision_config.backbone",
        "backbone_utils.consolidate_backbone_kwargs_to_config",
        "repo_exists and the configuration of that repository",
        _seeing(model_type="rf_detr", backbone="evil/repo"),
        r"vision_config\.backbone.*" + _NEVER_FETCHED,
    ),
    "a name of the model": Way(
        "config.json: _name_or_path, name_or_path, _commit_hash",
        "configuration_utils.PreTrainedConfig.__init__", "a repository, if it stood for the folder",
        _config(_name_or_path="evil/repo", name_or_path="evil/repo", _commit_hash="evil"),
    ),
    "a name of the tokenizer": Way(
        "tokenizer_config.json: name_or_path",
        "tokenization_utils_tokenizers.TokenizersBackend._patch_mistral_regex",
        "model_info of that repository, if it stood for the folder",
        _tokenizer(name_or_path="evil/repo", is_local=False, local_files_only=False),
    ),
    "an adapter": Way(
        "adapter_config.json: base_model_name_or_path", "integrations.peft.maybe_load_adapters",
        "the base model, of the hub or another folder",
        lambda folder, _: write_files(
            make_llama(folder), adapter_config__json={"base_model_name_or_path": "evil/repo"}
        ), "holds an adapter beside a model",
    ),
    "functions of a generation": Way(
        "generation_config.json: custom_generate, cache_implementation",
        "generation.utils.GenerationMixin.generate, which is never called",
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
        "config.json: configuration_files", "configuration_utils.PreTrainedConfig.get_config_dict",
        "a configuration that was not inspected",
        _config(configuration_files=["../outside/evil.json"]),
        "configuration_files in config.json leads to",
    ),
    "other weights": Way(
        "config.json: transformers_weights", "modeling_utils._get_resolved_checkpoint_files",
        "weights that were not inspected",
        _config(transformers_weights="../outside/evil.safetensors"), "transformers_weights",
    ),
    "a shard": Way(
        "model.safetensors.index.json: weight_map", "utils.hub.get_checkpoint_shard_files",
        "any file", _shard, "a shard is a file of the same folder",
    ),
    "shards of a distributed checkpoint": Way(
        "shard-00001-model-00001-of-00001.safetensors",
        "distributed.checkpoint.get_distributed_checkpoint_dir",
        "weights that were not inspected, in place of model.safetensors",
        _link("shard-00001-model-00001-of-00001.safetensors", "evil.safetensors"),
    ),
    "a GGUF file": Way(
        "tokenizer_config.json: gguf_file",
        "tokenization_utils_tokenizers.TokenizersBackend.__init__",
        "any file, or one of a repository",
        _vocabulary(lambda outside: {"gguf_file": str(outside / "evil.gguf")}),
    ),
    "files of a vocabulary": Way(
        "tokenizer_config.json: vocab, merges",
        "tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format", "any file",
        _vocabulary(
            lambda outside: {
                "vocab": str(outside / "vocab.json"),
                "merges": str(outside / "merges.txt"),
            }
        ),
    ),
    "arguments of a class": Way(
        "tokenizer_config.json: init_inputs",
        "tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained",
        "any file, where a class takes paths",
        _vocabulary(lambda outside: {"init_inputs": [str(outside / "vocab.json")]}),
    ),
    "a file of pieces": Way(
        "tokenizer_config.json: vocab_file, merges_file, tokenizer_file, spm_file",
        "tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained", "any file",
        lambda folder, outside: _text(
            folder, tokenizer_class="T5Tokenizer", vocab_file=str(outside / "evil.model"),
            merges_file=str(outside / "merges.txt"), tokenizer_file=str(outside / "evil.json"),
            spm_file=str(outside / "evil.model"),
        ), looks_for="google",
    ),
    "tokenizers of other releases": Way(
        "tokenizer_config.json: fast_tokenizer_files",
        "tokenization_utils_tokenizers.get_fast_tokenizer_file", "any file",
        _versions(lambda outside: [str(outside / "tokenizer.4.0.0.json")]),
        "fast_tokenizer_files in tokenizer_config.json names",
        "fast_tokenizer_files in tokenizer_config.json names",
    ),
    "tokenizers of other releases, as an object": Way(
        "tokenizer_config.json: fast_tokenizer_files = {…}",
        "tokenization_utils_tokenizers.get_fast_tokenizer_file", "any file",
        _versions(lambda outside: {str(outside / "tokenizer.4.0.0.json"): 1}),
    ),
    "a link of such a tokenizer": Way(
        "tokenizer_config.json: fast_tokenizer_files, and a link",
        "tokenization_utils_tokenizers.get_fast_tokenizer_file", "any file",
        _versions(lambda _: ["tokenizer.4.0.0.json"], linked=True), _LINK,
    ),
    "a link in the place of templates": Way(
        "additional_chat_templates/x.jinja",
        "tokenization_utils_base.PreTrainedTokenizerBase.from_pretrained", "any file",
        _link("additional_chat_templates/x.jinja", "evil.jinja"), _LINK, _LINK,
    ),
    "a link in the place of a folder of templates": Way(
        "additional_chat_templates",
        "tokenization_utils_base.PreTrainedTokenizerBase.from_pretrained", "any folder",
        _link("additional_chat_templates", "."), _LINK, _LINK,
    ),
    **{
        f"a link in the place of {name}": Way(
            name,
            read_in,
            "any file",
            _link(name, to),
            _LINK,
            # Of weights the conductor reads nothing.
            "" if "safetensors" in name else _LINK,
        )
        for name, read_in, to in (
            ("config.json", "configuration_utils.PreTrainedConfig._get_config_dict", "evil.json"),
            ("model.safetensors", "modeling_utils._get_resolved_checkpoint_files",
             "evil.safetensors"),
            ("model.safetensors.index.json", "utils.hub.get_checkpoint_shard_files", "evil.json"),
            ("generation_config.json", "generation.GenerationConfig.from_pretrained", "evil.json"),
            ("tokenizer.json", "tokenization_utils_base.from_pretrained", "evil.json"),
            ("tokenizer_config.json", "tokenization_auto.get_tokenizer_config", "evil.json"),
            ("special_tokens_map.json", "tokenization_utils_base._from_pretrained", "evil.json"),
            ("added_tokens.json", "tokenization_utils_base._from_pretrained", "evil.json"),
            ("chat_template.jinja", "tokenization_utils_base._from_pretrained", "evil.jinja"),
        )
    },
    **{
        f"a link in the place of {name}": Way(
            name, read_in, "any file", _link(name, to), _LINK
        )
        for name, read_in, to in (
            ("vocab.json", "tokenization_utils_base.from_pretrained", "vocab.json"),
            ("tekken.json", "tokenization_utils_base.from_pretrained", "evil.json"),
            ("tokenizer.model", "tokenization_utils_base.from_pretrained", "evil.model"),
        )
    },
    **{
        f"a link in the place of {name}": Way(
            name, "a processor, which is never made", "any file", _link(name, "evil.json")
        )
        for name in ("processor_config.json", "preprocessor_config.json")
    },
}  # fmt: skip
