"""A multimodal checkpoint through the whole system: its text is served, its images are refused."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e

N_NEW = 24
PROMPT = list(range(40, 140))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A random Gemma 3 with its vision tower, and transformers' greedy answer to `PROMPT`."""
    import torch
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    folder = make_tiny_model("gemma3", tmp_path_factory.mktemp("models") / "seeing")
    text = transformers.AutoConfig.from_pretrained(folder)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=5
    )
    torch.manual_seed(0)
    model: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    with torch.no_grad():
        answer = model.generate(
            input_ids=torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=N_NEW,
            do_sample=False,
        )
    return folder, answer[0, len(PROMPT) :].tolist()


def test_text_is_served_token_by_token_and_images_are_refused_by_name(
    multimodal: tuple[Path, list[int]], tmp_path: Path
) -> None:
    folder, expected = multimodal
    port = free_port()
    command = [sys.executable, "-m", "halfmoon_cli", "up", "--model", str(folder)]
    fp32 = ("-o", "prefill.dtype=float32", "-o", "decode.dtype=float32")
    up = start_bound(
        [*command, "--port", str(port), *fp32],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        lines = itertools.takewhile(lambda line: "Ctrl-C stops it" not in line, up.stdout)
        printed = " ".join("".join(lines).split())
        assert "text is served alone: requests with images are refused" in printed, printed
        url = f"http://127.0.0.1:{port}"
        body: dict[str, Any] = {"model": "seeing", "max_tokens": N_NEW, "temperature": 0}
        asked = {**body, "prompt": PROMPT, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == expected
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        asked = {**body, "messages": [{"role": "user", "content": [image]}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]
    finally:
        up.terminate()
        up.wait(60)
