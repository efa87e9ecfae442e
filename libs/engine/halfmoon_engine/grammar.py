"""Keeping an answer within a grammar: which tokens may come next, by llguidance.

A grammar is text in `Sampling.grammar`. It is compiled where tokens are drawn, once for each
text; each request follows it with a matcher of its own, which is made anew from the answer's
tokens wherever there is none, as on another worker after a retry. llguidance is imported when
a model is loaded, never by the fake engine.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw
from halfmoon_protocol.sampling import MAX_GRAMMAR_SYMBOLS

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

#: Compiled grammars that are kept, the last used ones.
_MAX_COMPILED = 64


class GrammarNotFollowed(Exception):
    """The grammar does not compile here, takes too much, or the answer has left it."""


class Grammars:
    """The grammars in use with one model.

    Args:
        tokenizer: the text of its ``tokenizer.json``.
        n_vocab: logits of a row.
        eos_token_ids: what ends an answer; allowed once the grammar is fulfilled.

    Raises:
        ValueError: no end token, or a tokenizer that llguidance does not read.
    """

    def __init__(self, tokenizer: str, n_vocab: int, eos_token_ids: Sequence[int]) -> None:
        import llguidance

        if not eos_token_ids:
            raise ValueError("the model has no end token, so no answer could end")
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(
            verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS
        )
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer, n_vocab=n_vocab, eos_token=list(eos_token_ids)
        )
        self._n_vocab = n_vocab
        self._eos = list(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def of_model(cls, folder: Path, n_vocab: int, eos_token_ids: Sequence[int]) -> Self | None:
        """Those of a model's folder; None, and a warning, where it can't have any."""
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            return cls(_uncut(text), n_vocab, eos_token_ids)
        except (OSError, ValueError) as error:
            log.warning("requests with a grammar can't be served with this model: %s", error)
            return None

    def allowed(self, draw: Draw) -> NDArray[np.bool_]:
        """Whether each token may come next, by its id: [n_vocab], at least one of them true.

        Raises:
            GrammarNotFollowed: see there; this request can't go on.
        """
        kept = None if draw.scratch is None else draw.scratch.value
        following = kept if isinstance(kept, _Following) else self._begin(draw.sampling.grammar)
        if draw.scratch is not None:
            draw.scratch.value = following
        matcher = following.matcher
        new = list(draw.history[draw.n_prompt + following.n_followed :])
        if new and not matcher.consume_tokens(new):
            raise GrammarNotFollowed(matcher.get_error())
        following.n_followed += len(new)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise GrammarNotFollowed(matcher.get_error())
        allowed = np.unpackbits(bits, bitorder="little")[: self._n_vocab].astype(np.bool_)
        if not allowed.any():  # no token of this vocabulary spells what must come
            raise GrammarNotFollowed("no token of the model fits what must come next")
        return allowed

    def _begin(self, grammar: str) -> "_Following":
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if compiled.is_error():
                raise GrammarNotFollowed(compiled.get_error())
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return _Following(compiled.deep_copy())


class _Following:
    """A matcher and how many of the answer's tokens it has seen."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher
        self.n_followed = 0


def _uncut(tokenizer: str) -> str:
    """Without the truncation and padding that it may have been trained with."""
    from tokenizers import Tokenizer

    try:
        loaded: Any = Tokenizer.from_str(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None
    loaded.no_truncation()
    loaded.no_padding()
    return str(loaded.to_str())
