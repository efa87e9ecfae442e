"""Read the rules that the grammar library compiled, and find those that no finite text fulfils.

The library checks that a grammar compiles, not that an answer can end. A rule may need itself for
ever (``a: "x" a``, a schema that requires itself), or match nothing at all. A model that comes to
such a rule runs to its length, or has no next token. The library writes the compiled rules of any
grammar, schemas included, to its log:

      [3] [3]  (ExprRef ∅)                      pattern 3, which matches nothing
    Grammar:
    a               ⇦ [1] a                     a rule: pattern 1, then the rule itself
                    ⇦ ϵ                         or nothing
      == Optimize ==>                           the same again, with fewer rules

A symbol without a definition there counts as one that matches something.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

_PATTERN = re.compile(r"  (\[\d+\]) .*?  \((?:ExprRef )?(.*?)\)(?: \w+)*")
_NOTHING = ("∅", "NoMatch")
_ARROW = "⇦"
_EMPTY_TEXT = "ϵ"
_START = "start"
#: How the library names places of a schema.
_SCHEMA = "json-schema:///"
_MAX_SHOWN = 12


class CompiledRules:
    """The rules of one grammar, by the library's log of its compilation."""

    def __init__(self, log: str) -> None:
        patterns, _, rest = log.partition("Grammar:\n")
        #: Patterns that match no text.
        self._empty = {
            pattern[1]
            for line in patterns.splitlines()
            if (pattern := _PATTERN.fullmatch(line)) and pattern[2] in _NOTHING
        }
        #: Alternatives of each rule: sequences of rules and patterns.
        self._rules: defaultdict[str, list[Sequence[str]]] = defaultdict(list)
        name = ""
        for line in rest.partition("== Optimize")[0].splitlines():
            left, arrow, right = line.partition(_ARROW)
            if arrow:
                name = left.strip() or name
                self._rules[name].append([each for each in right.split() if each != _EMPTY_TEXT])
        self._ending = frozenset(self._find_ending())

    def trap(self) -> Sequence[str]:
        """Return symbols that need each other without an end, where an answer may come to them.

        The last one is a pattern that matches nothing, or occurs before. Empty: there is no trap.
        """
        if not self._ends(_START):
            return self._endless_path(_START)
        seen = {_START}
        stack = [_START]
        while stack:
            name = stack.pop()
            for symbols in self._rules.get(name, ()):
                for i, symbol in enumerate(symbols):
                    if not self._ends(symbol) and i > 0:
                        return self._endless_path(symbol)
                    if symbol not in seen:
                        seen.add(symbol)
                        stack.append(symbol)
                    # An alternative that can't begin is never chosen: what follows is not reached.
                    if not self._ends(symbol):
                        break
        return ()

    def _ends(self, symbol: str) -> bool:
        """Return whether some finite text fulfils a rule or pattern."""
        if symbol in self._rules:
            return symbol in self._ending
        return symbol not in self._empty

    def _endless_path(self, symbol: str) -> list[str]:
        path: list[str] = []
        while symbol not in path:
            path.append(symbol)
            if symbol not in self._rules:
                return path
            symbol = next(each for each in self._rules[symbol][0] if not self._ends(each))
        return [*path, symbol]

    def _find_ending(self) -> Iterator[str]:
        """Yield the rules that a finite text fulfils, in time of the grammar's size.

        A rule does once all symbols of one of its alternatives do: a least fixed point.
        """
        #: Alternatives that wait for a rule, once for each place where it stands.
        waiting: defaultdict[str, list[int]] = defaultdict(list)
        n_missing: list[int] = []
        owners: list[str] = []
        ready: list[str] = []
        for name, alternatives in self._rules.items():
            for symbols in alternatives:
                missing = [each for each in symbols if each in self._rules or each in self._empty]
                for each in missing:
                    waiting[each].append(len(owners))
                owners.append(name)
                n_missing.append(len(missing))
                if not missing:
                    ready.append(name)
        done: set[str] = set()
        while ready:
            name = ready.pop()
            if name in done:
                continue
            done.add(name)
            yield name
            for i in waiting[name]:
                n_missing[i] -= 1
                if n_missing[i] == 0:
                    ready.append(owners[i])


def describe_trap(path: Sequence[str], author_rules: frozenset[str]) -> str:
    """Say what is wrong with the rules of a trap, in the names that their author gave.

    Args:
        path: see `CompiledRules.trap`.
        author_rules: names of rules that the client wrote.
    """
    begin = path.index(path[-1])
    if begin == len(path) - 1:
        names = _author_names(path, author_rules)
        within = f" in {names[-1]}" if names else ""
        return f"has a pattern{within} that matches no text"
    names = _author_names(path[begin:], author_rules)
    shown = f": {' → '.join([*names, names[0]][-_MAX_SHOWN:])}" if names else ""
    return (
        f"has a part that needs itself without an end{shown}; no finite answer can have it. Make "
        "one step of that circle optional, or give it an alternative that ends"
    )


def _author_names(path: Sequence[str], author_rules: frozenset[str]) -> list[str]:
    """Return the author's names along a path, each once; the library made other rules itself."""
    found: dict[str, None] = {}
    for symbol in path:
        name = symbol.partition("#")[0]
        if "://" in symbol:
            found[symbol.removeprefix(_SCHEMA)] = None
        elif name in author_rules or (name := name.removesuffix("_")) in author_rules:
            found[name] = None
    return list(found)
