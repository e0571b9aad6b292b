"""Terminals of a grammar, and the grammar in the library's Lark syntax.

The library reads text in two stages: regular expressions cut the text into terminals, and rules combine terminals.  A terminal
always takes as much text as it can, so ``[a-z]+ "end"`` as two terminals never matches.  This module therefore chooses terminals
so that the cut never matters:

* Rules without recursion are regular.  They become one regular expression.
* In recursive rules each regular part becomes a terminal: a text, a repetition, a group or another rule.  Terminals are safe if
  none can continue where another one may end and the rules may continue with the same character.  Terminals that are not safe are
  divided into single characters, where no cut is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Final

from deepinfer.errors import RequestError
from deepinfer.grammar.nodes import EMPTY, Alt, Chars, Node, Ranges, Ref, Repeat, Seq, Term, alt, children, refs, seq
from deepinfer.grammar.pace import pace

MAX_WORK: Final = 400_000
"""Steps of the analysis; a grammar that needs more is refused.  They take 1 s."""
_MAX_POSITIONS: Final = 1_000
_MAX_PAIRS: Final = 100_000
"""Limits of the proof that terminals are safe; without a proof they are divided."""
MAX_OPEN: Final = 2_000
"""Limit of the alternatives that may begin at one place, outside terminals."""
_MAX_NESTING: Final = 8
"""Nested groups in one line of the output; deeper groups get names, because the library limits them."""


def to_lark(rules: dict[str, Node]) -> str:
    """The Lark grammar of rules that start with ``root``; every rule that is named must exist.

    Raises:
        RequestError: a rule never ends, or the grammar is too complex.

    Cost: linear for usual grammars, at most :data:`MAX_WORK` steps.
    """
    return _Converter(rules).lark()


class _Converter:
    """Chooses terminals and writes Lark."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._work = 0
        self._users: dict[str, list[str]] = {name: [] for name in rules}
        for name, node in rules.items():
            for used in set(refs(node)):
                self._users[used].append(name)
        self._check_ends()
        self._regular = self._regular_rules()
        self._nullable_regular: dict[str, bool] = {}
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._terminals: dict[Node, str] = {}
        self._terminals_of_rules: dict[str, str] = {}
        self._lines: list[str] = []

    def _spend(self, steps: int = 1) -> None:
        pace()
        self._work += steps
        if self._work > MAX_WORK:
            raise RequestError("the EBNF grammar is too complex; use fewer rules, and repetitions in the place of recursion")

    def _check_ends(self) -> None:
        """Refuse a rule that only endless text satisfies."""
        ending: set[str] = set()
        todo = list(self._rules)
        while todo:
            name = todo.pop()
            self._spend()
            if name not in ending and self._ends(self._rules[name], ending):
                ending.add(name)
                todo.extend(self._users[name])
        for name in self._rules:
            if name not in ending:
                raise RequestError(
                    f"the rule {name} of the EBNF grammar never ends; add an alternative that does not need {name}"
                )

    def _ends(self, node: Node, ending: set[str]) -> bool:
        self._spend()
        if isinstance(node, Ref):
            return node.name in ending
        if isinstance(node, Repeat) and node.least == 0:
            return True
        inner = (self._ends(each, ending) for each in children(node))
        return any(inner) if isinstance(node, Alt) else all(inner)

    def _regular_rules(self) -> dict[str, None]:
        """Rules that reach no recursion; each stands after the rules that it uses."""
        missing = {name: set(refs(node)) for name, node in self._rules.items()}
        made: dict[str, None] = {}
        ready = [name for name, used in missing.items() if not used]
        while ready:
            name = ready.pop()
            made[name] = None
            for user in self._users[name]:
                self._spend()
                missing[user].discard(name)
                if not missing[user]:
                    ready.append(user)
        return made

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in refs(node))

    def _is_nullable(self, node: Node) -> bool:
        """Whether a regular node matches the empty text."""
        self._spend()
        if isinstance(node, Ref):
            if node.name not in self._nullable_regular:
                for name in self._regular:  # in order, so that no recursion goes through rules
                    if name not in self._nullable_regular:
                        self._nullable_regular[name] = self._is_nullable(self._rules[name])
            return self._nullable_regular[node.name]
        if isinstance(node, Chars):
            return False
        if isinstance(node, Repeat):
            return node.least == 0 or self._is_nullable(node.item)
        inner = (self._is_nullable(each) for each in children(node))
        return any(inner) if isinstance(node, Alt) else all(inner)

    # The recursive part.

    def lark(self) -> str:
        """The grammar in Lark."""
        if "root" in self._regular:
            self._lines.append("start: " + self._terminal_of_rule("root"))
            return "\n".join(self._lines) + "\n"
        divided: set[Node] = set()
        grammar = self._lowered(divided)
        while unsafe := _Safety(grammar, self._rules, self._spend).unsafe_terminals():
            divided |= unsafe
            grammar = self._lowered(divided)
        self._check_rows(grammar)
        for name, node in grammar.items():
            self._lines.append(f"{self._rule_name(name)}: {self._text(node, is_rule=True)}")
        self._lines.append("start: " + self._rule_name("root"))
        return "\n".join(self._lines) + "\n"

    def _check_rows(self, grammar: dict[str, Node]) -> None:
        """Refuse a grammar in which too many alternatives are open at one place.

        The library compares each of them with all others, so 12,000 of them take a second for one token.
        """
        nullable: set[str] = set()

        def walk(node: Node, found: set[str]) -> bool:
            """Collect the rules that may begin a node; returns whether the node is nullable."""
            self._spend()
            if isinstance(node, Term | Chars):
                return False
            if isinstance(node, Ref):
                found.add(node.name)
                return node.name in nullable
            if isinstance(node, Alt):
                empty = [walk(each, found) for each in node.options]  # all of them, to collect their rules
                return any(empty)
            if isinstance(node, Repeat):
                return walk(node.item, found) or node.least == 0
            return all(walk(each, found) for each in children(node))

        before = -1
        while len(nullable) != before:
            before = len(nullable)
            for name, node in reversed(grammar.items()):  # rules stand after those that use them
                if walk(node, set()):
                    nullable.add(name)
        begins: dict[str, set[str]] = {name: set() for name in grammar}
        sizes = {}
        for name, node in grammar.items():
            walk(node, begins[name])
            sizes[name] = _num_alternatives(node)
        for name in grammar:
            open_rules, waiting = {name}, [name]
            while waiting:
                self._spend()
                fresh = begins[waiting.pop()] - open_rules
                open_rules |= fresh
                waiting.extend(fresh)
            if sum(sizes[each] for each in open_rules) > MAX_OPEN:
                rule = name.removesuffix("/")
                raise RequestError(
                    f"the EBNF grammar has more than {MAX_OPEN} alternatives where the rule {rule} begins; "
                    "use fewer, or texts and classes without recursion"
                )

    def _lowered(self, divided: set[Node]) -> dict[str, Node]:
        """The recursive rules that ``root`` reaches, with terminals; nodes in ``divided`` are divided into characters.

        A regular rule that is divided gets a name with a ``/``.
        """
        made: dict[str, Node] = {}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name in made:
                continue
            own = name.removesuffix("/")
            made[name] = self._divide(self._rules[own]) if name != own else self._lower(self._rules[own], divided)
            waiting.extend(self._used(made[name]))
        return made

    def _used(self, node: Node) -> Iterator[str]:
        """The rules that a lowered node names outside its terminals."""
        self._spend()
        if isinstance(node, Ref):
            yield node.name
        elif not isinstance(node, Term):
            for each in children(node):
                yield from self._used(each)

    def _lower(self, node: Node, divided: set[Node]) -> Node:
        self._spend()
        if self._is_regular(node):
            return self._term(node, divided)
        if isinstance(node, Seq):
            items: list[Node] = []
            for is_text, run in groupby(node.items, lambda each: isinstance(each, Chars)):
                parts = list(run)
                items.extend([self._term(seq(parts), divided)] if is_text else [self._lower(each, divided) for each in parts])
            return seq(items)
        if isinstance(node, Alt):
            return alt(self._lower(each, divided) for each in node.options)
        if isinstance(node, Repeat):
            return Repeat(self._lower(node.item, divided), node.least, node.most)
        return node

    def _term(self, node: Node, divided: set[Node]) -> Node:
        if node == EMPTY:
            return EMPTY
        if node in divided:
            return self._divide(node)
        return Repeat(Term(node), 0, 1) if self._is_nullable(node) else Term(node)

    def _divide(self, node: Node) -> Node:
        """A regular node as rules over single characters."""
        self._spend()
        if isinstance(node, Chars):
            return Term(node)
        if isinstance(node, Seq):
            return seq(self._divide(each) for each in node.items)
        if isinstance(node, Alt):
            return alt(self._divide(each) for each in node.options)
        if isinstance(node, Repeat):
            return Repeat(self._divide(node.item), node.least, node.most)
        assert isinstance(node, Ref)
        return Ref(node.name + "/")

    # Writing.

    def _rule_name(self, name: str) -> str:
        return f"{'d' if name.endswith('/') else 'r'}{self._numbers[name.removesuffix('/')]}"

    def _terminal_of_rule(self, name: str) -> str:
        """The terminal of a regular rule; rules that it uses come first, so no recursion goes through rules."""
        if name in self._terminals_of_rules:
            return self._terminals_of_rules[name]
        needed, waiting = {name}, [name]
        while waiting:
            for each in refs(self._rules[waiting.pop()]):
                if each not in needed:
                    needed.add(each)
                    waiting.append(each)
        for each in self._regular:
            node = self._rules[each]
            if each in needed and each not in self._terminals_of_rules:
                text = self._text(node, is_rule=False)
                self._terminals_of_rules[each] = f"R{self._numbers[each]}"
                self._lines.append(f"R{self._numbers[each]}: {text}")
        return self._terminals_of_rules[name]

    def _text(self, node: Node, *, is_rule: bool, depth: int = 0) -> str:
        """A node in Lark: the body of a rule, or of a terminal."""
        self._spend()
        if isinstance(node, Term):
            return self._terminal(node.node)
        if isinstance(node, Chars):
            return f"/{_class(node.ranges)}/"
        if isinstance(node, Ref):
            return self._rule_name(node.name) if is_rule else self._terminal_of_rule(node.name)
        if depth > _MAX_NESTING and children(node):
            return self._named(node, is_rule=is_rule)
        if isinstance(node, Repeat):
            inner = self._text(node.item, is_rule=is_rule, depth=depth + 1)
            count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
            most = "" if node.most is None else node.most
            return f"({inner}){count or f'{{{node.least},{most}}}'}"
        if isinstance(node, Alt):
            return "(" + " | ".join(self._text(each, is_rule=is_rule, depth=depth + 1) for each in node.options) + ")"
        parts: list[str] = []
        text = ""
        for each in node.items:
            if isinstance(each, Chars):
                text += _class(each.ranges)
                continue
            if text:
                parts.append(f"/{text}/")
                text = ""
            parts.append(self._text(each, is_rule=is_rule, depth=depth + 1))
        if text:
            parts.append(f"/{text}/")
        return "(" + " ".join(parts) + ")" if parts else '""'

    def _named(self, node: Node, *, is_rule: bool) -> str:
        name = f"{'g' if is_rule else 'G'}{len(self._lines)}"
        at = len(self._lines)
        self._lines.append("")
        self._lines[at] = f"{name}: {self._text(node, is_rule=is_rule)}"
        return name

    def _terminal(self, node: Node) -> str:
        """The name or text of a terminal, which does not match the empty text."""
        if isinstance(node, Chars):
            return f"/{_class(node.ranges)}/"
        if node not in self._terminals:
            body = self._text(node, is_rule=False)
            name = f"T{len(self._terminals)}"
            self._terminals[node] = name
            self._lines.append(f"{name}: {body}{' & /(?s:.+)/' if self._is_nullable(node) else ''}")
        return self._terminals[node]


def _class(ranges: Ranges) -> str:
    """A character or a class in the syntax of regular expressions."""

    def code(value: int) -> str:
        char = chr(value)
        return char if char.isascii() and char.isalnum() else rf"\x{{{value:X}}}"

    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return code(ranges[0][0])
    return "[" + "".join(code(low) if low == high else f"{code(low)}-{code(high)}" for low, high in ranges) + "]"


def _num_alternatives(node: Node) -> int:
    """Alternatives in a node, outside its terminals."""
    made, waiting = 1, [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Alt):
            made += len(each.options)
        if not isinstance(each, Term):
            waiting.extend(children(each))
    return made


class _TooLarge(Exception):
    """The proof that terminals are safe needs too many steps."""


class _Safety:
    """Finds terminals that can take text which belongs to what follows another terminal.

    Sets of characters are the bits of a number, one for each class of characters that the grammar distinguishes.  A terminal is
    an automaton without empty steps: each occurrence of a class in it is a position.

    Source: Glushkov's construction; FIRST and FOLLOW of context-free grammars.
    """

    def __init__(self, grammar: dict[str, Node], rules: dict[str, Node], spend: Callable[[int], None]) -> None:
        self._grammar = grammar
        self._rules = rules
        self._spend = spend
        self._terms: dict[Node, int] = {}
        for body in grammar.values():
            waiting = [body]
            while waiting:
                node = waiting.pop()
                spend(1)
                if isinstance(node, Term):
                    self._terms.setdefault(node.node, len(self._terms))
                else:
                    waiting.extend(children(node))
        self._bounds = self._alphabet()
        self._chars: list[int] = []
        self._next: list[list[int]] = []
        self._begins: list[list[int]] = []
        self._ends: list[set[int]] = []

    def unsafe_terminals(self) -> set[Node]:
        """Terminals of more than one character that may take too much; all such terminals if there is no proof."""
        divisible = [node for node in self._terms if not isinstance(node, Chars)]
        if not divisible:
            return set()
        try:
            for node in self._terms:
                _, begins, ends = self._automaton(node)
                self._begins.append(begins)
                self._ends.append(set(ends))
            greedy = self._overtaking(self._follow())
        except (_TooLarge, RecursionError):  # rules may name each other in a long chain
            return set(divisible)
        return {node for node in divisible if self._terms[node] in greedy}

    def _alphabet(self) -> list[int]:
        """The code points where a new class of characters begins."""
        bounds = {0}
        seen: set[str] = set()
        waiting: list[Node] = list(self._terms)
        while waiting:
            node = waiting.pop()
            self._spend(1)
            if isinstance(node, Chars):
                bounds.update(each for low, high in node.ranges for each in (low, high + 1))
            elif isinstance(node, Ref) and node.name not in seen:
                seen.add(node.name)
                waiting.append(self._rules[node.name])
            waiting.extend(children(node))
        return sorted(bounds)

    def _bits(self, ranges: Ranges) -> int:
        made = 0
        for low, high in ranges:
            made |= (1 << bisect_left(self._bounds, high + 1)) - (1 << bisect_left(self._bounds, low))
        return made

    def _automaton(self, node: Node) -> tuple[bool, list[int], list[int]]:
        """Add the positions of a regular node; returns whether it is nullable, its first and its last positions."""
        if isinstance(node, Chars):
            if len(self._chars) >= _MAX_POSITIONS:
                raise _TooLarge
            self._chars.append(self._bits(node.ranges))
            self._next.append([])
            at = len(self._chars) - 1
            return False, [at], [at]
        if isinstance(node, Ref):
            return self._automaton(self._rules[node.name])
        if isinstance(node, Alt):
            parts = [self._automaton(each) for each in node.options]
            return any(p[0] for p in parts), [b for p in parts for b in p[1]], [e for p in parts for e in p[2]]
        if isinstance(node, Repeat):
            times = node.least + 1 if node.most is None else node.most
            if times > _MAX_POSITIONS:
                raise _TooLarge
            made: tuple[bool, list[int], list[int]] = (True, [], [])
            for number in range(times):
                nullable, begins, ends = self._automaton(node.item)
                if node.most is None and number == times - 1:
                    self._link(ends, begins)
                made = self._joined(made, (nullable or number >= node.least, begins, ends))
            return made
        made = (True, [], [])
        for each in children(node):
            made = self._joined(made, self._automaton(each))
        return made

    def _joined(
        self, left: tuple[bool, list[int], list[int]], right: tuple[bool, list[int], list[int]]
    ) -> tuple[bool, list[int], list[int]]:
        self._link(left[2], right[1])
        begins = left[1] + right[1] if left[0] else left[1]
        ends = left[2] + right[2] if right[0] else right[2]
        return left[0] and right[0], begins, ends

    def _link(self, ends: list[int], begins: list[int]) -> None:
        if len(ends) * len(begins) > _MAX_PAIRS:
            raise _TooLarge
        self._spend(len(ends) * len(begins) // 16)
        for each in ends:
            self._next[each].extend(begins)

    def _follow(self) -> list[int]:
        """The characters that may follow each terminal."""
        nullable: dict[str, bool] = dict.fromkeys(self._grammar, False)
        first: dict[str, int] = dict.fromkeys(self._grammar, 0)
        users: dict[str, set[str]] = {name: set() for name in self._grammar}

        def start(node: Node, user: str) -> tuple[bool, int]:
            self._spend(1)
            if isinstance(node, Term):
                made = 0
                for position in self._begins[self._terms[node.node]]:
                    made |= self._chars[position]
                return False, made
            if isinstance(node, Ref):
                users[node.name].add(user)
                return nullable[node.name], first[node.name]
            if isinstance(node, Repeat):
                inner = start(node.item, user)
                return node.least == 0 or inner[0], inner[1]
            is_alt = isinstance(node, Alt)
            empty, bits = not is_alt, 0
            for each in children(node):
                inner = start(each, user)
                if is_alt:
                    empty, bits = empty or inner[0], bits | inner[1]
                elif empty:
                    empty, bits = inner[0], bits | inner[1]
            return empty, bits

        todo = list(self._grammar)
        while todo:
            name = todo.pop()
            found = start(self._grammar[name], name)
            if found != (nullable[name], first[name]):
                nullable[name], first[name] = found
                todo.extend(users[name])

        follow = [0] * len(self._terms)
        after: dict[str, int] = dict.fromkeys(self._grammar, 0)

        def spread(node: Node, bits: int) -> None:
            self._spend(1)
            if isinstance(node, Term):
                follow[self._terms[node.node]] |= bits
            elif isinstance(node, Ref):
                if after[node.name] | bits != after[node.name]:
                    after[node.name] |= bits
                    todo.append(node.name)
            elif isinstance(node, Repeat):
                spread(node.item, bits if node.most == 1 else bits | start(node.item, "")[1])
            elif isinstance(node, Alt):
                for each in node.options:
                    spread(each, bits)
            else:
                for part in reversed(children(node)):
                    spread(part, bits)
                    empty, own = start(part, "")
                    bits = own | bits if empty else own

        todo = list(self._grammar)
        while todo:
            name = todo.pop()
            spread(self._grammar[name], after[name])
        return follow

    def _overtaking(self, follow: list[int]) -> set[int]:
        """Terminals that may continue where another terminal, or the same one, ends before a character that may follow it."""
        owners: dict[int, int] = {}
        for term, begins in enumerate(self._begins):
            reached = list(begins)
            while reached:
                at = reached.pop()
                if at not in owners:
                    owners[at] = term
                    reached.extend(self._next[at])
        begins = [each for term in self._begins for each in term]
        pairs = {(short, long) for short in begins for long in begins if self._chars[short] & self._chars[long]}
        if len(begins) ** 2 > _MAX_PAIRS:
            raise _TooLarge
        waiting = list(pairs)
        made: set[int] = set()
        while waiting:
            short, long = waiting.pop()
            after = follow[owners[short]] if short in self._ends[owners[short]] else 0
            for longer in self._next[long]:
                if self._chars[longer] & after:
                    made.add(owners[longer])
                for shorter in self._next[short]:
                    pair = (shorter, longer)
                    if self._chars[shorter] & self._chars[longer] and pair not in pairs:
                        if len(pairs) > _MAX_PAIRS:
                            raise _TooLarge
                        pairs.add(pair)
                        waiting.append(pair)
        return made
