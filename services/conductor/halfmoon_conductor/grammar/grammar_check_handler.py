"""The child process that checks grammars: translates, compiles, and makes the first mask.

`halfmoon_sandbox` forks it from a template that has read the model's tokenizer. What it costs
to check a text that a client chose is not known before: the process may be ended at any moment.
"""

from collections.abc import Callable

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_SYMBOLS

_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS)
_SHOWN_CHARACTERS = 300


class CheckArgument(msgspec.Struct, frozen=True):
    """What the template is made of."""

    #: Text of a ``tokenizer.json``; empty: grammars are compiled without tokens.
    tokenizer: str
    n_vocab: int
    eos_token_ids: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True):
    """Check this text."""

    text: str
    #: Whether a client wrote it: Lark, or GBNF (rules with ``::=``), which is translated.
    own: bool


class GrammarChecked(msgspec.Struct, frozen=True):
    """The answer to `CheckGrammar`."""

    #: In Lark; empty where it can't be used.
    grammar: str = ""
    #: Why it can't be used.
    problem: str = ""


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """A handler of `CheckGrammar` messages.

    Args:
        argument: a `CheckArgument`.
    """
    made = msgspec.msgpack.decode(argument, type=CheckArgument)
    tokenizer = _tokenizer(made)
    decoder = msgspec.msgpack.Decoder(CheckGrammar)

    def handle(request: bytes) -> bytes:
        return msgspec.msgpack.encode(_check(decoder.decode(request), tokenizer))

    return handle


def _tokenizer(made: CheckArgument) -> llguidance.LLTokenizer | None:
    if not made.tokenizer or not made.eos_token_ids:
        return None
    try:
        return llguidance.LLTokenizer(
            made.tokenizer, n_vocab=made.n_vocab, eos_token=list(made.eos_token_ids)
        )
    except ValueError:  # workers find the same and refuse by name
        return None


def _check(asked: CheckGrammar, tokenizer: llguidance.LLTokenizer | None) -> GrammarChecked:
    grammar = asked.text
    if asked.own:
        try:
            grammar = str(any_to_lark(grammar))
        except Exception as error:  # the translator raises what it likes
            return GrammarChecked(problem=f"can't be used: {str(error)[:_SHOWN_CHARACTERS]}")
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            return GrammarChecked(
                problem=f"makes a grammar of {len(grammar)} characters, over the "
                f"{MAX_GRAMMAR_CHARACTERS} that one may have"
            )
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if not failed and tokenizer is not None:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        failed, messages = matcher.is_error(), [matcher.get_error()]
    if failed:
        why = " ".join(messages).split("\n   1 |")[0].strip()[:_SHOWN_CHARACTERS]
        return GrammarChecked(problem=f"does not compile: {why}")
    return GrammarChecked(grammar=grammar)
