"""Grammars of the model's tool calls.

A block of calls, where ``｜DSML｜`` is one special token::

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="get_weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    <｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A string stands as raw text, without quotes and escapes; other values are JSON.  Parameters come in the order of the schema.  The
mark is a token id in the grammar, so text that spells it is text.

Source: the vendor's package ``deepseek-recipe`` 0.2.0, which writes and reads these blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from llguidance import regex_to_lark

from deepinfer.errors import RequestError, shown
from deepinfer.grammar.json_schema import DATE, HOSTNAME, prepare, translate

DSML: Final = "｜DSML｜"
"""Spelling of the mark."""
_OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
_UNSUPPORTED: Final = ("allOf", "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "$ref", "enum", "const")
_NEWLINES: Final = r'("\n" "\n"?)?'
_TYPES: Final = ("null", "boolean", "number", "array", "object")
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_RAW_FORMATS: Final = {
    "date": DATE,
    "time": _TIME,
    "date-time": f"{DATE}[tT]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": HOSTNAME,
}
"""Formats of raw strings."""


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    *,
    dsml_id: int,
    choice: str = "required",
    parallel: bool = True,
    answer_schema: object = None,
    free_text_before: bool = False,
    is_opened: bool = False,
    loose: Collection[str] = (),
) -> str:
    """A Lark grammar of tool calls, for ``schema_type`` ``lark``.

    Args:
        tools: functions with ``name`` and ``parameters``, or such functions under ``function``.
        dsml_id: id of the token :data:`DSML`.
        choice: ``required`` or ``any`` for a call of any tool, ``auto`` for calls or an answer, or the name of the only tool.
        parallel: allow several calls in the block.
        answer_schema: with ``auto``, JSON schema of an answer in the place of the calls; None for free text, which may also stand
            before the calls.
        free_text_before: allow free text before calls that are required.
        is_opened: the prompt ends after the first line of the block.
        loose: names of the tools whose schemas are not enforced: any parameters, each of them well-formed.

    Raises:
        RequestError: a tool or an argument is not usable.
    """
    functions = [_function(each) for each in tools]
    names = [each["name"] for each in functions]
    if len(set(names)) < len(names):
        raise RequestError(f"two tools have the name {shown(next(each for each in names if names.count(each) > 1))}; rename one")
    if choice not in ("required", "any", "auto"):
        functions = [each for each in functions if each["name"] == choice]
    if not functions:
        raise RequestError(f"no tool matches the choice {shown(choice)}; use auto, required, any, or one of {', '.join(names)}")
    if answer_schema is not None and (choice != "auto" or free_text_before):
        raise RequestError("answer_schema needs the choice auto and no free_text_before: an answer stands in the place of calls")
    if is_opened and (choice == "auto" or free_text_before):
        raise RequestError("is_opened excludes the choice auto and free_text_before: the block has begun, so calls must follow")
    mark = f"<[{dsml_id}]>"
    lines: list[str] = []
    for number, each in enumerate(functions):
        lines += _loose_call(each, number, mark) if each["name"] in loose else _call(each, number, mark)
    if any(each["name"] in loose for each in functions):
        lines += _any_parameter(mark)
    calls = "(" + " | ".join(f"call{number}" for number in range(len(functions))) + ")" + ("+" if parallel else "")
    lines.append(f'calls: {calls} "</" {mark} " calls>"')
    opening = f'{mark} " calls>\\n" calls'
    if is_opened:
        start = "calls"
    elif choice == "auto" and answer_schema is not None:
        start = f'{_NEWLINES} "<" {opening} | answer'
        lines.append(f"answer: %json {_json(answer_schema, 'answer_schema')}")
    elif choice == "auto" or free_text_before:
        start = f"OPEN {opening}" + (" | TEXT?" if choice == "auto" else "")
        lines += ["OPEN: /(?s:.*)</", *(["TEXT: /(?s:.+)/"] if choice == "auto" else [])]
    else:
        start = f'{_NEWLINES} "<" {opening}'
    return "\n".join([f"start: {start}", *lines]) + "\n"


def _function(given: Mapping[str, Any]) -> Mapping[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"the tool {shown(given)} has no name; give a function with name and parameters")
    if not re.fullmatch(r"[a-zA-Z0-9_.:-]+", function["name"]):
        raise RequestError(f"the tool name {shown(function['name'])} is not usable; use letters, digits, '_', '-', '.' and ':'")
    return function


def _call(function: Mapping[str, Any], number: int, mark: str) -> Iterator[str]:
    """The rules of one tool."""
    name, given = function["name"], function.get("parameters")
    schema = {} if given is None else given
    if not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of the tool {name} are {shown(given)}; give an object schema")
    _json(schema, f"the parameters of the tool {name}")
    for key in _UNSUPPORTED:
        if key in schema:
            raise RequestError(
                f"the parameters of the tool {name} have {key} beside their names, which cannot be enforced; remove it"
            )
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    for each in required:
        if each not in properties:
            raise RequestError(f"the tool {name} requires the parameter {shown(each)}, which has no schema; add it to properties")
    parts = []
    for position, (key, each) in enumerate(properties.items()):
        if each is False:
            continue
        if not re.fullmatch(r'[^"<>\x00-\x1f]+', key):
            raise RequestError(f"the tool {name} has the parameter {shown(key)}, which cannot stand in quotes; rename it")
        rule = f"c{number}p{position}"
        parts.append(rule if key in required else f"{rule}?")
        values = _Values(schema, f"the parameter {shown(key)} of the tool {name}")
        values.add(each)
        yield from _parameter(rule, key, values, mark)
    body = " ".join(parts)
    if all(each.endswith("?") for each in parts):  # the model writes an empty line in a call without parameters
        body = f'({body} | "\\n")' if parts else '"\\n"?'
    yield _call_rule(name, number, body, mark)


def _call_rule(name: str, number: int, body: str, mark: str) -> str:
    head = _text(f' invoke name="{name}">\n')
    return f'call{number}: "<" {mark} {head} {body} "</" {mark} " invoke>\\n"'


def _loose_call(function: Mapping[str, Any], number: int, mark: str) -> Iterator[str]:
    """The rule of one tool whose schema is not enforced."""
    yield _call_rule(function["name"], number, r'(any+ | "\n"?)', mark)


def _any_parameter(mark: str) -> Iterator[str]:
    """The rules of a parameter of any name and value."""
    name, raw, value = (_text(each) for each in (' parameter name="', '" string="true">', '" string="false">'))
    yield f'any: "<" {mark} {name} ANYNAME ({raw} ANYTEXT | {value} anyj "</") {mark} " parameter>\\n"'
    yield "anyj: %json {}"
    yield r'ANYNAME: /[^"<>\x00-\x1f]+/'
    yield 'ANYTEXT: /(?s:.*)/ "</"'


def _parameter(rule: str, key: str, values: _Values, mark: str) -> Iterator[str]:
    """The rules of one parameter: raw text, JSON, or either of them."""
    kinds = []
    for is_raw in (True, False):
        head = _text(f' parameter name="{key}" string="{str(is_raw).lower()}">')
        if is_raw and values.raw:
            kinds.append(f"{head} {rule.upper()}")
            yield f'{rule.upper()}: ({" | ".join(values.raw)}) "</"'
        elif not is_raw and values.schemas:
            schema = values.schemas[0] if len(values.schemas) == 1 else {"anyOf": values.schemas}
            kinds.append(f'{head} {rule}j "</"')
            definitions = values.definitions if '"$ref"' in json.dumps(schema) else {}
            yield f"{rule}j: %json {_json({**schema, **definitions}, values.place)}"
    yield f'{rule}: "<" {mark} ({" | ".join(kinds)}) {mark} " parameter>\\n"'


class _Values:
    """The values of one parameter, divided into strings, which are raw, and others, which are JSON.

    Attributes:
        raw: Lark expressions of the strings.
        schemas: schemas of the other values.
        definitions: ``$defs`` and ``definitions`` that the schemas may refer to.
    """

    def __init__(self, root: Mapping[str, Any], place: str) -> None:
        self.raw: list[str] = []
        self.schemas: list[dict[str, Any]] = []
        self.place = place
        self.definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._names: set[str] = set()

    def add(self, schema: object) -> None:
        """Add the values of a schema."""
        if schema is True:
            schema = {}
        assert isinstance(schema, Mapping), "prepare() checked it"
        if "$ref" in schema:
            self._add_target(schema)
            return
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._add_members(schema, key)
                return
        given = schema.get("type")
        types = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else ["string", *_TYPES]
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if "string" in types:
            if "allOf" in schema:
                raise RequestError(f"{self.place} has allOf, which cannot be enforced for raw text; join its schemas")
            strings = None if values is None else [each for each in values if isinstance(each, str)]
            if strings is None or strings:
                self.raw.append(self._raw(schema, strings))
        others = [each for each in types if each != "string"]
        if values is not None and others:
            rest = [each for each in values if not isinstance(each, str)]
            if rest:
                self.schemas.append({**_without(schema, "const"), "enum": rest, **({"type": others} if given else {})})
        elif others:
            self.schemas.append({**schema, "type": others[0] if len(others) == 1 else others})

    def _add_target(self, schema: Mapping[str, Any]) -> None:
        steps = schema["$ref"].split("/")
        target: Any = self.definitions
        for step in steps[1:] if steps[0] == "#" else [""]:
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping | bool):
            raise RequestError(f"{self.place} has the $ref {shown(schema['$ref'])}; refer to an entry of $defs")
        if schema["$ref"] in self._names:
            raise RequestError(f"{self.place} refers to itself without a value in between; remove the $ref")
        self._names.add(schema["$ref"])
        self.add(target)

    def _add_members(self, schema: Mapping[str, Any], key: str) -> None:
        beside = [each for each in schema if each not in (key, "title", "description", "default", "examples")]
        if beside:
            raise RequestError(
                f"{self.place} has {beside[0]} beside {key}, which cannot be enforced for raw text; move it inside"
            )
        before = len(self.raw), len(self.schemas)
        for each in schema[key]:
            if each is not False:
                self.add(each)
        if key == "oneOf" and len(self.raw) > before[0] + 1:
            raise RequestError(f"{self.place} has oneOf with several strings, which may overlap; use anyOf")
        if key == "oneOf" and len(self.schemas) > before[1] + 1:
            self.schemas[before[1] :] = [{"oneOf": self.schemas[before[1] :]}]

    def _raw(self, schema: Mapping[str, Any], strings: list[str] | None) -> str:
        """A Lark expression of raw strings."""
        parts = ["/(?s:.*)/"] if strings is None else ["(" + " | ".join(map(_text, dict.fromkeys(strings))) + ")"]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            parts.append(f"/(?s:.{{{int(least)},{'' if most is None else int(most)}}})/")
        if "pattern" in schema:
            parts.append(f"/{regex_to_lark(_search(translate(schema['pattern'])), 'dw')}/")
        form = schema.get("format")
        if form in _RAW_FORMATS:
            parts.append(f"/{regex_to_lark(_RAW_FORMATS[form], '')}/")
        elif form in ("email", "uri", "ipv6", "duration"):
            raise RequestError(f"{self.place} has the format {form}, which cannot be enforced for raw text; use a pattern")
        return "(" + " & ".join(parts) + ")"


def _search(pattern: str) -> str:
    """An expression for whole texts in which ``pattern`` is found."""
    options, depth, start, in_class = [], 0, 0, False
    for found in re.finditer(r"\\.|[\[\]()|]", pattern, re.DOTALL):
        char = found[0]
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and depth == 0:
            options.append(pattern[start : found.start()])
            start = found.end()
        else:
            depth += (char == "(") - (char == ")")
    options.append(pattern[start:])
    made = []
    for each in options:
        begin = "" if each.startswith("^") else "(?s:.*)"
        is_end = each.endswith("$") and (len(each) - len(each[:-1].rstrip("\\"))) % 2 == 1
        made.append(f"{begin}(?:{each.removeprefix('^')[: -1 if is_end else None]}){'' if is_end else '(?s:.*)'}")
    return "|".join(made)


def _json(schema: object, place: str) -> str:
    """A schema in JSON, after a check that names the place."""
    text = json.dumps(schema)
    try:
        prepare(text)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    return text


def _without(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _text(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)
