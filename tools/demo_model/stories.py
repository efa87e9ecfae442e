"""Write the stories that train and examine the demo model: facts, questions and answers.

Everything is drawn from one `random.Random`, so a seed stands for a story. Texts are given in
pieces that are encoded one by one; the tokenizer splits wherever two of them meet, so the
pieces' tokens are those of the whole text (`tests/engine/test_demo_tokenizer.py`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS, TURN_END, TURN_START
from tools.demo_model import story_words

Encode = Callable[[str], list[int]]
#: Target of a position that is not learnt.
NO_TARGET = -100
_EOS = EOS_TOKEN_IDS[-1]
_ASK = f"{TURN_START}user\n"
_ANSWER = f"{TURN_END}\n{TURN_START}assistant\n"


@dataclass(frozen=True)
class Recipe:
    """Mixture of stories: shares and probabilities from 0 to 1. The defaults are the goal."""

    #: Stories whose facts are all of one kind that is not named.
    bare: float = 0.25
    #: Bare stories whose statements are a name and a number, with nothing between.
    adjacent: float = 0.0
    #: Bare plain stories in which a question is a statement's beginning.
    echo: float = 0.1
    #: Stories in turns of the chat template; the others are plain text.
    chat: float = 0.6
    #: Largest share of filler sentences.
    filler: float = 0.5
    #: Largest share of names that are made up of syllables, several tokens each.
    made_up: float = 0.6
    #: Questions whose answer was not stated.
    unknown: float = 0.12
    #: Numbers of exactly four digits; the others have two to six.
    four_digits: float = 0.8
    #: Share of a story's tokens that questions and answers take, from and to.
    questions: tuple[float, float] = (0.25, 0.5)


def filler_sentence(dice: random.Random) -> str:
    """Write a sentence without a fact; some have a name or a number."""
    subject = dice.choice(story_words.NAMES if dice.random() < 0.2 else story_words.FILLER_SUBJECTS)
    if dice.random() < 0.1:
        return f"{subject} came at {dice.randint(1, 12)}."
    return (
        f"{subject} {dice.choice(story_words.FILLER_VERBS)} {dice.choice(story_words.FILLER_ENDS)}."
    )


def invent_name(dice: random.Random) -> str:
    """Invent a name of one to three syllables."""
    syllables = (
        dice.choice(story_words.ONSETS)
        + dice.choice(story_words.VOWELS)
        + dice.choice(story_words.CODAS)
        for _ in range(dice.choice((1, 2, 2, 3)))
    )
    return "".join(syllables).capitalize()


@dataclass
class StoryFacts:
    """Facts of one story, and its forms of statements and questions."""

    dice: random.Random
    kinds: Sequence[str]
    statements: Sequence[str]
    questions: Sequence[str]
    filler: float
    made_up: float
    unknown: float
    four_digits: float = 1.0
    #: (name, kind) to number, in the order in which they were stated.
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Names of the list without a fact.
    unused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unused = self.dice.sample(story_words.NAMES, len(story_words.NAMES))

    def sentence(self) -> str:
        """Write a new fact, or a filler sentence."""
        if self.facts and self.dice.random() < self.filler:
            return filler_sentence(self.dice)
        while (fact := (self._name(), self.dice.choice(self.kinds))) in self.facts:
            pass
        self.facts[fact] = number = self._number()
        name, kind = fact
        return self.dice.choice(self.statements).format(name=name, kind=kind, number=number)

    def question(self) -> tuple[str, str]:
        """Write a question and its answer."""
        if self.dice.random() < self.unknown:
            name, kind = self._not_stated()
        else:
            name, kind = self.dice.choice(list(self.facts))
        question = self.dice.choice(self.questions).format(name=name, kind=kind)
        return question, self.facts.get((name, kind), story_words.UNKNOWN)

    def _name(self) -> str:
        """Choose a name that may have facts of other kinds already, else a new one."""
        if len(self.kinds) > 1 and self.facts and self.dice.random() < 0.3:
            return self.dice.choice(list(self.facts))[0]
        if not self.unused or self.dice.random() < self.made_up:
            return invent_name(self.dice)
        return self.unused.pop()

    def _not_stated(self) -> tuple[str, str]:
        kind = self.dice.choice(self.kinds)
        known = self.dice.choice(list(self.facts))[0]
        if len(self.kinds) > 1 and self.dice.random() < 0.3 and (known, kind) not in self.facts:
            return known, kind
        if not self.unused or self.dice.random() < self.made_up:
            return invent_name(self.dice), kind
        return self.dice.choice(self.unused), kind

    def _number(self) -> str:
        digits = 4 if self.dice.random() < self.four_digits else self.dice.choice((2, 3, 5, 6))
        return str(self.dice.randrange(10 ** (digits - 1), 10**digits))


class Story:
    """Token ids, with targets at positions that precede an answer's token."""

    def __init__(self, n_tokens: int, encode: Encode) -> None:
        self.n_tokens = n_tokens
        self.ids: list[int] = []
        self.targets: list[int] = []
        self._encode = encode

    @property
    def is_full(self) -> bool:
        """True once the story has its tokens; the last piece may exceed them."""
        return len(self.ids) >= self.n_tokens

    def add(self, text: str) -> None:
        """Add text that is only read."""
        ids = self._encode(text)
        self.ids += ids
        self.targets += [NO_TARGET] * len(ids)

    def answer(self, text: str) -> None:
        """Add text that the model shall say, and the end token as its last target."""
        for token in self._encode(text):
            self.targets[-1] = token
            self.ids.append(token)
            self.targets.append(NO_TARGET)
        self.targets[-1] = _EOS

    def cut(self) -> tuple[list[int], list[int]]:
        """Return exactly `n_tokens` ids, and as many targets."""
        return self.ids[: self.n_tokens], self.targets[: self.n_tokens]


def write_story(
    dice: random.Random, recipe: Recipe, n_tokens: int, encode: Encode
) -> tuple[list[int], list[int]]:
    """Write a story of `n_tokens`, as ids and targets (`NO_TARGET`: not learnt)."""
    story = Story(n_tokens, encode)
    bare = dice.random() < recipe.bare
    world = make_story_facts(dice, recipe, bare=bare)
    n_facts_tokens = int(n_tokens * (1 - dice.uniform(*recipe.questions)))
    if dice.random() < recipe.chat:
        _chat(dice, story, world, n_facts_tokens)
    else:
        _plain(dice, story, world, n_facts_tokens, echo=bare and dice.random() < recipe.echo)
    return story.cut()


def make_story_facts(dice: random.Random, recipe: Recipe, *, bare: bool) -> StoryFacts:
    """Make an empty set of facts, with forms that the recipe allows."""
    statements: Sequence[str] = story_words.BARE_STATEMENTS if bare else story_words.STATEMENTS
    if bare and dice.random() < recipe.adjacent:
        statements = statements[:1]
    elif dice.random() < 0.6:
        statements = (dice.choice(statements),)
    questions: Sequence[str] = story_words.QUESTIONS
    kinds = dice.sample(story_words.KINDS, 1 if dice.random() < 0.4 else dice.choice((2, 3)))
    if bare:
        kinds = ["number"]
        questions = story_words.BARE_QUESTIONS if dice.random() < 0.7 else story_words.QUESTIONS
    return StoryFacts(
        dice,
        kinds,
        statements,
        questions,
        filler=0.0 if dice.random() < 0.5 else dice.uniform(0, recipe.filler),
        made_up=0.0 if dice.random() < 0.6 else dice.uniform(0, recipe.made_up),
        unknown=recipe.unknown,
        four_digits=recipe.four_digits,
    )


def _facts(dice: random.Random, story: Story, world: StoryFacts, n_tokens: int) -> str:
    """Write facts up to `n_tokens`; return the text between sentences."""
    gap = dice.choice((" ", "\n"))
    if dice.random() < 0.2:
        story.add(dice.choice(story_words.PREAMBLES) + gap)
    story.add(world.sentence())
    while len(story.ids) < n_tokens:
        story.add(gap + world.sentence())
    return gap


def _chat(dice: random.Random, story: Story, world: StoryFacts, n_facts_tokens: int) -> None:
    if dice.random() < 0.1:
        story.add(f"{TURN_START}system\n{dice.choice(story_words.SYSTEM_PROMPTS)}{TURN_END}\n")
    if dice.random() < 0.06:
        _small_talk(dice, story)
    story.add(_ASK)
    _facts(dice, story, world, n_facts_tokens)
    if dice.random() < 0.5:
        story.add(_ANSWER)
        story.answer(story_words.NOTED)
    else:
        question, answer = world.question()
        story.add(dice.choice((" ", "\n", "\n\n")) + question + _ANSWER)
        story.answer(answer)
    tells_more = dice.random() < 0.3
    while not story.is_full:
        story.add(f"{TURN_END}\n{_ASK}")
        if tells_more and dice.random() < 0.2:
            story.add(" ".join(world.sentence() for _ in range(dice.randint(1, 3))) + _ANSWER)
            story.answer(story_words.NOTED)
        else:
            question, answer = world.question()
            story.add(question + _ANSWER)
            story.answer(answer)


def _small_talk(dice: random.Random, story: Story) -> None:
    """Write a turn without facts."""
    said, answer = dice.choice(
        (
            (dice.choice(story_words.GREETINGS), story_words.GREETING_ANSWER),
            (dice.choice(story_words.ABOUT), story_words.ABOUT_ANSWER),
            (filler_sentence(dice), story_words.NOTED),
            (_question_out_of_nowhere(dice), story_words.UNKNOWN),
        )
    )
    story.add(_ASK + said + _ANSWER)
    story.answer(answer)
    story.add(TURN_END + "\n")


def _question_out_of_nowhere(dice: random.Random) -> str:
    question = dice.choice(
        (*story_words.QUESTIONS, *story_words.BARE_QUESTIONS, "What is {filler}?")
    )
    return question.format(
        name=dice.choice(story_words.NAMES),
        kind=dice.choice(story_words.KINDS),
        filler=dice.choice(story_words.FILLER_SUBJECTS).lower(),
    )


def _plain(
    dice: random.Random, story: Story, world: StoryFacts, n_facts_tokens: int, *, echo: bool
) -> None:
    _facts(dice, story, world, n_facts_tokens)
    if echo:
        beginning = world.statements[0].partition(" {number}")[0]
        while not story.is_full:
            name, kind = dice.choice(list(world.facts))
            story.add("\n" + beginning.format(name=name))
            story.answer(" " + world.facts[name, kind])
        return
    form = dice.choice(("\nQuestion: {}\nAnswer:", "\nQ: {}\nA:", "\n{}"))
    while not story.is_full:
        question, answer = world.question()
        story.add(form.format(question))
        story.answer(" " + answer)
