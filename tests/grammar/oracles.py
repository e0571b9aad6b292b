"""Judges of texts that share no code with the library of grammars."""

from deepinfer.grammar.ebnf import _Reader
from deepinfer.grammar.nodes import Alt, Chars, Ref, Repeat, Seq


def ebnf_accepts(grammar, text):
    """Whether a text is in the language of an EBNF grammar: sets of ends, grown until nothing changes."""
    return len(text) in _Ends(_Reader(grammar).rules(), text).of("root")


class _Ends:
    def __init__(self, rules, text):
        self._rules = rules
        self._text = text
        self._found = {}

    def of(self, name):
        """Where a match of a rule that begins at 0 may end."""
        before = None
        self._walk(Ref(name), 0)
        while before != self._found:
            before = {key: set(ends) for key, ends in self._found.items()}
            for rule, start in before:
                self._found[rule, start] |= self._walk(self._rules[rule], start)
        return self._found[name, 0]

    def _walk(self, node, start):
        if isinstance(node, Chars):
            fits = start < len(self._text) and any(low <= ord(self._text[start]) <= high for low, high in node.ranges)
            return {start + 1} if fits else set()
        if isinstance(node, Ref):
            return self._found.setdefault((node.name, start), set())
        if isinstance(node, Alt):
            return set().union(*(self._walk(each, start) for each in node.options))
        if isinstance(node, Seq):
            ends = {start}
            for each in node.items:
                ends = set().union(*(self._walk(each, at) for at in ends))
            return ends
        assert isinstance(node, Repeat)
        ends, seen = {start}, set()
        made = {start} if node.least == 0 else set()
        count = 0
        while ends and (node.most is None or count < node.most) and not (count >= node.least and ends <= seen):
            seen |= ends if count >= node.least else set()
            ends = set().union(*(self._walk(node.item, at) for at in ends))
            count += 1
            made |= ends if count >= node.least else set()
        return made
