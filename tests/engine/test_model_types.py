"""Each model type of transformers that continues texts is served as by transformers, or refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped_transformers
from safetensors.torch import load_file as _load_file
from safetensors.torch import save_file as _save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from halfmoon_engine.attention.attention_probe import probe_attention
from halfmoon_engine.checkpoints.architecture import check_architecture
from halfmoon_engine.checkpoints.text_class import text_class, text_config_of
from halfmoon_engine.load import open_engine
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_engine.stages.unused_parts import UnusedPart, leave_out_other_inputs
from halfmoon_models.errors import ModelError
from halfmoon_models.model_kinds import check_kind
from halfmoon_testing.models.byte_tokenizer import train_tokenizer, write_tokenizer
from halfmoon_testing.models.shrunken_configs import SHRUNKEN_VOCAB_SIZE, shrunken_config
from tests.engine.driver import Driver

transformers: Any = untyped_transformers
load_file: Any = _load_file
save_file: Any = _save_file
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def _words(text: str) -> list[str]:
    return text.split()


#: Types whose tiny models pass the probe.
SERVED = _words(
    "afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe "
    "gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa "
    "granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 "
    "iquestcoder jais2 jetmoe kolibri1 laguna llama mellum minimax_m2 ministral "
    "ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt "
    "persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open "
    "stablelm starcoder2 vaultgemma"
)
#: Types that read images or sounds too, and whose text alone equals transformers'.
SERVED_TEXT = _words(
    "aria aya_vision cosmos3_edge cosmos3_omni deepseek_vl ernie4_5_vl_moe exaone4_5 fuyu gemma3 "
    "glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite_docling hyperclovax_vision_v2 idefics2 "
    "idefics3 internvl lighton_ocr llava llava_next llava_next_video llava_onevision "
    "mistral3 ovis2 paddleocr_vl pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm "
    "step3p7 video_llama_3 video_llava vipllava glmasr moss_transcribe_diarize qwen2_audio "
    "qwen3_asr vibevoice_asr voxtral"
)
#: The same with towers that take long to write: probed only.
SERVED_TEXT_LARGE = _words(
    "cohere2_vision deepseek_vl_hybrid granite_speech granite_speech_plus janus muse_glimmer "
    "phi4_multimodal"
)
#: Types that speak as well: their thinker is served.
SPEAKERS = ("qwen2_5_omni", "qwen3_omni_moe")
#: Types that the probe refuses.
REFUSED_BY_PROBE = _words(
    "diffllama doge falcon git gpt_neox_japanese hrm_text kosmos-2.5 moshi openai-gpt xglm"
)
#: Types whose own code does not run on text alone.
NEED_OTHER_INPUTS = ("idefics", "instructblip", "instructblipvideo", "kosmos-2", "voxtral_realtime")
#: Types whose published layers are of other types than those of the default configuration.
REFUSED_AS_PUBLISHED = (
    "lfm2", "lfm2_moe", "lfm2_vl", "minimax_m3_vl", "minimax_m3_vl_text", "mllama",
)  # fmt: skip
#: Types that no tiny model was made of here: the probe decides when one is loaded.
NOT_TRIED = _words(
    "chameleon codegen cohere_compass cohere_compass_text dbrx deepseek_ocr2 diffusion_gemma dots1 "
    "emu3 evolla fast_vlm fun_asr_nano gemma4 gemma4_assistant gemma4_text gpt_neo gptj "
    "granite4_vision hunyuan_vl kyutai_speech_to_text molmo2 muse_spark perception_lm reformer "
    "shieldgemma2 xlm xlnet"
)
N_PROMPT, N_NEW = 40, 8
PROMPT = [(37 * i + 11) % 300 for i in range(N_PROMPT)]


def make(kind: str) -> Any:
    """A tiny random model of a type, with all of its towers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = text_config_of(shrunken_config(kind))
    model = text_class(config).from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        # Fresh weights attend almost alike, and fresh norms are 1.
        weight.data += 0.05 * torch.randn_like(weight)
    return model


def greedy(model: Any) -> list[int]:
    """The answer of transformers to `PROMPT`, computed anew for each token."""
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(N_NEW):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[N_PROMPT:]


def served(folder: Path) -> tuple[list[int], Any]:
    """The answer of an engine to `PROMPT`, whose keys and values it keeps; and its model."""
    write_tokenizer(train_tokenizer(["a b"], SHRUNKEN_VOCAB_SIZE), folder, max_context=256)
    engine: Any = open_engine(
        str(folder), block_size=16, dtype="float32", device="cpu", threads=1, native="off"
    )
    answer = Driver(engine, N_PROMPT + N_NEW).generate(PROMPT, N_NEW, chunk=16)
    return answer, engine._runner._staged.model


@pytest.mark.parametrize("kind", SERVED_TEXT)
def test_text_of_a_multimodal_model_equals_transformers_without_towers(
    kind: str, tmp_path: Path
) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path)
    answer, loaded = served(tmp_path)
    assert answer == greedy(model)
    left_out = [part for part in loaded.modules() if isinstance(part, UnusedPart)]
    assert left_out or kind in ("aria_text", "moss_transcribe_diarize")
    if left_out:
        assert _size(loaded) < _size(model)


@pytest.mark.parametrize("kind", [*SERVED, *SERVED_TEXT_LARGE])
def test_a_model_of_this_type_passes_the_probe(kind: str) -> None:
    model = make(kind)
    leave_out_other_inputs(model)
    probe_attention(StageModel(model))


@pytest.mark.parametrize("kind", SPEAKERS)
def test_of_a_model_that_speaks_the_thinker_is_served(kind: str, tmp_path: Path) -> None:
    thinker = make(f"{kind}_thinker")
    whole = transformers.CONFIG_MAPPING[kind]().to_dict()
    whole["thinker_config"] = thinker.config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(whole))
    thinker.save_pretrained(tmp_path / "thinker")
    saved = load_file(tmp_path / "thinker" / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in saved.items()}
    voice = {"talker.codec_head.weight": torch.zeros(2, 2)}
    save_file({**named, **voice}, tmp_path / "model.safetensors", {"format": "pt"})
    answer, _ = served(tmp_path)
    assert answer == greedy(thinker)


@pytest.mark.parametrize("kind", REFUSED_BY_PROBE)
def test_a_model_that_attends_otherwise_is_refused_by_its_type(kind: str) -> None:
    model = make(kind)
    with pytest.raises(ModelError, match=re.escape(repr(kind))):
        leave_out_other_inputs(model)
        probe_attention(StageModel(model))


@pytest.mark.parametrize("kind", NEED_OTHER_INPUTS)
def test_a_model_that_needs_more_than_text_is_refused(kind: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{kind!r} can't be served: .* on text alone .*choose a"):
        open_engine(str(tmp_path), block_size=16, dtype="float32", device="cpu", threads=1)


def test_layers_that_attend_to_images_only_are_refused(tmp_path: Path) -> None:
    config = shrunken_config("mllama")
    config.text_config.num_hidden_layers = 3
    config.text_config.cross_attention_layers = [1]
    model = transformers.MllamaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"'mllama'.* in layers \[0, 2\], not in each.*choose one"):
        open_engine(str(tmp_path), block_size=16, dtype="float32", device="cpu", threads=1)


def test_each_type_of_transformers_is_served_or_refused_by_its_configuration_or_listed_here() -> (
    None
):
    listed = {
        *SERVED, *SERVED_TEXT, *SERVED_TEXT_LARGE, *SPEAKERS, *REFUSED_BY_PROBE,
        *NEED_OTHER_INPUTS, *REFUSED_AS_PUBLISHED, *NOT_TRIED,
    }  # fmt: skip
    kinds = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    assert listed <= kinds | {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
    assert [kind for kind in sorted(kinds - listed) if not _refused(kind)] == []
    assert [kind for kind in (*SERVED, *SERVED_TEXT) if _refused(kind)] == []


def test_the_page_lists_the_types_that_are_served() -> None:
    page = DOCS.read_text()
    for title, kinds in (
        ("Text models", SERVED),
        ("Text of multimodal models", (*SERVED_TEXT, *SERVED_TEXT_LARGE, *SPEAKERS)),
    ):
        listed = page[page.index(f"**{title}:**") :].split("```")[1].split()
        assert listed == sorted(kinds), f"docs/models.md, {title}"


def _refused(kind: str) -> bool:
    """Whether the default configuration of a type is refused, by its file or once it is read."""
    config = transformers.CONFIG_MAPPING[kind]()
    try:
        check_kind(json.loads(config.to_json_string(use_diff=False)))
        check_architecture(text_config_of(config))
    except ModelError as error:
        assert kind in str(error) or str(config.model_type) in str(error)
        return True
    return False


def _size(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_a_model_whose_class_needs_another_package_says_which(tmp_path: Path) -> None:
    """The tower of FastVLM is of timm, which is not installed here."""
    if "timm" in _installed():
        pytest.skip("timm is installed")
    config = shrunken_config("fast_vlm")
    (tmp_path / "config.json").write_text(config.to_json_string())
    tensors = {f"layers.{i}": torch.zeros(2) for i in range(64)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"ImportError.*timm.*install the package"):
        open_engine(str(tmp_path), block_size=16)


def _installed() -> Sequence[str]:
    from importlib.metadata import packages_distributions

    return list(packages_distributions())
