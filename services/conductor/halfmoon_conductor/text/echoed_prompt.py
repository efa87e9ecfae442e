"""Show a prompt of token ids as text, and go on from it: `echo`.

Such a prompt may end inside of a character, whose rest the answer's first tokens bring. The
character belongs to the answer then, so that echo and answer together are the text of all tokens.
"""

from collections.abc import Sequence

from halfmoon_conductor.text.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from halfmoon_conductor.text.tokenizer_interface import Tokenizer

#: Tokens at the end of a prompt by which a detokenizer knows where it is.
_N_LAST = 2 * MAX_PENDING_TOKENS


def echo_of_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt, without a character that is incomplete at its end."""
    text = tokenizer.decode(list(token_ids))
    unfinished = _at_the_end_of(tokenizer, token_ids).flush()
    return text.removesuffix(unfinished) if unfinished else text


def detokenizer_after(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Detokenizer:
    """Return a detokenizer for what follows an echoed prompt, whose last character it may hold."""
    if not _at_the_end_of(tokenizer, token_ids).flush():
        return tokenizer.detokenizer()
    return _at_the_end_of(tokenizer, token_ids)


def _at_the_end_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Detokenizer:
    detokenizer = tokenizer.detokenizer()
    for token in token_ids[-_N_LAST:]:
        detokenizer.push(token)
    return detokenizer


class TextOffsets:
    """Count the characters before each token of a choice: of its echo, then of its answer.

    Tokens that share a character have the offset at which it begins.

    Args:
        tokenizer: the model's.
        prompt: the choice's.
        echo: its text, as the choice repeats it; None: it does not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echo: str | None) -> None:
        self._tokenizer = tokenizer
        self._echo = echo or ""
        self._offset = len(self._echo)
        self._answer = (
            tokenizer.detokenizer() if echo is None else detokenizer_after(tokenizer, prompt)
        )

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the offset of each token of the prompt in its echo."""
        detokenizer, offset = self._tokenizer.detokenizer(), 0
        offsets: list[int] = []
        for token in tokens:
            offsets.append(min(offset, len(self._echo)))
            shown = detokenizer.push(token) or self._written(token, offset)
            offset += len(shown)
        return offsets

    def of_answer(self, tokens: Sequence[int]) -> list[int]:
        """Return the offset of each further token of the answer."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._answer.push(token))
        return offsets

    def _written(self, token: int, offset: int) -> str:
        """Return the text of a special token that the client has written in its prompt."""
        try:
            text = self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:  # a part of a character
            return ""
        return text if self._echo.startswith(text, offset) else ""
