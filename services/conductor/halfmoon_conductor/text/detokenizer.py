"""Token ids into text, one at a time, at a bounded cost each.

The pieces of a sequence, joined, are what decoding the whole sequence at once gives. That is
not the join of the tokens' own texts: a character may be spread over several tokens, and some
decoders look at neighbours (a space that only the first token loses).

`ByteDetokenizer` is exact for byte-level BPE (GPT-2, Llama 3, Qwen, Mistral's tekken, …):
every token is some bytes. `WindowDetokenizer` serves every other decoder by decoding the last
few tokens again. What neither may do is decode the whole answer for each new token.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

#: Shown for bytes that are no character.
REPLACEMENT = "�"
#: A character has at most 4 bytes; tokens that end in a broken one for longer stay broken.
MAX_PENDING_TOKENS = 8


class Detokenizer(Protocol):
    """One sequence on its way from ids to text."""

    def push(self, token: int) -> str:
        """The text that this token settles; empty when a character is still incomplete."""
        ...

    def flush(self) -> str:
        """The rest, now that no more tokens come."""
        ...


class ByteDetokenizer:
    """For tokens that are bytes: joins them and reads them as UTF-8.

    Args:
        token_bytes: the bytes of a token; none for a token that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token settles."""
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        """An incomplete character at the end, as a replacement character."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders that look at neighbours: decodes a window of the last few tokens.

    ``window = settled + unsettled``: the settled tokens' text is out already, and they are
    there so that the unsettled ones are decoded as what follows them.

    Args:
        decode: ids to text.
        hidden: tokens that are not shown and don't count as neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._settled: list[int] = []
        self._unsettled: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token settles."""
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
        """The text of the tokens that have not settled."""
        piece = self._piece() if self._unsettled else ""
        self._settled, self._unsettled = self._unsettled, []
        return piece

    def _piece(self) -> str:
        before = self._decode(self._settled) if self._settled else ""
        after = self._decode(self._settled + self._unsettled)
        if after.startswith(before):
            return after[len(before) :]
        # A byte that breaks a run changes how the decoder shows the run's earlier bytes,
        # which are out already: show what is new by itself.
        return self._decode(self._unsettled)

    def _forget_silent(self) -> None:
        """Keep the window short when token after token has no text at all."""
        if len(self._unsettled) > 2 * MAX_PENDING_TOKENS:
            self._settled, self._unsettled = self._unsettled[-MAX_PENDING_TOKENS:], []

    def check(self) -> None:
        """Audit: the window is bounded, and hides nothing that is hidden."""
        assert len(self._settled) <= 2 * MAX_PENDING_TOKENS + 1
        assert len(self._unsettled) <= 2 * MAX_PENDING_TOKENS
        assert not self._hidden & {*self._settled, *self._unsettled}
