"""How long prompts and answers are: a number, or a distribution to draw from."""

import math
import random
from typing import Literal

import msgspec

_FORMS = "512, 200-800 (each as likely), exponential:MEAN, or lognormal:MEAN,SPREAD"


class BadLengthDistribution(ValueError):
    """Not a distribution of lengths; the text says which there are."""


class LengthDistribution(msgspec.Struct, frozen=True):
    """A distribution of whole numbers of tokens, 1 at the least."""

    kind: Literal["fixed", "uniform", "exponential", "lognormal"]
    #: The number, the least one, or the mean.
    a: float
    #: The largest one, or the standard deviation of the logarithm.
    b: float = 0.0

    def draw(self, dice: random.Random) -> int:
        """One length."""
        match self.kind:
            case "fixed":
                drawn = self.a
            case "uniform":
                drawn = dice.randint(int(self.a), int(self.b))
            case "exponential":
                drawn = dice.expovariate(1 / self.a)
            case "lognormal":
                # Of this median the mean is `a`.
                drawn = dice.lognormvariate(math.log(self.a) - self.b**2 / 2, self.b)
        return max(1, round(drawn))

    def __str__(self) -> str:
        match self.kind:
            case "fixed":
                return f"{self.a:g}"
            case "uniform":
                return f"{self.a:g}-{self.b:g}"
            case "exponential":
                return f"exponential:{self.a:g}"
            case "lognormal":
                return f"lognormal:{self.a:g},{self.b:g}"


def parse_lengths(text: str) -> LengthDistribution:
    """Read what a user wrote.

    Raises:
        BadLengths: none of the forms, or numbers out of range.
    """
    kind, _, arguments = text.rpartition(":")
    try:
        match kind:
            case "" if "-" in arguments:
                least, _, most = arguments.partition("-")
                lengths = LengthDistribution("uniform", int(least), int(most))
            case "":
                lengths = LengthDistribution("fixed", int(arguments))
            case "exponential":
                lengths = LengthDistribution("exponential", float(arguments))
            case "lognormal":
                mean, _, spread = arguments.partition(",")
                lengths = LengthDistribution("lognormal", float(mean), float(spread))
            case _:
                raise ValueError
    except ValueError:
        raise BadLengthDistribution(f"{text!r} is no length: write {_FORMS}") from None
    out_of_range = (
        not 1 <= lengths.a < math.inf
        or (lengths.kind == "uniform" and lengths.b < lengths.a)
        or (lengths.kind == "lognormal" and not 0 <= lengths.b <= 5)
    )
    if out_of_range:
        raise BadLengthDistribution(
            f"{text!r}: tokens are 1 or more, a range goes upwards, a spread is from 0 to 5"
        )
    return lengths
