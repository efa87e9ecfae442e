"""Set the sizes up to which work on a body is done on the event loop.

Texts are never among it: chat templates and tokenizers come with a checkpoint, and may take any
time and memory. A child process, which can be ended, renders and tokenizes them.
"""

#: Characters of a text that the cache of words encodes.
MAX_INLINE_CHARACTERS = 8192
#: Bodies of token ids up to this size are parsed and checked on the event loop.
MAX_INLINE_BYTES = 10 * 1024
