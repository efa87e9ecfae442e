"""Turn token ids into text one at a time, at a bounded cost each.

The pieces of a sequence, joined, equal the text of decoding the whole sequence at once. Joining the
tokens' own texts would not: a character may be spread over several tokens, and some decoders look
at neighbours (a space that only the first token loses).

`ByteDetokenizer` is exact for byte-level BPE (GPT-2, Llama 3, Qwen, Mistral's tekken, …), where
every token is some bytes. `WindowDetokenizer` serves every other decoder by decoding the last few
tokens again. Neither decodes the whole answer for each new token.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

#: Stands for bytes that are no valid character.
REPLACEMENT = "�"
#: A character has at most 4 bytes. After this many tokens a broken character stays broken.
MAX_PENDING_TOKENS = 8


class Detokenizer(Protocol):
    """Detokenize one sequence."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the remaining text, now that no more tokens come."""
        ...


class ByteDetokenizer:
    """Detokenize tokens that are bytes: join them and decode UTF-8.

    Args:
        token_bytes: returns the bytes of a token; empty for a token that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        """Return an incomplete character at the end as a replacement character."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenize for decoders that look at neighbours, by decoding a window of the last tokens.

    ``window = settled + unsettled``: the text of the settled tokens has been returned. They stay in
    the window so that the unsettled ones are decoded in their context.

    Args:
        decode: turns token ids into text.
        hidden: tokens that are not shown and don't count as neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._settled: list[int] = []
        self._unsettled: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if token in self._hidden:
            return ""
        self._unsettled.append(token)
        piece = self._piece()
        broken = piece.endswith(REPLACEMENT) and len(self._unsettled) < MAX_PENDING_TOKENS
        if broken or not piece:
            self._forget_silent()
            return ""
        self._settled, self._unsettled = self._unsettled, []
        return piece

    def flush(self) -> str:
        """Return the text of the unsettled tokens."""
        piece = self._piece() if self._unsettled else ""
        self._settled, self._unsettled = self._unsettled, []
        return piece

    def _piece(self) -> str:
        before = self._decode(self._settled) if self._settled else ""
        after = self._decode(self._settled + self._unsettled)
        if after.startswith(before):
            return after[len(before) :]
        # A byte that breaks a run changes how the decoder shows the run's earlier bytes, whose text
        # was already returned. So the new tokens are decoded by themselves.
        return self._decode(self._unsettled)

    def _forget_silent(self) -> None:
        """Shorten the window when many tokens in a row have no text."""
        if len(self._unsettled) > 2 * MAX_PENDING_TOKENS:
            self._settled, self._unsettled = self._unsettled[-MAX_PENDING_TOKENS:], []

    def check(self) -> None:
        """Check that the window is bounded and contains no hidden token."""
        assert len(self._settled) <= 2 * MAX_PENDING_TOKENS + 1
        assert len(self._unsettled) <= 2 * MAX_PENDING_TOKENS
        assert not self._hidden & {*self._settled, *self._unsettled}
