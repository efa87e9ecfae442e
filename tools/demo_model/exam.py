"""Write exams for the demo model: questions with their right answers.

An exam is one context with facts all over it, and questions about any of them. Its words are those
of the training, its seeds are not.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tools.demo_model import story_words
from tools.demo_model.json_answers import draw_keys, request_json, right_json
from tools.demo_model.story_facts import Recipe, StoryFacts, make_story_facts
from tools.demo_model.story_text import Encode
from tools.demo_model.tool_calls import Toolbox, draw_toolbox

#: Tokens of a prompt besides its context: turns, roles and the question.
_AROUND_TOKENS = 36
#: Questions about names of the list, all stated.
RECALL_KINDS = Recipe(unknown=0, made_up=0)

Message = dict[str, Any]


@dataclass(frozen=True)
class ExamQuestion:
    """A question with tools, and what came of it so far."""

    question: str
    answer: str
    #: A call and its result.
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Exam:
    """A context, and questions about it."""

    context: str
    n_facts: int
    #: (question, answer); facts are drawn anew each time.
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ToolExam:
    """A context, the schemas of tools, and questions that some of them answer."""

    context: str
    tools: list[dict[str, Any]]
    #: Of stated facts, which no tool is needed for.
    stated: tuple[ExamQuestion, ...]
    #: Of facts that a tool finds; the answer is its call.
    calls: tuple[ExamQuestion, ...]
    #: The same with the tool's result; the answer has its number.
    results: tuple[ExamQuestion, ...]


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
    world, context = _context(dice, n_tokens, encode, recipe)
    questions = tuple(world.question() for _ in range(n_questions))
    return Exam(context, len(world.facts), questions)


def write_json_exam(seed: int, n_tokens: int, n_questions: int, encode: Encode) -> Exam:
    """Write an exam whose questions ask for JSON and name its keys; see `write_exam`."""
    dice = random.Random(f"exam {seed}")
    world, context = _context(dice, n_tokens, encode, RECALL_KINDS)

    def question() -> tuple[str, str]:
        name, kind = dice.choice(list(world.facts))
        keys = draw_keys(dice, kind)
        asked = request_json(dice, world.ask(name, kind), keys)
        return asked, right_json(name, world.facts[name, kind], keys)

    return Exam(context, len(world.facts), tuple(question() for _ in range(n_questions)))


def write_tool_exam(seed: int, n_tokens: int, n_questions: int, encode: Encode) -> ToolExam:
    """Write an exam with tools, as many questions of each kind; see `write_exam`."""
    dice = random.Random(f"exam {seed}")
    world, context = _context(dice, n_tokens, encode, RECALL_KINDS)
    toolbox = draw_toolbox(dice, world.kinds)
    stated = [dice.choice(list(world.facts)) for _ in range(n_questions)]
    pairs = [_ask_tool(dice, world, toolbox) for _ in range(n_questions)]
    return ToolExam(
        context,
        toolbox.schemas(),
        stated=tuple(ExamQuestion(world.ask(*fact), world.facts[fact]) for fact in stated),
        calls=tuple(call for call, _ in pairs),
        results=tuple(result for _, result in pairs),
    )


def _ask_tool(
    dice: random.Random, world: StoryFacts, toolbox: Toolbox
) -> tuple[ExamQuestion, ExamQuestion]:
    """Ask what a tool finds: once for its call, and once with its result."""
    name, kind = world.not_stated(dice.choice(list(toolbox.functions)))
    question, number = world.ask(name, kind), world.number()
    function, parameter = toolbox.functions[kind]
    result = dice.choice(story_words.RESULTS).format(name=name, kind=kind, number=number)
    arguments = json.dumps({parameter: name})
    called = {"type": "function", "function": {"name": function, "arguments": arguments}}
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1"} | called]},
        {"role": "tool", "content": result, "tool_call_id": "call_1"},
    )
    return (
        ExamQuestion(question, toolbox.call(name, kind)),
        ExamQuestion(question, number, messages),
    )


def _context(
    dice: random.Random, n_tokens: int, encode: Encode, recipe: Recipe
) -> tuple[StoryFacts, str]:
    """Write sentences for prompts of about `n_tokens`; return their facts and text."""
    world = make_story_facts(dice, recipe, bare=False)
    gap = dice.choice((" ", "\n"))
    sentences = [world.sentence()]
    n_context = _AROUND_TOKENS + len(encode(sentences[0]))
    while n_context < n_tokens:
        sentences.append(gap + world.sentence())
        n_context += len(encode(sentences[-1]))
    return world, "".join(sentences)


def chat_messages(exam: Exam | ToolExam, question: str) -> list[Message]:
    """Return one user turn with the context and the question."""
    return [{"role": "user", "content": f"{exam.context}\n{question}"}]


def plain_prompt(exam: Exam, question: str) -> str:
    """Return the prompt of a completion; the answer begins with a space."""
    return f"{exam.context}\nQuestion: {question}\nAnswer:"
