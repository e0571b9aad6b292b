"""EBNF as its users write it, converted to the library's Lark syntax.

The dialect::

    root ::= "a" [b-d]+ rest?      # the grammar starts with root
    rest ::= | "(" root ")" | 'x'{2,3}

A rule continues over lines until the next ``name ::=``.  Texts stand in double or single quotes; a class has ranges and may be
negated.  ``*``, ``+``, ``?``, ``{m}``, ``{m,}``, ``{,n}`` and ``{m,n}`` repeat.  Alternatives may be empty.  The escapes are
``\\n``, ``\\t``, ``\\r``, ``\\xHH``, ``\\uHHHH``, ``\\UHHHHHHHH``,
``\\u{H…}`` and a backslash before punctuation.  Lookahead,
``(= …)``, is refused.

Place in the flow: the compiler converts with it.  No library of grammars is used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from deepinfer.errors import RequestError
from deepinfer.grammar.json_schema import MAX_COUNT, MAX_DEPTH
from deepinfer.grammar.nodes import EMPTY, MAX_RULES, Alt, Chars, Node, Ranges, Ref, Repeat, Seq, alt, line_and_column, refs, seq
from deepinfer.grammar.terminals import to_lark

_LAST_CODE: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)


def convert(text: str) -> str:
    """The Lark grammar of an EBNF grammar.

    Raises:
        RequestError: the grammar has a syntax error, names an unknown rule, has a rule that never ends, or exceeds a limit.  The
            message names line and column.

    Cost: see :func:`deepinfer.grammar.terminals.to_lark`.
    """
    rules = {name: _without_linear_recursion(name, node) for name, node in _Reader(text).rules().items()}
    return to_lark(rules)


class _Reader:
    """Reads the text of a grammar."""

    _SKIP = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
    _NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
    _HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*::=")
    _COUNT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
    _CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,6})\}")
    _ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0", "e": "\x1b"}

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._places: dict[str, int] = {}

    def rules(self) -> dict[str, Node]:
        """Rule name -> its body, in the order of the text."""
        made: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            head = self._HEAD.match(self._text, self._at)
            if head is None:
                raise self._error("a rule must start with its name and ::=", "write name ::= …")
            if head[1] in made:
                raise self._error(f"the rule {head[1]} is defined twice", "join its alternatives with |")
            self._at = head.end()
            if len(made) == MAX_RULES:
                raise self._error(f"there are more than {MAX_RULES} rules", "use fewer")
            made[head[1]] = self._alternatives()
            if self._at < len(self._text) and self._text[self._at] == ")":
                raise self._error("a ) has no (", "remove it")
        if "root" not in made:
            raise RequestError("the EBNF grammar has no rule root, where it starts; add root ::= …")
        for name, at in self._places.items():
            if name not in made:
                self._at = at
                raise self._error(f"the rule {name} is not defined", f"add {name} ::= …, or put a text in quotes")
        return made

    def _error(self, what: str, then: str) -> RequestError:
        place = line_and_column(self._text, self._at)
        return RequestError(f"the EBNF grammar is wrong at {place}: {what}; {then}")

    def _skip(self) -> None:
        found = self._SKIP.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            options.append(self._sequence())
        return alt(options)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            self._skip()
            item = self._part()
            if item is None:
                return seq(items)
            self._skip()
            while (again := self._repeat(item)) is not None:
                item = again
                self._skip()
            items.extend(item.items if isinstance(item, Seq) else [item])

    def _part(self) -> Node | None:
        """The next part of a sequence; None at its end."""
        char = self._text[self._at : self._at + 1]
        if char in ("", "|", ")") or self._HEAD.match(self._text, self._at):
            return None
        if char in "\"'":
            return self._literal(char)
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        name = self._NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"{char!r} is not a part of a rule", "use a text in quotes, a class, a rule or a group")
        self._places.setdefault(name[0], self._at)
        self._at = name.end()
        return Ref(name[0])

    def _group(self) -> Node:
        start = self._at
        if self._text.startswith("(=", start):
            raise self._error("lookahead, (= …), cannot be enforced", "write what follows as a part of the rule")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH} levels", "give inner groups a rule")
        self._at += 1
        inner = self._alternatives()
        if not self._text.startswith(")", self._at):
            self._at = start
            raise self._error("a ( has no )", "add it")
        self._at += 1
        self._depth -= 1
        return inner

    def _repeat(self, item: Node) -> Node | None:
        char = self._text[self._at : self._at + 1]
        if char in ("*", "+", "?") and char:
            self._at += 1
            return EMPTY if item == EMPTY else Repeat(item, int(char == "+"), 1 if char == "?" else None)
        if char != "{":
            return None
        found = self._COUNT.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            raise self._error("a count must be {m}, {m,}, {,n} or {m,n}", "correct it")
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > MAX_COUNT:
            raise self._error(f"a count is above {MAX_COUNT}", "use a smaller one")
        if most is not None and most < least:
            raise self._error(f"the count {{{least},{most}}} is empty", "give the smaller number first")
        self._at = found.end()
        return EMPTY if most == 0 or item == EMPTY else Repeat(item, least, most)

    def _literal(self, quote: str) -> Node:
        start = self._at
        self._at += 1
        codes: list[int] = []
        while not self._text.startswith(quote, self._at):
            if self._at >= len(self._text) or self._text[self._at] == "\n":
                self._at = start
                raise self._error("a text has no closing quote", "add it, and write a new line as \\n")
            codes.append(self._character())
        self._at += 1
        return seq(Chars(((each, each),)) for each in codes)

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                self._at = start
                raise self._error("a class has no ]", "add it")
            low = high = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self._at >= len(self._text):
                    continue  # the class has no end
                high = self._character()
                if high < low:
                    raise self._error("a range ends before it begins", "give the smaller character first")
            ranges.append((low, high))
        self._at += 1
        wanted = _merged(ranges)
        found = _complement(_merged([*(wanted if is_negated else _complement(wanted)), _SURROGATES]))
        if not found:
            self._at = start
            raise self._error("a class contains no character", "add one")
        return Chars(found)

    def _character(self) -> int:
        char = self._text[self._at]
        if char != "\\":
            self._at += 1
            return ord(char)
        after = self._text[self._at + 1 : self._at + 2]
        code = self._CODE.match(self._text, self._at + 1)
        if code is not None:
            value = int(next(each for each in code.groups() if each), 16)
            if value > _LAST_CODE or _SURROGATES[0] <= value <= _SURROGATES[1]:
                raise self._error(f"{code[0]} is not a character", "use a code point of Unicode, without surrogates")
            self._at = code.end()
            return value
        if after in self._ESCAPES and after:
            self._at += 2
            return ord(self._ESCAPES[after])
        if not after or after.isalnum() or ord(after) > ord("~") or after < " ":
            raise self._error(
                f"the escape \\{after} is unknown", "use \\n, \\t, \\r, \\xHH, \\uHHHH or a backslash before punctuation"
            )
        self._at += 2
        return ord(after)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def _complement(ranges: Ranges) -> Ranges:
    made, low = [], 0
    for each in ranges:
        if low < each[0]:
            made.append((low, each[0] - 1))
        low = each[1] + 1
    return (*made, (low, _LAST_CODE)) if low <= _LAST_CODE else tuple(made)


def _without_linear_recursion(name: str, node: Node) -> Node:
    """A rule that names itself only at the end of alternatives, or only at their beginning, as a repetition."""
    options = [each.items if isinstance(each, Seq) else (each,) for each in (node.options if isinstance(node, Alt) else (node,))]
    own = Ref(name)
    for is_right in (True, False):
        loops: list[Node] = []
        ends: list[Node] = []
        for items in options:
            if items and items[-1 if is_right else 0] == own:
                loops.append(seq(items[:-1] if is_right else items[1:]))
            else:
                ends.append(seq(items))
        if loops and ends and name not in {used for each in (*loops, *ends) for used in refs(each)}:
            again = Repeat(alt(loops), 0, None)
            return seq([again, alt(ends)] if is_right else [alt(ends), again])
    return node
