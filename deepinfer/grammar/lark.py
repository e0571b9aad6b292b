"""Users' Lark grammars: what is refused, and what is changed, before the library reads them.

The language is the library's variant of Lark.  Embedded schemas, ``%json {…}``, are prepared like schemas of their own.  A token
is named by id, ``<[7]>`` or ``<[7-9,12]>``, or by the spelling of a special token in angle brackets, ``<think>``.  Special tokens
that a grammar does not name are never allowed, whatever its regular expressions match.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from deepinfer.errors import RequestError, reason, shown
from deepinfer.grammar.json_schema import MAX_REGEX_BYTES, prepare
from deepinfer.grammar.nodes import MAX_RULES, line_and_column
from deepinfer.grammar.terminals import MAX_OPEN
from deepinfer.grammar.vocabulary import Vocabulary

_MAX_RANGE: Final = 4_096
_TOKEN: Final = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\s]+>)
    |(?P<command>%[a-z]+)
    |(?P<name>[!?_]*[A-Za-z][A-Za-z0-9_\-]*)(?P<after>\s*(?:\[[^\]\n]*\]\s*)?:(?!:)|\s*=)?
    |(?P<bar>\|)
    |(?P<other>@[A-Za-z0-9_\-]+)""",
    re.VERBOSE,
)
_REFUSED_OPTIONS: Final = ("max_tokens", "temperature", "stop", "stop_capture")
_OPTIONS: Final = ("no_forcing", "allow_initial_skip", "ignore_once")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLark:
    """A grammar for the library.

    Attributes:
        text: the grammar, with prepared schemas.
        token_ids: special tokens that it names, ascending.
    """

    text: str
    token_ids: tuple[int, ...]


def prepare_lark(text: str, vocabulary: Vocabulary) -> PreparedLark:
    """Check a grammar.

    Raises:
        RequestError: the grammar uses something that is refused.  The message names line and column.
    """
    return _Reader(text, vocabulary).read()


class _Reader:
    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self._named: set[int] = set()
        self._num_rules = 0
        self._num_alternatives = 0
        self._is_rule = False

    def read(self) -> PreparedLark:
        """Walk through the tokens of the grammar."""
        if self._text.lstrip().startswith("{"):  # the library would read it as its own list of grammars
            raise self._error(0, "it begins with {", "begin with a rule, such as start: …")
        made: list[str] = []
        at = copied = 0
        while found := _TOKEN.search(self._text, at):
            kind, at = found.lastgroup, found.end()
            if kind == "special":
                self._named.update(self._token_ids(found[0], found.start()))
            elif kind in ("name", "after"):
                self._check_name(found)
            elif kind == "regex" and len(found[0].encode()) > MAX_REGEX_BYTES:
                raise self._error(found.start(), f"a regex has more than {MAX_REGEX_BYTES} bytes", "shorten it")
            elif kind == "bar":
                self._check_bar(found.start())
            elif kind == "other":
                raise self._error(found.start(), f"{found[0]} names another grammar", "write its rules here")
            elif kind == "command" and found[0] in ("%json", "%llguidance", "%regex"):
                value, at = self._json(at)
                if found[0] == "%json":
                    made += [self._text[copied : found.end()], " ", self._schema(value, found.start())]
                    copied = at
                elif found[0] == "%llguidance":
                    self._check_options(value, found.start())
        made.append(self._text[copied:])
        return PreparedLark(text="".join(made), token_ids=tuple(sorted(self._named)))

    def _error(self, at: int, what: str, then: str) -> RequestError:
        return RequestError(f"the Lark grammar is refused at {line_and_column(self._text, at)}: {what}; {then}")

    def _check_name(self, found: re.Match[str]) -> None:
        name, after = found["name"], found["after"] or ""
        if after.endswith("=") and name in _REFUSED_OPTIONS:
            raise self._error(found.start(), f"the option {name} cannot be combined with drafts", "leave it out")
        for option in re.findall(r"[a-z_]+(?=\s*=)", after if after.endswith(":") else ""):
            if option in _REFUSED_OPTIONS:
                raise self._error(found.start(), f"the option {option} cannot be combined with drafts", "leave it out")
        if after.endswith(":"):
            self._num_rules += 1
            self._is_rule = not name.lstrip("!?_")[0].isupper()
        if self._num_rules > MAX_RULES:
            raise self._error(found.start(), f"there are more than {MAX_RULES} rules and terminals", "use fewer")

    def _check_bar(self, at: int) -> None:
        self._num_alternatives += self._is_rule
        if self._num_alternatives > MAX_OPEN:
            raise self._error(at, f"rules have more than {MAX_OPEN} alternatives", "use a terminal, whose name is in upper case")

    def _json(self, at: int) -> tuple[object, int]:
        start = len(self._text) - len(self._text[at:].lstrip())
        try:
            return json.JSONDecoder().raw_decode(self._text, start)
        except (ValueError, RecursionError) as error:
            raise self._error(at, f"the JSON here cannot be read ({reason(error)})", "correct it") from error

    def _schema(self, value: object, at: int) -> str:
        try:
            return prepare(value).text
        except RequestError as error:
            raise RequestError(f"in the Lark grammar at {line_and_column(self._text, at)}: {error}") from error

    def _check_options(self, value: object, at: int) -> None:
        for name in value if isinstance(value, dict) else [value]:
            if name not in _OPTIONS:
                raise self._error(at, f"the option {shown(name)} is not supported", f"use only {', '.join(_OPTIONS)}")

    def _token_ids(self, text: str, at: int) -> list[int]:
        """The special tokens among the tokens that ``<…>`` names."""
        if not text.startswith("<["):
            found = self._vocabulary.special_id(text)
            if found is None:
                raise self._error(at, f"{text} is not a special token", "name a token by id, such as <[7]>")
            ranges = [(found, found)]
        else:
            spans = re.fullmatch(r"<\[\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*\]>", text)
            if spans is None:
                raise self._error(at, f"{text} does not list token ids", "write ids and ranges, such as <[7-9,12]>")
            ends = [[int(each) for each in span.split("-")] for span in text[2:-2].split(",")]
            ranges = [(each[0], each[-1]) for each in ends]
        named = []
        for low, high in ranges:
            if high >= self._vocabulary.vocab_size or high - low > _MAX_RANGE:
                limit = f"ids below {self._vocabulary.vocab_size}, at most {_MAX_RANGE} in a range"
                raise self._error(at, f"{text} is outside the vocabulary or too wide", f"use {limit}")
            named += [each for each in range(low, high + 1) if each in self._vocabulary.special_ids]
        if self._vocabulary.eos_token_id in named:
            raise self._error(at, f"{text} names the end token, which is allowed where the grammar ends", "leave it out")
        return named
