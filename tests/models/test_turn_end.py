"""The token that a chat template writes after an answer, and tokens that it is not."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from halfmoon_models.tokenizer.turn_end import Render, find_turn_end

_ADDED = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>",
    "<|start|>", "<|end|>", "<|return|>", "<|message|>", "[INST]", "[/INST]", "<start_of_turn>",
    "<end_of_turn>", "\n\n", " ",
]  # fmt: skip
Messages = Sequence[Mapping[str, Any]]


def written(
    user: str, assistant: str, *, last: str | None = None, begin: str = "", prompt: str = ""
) -> Render:
    """A template that puts texts in the place of X, and `prompt` at the end, asked or not."""

    def render(messages: Messages) -> str:
        parts = [begin]
        for place, message in enumerate(messages):
            is_last = place == len(messages) - 1
            form = user if message["role"] == "user" else assistant
            if is_last and last is not None and message["role"] == "assistant":
                form = last
            parts.append(form.replace("X", message["content"]))
        return "".join(parts) + prompt

    return render


_CHATML = ("<|im_start|>user\nX<|im_end|>\n", "<|im_start|>assistant\nX<|im_end|>\n")
_GLM = ("<|user|>\nX", "<|assistant|>\nX")


@pytest.mark.parametrize(
    ("render", "expected"),
    [
        (written(*_CHATML), "<|im_end|>"),
        (written(*_CHATML, prompt="<|im_start|>assistant\n"), "<|im_end|>"),
        (written("[INST] X [/INST]", " X </s>", begin="<s>"), "</s>"),
        (written("<|user|>\nX</s>\n", "<|assistant|>\nX</s>\n"), "</s>"),
        (written("USER: X<|end|>", "ASSISTANT: X<|end|>"), "<|end|>"),
        (
            written(
                "<start_of_turn>user\nX<end_of_turn>\n", "<start_of_turn>model\nX<end_of_turn>\n"
            ),
            "<end_of_turn>",
        ),
        (written(*_CHATML, last="<|im_start|>assistant\n<think>\n\n</think>\n\nX<|im_end|>\n"),
         "<|im_end|>"),
    ],
)  # fmt: skip
def test_the_token_after_each_answer_ends_it(render: Render, expected: str) -> None:
    assert find_turn_end(render, _ADDED) == expected


@pytest.mark.parametrize(
    "render",
    [
        written(*_GLM),
        written(*_GLM, prompt="<|assistant|>\n"),
        written("<|im_start|>user\nX", "<|im_start|>assistant\nX"),
        written("<|im_start|>user\nX", "<|im_start|>assistant\nX", prompt="<|im_start|>assistant"),
        written("<|user|>X", "<|assistant|>X", prompt="<|user|>"),
        written("User: X\n\n", "Assistant: X\n\n"),
        written(
            "<|start|>user<|message|>X<|end|>",
            "<|start|>assistant<|message|>X<|end|>",
            last="<|start|>assistant<|message|>X<|return|>",
        ),
        written("X", "nothing"),
        lambda _: 1 / 0,
        lambda messages: str(messages) + "x" * (1 << 21),
    ],
)
def test_what_begins_a_turn_or_ends_a_thought_ends_no_answer(render: Render) -> None:
    assert find_turn_end(render, _ADDED) is None


def test_a_template_that_takes_parts_only_is_asked_with_parts() -> None:
    def render(messages: Messages) -> str:
        texts = (f"{m['role']}:{m['content'][0]['text']}</s>" for m in messages)
        return "".join(texts)

    assert find_turn_end(render, _ADDED) == "</s>"
