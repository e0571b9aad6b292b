"""The parts of a grammar: what the EBNF reader makes, and what terminals are chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

MAX_RULES: Final = 2_000
"""Limit of the rules and terminals of a grammar; the library's reader recurses through them."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of ascending ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts in order; none is the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several alternatives."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``least`` to ``most`` times; ``most`` None is no limit."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """The text of a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Term:
    """A terminal: a regular part of a recursive rule."""

    node: Node


Node = Chars | Seq | Alt | Repeat | Ref | Term
EMPTY: Final = Seq(())


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly in a node."""
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Alt):
        return node.options
    if isinstance(node, Repeat | Term):
        return (node.item if isinstance(node, Repeat) else node.node,)
    return ()


def refs(node: Node) -> Iterator[str]:
    """The names of rules in a node."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Ref):
            yield each.name
        waiting.extend(children(each))


def seq(items: Iterable[Node]) -> Node:
    """Parts in order, without the empty ones; a single part is itself."""
    made = tuple(each for each in items if each != EMPTY)
    return made[0] if len(made) == 1 else Seq(made)


def alt(options: Iterable[Node]) -> Node:
    """Alternatives, each once; a single alternative is itself."""
    made = tuple(dict.fromkeys(options))
    return made[0] if len(made) == 1 else Alt(made)


def line_and_column(text: str, at: int) -> str:
    """Where a character of a grammar stands, for messages; both count from 1."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"
