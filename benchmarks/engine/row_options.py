"""Choose measured rows on a command line."""

import argparse

from benchmarks.engine.rows import (
    DECODE_BATCHES,
    DECODE_CONTEXTS,
    PREFILL_TOKENS,
    DecodeRow,
    MeasuredRow,
    PrefillRow,
)


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `chosen_rows` reads."""
    add = parser.add_argument
    add("--prefill", default=_text(PREFILL_TOKENS), help="prompts; empty: none")
    add("--batches", default=_text(DECODE_BATCHES), help="requests of a decode step; empty: none")
    add("--contexts", default=_text(DECODE_CONTEXTS), help="tokens of each of those requests")


def chosen_rows(options: argparse.Namespace) -> tuple[MeasuredRow, ...]:
    """Return the rows that the options choose, those of prefill first."""
    return (
        *(PrefillRow(n) for n in _numbers(options.prefill)),
        *(
            DecodeRow(batch, context)
            for batch in _numbers(options.batches)
            for context in _numbers(options.contexts)
        ),
    )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
