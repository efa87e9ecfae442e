"""Choose the class of transformers that a folder's tokenizer is loaded with.

Transformers 5 keeps the vocabulary of ``tokenizer.json`` for some classes, and makes normalizer,
pre-tokenizer and decoder anew. So the class decides about token ids. The tables below are compared
with those of transformers in `tests/engine/test_tokenizer_tables.py`.
"""

from collections.abc import Mapping
from typing import Any

#: Class that takes a ``tokenizer.json`` as it stands.
GENERIC_CLASS = "TokenizersBackend"
#: Classes with a form of their own, by the types of models that they are registered for.
_REGISTERED = {
    "GemmaTokenizer": (
        "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma "
        "diffusion_gemma zaya"
    ),
    "Qwen2Tokenizer": (
        "qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe "
        "qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe audioflamingo3 colqwen2 cosmos3_omni "
        "dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2 "
        "qianfan_ocr vibevoice"
    ),
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPT2Tokenizer": (
        "gpt2 gpt_neo gptj codegen dbrx emu3 jais2 opt phi starcoder2 blip-2 instructblip "
        "instructblipvideo hyperclovax_vision_v2"
    ),
    "GPTNeoXTokenizer": "gpt_neox olmo olmoe mpt mamba mamba2 falcon_mamba rwkv xlstm",
    "CohereTokenizer": "cohere cohere2 aya_vision",
    "LlamaTokenizer": "idefics idefics2",
    "CodeLlamaTokenizer": "code_llama",
    GENERIC_CLASS: (
        "aria arctic beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 "
        "ernie4_5_moe EvollaModel flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
        "glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe "
        "granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 "
        "internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash "
        "minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 "
        "mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 "
        "nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid opencua openvla "
        "paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts "
        "smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl"
    ),
}
REGISTERED_CLASSES = {
    model_type: name for name, types in _REGISTERED.items() for model_type in types.split()
}
_MISNAMED = (
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax "
    "hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next "
    "minicpm3 minicpmv minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 "
    "opencua openvla paddleocr_vl phi3 phi3_v phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text "
    "qwen4_exp siglip2 smolvlm step3_vl vipllava"
)
#: Types whose published ``tokenizer_class`` is known to be wrong; the registered one holds.
MISNAMED_TYPES = frozenset(_MISNAMED.split())


def tokenizer_class(
    tokenizer_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer_json: str
) -> str:
    """Return the name of the class, without ``Fast`` at its end.

    Args:
        tokenizer_config: of ``tokenizer_config.json``.
        config: of ``config.json``.
        tokenizer_json: text of ``tokenizer.json``; empty without one.
    """
    model_type = str(config.get("model_type") or "")
    registered = REGISTERED_CLASSES.get(model_type)
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str) or not named:
        return registered or GENERIC_CLASS
    named = named.removesuffix("Fast")
    has_code = "auto_map" in tokenizer_config
    if (
        named == "LlamaTokenizer"
        and not has_code
        and model_type not in MISNAMED_TYPES
        and '"ByteLevel"' in tokenizer_json
    ):
        return GENERIC_CLASS
    if registered is None or registered == named or (has_code and model_type not in MISNAMED_TYPES):
        return named
    if registered == GENERIC_CLASS or model_type in MISNAMED_TYPES:
        return registered
    return named
