"""The demo model: standard files, readable answers, made once and all at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as untyped_transformers
from tokenizers import Tokenizer

from halfmoon_engine import demo_model
from halfmoon_engine.demo_model import NotOurFolder, make_demo_model
from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling

transformers: Any = untyped_transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("demo") / "model")


def test_its_tokenizer_reads_and_writes_any_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("def handle(event, now):\n    return []\n", "½ moon 月 🌓", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= demo_model.VOCAB_SIZE
    assert len(tokenizer.encode("the scheduling core owns decisions").ids) < 12


def test_its_chat_template_makes_turns(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        tokenizer.convert_tokens_to_ids("<|im_end|>")
        in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )


def test_it_answers_in_text_and_at_length(folder: Path) -> None:
    engine = open_engine(str(folder), block_size=64, device="cpu", threads=2)
    assert engine.layout.dtype == "float32"
    pool = bytearray(4 * engine.layout.block_bytes)
    engine.attach(memoryview(pool))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n").ids
    n_prompt, draw, start = len(tokens), Draw(Sampling(temperature=0.0)), 0
    while len(tokens) < n_prompt + 100:
        (token,) = engine.forward([Run(tokens[start:], start, [2, 0, 3, 1], draw)])
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    answer = tokens[n_prompt:]
    assert not set(answer) & set(engine.eos_token_ids)
    assert len(set(answer)) > 10
    assert "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(answer)


def test_a_current_folder_is_left_alone_and_a_stale_one_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def write(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_write", write)
    folder = tmp_path / "model"
    make_demo_model(folder)
    (folder / "leftover").write_text("")
    make_demo_model(folder)
    assert len(made) == 1
    monkeypatch.setattr(demo_model, "VERSION", demo_model.VERSION + 1)
    make_demo_model(folder)
    assert len(made) == 2
    assert not (folder / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_making_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("the disk is full")

    monkeypatch.setattr(demo_model, "_write", write)
    with pytest.raises(OSError, match="full"):
        make_demo_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(NotOurFolder, match="holds something"):
        make_demo_model(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
