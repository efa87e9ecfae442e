"""Check grammars in a child process: translate, compile, find traps, compute the first mask.

`halfmoon_sandbox` forks the process from a template that has loaded the model's tokenizer. The cost
of a client's grammar is unknown in advance, so the process may be killed at any moment.
"""

import os
import re
from collections.abc import Callable

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from halfmoon_conductor.grammar.compiled_rules import CompiledRules, describe_trap
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_SYMBOLS

_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS)
_SHOWN_CHARACTERS = 300
_STDERR = 2
#: The library's level of logging that has the compiled rules.
_LOG_RULES = 2
#: A rule's name, before its options and its colon.
_RULE_NAME = re.compile(r"^[ \t]*[?!]?([a-z_][\w-]*)[^:\n\"/]*:", re.MULTILINE)
_NO_BEGINNING = "matches no text that this model's tokens can write"


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
    problem = _compile_problem(grammar, tokenizer, from_client=check.from_client)
    return GrammarChecked(problem=problem) if problem else GrammarChecked(grammar=grammar)


def _compile_problem(
    grammar: str, tokenizer: llguidance.LLTokenizer | None, *, from_client: bool
) -> str:
    """Return the reason why no answer should begin with a grammar; empty: there is none."""
    if tokenizer is None:
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, limits=_LIMITS
        )
        return f"does not compile: {_first_lines(' '.join(messages))}" if failed else ""
    error, log = _compiled(grammar, tokenizer)
    if error:
        return f"does not compile: {_first_lines(error)}"
    if trap := CompiledRules(log).trap():
        names = _RULE_NAME.findall(grammar) if from_client else ()
        return describe_trap(trap, frozenset(names))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        if str(matcher.get_error()).startswith("NoExtension"):
            return _NO_BEGINNING
        return f"does not compile: {_first_lines(matcher.get_error())}"
    return "" if any(mask) else _NO_BEGINNING


def _compiled(grammar: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, str]:
    """Compile a grammar; return the library's error, if any, and its log, which has all rules.

    The library writes to standard error, which a file in memory stands in for meanwhile.
    """
    with os.fdopen(os.memfd_create("compiled_rules"), "w+b") as log:
        before = os.dup(_STDERR)
        os.dup2(log.fileno(), _STDERR)
        try:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=_LOG_RULES, limits=_LIMITS)
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
        log.seek(0)
        return matcher.get_error(), log.read().decode("utf-8", "replace")


def _first_lines(message: str) -> str:
    """Return the library's message without the lines that show the grammar."""
    return message.split("\n   1 |")[0].strip()[:_SHOWN_CHARACTERS]
