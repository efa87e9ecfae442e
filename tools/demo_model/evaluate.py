"""Examine the demo model: ``python -m tools.demo_model.evaluate [FOLDER]``.

Answers are greedy, by transformers alone, and right when they are the right answer to the
last character. The table goes into the README in the model's folder.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers

from halfmoon_engine.demo import FOLDER
from tools.demo_model.exam import (
    RECALL_KINDS,
    Exam,
    ExamQuestion,
    ToolExam,
    chat_messages,
    plain_prompt,
    write_exam,
    write_json_exam,
    write_tool_exam,
)

transformers: Any = untyped_transformers

LENGTHS = (250, 500, 1000, 2000, 4000, 8000)
_N_EXAMS = 5
_N_QUESTIONS = 30
_MAX_ANSWER_TOKENS = 24
_KINDS = {
    "chat": RECALL_KINDS,
    "plain text": RECALL_KINDS,
    "made-up names": replace(RECALL_KINDS, made_up=1.0),
    "never stated": replace(RECALL_KINDS, unknown=1.0),
}
COLUMNS = (*_KINDS, "as JSON", "tool not needed", "tool call", "tool's result")
_BEGIN, _END = "<!-- accuracy -->\n", "<!-- end of accuracy -->"


@dataclass
class ExaminedModel:
    """Model and tokenizer under examination."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> "ExaminedModel":
        """Load the model from its folder, in float32."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.eval(), transformers.AutoTokenizer.from_pretrained(folder))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def chat_ids(self, exam: Exam, question: str) -> list[int]:
        """Return the prompt of a chat."""
        text = self.tokenizer.apply_chat_template(
            chat_messages(exam, question), tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def tool_ids(self, exam: ToolExam, asked: ExamQuestion) -> list[int]:
        """Return the prompt of a chat with tools."""
        text = self.tokenizer.apply_chat_template(
            [*chat_messages(exam, asked.question), *asked.messages],
            tools=exam.tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.encode(text)

    def plain_ids(self, exam: Exam, question: str) -> list[int]:
        """Return the prompt of a completion."""
        return self.encode(plain_prompt(exam, question))

    @torch.inference_mode()
    def count_right(self, prompts: Sequence[list[int]], answers: Sequence[str]) -> int:
        """Count prompts whose greedy answer is the right one, without generating it.

        That is so when each of its tokens, and the end, is the likeliest after those before.
        """
        shared = _common_prefix(prompts)
        cache = transformers.DynamicCache()
        self.model(torch.tensor([prompts[0][:shared]]), past_key_values=cache, logits_to_keep=1)
        n_right = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            if (n_more := cache.get_seq_length() - shared) > 0:
                cache.crop(-n_more)
            right = self.encode(answer)
            ids = prompt[shared:] + right
            logits = self.model(torch.tensor([ids]), past_key_values=cache).logits
            said = logits[0, -len(right) - 1 :].argmax(-1).tolist()
            n_right += said[:-1] == right and said[-1] in self.model.config.eos_token_id
        return n_right

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Generate greedy answers to prompts; compute their common beginning once."""
        shared = _common_prefix(prompts)
        cache = transformers.DynamicCache()
        self.model(torch.tensor([prompts[0][:shared]]), past_key_values=cache)
        answers = []
        for prompt in prompts:
            if (n_more := cache.get_seq_length() - shared) > 0:
                cache.crop(-n_more)
            ids = list(prompt[shared:])
            answer: list[int] = []
            while len(answer) < _MAX_ANSWER_TOKENS:
                logits = self.model(torch.tensor([ids]), past_key_values=cache).logits
                token = int(logits[0, -1].argmax())
                if token in self.model.config.eos_token_id:
                    break
                answer.append(token)
                ids = [token]
            answers.append(self.tokenizer.decode(answer).strip())
        return answers


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common beginning, shorter than each prompt."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    n = min(len(first), len(last)) - 1
    return next((i for i in range(n) if first[i] != last[i]), n)


def score_exams(
    examinee: ExaminedModel, column: str, n_tokens: int, seeds: Sequence[int]
) -> tuple[int, int]:
    """Return the numbers of right answers and of questions."""
    n_right = n_asked = 0
    for seed in seeds:
        prompts, answers = zip(*_asked(examinee, column, n_tokens, seed), strict=True)
        n_right += examinee.count_right(prompts, answers)
        n_asked += len(answers)
    return n_right, n_asked


def _asked(
    examinee: ExaminedModel, column: str, n_tokens: int, seed: int
) -> Iterator[tuple[list[int], str]]:
    """Write an exam; yield its prompts and their right answers."""
    if "tool" in column:
        exam = write_tool_exam(seed, n_tokens, _N_QUESTIONS, examinee.encode)
        by_column = dict(zip(COLUMNS[-3:], (exam.stated, exam.calls, exam.results), strict=True))
        for asked in by_column[column]:
            yield examinee.tool_ids(exam, asked), asked.answer
        return
    write = write_json_exam if column == "as JSON" else write_exam
    recall = [_KINDS[column]] if column in _KINDS else []
    plain = write(seed, n_tokens, _N_QUESTIONS, examinee.encode, *recall)
    for question, answer in plain.questions:
        if column == "plain text":
            yield examinee.plain_ids(plain, question), f" {answer}"
        else:
            yield examinee.chat_ids(plain, question), answer


def score_table(examinee: ExaminedModel, lengths: Sequence[int] = LENGTHS) -> str:
    """Return a Markdown table: a line per length, a column per kind of question."""
    lines = [
        f"| prompt tokens | facts | {' | '.join(COLUMNS)} |",
        "|" + "---|" * (2 + len(COLUMNS)),
    ]
    for n_tokens in lengths:
        seeds = range(n_tokens, n_tokens + _N_EXAMS)
        n_facts = sum(write_exam(s, n_tokens, 1, examinee.encode).n_facts for s in seeds)
        cells = [f"{n_tokens:,}", f"{n_facts / _N_EXAMS:.0f}"]
        for column in COLUMNS:
            n_right, n_asked = score_exams(examinee, column, n_tokens, seeds)
            cells.append(f"{n_right / n_asked:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine the model in the folder that the command line names, and write its table."""
    parser = argparse.ArgumentParser(description="Examine Halfmoon's demo model.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    torch.set_num_threads(2)
    accuracy = score_table(ExaminedModel.load(folder))
    readme = folder / "README.md"
    if readme.exists():
        before, _, rest = readme.read_text().partition(_BEGIN)
        readme.write_text(before + _BEGIN + accuracy + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
