"""Check grammars in a child process: translate, compile, and compute the first mask.

`halfmoon_sandbox` forks the process from a template that has loaded the model's tokenizer. The cost
of a client's grammar is unknown in advance, so the process may be killed at any moment.
"""

from collections.abc import Callable

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_SYMBOLS

_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS)
_SHOWN_CHARACTERS = 300


class CheckArgument(msgspec.Struct, frozen=True):
    """Settings of the template process."""

    #: Text of a ``tokenizer.json``; empty: grammars are compiled without tokens.
    tokenizer: str
    n_vocab: int
    eos_token_ids: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True):
    """A grammar to check."""

    text: str
    #: Whether a client wrote it: Lark, or GBNF (rules with ``::=``), which is translated.
    from_client: bool


class GrammarChecked(msgspec.Struct, frozen=True):
    """The result of `CheckGrammar`."""

    #: The grammar in Lark; empty if it can't be used.
    grammar: str = ""
    #: The reason why it can't be used.
    problem: str = ""


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Make a handler of `CheckGrammar` messages.

    Args:
        argument: a `CheckArgument` in MessagePack.
    """
    argument_ = msgspec.msgpack.decode(argument, type=CheckArgument)
    tokenizer = _tokenizer(argument_)
    decoder = msgspec.msgpack.Decoder(CheckGrammar)

    def handle(request: bytes) -> bytes:
        return msgspec.msgpack.encode(_check(decoder.decode(request), tokenizer))

    return handle


def _tokenizer(argument_: CheckArgument) -> llguidance.LLTokenizer | None:
    if not argument_.tokenizer or not argument_.eos_token_ids:
        return None
    try:
        return llguidance.LLTokenizer(
            argument_.tokenizer, n_vocab=argument_.n_vocab, eos_token=list(argument_.eos_token_ids)
        )
    except ValueError:  # workers find the same error and refuse such requests
        return None


def _check(check: CheckGrammar, tokenizer: llguidance.LLTokenizer | None) -> GrammarChecked:
    grammar = check.text
    if check.from_client:
        try:
            grammar = str(any_to_lark(grammar))
        except Exception as error:  # the translator raises many types
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
