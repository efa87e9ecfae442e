"""Compile one grammar in a child process, and answer which tokens may come next.

`halfmoon_sandbox` forks it from a template that has read the model's tokenizer. One process
follows one grammar, for any number of requests, each with a matcher of its own. The grammar is not
trusted: the process may be ended at any moment, and another one gets all tokens of an answer again.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llguidance
import msgspec

from halfmoon_engine.sampling.grammar_messages import (
    AdvanceGrammar,
    GrammarAdvanced,
    GrammarChildConfig,
)
from halfmoon_protocol.sampling import MAX_GRAMMAR_SYMBOLS

#: Requests whose matchers are kept, those used last.
_MAX_MATCHERS = 64
_SHOWN_CHARACTERS = 300
_DEAD_END = "what it wants next matches no text; write that part in another way"
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS)


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Make a handler of `AdvanceGrammar` messages.

    Args:
        argument: a `GrammarChildConfig`.
    """
    made = msgspec.msgpack.decode(argument, type=GrammarChildConfig)
    tokenizer = llguidance.LLTokenizer(
        made.tokenizer, n_vocab=made.n_vocab, eos_token=list(made.eos_token_ids)
    )
    matchers = GrammarMatchers(lambda text: compile_grammar(text, tokenizer))
    decoder = msgspec.msgpack.Decoder(AdvanceGrammar)

    def handle(request: bytes) -> bytes:
        return msgspec.msgpack.encode(matchers.follow(decoder.decode(request)))

    return handle


def compile_grammar(text: str, tokenizer: Any) -> Any:
    """Return a matcher at the beginning of an answer; it may be in an error state."""
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


class GrammarMatchers:
    """Answers that are being followed, each with its matcher."""

    def __init__(self, compile_text: Callable[[str], Any]) -> None:
        self._compile = compile_text
        self._compiled: Any = None
        #: By key: the matcher, and how many tokens it has seen.
        self._running: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def follow(self, asked: AdvanceGrammar) -> GrammarAdvanced:
        """Feed an answer's new tokens to its matcher; the tokens that may follow."""
        if asked.n_before == 0:
            if self._compiled is None:
                self._compiled = self._compile(asked.grammar)
            matcher = self._compiled.deep_copy()
        else:
            matcher, n_seen = self._running.get(asked.key, (None, -1))
            if n_seen != asked.n_before:
                return GrammarAdvanced("unknown")
        self._running.pop(asked.key, None)
        if matcher.is_error():
            return GrammarAdvanced("invalid", reason=_reason(matcher))
        if asked.tokens and not matcher.consume_tokens(list(asked.tokens)):
            # The library has one kind of error for a wrong token and for a limit of its own.
            left = "satisfy the grammar" in matcher.get_error()
            return GrammarAdvanced("left" if left else "invalid", reason=_reason(matcher))
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return GrammarAdvanced("invalid", reason=_reason(matcher))
        self._running[asked.key] = matcher, asked.n_before + len(asked.tokens)
        if len(self._running) > _MAX_MATCHERS:
            self._running.popitem(last=False)
        return GrammarAdvanced("mask", mask=mask)


def _reason(matcher: Any) -> str:
    """Say why a matcher stopped; the library's word for a dead end means nothing to a client."""
    if str(matcher.get_error()).startswith("NoExtension"):
        return _DEAD_END
    return str(matcher.get_error()).split("\n<")[0][:_SHOWN_CHARACTERS]
