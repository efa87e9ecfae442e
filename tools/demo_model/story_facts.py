"""Draw the facts of a story, and write statements, questions and sentences beside the point."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.demo_model import story_words


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
    #: Stories in turns that offer tools, some without any facts.
    tools: float = 0.0
    #: Questions of stories in turns that are answered as JSON.
    as_json: float = 0.0
    #: Stories that practise to copy names and words, without facts.
    practice: float = 0.0
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
        self.facts[fact] = number = self.number()
        name, kind = fact
        return self.dice.choice(self.statements).format(name=name, kind=kind, number=number)

    def question(self) -> tuple[str, str]:
        """Write a question and its answer."""
        if self.dice.random() < self.unknown:
            name, kind = self.not_stated()
        else:
            name, kind = self.dice.choice(list(self.facts))
        return self.ask(name, kind), self.facts.get((name, kind), story_words.UNKNOWN)

    def ask(self, name: str, kind: str) -> str:
        """Write a question about this name and kind."""
        return self.dice.choice(self.questions).format(name=name, kind=kind)

    def _name(self) -> str:
        """Choose a name that may have facts of other kinds already, else a new one."""
        if len(self.kinds) > 1 and self.facts and self.dice.random() < 0.3:
            return self.dice.choice(list(self.facts))[0]
        if not self.unused or self.dice.random() < self.made_up:
            return invent_name(self.dice)
        return self.unused.pop()

    def not_stated(self, kind: str | None = None) -> tuple[str, str]:
        """Choose a name and a kind that have no fact."""
        kind = kind or self.dice.choice(self.kinds)
        if self.facts and len(self.kinds) > 1 and self.dice.random() < 0.3:
            known = self.dice.choice(list(self.facts))[0]
            if (known, kind) not in self.facts:
                return known, kind
        if not self.unused or self.dice.random() < self.made_up:
            return invent_name(self.dice), kind
        return self.dice.choice(self.unused), kind

    def number(self) -> str:
        """Draw a number."""
        digits = 4 if self.dice.random() < self.four_digits else self.dice.choice((2, 3, 5, 6))
        return str(self.dice.randrange(10 ** (digits - 1), 10**digits))


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
