"""Where work on a body is done: short ones here and now, others in a helper process.

A helper costs half a millisecond and a turn in a queue: more than tokenising a few pages takes.
A book would stop every stream for as long as it takes.
"""

#: About 2,000 tokens, which take the tokenizer two milliseconds.
SHORT_CHARACTERS = 8192
#: A body of so many bytes is read, checked and tokenised on the event loop.
SHORT_BYTES = SHORT_CHARACTERS + 2048
#: A chat template may write more than it was given, such as a schema with indents.
SHORT_RENDERED = 4 * SHORT_CHARACTERS


class NotShort(Exception):
    """A small body turned out to be much work: it is for a helper."""
