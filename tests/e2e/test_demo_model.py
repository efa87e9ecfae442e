"""The demo model through 2P+2D of real processes: its answers are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfmoon_engine import demo
from tools.demo_model.exam import chat_messages, write_exam

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BLOCK = 16
LENGTHS = (120, 500, 1000, 2000)
N_QUESTIONS = 3
#: One for all runs: of 193 random exams there was one with under ten of twelve answers right.
SEED = 2026


class Oracle:
    """`transformers.generate`."""

    def __init__(self) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(demo.FOLDER, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(demo.FOLDER)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """The answer, and the prompt's tokens."""
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        n_prompt = inputs["input_ids"].shape[1]
        made = self._model.generate(**inputs, do_sample=False, max_new_tokens=24)
        return self._tokenizer.decode(made[0, n_prompt:], skip_special_tokens=True), n_prompt


def prefill_worker(cluster: Any) -> str:
    """Of the last request."""
    return str(cluster.decisions()[-1]["placement"]["chosen"]["worker_id"])


def test_answers_cold_cached_and_through_another_prefill_worker_are_those_of_transformers(
    start_cluster: Any,
) -> None:
    oracle = Oracle()
    block = ["--block-size", str(BLOCK)]
    extra = {"conductor": ["--placement", "random"], "prefill": block, "decode": block}
    with start_cluster(
        str(demo.FOLDER), n_prefill=2, n_decode=2, n_kvstore=2, extra=extra
    ) as cluster:

        def ask(messages: list[dict[str, str]]) -> tuple[str, int]:
            """The answer, and how much of its prompt was cached."""
            answer = cluster.post(
                "/v1/chat/completions",
                model=cluster.model,
                messages=messages,
                max_tokens=24,
                temperature=0,
            )
            assert answer.status_code == 200, answer.text
            said = answer.json()
            text = str(said["choices"][0]["message"]["content"])
            return text, int(said["usage"]["prompt_tokens_details"]["cached_tokens"])

        n_right = 0
        for n_tokens in LENGTHS:
            exam = write_exam(SEED, n_tokens, N_QUESTIONS, oracle.encode)
            for question, right in exam.questions:
                messages = chat_messages(exam, question)
                expected, n_prompt = oracle.answer(messages)
                workers: set[str] = set()

                def cached_by_both(
                    messages: list[dict[str, str]] = messages,
                    expected: str = expected,
                    n_whole: int = (n_prompt - 1) // BLOCK * BLOCK,
                    workers: set[str] = workers,
                ) -> bool:
                    """Whether each prefill worker has answered from cached blocks alone."""
                    text, n_cached = ask(messages)
                    assert text == expected
                    if n_cached == n_whole:
                        workers.add(prefill_worker(cluster))
                    return len(workers) == 2

                cluster.until(cached_by_both)
                n_right += expected == right
        assert n_right >= 0.8 * len(LENGTHS) * N_QUESTIONS
