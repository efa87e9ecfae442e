"""Where work on a body is done: short ones here and now, others in a helper process.

A helper costs half a millisecond and a turn in a queue: more than tokenising a few pages takes.
A book would stop every stream for as long as it takes.
"""

#: About 2,000 tokens, which take the tokenizer two milliseconds.
MAX_INLINE_CHARACTERS = 8192
#: A body of so many bytes is read, checked and tokenised on the event loop.
MAX_INLINE_BYTES = MAX_INLINE_CHARACTERS + 2048
#: A chat template may write more than it was given, such as a schema with indents.
MAX_INLINE_RENDERED_CHARACTERS = 4 * MAX_INLINE_CHARACTERS


class InlineLimitExceeded(Exception):
    """A small body turned out to be much work: it is for a helper."""
