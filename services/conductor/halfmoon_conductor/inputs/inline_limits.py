"""Set the sizes up to which a body is parsed and tokenized on the event loop.

A child process costs half a millisecond and a wait in a queue: more than tokenizing a few pages.
Tokenizing a book on the event loop would pause every stream.
"""

#: About 2,000 tokens, for which the tokenizer takes two milliseconds.
MAX_INLINE_CHARACTERS = 8192
#: Bodies up to this size are parsed, checked and tokenized on the event loop.
MAX_INLINE_BYTES = MAX_INLINE_CHARACTERS + 2048
#: A chat template may write more than it was given, such as an indented schema.
MAX_INLINE_RENDERED_CHARACTERS = 4 * MAX_INLINE_CHARACTERS


class InlineLimitExceeded(Exception):
    """Raised when a small body turns out to be too much work for the event loop."""
