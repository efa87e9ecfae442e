"""Examine the demo model: ``python -m tools.demo_model.evaluate [FOLDER]``.

Answers are greedy, by transformers alone, and right when they are the right answer to the
last character. The table goes into the README in the model's folder.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers

from halfmoon_engine.demo import FOLDER
from tools.demo_model.exam import RECALL_KINDS, Exam, chat_messages, plain_prompt, write_exam

transformers: Any = untyped_transformers

LENGTHS = (250, 500, 1000, 2000, 4000, 8000)
_N_EXAMS = 5
_N_QUESTIONS = 30
_MAX_ANSWER_TOKENS = 24
_COLUMNS = {
    "chat": RECALL_KINDS,
    "plain text": RECALL_KINDS,
    "made-up names": replace(RECALL_KINDS, made_up=1.0),
    "never stated": replace(RECALL_KINDS, unknown=1.0),
}
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

    def plain_ids(self, exam: Exam, question: str) -> list[int]:
        """Return the prompt of a completion."""
        return self.encode(plain_prompt(exam, question))

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
    ids = examinee.plain_ids if column == "plain text" else examinee.chat_ids
    for seed in seeds:
        exam = write_exam(seed, n_tokens, _N_QUESTIONS, examinee.encode, _COLUMNS[column])
        answers = examinee.answers([ids(exam, question) for question, _ in exam.questions])
        rights = [answer for _, answer in exam.questions]
        n_right += sum(a == b for a, b in zip(answers, rights, strict=True))
        n_asked += len(rights)
    return n_right, n_asked


def score_table(examinee: ExaminedModel) -> str:
    """Return a Markdown table: a line per length, a column per kind of question."""
    lines = [
        f"| prompt tokens | facts | {' | '.join(_COLUMNS)} |",
        "|" + "---|" * (2 + len(_COLUMNS)),
    ]
    for n_tokens in LENGTHS:
        seeds = range(n_tokens, n_tokens + _N_EXAMS)
        n_facts = sum(write_exam(s, n_tokens, 1, examinee.encode).n_facts for s in seeds)
        cells = [f"{n_tokens:,}", f"{n_facts / _N_EXAMS:.0f}"]
        for column in _COLUMNS:
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
