"""The model's tokenizer, from its files."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import llguidance
import pytest

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_files import MODEL_FILES
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_conductor.text.tokenizer_loader import open_tokenizer


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def write(folder: Path, **files: Any) -> HubTokenizer:
    """Write files of JSON into a folder, and open it."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return HubTokenizer(folder)


def test_special_tokens_are_not_shown(tokenizer: HubTokenizer) -> None:
    token_ids = tokenizer.encode("half<|end|> moon", add_special_tokens=False)
    assert 0 in token_ids
    assert tokenizer.decode(token_ids) == "half moon"
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(token) for token in token_ids) == "half moon"


def test_a_tokenizer_that_says_to_cut_its_texts_does_not(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    opened = write(folder, tokenizer={**content, "truncation": cut})
    assert len(opened.encode("0123456789", add_special_tokens=False)) == 10


_PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_TURNS = "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<été>{% endfor %}"
_TURN = {"eos_token": "<|turn|>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 7]}, "config": {}}, {5, 7, 0}),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, {9, 0}),
        ({"generation_config": {"eos_token_id": 5},
          "config": {"eos_token_id": 6, "text_config": {"eos_token_id": [4, 7]}}}, {5, 6, 4, 7, 0}),
        ({}, {0}),
        ({"tokenizer_config": {"chat_template": _PLAIN}}, set()),
        ({"tokenizer_config": {"chat_template": _PLAIN, **_TURN}}, {1}),
        ({"tokenizer_config": {}, "special_tokens_map": _TURN}, {1}),
        ({"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {}},
          "special_tokens_map": {"eos_token": {"content": "<|turn|>"}}}, {0, 1}),
        ({"tokenizer_config": {"chat_template": "{% if %}", **_TURN}}, {1}),
        ({"generation_config": {"eos_token_id": 5},
          "config": {"eos_token_id": [1, 500, -1, 3], "vocab_size": 420}}, {5, 1, 3, 0}),
        ({"tokenizer_config": {"eos_token": "no such token"}}, {"no such token"}),
        # What the template writes after answers ends them, too.
        ({"generation_config": {"eos_token_id": 5},
          "tokenizer_config": {"chat_template": _TURNS, "eos_token": "<|end|>"}}, {5, 0, "<été>"}),
    ],
)  # fmt: skip
def test_an_answer_ends_at_the_tokens_of_all_files(
    folder: Path, files: dict[str, Any], expected: set[int | str]
) -> None:
    opened = write(folder, **{"generation_config": {}, **files})
    assert set(opened.eos_token_ids) == {
        opened.encode(each, add_special_tokens=False)[0] if isinstance(each, str) else each
        for each in expected
    }


def test_a_token_that_the_model_does_not_embed_is_named_and_its_text_is_refused(
    folder: Path, card: ModelCard
) -> None:
    (last,) = HubTokenizer(folder).encode("half moon 半", add_special_tokens=False)
    opened = write(folder, config={"vocab_size": last})
    assert opened.unembedded_tokens == {last: "half moon 半"}
    encoder = PromptEncoder(lambda: card, opened)
    assert encoder.encode("half moon", True)
    with pytest.raises(InvalidRequest, match=rf"'half moon 半' \({last}\).*less than {last}"):
        encoder.encode("a half moon 半", True)
    ends = list(opened.eos_token_ids)
    # For grammars, too: the library refuses tokens without a logit.
    made = llguidance.LLTokenizer(opened.definition, n_vocab=opened.vocab_size, eos_token=ends)
    assert made.vocab_size == last


def test_a_tokenizer_whose_ordinary_tokens_are_not_embedded_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(TokenizerUnavailable, match=r"copy: .*ids up to \d+ .* embeds 300 tokens"):
        open_tokenizer(str(folder))


def test_tokens_of_the_config_alone_reach_grammars_and_answers(folder: Path) -> None:
    decoder = {"900": {"content": "<|new|>", "special": True}}
    opened = write(folder, tokenizer_config={"added_tokens_decoder": decoder})
    (new, _, _) = opened.encode("<|new|> x", add_special_tokens=False)
    assert opened.token_bytes(new) == b"<|new|>"
    assert opened.decode([new]) == ""
    assert '"<|new|>"' in opened.definition


def test_the_vocabulary_is_as_large_as_what_the_model_embeds(folder: Path) -> None:
    largest = HubTokenizer(folder).vocab_size
    assert write(folder, config={"vocab_size": largest + 28}).vocab_size == largest + 28


def test_templates_are_read_from_the_first_place_that_has_some(folder: Path) -> None:
    assert write(folder, tokenizer_config={}).chat_templates == {}
    opened = write(folder, chat_template={"chat_template": "P"})
    assert opened.chat_templates == {"default": "P"}
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    opened = write(folder, tokenizer_config={"chat_template": several})
    assert opened.chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("J")
    assert HubTokenizer(folder).chat_templates == {"default": "J"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("R")
    assert HubTokenizer(folder).chat_templates == {"default": "J", "rag": "R"}


def test_named_templates_of_the_hubs_cache_are_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0f"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    shutil.copytree(folder, snapshot)
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "0a").write_text("R")
    (snapshot / "additional_chat_templates/rag.jinja").symlink_to("../../../blobs/0a")
    assert HubTokenizer(snapshot).chat_templates == {"rag": "R"}


def test_too_many_templates_are_refused(folder: Path) -> None:
    several = [{"name": str(i), "template": "T"} for i in range(65)]
    with pytest.raises(TokenizerUnavailable, match="65 chat templates are over the 64"):
        write(folder, tokenizer_config={"chat_template": several})


END = {"eos_token": "<|end|>"}
OTHERS = {"image_token": "<|turn|>", "extra_special_tokens": {"call_start": "<|end|>"}}


@pytest.mark.parametrize(
    ("special_tokens_map", "tokenizer_config", "expected"),
    [
        ({"pad_token": {"content": "<|end|>", "lstrip": False}},
         {"bos_token": "<|turn|>", "eos_token": None},
         {"pad_token": "<|end|>", "bos_token": "<|turn|>"}),
        ({}, OTHERS | {"add_bos_token": True},
         {"image_token": "<|turn|>", "call_start": "<|end|>"}),
        (END, _TURN, END),
        # The old file counts where the config does not describe them.
        (END, _TURN | {"added_tokens_decoder": {}}, _TURN),
    ],
)  # fmt: skip
def test_special_tokens_have_their_roles(
    folder: Path, special_tokens_map: Any, tokenizer_config: Any, expected: Any
) -> None:
    opened = write(folder, special_tokens_map=special_tokens_map, tokenizer_config=tokenizer_config)
    assert opened.special_tokens == expected


def test_a_hub_id_fetches_the_tokenizers_files_only(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(model_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_tokenizer("lab/moon").eos_token_ids == (0,)
    assert asked == [("lab/moon", list(MODEL_FILES))]
    assert not any("safetensors" in name or name.endswith(".bin") for name in MODEL_FILES)


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        raise ConnectionError("no route\nmore of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(TokenizerUnavailable, match=r"lab/moon is not a local folder.*no route$"):
        open_tokenizer("lab/moon")


def test_encoding_a_long_text_leaves_the_interpreter_to_others(tokenizer: HubTokenizer) -> None:
    """The event loop must go on: here another thread counts while this text is encoded."""
    text = "the half moon " * 60_000
    counted, encoded = 0, threading.Event()

    def encode() -> None:
        tokenizer.encode(text, add_special_tokens=False)
        encoded.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not encoded.wait(0.001):
        counted += 1
    thread.join()
    assert counted > 10


def test_a_fake_model_needs_no_files() -> None:
    fake = open_tokenizer("fake://tiny?vocab=100&eos=7&step_s=0.01")
    assert isinstance(fake, FakeTokenizer)
    assert fake.encode("aé", add_special_tokens=True) == [97, 0xC3 % 100, 0xA9 % 100]
    assert fake.eos_token_ids == (7,)
    detokenizer = fake.detokenizer()
    pieces = [detokenizer.push(token) for token in (5, 12)]
    assert pieces == [" t5", " t12"]
    assert "".join(pieces) == fake.decode([5, 12])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "copy"),
        ("tokenizer.json", '{"model": {"type": "Nothing"}}', "unusable"),
        ("tokenizer.json", "[" * 100_000, "levels deep"),
        ("tokenizer.json", '{"model": 5}', "no model in it"),
        ("config.json", '{"vocab_size": "many"}', "vocab_size is many"),
        ("config.json", '{"vocab_size": 1000000000000}', "vocab_size is 1000000000000"),
        ("config.json", '{"text_config": 5}', "unusable"),
        ("generation_config.json", "{", "copy"),
        ("generation_config.json", '{"eos_token_id": -7}', "eos_token_id -7"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id a"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "unusable"),
        ("special_tokens_map.json", "[]", "JSON list"),
        ("chat_template.jinja", "x" * (17 << 20), "larger than 16 MiB"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    folder: Path, name: str, content: str, words: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(TokenizerUnavailable, match=words) as caught:
        open_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(TokenizerUnavailable, match="outside of the model's folder"):
        open_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("/no/such/folder", "is not a folder"),
        ("./nothing", "is not a folder"),
        ("a/b/c", "is not a folder"),
        ("fake://tiny?vocab=many", "vocab|many"),
        ("fake://tiny?vocab=0", "vocab|many"),
    ],
)
def test_what_names_no_model_is_refused(spec: str, words: str) -> None:
    with pytest.raises(TokenizerUnavailable, match=words):
        open_tokenizer(spec)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"no tokenizer\.json"):
        open_tokenizer(str(tmp_path))
