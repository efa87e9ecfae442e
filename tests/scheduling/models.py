"""Run a state machine of hypothesis as a test: a few short runs by day, many long ones at night."""

from unittest import TestCase

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

from tests.nightly import by_day


def model_test(
    model: type[RuleBasedStateMachine], at_night: int, steps_at_night: int = 50
) -> type[TestCase]:
    """Return the test of a model, which pytest finds by the name that a module gives it."""
    test: type[TestCase] = model.TestCase
    test.settings = settings(  # type: ignore[attr-defined]
        max_examples=by_day(25, at_night=at_night),
        stateful_step_count=by_day(20, at_night=steps_at_night),
        deadline=None,
    )
    return test
