"""List the model types (`model_type` in config.json) that can't be served, by reason."""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


ENCODERS = _types(
    "albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta "
    "deberta-v2 distilbert electra ernie ernie_m esm esmc eurobert flaubert fnet funnel gte ibert "
    "jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 lilt longformer luke markuplm "
    "megatron-bert mobilebert modernbert modernvbert mpnet mra nezha nomic_bert nystromformer "
    "perceiver qdqbert realm rembert roberta roberta-prelayernorm roc_bert roformer splinter "
    "squeezebert tapas ultrabert visual_bert xlm-roberta xlm-roberta-xl xmod yoso"
)
ENCODER_DECODERS = _types(
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 "
    "marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 "
    "t5gemma t5gemma2 umt5 xlm-prophetnet"
)
VISION = _types(
    "align beit bit blip blip-2 chinese_clip clip clip_text_model clip_vision_model clipseg "
    "conditional_detr convnext convnextv2 cvt deit depth_anything detr dinov2 dinov3_vit dpt "
    "efficientnet focalnet glpn grounding-dino groupvit hiera imagegpt levit mask2former "
    "maskformer mobilenet_v1 mobilenet_v2 mobilevit owlv2 owlvit poolformer pvt regnet resnet "
    "rt_detr sam sam2 segformer siglip siglip2 siglip_vision_model superpoint swin swinv2 "
    "timesformer timm_backbone trocr vision-encoder-decoder vision-text-dual-encoder videomae "
    "vilt vit vit_mae vit_msn vitmatte yolos zoedepth"
)
AUDIO = _types(
    "audio-spectrogram-transformer bark clap encodec hubert mimi moonshine musicgen parakeet_ctc "
    "seamless_m4t seamless_m4t_v2 sew sew-d speech-encoder-decoder speech_to_text speecht5 "
    "unispeech unispeech-sat univnet vits wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper"
)
LATENT = "multi-head latent attention has keys and values of different sizes"
SHARED_KEYS = "some of its layers use another layer's keys and values"
#: Models with other state than keys and values of one shape, and the kind of that state.
OTHER_STATE = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
        "its layers have no attention heads but a recurrent state (linear_attention)",
    ),
    **dict.fromkeys(
        _types(
            "bamba falcon_h1 jamba kimi_linear nemotron_h qwen3_5 qwen3_5_moe qwen3_5_moe_text "
            "qwen3_5_text qwen3_next recurrent_gemma zamba zamba2"
        ),
        "its layers of type linear_attention or convolution keep another kind of state",
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3"),
        LATENT,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), SHARED_KEYS),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "its layers of type chunked_attention keep another kind of state",
    ),
}
#: Types of layers (`layer_types`) whose state is keys and values.
PAGEABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
