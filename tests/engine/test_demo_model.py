"""The demo model as it is shipped: small, standard files, and numbers that are right."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from halfmoon_engine import demo
from tools.demo_model import stories, story_words
from tools.demo_model.chat_template import CHAT_TEMPLATE
from tools.demo_model.evaluate import ExaminedModel
from tools.demo_model.exam import RECALL_KINDS, Exam, write_exam, write_json_exam, write_tool_exam
from tools.demo_model.make_tokenizer import make_tokenizer
from tools.demo_model.story_facts import Recipe
from tools.demo_model.story_text import NO_TARGET
from tools.demo_model.train import Start, train

SEED = 20_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def examinee() -> Iterator[ExaminedModel]:
    # So small a model gains nothing by a second thread, and waits for it on a busy machine.
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ExaminedModel.load(demo.FOLDER)
    torch.set_num_threads(n_threads)


def asked(examinee: ExaminedModel, messages: list[dict[str, str]]) -> list[int]:
    """The prompt of a conversation."""
    text = examinee.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    prompt: list[int] = examinee.encode(text)
    return prompt


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Training sets the threads of its process."""
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def wrong(examinee: ExaminedModel, exam: Exam) -> list[tuple[str, str, str]]:
    """Questions that are answered wrongly: question, answer, right answer."""
    answers = examinee.answers([examinee.chat_ids(exam, each) for each, _ in exam.questions])
    both = zip(exam.questions, answers, strict=True)
    return [(question, said, right) for (question, right), said in both if said != right]


def test_its_files_are_under_ten_megabytes_together() -> None:
    files = [path for path in demo.FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10_000_000
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files
    }


def test_it_recalls_stated_numbers_alone_and_answers_as_json(examinee: ExaminedModel) -> None:
    exam = write_exam(SEED, 1000, 40, examinee.encode)
    assert 950 < len(examinee.chat_ids(exam, exam.questions[0][0])) <= 1020
    unstated = write_exam(SEED, 500, 20, examinee.encode, replace(RECALL_KINDS, unknown=1.0))
    assert {answer for _, answer in unstated.questions} == {story_words.UNKNOWN}
    as_json = write_json_exam(SEED, 500, 20, examinee.encode)
    for each, most in ((exam, 2), (unstated, 1), (as_json, 3)):
        assert len(wrong(examinee, each)) <= most, wrong(examinee, each)


def test_the_conversation_in_its_readme_is_true(examinee: ExaminedModel) -> None:
    readme = (demo.FOLDER / "README.md").read_text()
    lines = readme.split("```\n")[1].splitlines()
    messages = []
    for said, answer in zip(lines[::2], lines[1::2], strict=True):
        messages.append({"role": "user", "content": said.removeprefix("> ")})
        assert examinee.answers([asked(examinee, messages)]) == [answer]
        messages.append({"role": "assistant", "content": answer})
    assert len(messages) == 6


def test_it_calls_tools_for_what_was_not_stated_only(examinee: ExaminedModel) -> None:
    exam = write_tool_exam(SEED, 500, 10, examinee.encode)
    for questions in (exam.stated, exam.calls, exam.results):
        prompts = [examinee.tool_ids(exam, asked) for asked in questions]
        answers = [asked.answer for asked in questions]
        assert examinee.count_right(prompts, answers) >= 8


def test_right_answers_are_counted_as_if_they_were_generated(examinee: ExaminedModel) -> None:
    exam = write_exam(SEED, 4000, 12, examinee.encode)
    prompts = [examinee.chat_ids(exam, question) for question, _ in exam.questions]
    said = examinee.answers(prompts)
    assert examinee.count_right(prompts, said) == len(said)
    others = [f"{answer}0" for answer in said[:-1]]
    assert examinee.count_right(prompts, [*others, said[-1]]) == 1


def test_its_tokenizer_is_the_scripts_and_has_a_token_for_each_name(tokenizer: Any) -> None:
    assert json.loads(make_tokenizer().to_str()) == json.loads(tokenizer.to_str())
    assert (demo.FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    code = "def handle(event, now):\n    return []\n"
    for text in (code, "½ moon 月 🌓", "\x00\x7f", "ADA's 007"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    names = {name: tokenizer.encode(name).ids for name in story_words.NAMES}
    assert all(len(ids) == 1 for ids in names.values())
    assert names["Ada"][0] in tokenizer.encode("I know that Ada is here").ids
    assert len(tokenizer.encode("4821").ids) == 4


@pytest.mark.parametrize("recipe", [Recipe(tools=0.5, as_json=0.5), Recipe(practice=1.0)])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_a_story_have_its_tokens(tokenizer: Any, seed: int, recipe: Recipe) -> None:
    ids, targets = stories.write_story(
        random.Random(seed),
        recipe,
        400,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    assert len(ids) == len(targets) == 400
    text = tokenizer.decode(ids[:390], skip_special_tokens=False)
    assert tokenizer.encode(text).ids[:380] == ids[:380]
    # What is to be learnt is what comes next, or that the answer ends.
    learnt = [i for i in range(399) if targets[i] != NO_TARGET]
    assert learnt
    assert all(targets[i] in (ids[i + 1], 2) for i in learnt)


@pytest.mark.usefixtures("one_thread")
def test_its_training_runs_and_writes_the_files_of_a_model(tmp_path: Path) -> None:
    train(tmp_path, n_tokens=2048)
    shipped = {path.name for path in demo.FOLDER.iterdir()} - {"README.md"}
    assert {path.name for path in tmp_path.iterdir()} == shipped
    trained = ExaminedModel.load(tmp_path)
    assert trained.encode("Ada") == ExaminedModel.load(demo.FOLDER).encode("Ada")


@pytest.mark.usefixtures("one_thread")
def test_its_training_goes_on_from_earlier_weights(tmp_path: Path) -> None:
    train(tmp_path, 1, Start(demo.FOLDER, shortest=192, longest=192, learning_rate=0.0))
    before, after = (ExaminedModel.load(at).model.state_dict() for at in (demo.FOLDER, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
