"""The project's own small model: random weights, a real tokenizer, made where it is needed.

So that ``make up`` answers without a network. Its shape is Qwen3's, with 27 million
parameters; its text is fragments of our own sources in no order, and the same fragments for
the same prompt. Tokens that don't stand for text alone (half a character, the end of a turn)
are as good as never chosen, so answers are readable and as long as was asked for.

Run ``python -m halfmoon_engine.demo_model FOLDER`` to make it.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from halfmoon_engine.errors import EngineError
from halfmoon_engine.threads import wait_briefly

#: Goes up whenever the recipe below changes: folders of other versions are made anew.
VERSION = 1
_STAMP = "halfmoon_demo.json"
VOCAB_SIZE = 8192
MAX_CONTEXT = 16384
_SEED = 1969
#: Wide enough that the best token leads clearly: a gain of about two per layer of 512.
_WEIGHT_STD = 0.09
_PACKAGES = (
    "protocol",
    "metadata",
    "scheduling",
    "transfer",
    "runtime",
    "engine",
    "cli",
    "conductor",
    "prefill",
    "decode",
    "kvstore",
)


class NotOurFolder(EngineError, FileExistsError):
    """The folder holds something else, which making a model would destroy."""


def make_demo_model(folder: Path) -> Path:
    """Make the model in `folder` unless this version of it is there already.

    It appears there complete or not at all, also when several processes make it at once.
    Takes about ten seconds on two cores.

    Returns:
        `folder`.

    Raises:
        NotOurFolder: there is something in `folder` that is no demo model.
    """
    if _is_current(folder):
        return folder
    if folder.exists() and not (folder / _STAMP).is_file() and any(folder.iterdir()):
        raise NotOurFolder(f"{folder} holds something that is no demo model; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made = workshop / "made"
        made.mkdir()
        _write(made)
        (made / _STAMP).write_text(json.dumps({"version": VERSION}) + "\n")
        if folder.exists():
            with suppress(FileNotFoundError):
                folder.rename(workshop / "stale")
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster; its model is as good as ours.
            if not _is_current(folder):
                raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return folder


def _is_current(folder: Path) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and stamp.get("version") == VERSION


def _write(folder: Path) -> None:
    wait_briefly()
    import torch
    import transformers as untyped_transformers

    from halfmoon_engine.tokenizer_files import EOS_TOKEN_IDS, train_tokenizer, write_tokenizer

    transformers: Any = untyped_transformers
    tokenizer = train_tokenizer(own_texts(), VOCAB_SIZE)
    write_tokenizer(tokenizer, folder, max_context=MAX_CONTEXT)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=_WEIGHT_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(EOS_TOKEN_IDS),
        pad_token_id=EOS_TOKEN_IDS[0],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    unreadable = [token for token in range(VOCAB_SIZE) if not _is_text(tokenizer, token)]
    model.lm_head.weight.data[unreadable] = 0
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(EOS_TOKEN_IDS), pad_token_id=EOS_TOKEN_IDS[0]
    )
    model.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _is_text(tokenizer: Any, token: int) -> bool:
    """Whether a token is whole characters by itself; special tokens and unused ids aren't."""
    text = tokenizer.decode([token], skip_special_tokens=True)
    return text != "" and "\N{REPLACEMENT CHARACTER}" not in text


def own_texts() -> Iterator[str]:
    """The project's sources as installed, then README and docs where this is a checkout."""
    for package in _PACKAGES:
        with suppress(ModuleNotFoundError):
            yield from _sources(resources.files(f"halfmoon_{package}"))
    for parent in Path(__file__).resolve().parents:
        if (parent / "libs").is_dir() and (parent / "pyproject.toml").is_file():
            for path in sorted([*parent.glob("*.md"), *(parent / "docs").rglob("*.md")]):
                yield path.read_text(encoding="utf-8")


def _sources(folder: Traversable) -> Iterator[str]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_text(encoding="utf-8")


def main() -> None:
    """Make the model in the folder that the command line names, and print the folder."""
    parser = argparse.ArgumentParser(description="Make Halfmoon's small demo model.")
    parser.add_argument("folder", type=Path)
    print(make_demo_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
