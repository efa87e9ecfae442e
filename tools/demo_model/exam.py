"""Write exams for the demo model: questions with their right answers.

An exam is one context with facts all over it, and questions about any of them. Its words are those
of the training, its seeds are not.
"""

import random
from dataclasses import dataclass

from tools.demo_model.stories import Encode, Recipe, make_story_facts

#: Tokens of a prompt besides its context: turns, roles and the question.
_AROUND_TOKENS = 36
#: Questions about names of the list, all stated.
RECALL_KINDS = Recipe(unknown=0, made_up=0)


@dataclass(frozen=True)
class Exam:
    """A context, and questions about it."""

    context: str
    n_facts: int
    #: (question, answer); facts are drawn anew each time.
    questions: tuple[tuple[str, str], ...]


def write_exam(
    seed: int, n_tokens: int, n_questions: int, encode: Encode, recipe: Recipe = RECALL_KINDS
) -> Exam:
    """Write an exam whose prompts have about `n_tokens`, with one question and its turns.

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
    """Return one user turn with the context and the question."""
    return [{"role": "user", "content": f"{exam.context}\n{question}"}]


def plain_prompt(exam: Exam, question: str) -> str:
    """Return the prompt of a completion; the answer begins with a space."""
    return f"{exam.context}\nQuestion: {question}\nAnswer:"
