"""Questions to the demo model, with the answers that are right.

An exam is one context with facts all over it, and questions about any of them: in words that
the model was trained on, from seeds that it was not.
"""

import random
from dataclasses import dataclass

from tools.demo_model.stories import Encode, Recipe, make_story_facts

#: What a prompt has besides its context: turns, roles and the question.
_AROUND_TOKENS = 36
#: Of names in the list, all stated.
RECALL_KINDS = Recipe(unknown=0, made_up=0)


@dataclass(frozen=True)
class Exam:
    """A context and what is asked of it."""

    context: str
    n_facts: int
    #: (question, answer); facts are drawn anew each time.
    questions: tuple[tuple[str, str], ...]


def write_exam(
    seed: int, n_tokens: int, n_questions: int, encode: Encode, recipe: Recipe = RECALL_KINDS
) -> Exam:
    """An exam whose prompts have about `n_tokens`, one question and its turns included.

    Args:
        seed: equal seeds give equal exams.
        n_tokens: a sentence more or less.
        n_questions: to be asked one by one, each of the whole context.
        encode: the model's tokenizer, without special tokens.
        recipe: how facts and questions are mixed.
    """
    dice = random.Random(f"exam {seed}")
    world = make_story_facts(dice, recipe, bare=False)
    gap = dice.choice((" ", "\n"))
    sentences = [world.sentence()]
    n_context = _AROUND_TOKENS + len(encode(sentences[0]))
    while n_context < n_tokens:
        sentences.append(gap + world.sentence())
        n_context += len(encode(sentences[-1]))
    questions = tuple(world.question() for _ in range(n_questions))
    return Exam("".join(sentences), len(world.facts), questions)


def chat_messages(exam: Exam, question: str) -> list[dict[str, str]]:
    """The whole of it in one turn of the user's, the question at the end."""
    return [{"role": "user", "content": f"{exam.context}\n{question}"}]


def plain_prompt(exam: Exam, question: str) -> str:
    """For completions; the answer begins with a space."""
    return f"{exam.context}\nQuestion: {question}\nAnswer:"
