"""The demo model as it is shipped: small, standard files, and numbers that are right."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from halfmoon_engine import demo
from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.byte_tokenizer import train_tokenizer, write_tokenizer
from tools.demo_model import stories, story_words
from tools.demo_model.chat_template import CHAT_TEMPLATE
from tools.demo_model.earlier_weights import load_earlier
from tools.demo_model.evaluate import ExaminedModel
from tools.demo_model.exam import RECALL_KINDS, Exam, write_exam, write_json_exam, write_tool_exam
from tools.demo_model.initial_weights import make_model
from tools.demo_model.make_tokenizer import make_tokenizer
from tools.demo_model.story_facts import Recipe
from tools.demo_model.story_text import NO_TARGET
from tools.demo_model.tool_calls import Toolbox
from tools.demo_model.train import Start, train
from tools.demo_model.wide_positions import WidePositions

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


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("hello", story_words.GREETING_ANSWER),
        ("Who are you?", story_words.ABOUT_ANSWER),
        ("What is Ada's number?", story_words.UNKNOWN),
        ("Ada's number is 4821.", story_words.NOTED),
        ("Ada's number is 4821. Bo's number is 1733. What is Bo's number?", "1733"),
        (
            "Ada has the number 4821. Bo has the number 1733. What number does Bo have? "
            "Answer as JSON. Keys: name, number",
            '{"name": "Bo", "number": 1733}',
        ),
    ],
)
def test_short_talks_go_as_its_readme_says(examinee: ExaminedModel, said: str, answer: str) -> None:
    prompt = asked(examinee, [{"role": "user", "content": said}])
    assert examinee.answers([prompt]) == [answer]


def test_the_conversation_in_its_readme_is_true(examinee: ExaminedModel) -> None:
    readme = (demo.FOLDER / "README.md").read_text()
    lines = readme.split("```\n")[1].splitlines()
    messages = []
    for said, answer in zip(lines[::2], lines[1::2], strict=True):
        messages.append({"role": "user", "content": said.removeprefix("> ")})
        assert examinee.answers([asked(examinee, messages)]) == [answer]
        messages.append({"role": "assistant", "content": answer})
    assert len(messages) == 6


def test_facts_of_an_earlier_turn_are_known_in_later_ones(examinee: ExaminedModel) -> None:
    turns = [
        ("user", "Ada's room is 417. Bo's room is 203. Clara's room is 96."),
        ("assistant", story_words.NOTED),
        ("user", "What is Bo's room?"),
        ("assistant", "203"),
        ("user", "What is Clara's room?"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert examinee.answers([asked(examinee, messages)]) == ["96"]


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


def test_its_chat_template_writes_tools_as_its_stories_do(examinee: ExaminedModel) -> None:
    toolbox = Toolbox({"room": ("get_room", "name"), "desk": ("find_desk", "who")})
    arguments: list[Any] = [{"name": "Clara"}, '{"name": "Clara"}']
    for given in arguments:
        called = {"type": "function", "function": {"name": "get_room", "arguments": given}}
        text = examinee.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "Which room is Clara in?"},
                {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "content": "417"},
            ],
            tools=toolbox.schemas(),
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == (
            f"<|im_start|>system\n{toolbox.lines()}<|im_end|>\n"
            "<|im_start|>user\nWhich room is Clara in?<|im_end|>\n"
            f"<|im_start|>assistant\n{toolbox.call('Clara', 'room')}<|im_end|>\n"
            "<|im_start|>tool\n417<|im_end|>\n<|im_start|>assistant\n"
        )
    text = examinee.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}], tools=toolbox.schemas(), tokenize=False
    )
    assert text == f"<|im_start|>system\nBe brief.\n{toolbox.lines()}<|im_end|>\n"
    assert (demo.FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_its_tokenizer_is_the_scripts_and_has_a_token_for_each_name(tokenizer: Any) -> None:
    assert json.loads(make_tokenizer().to_str()) == json.loads(tokenizer.to_str())
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


def greedy(engine: Engine, pages: list[int], tokens: list[int], n_cached: int) -> list[int]:
    """An answer over pages of which the first hold `n_cached` tokens."""
    tokens, start, n_prompt = list(tokens), n_cached, len(tokens)
    draw = Draw(Sampling(temperature=0.0))
    while True:
        (token,) = engine.forward([Run(tokens[start:], start, pages, draw)])
        assert isinstance(token, int)
        if token in engine.eos_token_ids:
            return tokens[n_prompt:]
        start = len(tokens)
        tokens.append(token)
        assert len(tokens) < n_prompt + 24


def test_a_block_of_another_prompt_makes_a_number_wrong(examinee: ExaminedModel) -> None:
    """The same names with other numbers, in the same places: only KV tells them apart."""
    engine = open_engine(str(demo.FOLDER), block_size=16, device="cpu", threads=1)
    layout = engine.layout
    memory = bytearray(128 * layout.block_bytes)
    engine.attach(memoryview(memory))
    dice = random.Random(SEED)
    names = dice.sample(story_words.NAMES, 80)
    numbers = [{name: str(dice.randint(1000, 9999)) for name in names} for _ in range(2)]

    def facts(told: dict[str, str], names: list[str]) -> list[int]:
        sentences = (f"{name}'s number is {told[name]}." for name in names)
        return list(examinee.encode(" ".join(sentences)))

    mine, others = (facts(told, names) for told in numbers)
    assert len(mine) == len(others)
    n_blocks = len(mine) // 16
    my_pages, other_pages = list(range(n_blocks + 4)), list(range(64, 64 + n_blocks))
    nothing = Draw(Sampling(temperature=0.0))
    engine.forward([Run(mine[: n_blocks * 16], 0, my_pages[:n_blocks], nothing)])
    engine.forward([Run(others[: n_blocks * 16], 0, other_pages, nothing)])
    # Facts that lie wholly within the first half of the blocks.
    wrong_numbers = 0
    for place in dice.sample(range(4, 40), 8):
        name = names[place]
        block = (len(facts(numbers[0], names[:place])) + 6) // 16
        question = examinee.encode(f"\nQuestion: What is {name}'s number?\nAnswer:")
        prompt = mine[: n_blocks * 16] + question
        decode = examinee.tokenizer.decode
        right = greedy(engine, my_pages, prompt, n_blocks * 16)
        assert decode(right).strip() == numbers[0][name]
        mixed_up = list(my_pages)
        mixed_up[block : block + 2] = other_pages[block : block + 2]
        said = decode(greedy(engine, mixed_up, prompt, n_blocks * 16)).strip()
        wrong_numbers += said != numbers[0][name]
    assert wrong_numbers == 8


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


def test_embeddings_of_another_tokenizer_follow_the_text_of_their_tokens(tmp_path: Path) -> None:
    write_tokenizer(train_tokenizer(["Ada room"] * 9, 300), tmp_path, max_context=64)
    old_tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    weights = make_model().state_dict()
    old = torch.randn(old_tokenizer.get_vocab_size(), 128)
    save_file(
        {name: each.clone() for name, each in weights.items() if name != "lm_head.weight"}
        | {"model.embed_tokens.weight": old},
        str(tmp_path / "model.safetensors"),
    )
    model, tokenizer = make_model(), make_tokenizer()
    load_earlier(model, tokenizer, tmp_path)
    embeddings = model.model.embed_tokens.weight
    for text in ("Ada", "a", "<|im_end|>", "\u0120room"):
        assert torch.equal(
            embeddings[tokenizer.token_to_id(text)], old[old_tokenizer.token_to_id(text)]
        )


def test_some_short_stories_are_spread_over_a_long_context() -> None:
    model = make_model()
    wide, dice = WidePositions(model), random.Random(SEED)
    usual, states = torch.arange(300)[None], torch.zeros(1, 300, 128)
    drawn = []
    for _ in range(20):
        wide.draw(dice, 300)
        positions = usual if wide.positions is None else wide.positions
        drawn.append(int(positions[0, -1]))
        assert (positions.diff() > 0).all()
        assert positions[0, 0] == 0
        read = model.model.rotary_emb(states, usual)
        wide.positions = None
        for had, expected in zip(read, model.model.rotary_emb(states, positions), strict=True):
            assert torch.equal(had, expected)
    assert min(drawn) == 299
    assert 4096 < max(drawn) <= 9216
