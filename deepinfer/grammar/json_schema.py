"""JSON schemas: what is checked before the library sees a schema, and what is changed in it.

:func:`prepare` refuses a schema that is too large, names a keyword that cannot be enforced, refers to another document, or cannot
be satisfied by a finite value.  The message names the place, for example ``#/properties/a/not``.  No keyword is dropped silently:
a keyword of JSON Schema is enforced or refused.  Names that JSON Schema does not define are annotations, and so are unknown
values of ``format``.

Strict: an object schema with ``properties`` or ``patternProperties`` and without ``additionalProperties`` allows no other names.
The parts of an object schema that is combined from several schemas (``allOf``; ``anyOf``, ``oneOf`` or ``$ref`` beside other
keywords) stay open, because each part must accept the names of the others; the combination is closed to the names of all parts.
An object schema with neither keyword accepts any object, and ``{}`` accepts any JSON value.

Place in the flow: the compiler and the tool calls prepare schemas with it.  No library of grammars is used here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from deepinfer.errors import RequestError, reason, shown
from deepinfer.grammar.pace import pace

MAX_SCHEMA_BYTES: Final = 256_000
"""Limit of the text of any grammar."""
MAX_DEPTH: Final = 60
"""Limit of nested arrays and objects in the text of a schema."""
MAX_PROPERTIES: Final = 2_000
"""Limit of the named properties of a schema, summed over all its objects."""
MAX_REGEX_BYTES: Final = 8_000
"""Limit of the text of one regular expression."""
MAX_COUNT: Final = 1_000_000
"""Limit of the bounds of lengths and counts."""
MAX_BLANKS: Final = 8

OPTIONS: Final = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""The library's options of a schema: at most eight blanks between two tokens of JSON, and no leniency."""

DATE: Final = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_LABEL: Final = r"[a-zA-Z0-9-](?:[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]*|-(?:[a-zA-Z0-9][a-zA-Z0-9-]*)?)?)?"
HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_FORMATS: Final[dict[str, dict[str, Any]]] = {
    "date-time": {"pattern": f"^{DATE}.[0-9:]{{6}}[0-5]"},
    "time": {"pattern": "^[0-9:]{6}[0-5]"},
    "date": {"pattern": f"^{DATE}$"},
    "hostname": {"pattern": f"^{HOSTNAME}$", "maxLength": 253},
    "duration": {}, "email": {}, "ipv4": {}, "ipv6": {}, "uuid": {}, "uri": {},
}  # fmt: skip
"""Values of ``format`` that are enforced, and what the library's own expression lacks.

A day must exist.  Leap seconds are refused, because they exist only at some times.  Internationalised labels (``xn--``) are
refused, because their decoded text has rules of its own.
"""
_JS_BLANKS: Final = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_JS_CLASSES: Final = {r"\s": f"[{_JS_BLANKS}]", r"\S": f"[^{_JS_BLANKS}]", ".": r"[^\n\r\u2028\u2029]"}
"""Parts of an ECMAScript expression that the library's syntax has with another meaning."""
_ONE: Final = ("items", "additionalItems", "additionalProperties")
_NAMED: Final = ("properties", "patternProperties")
_DEFINITIONS: Final = ("$defs", "definitions")
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_UNSUPPORTED: Final = (
    "not", "if", "contains", "propertyNames", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_WITHOUT_EFFECT: Final = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
"""Keywords that mean nothing without another one that is refused."""
_NEUTRAL: Final = {"uniqueItems": (False,), "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},)}
"""Values that demand nothing."""
_EXPLAINED: Final = ("oneOf", "pattern", "patternProperties", "minProperties", "maxProperties", "allOf")
"""Keywords that the library may refuse; it does not say where they are."""
_MAX_PLACES: Final = 3
_MAX_COMBINED: Final = 200_000
"""Limit of the steps from a schema to those it is combined from; they take 0.1 s."""

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSchema:
    """A schema for the library.

    Attributes:
        text: the schema in JSON, with the library's options.
        places: keyword -> the places where it stands, for messages.
    """

    text: str
    places: dict[str, list[str]]

    def explain(self, error: str, cause: str) -> str:
        """The library's reason for refusing this schema, with the places of the keywords that it names.

        Args:
            error: the library's whole message.
            cause: the part of it that says why.
        """
        text = cause
        if "oneOf" in error:
            text = (
                "oneOf with alternatives that may overlap cannot be enforced; use anyOf, or alternatives that differ in a const"
            )
        named = [name for name in _EXPLAINED if name in error or (name == "pattern" and "regex" in error)]
        places = [place for name in named for place in self.places.get(name, ())]
        if not places:
            return text
        rest = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
        return f"{text} (at {', '.join(places[:_MAX_PLACES])}{rest})"


def prepare(given: object) -> PreparedSchema:
    """Check a schema and make it strict.

    Args:
        given: the text of a schema, or a JSON value.

    Raises:
        RequestError: the schema cannot be read, exceeds a limit, or cannot be enforced.

    Cost: linear in the text; 256 kB take 0.1 s.
    """
    text = given if isinstance(given, str) else json.dumps(given)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        raise RequestError(f"the JSON schema has more than {MAX_SCHEMA_BYTES} bytes; shorten it")
    root = _parse(text)
    if root is False:
        raise RequestError("the JSON schema is false, so no value satisfies it; give a schema that some value satisfies")
    if root is True:
        root = {}
    if not isinstance(root, dict):
        raise RequestError(f"the JSON schema is {shown(root)}; give an object, true or false")
    document = _Document(root)
    document.check_endings()
    document.close()
    try:
        made = json.dumps({**root, "x-guidance": OPTIONS}, allow_nan=False)
    except ValueError as error:
        raise RequestError("the JSON schema has a number that is too large for a double; use a smaller number") from error
    return PreparedSchema(text=made, places=document.places)


def _parse(text: str) -> Any:  # noqa: ANN401  (a JSON value)
    def unique(pairs: list[tuple[str, Any]]) -> Schema:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise RequestError(f"the JSON schema has the name {shown(twice)} twice in one object; remove one of them")
        return made

    def constant(name: str) -> None:
        raise RequestError(f"the JSON schema has {name}, which is not JSON; use a number")

    deep = RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels; make it flatter, for example with $defs")
    try:
        root = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError as error:
        raise deep from error
    except ValueError as error:
        raise RequestError(f"the JSON schema is not JSON ({reason(error)}); correct its text") from error
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(root, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError("the JSON schema holds a lone surrogate; write whole characters") from error
        except RecursionError as error:
            raise deep from error
    level = [root]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inner(each)]
    if level:
        raise deep
    return root


def _inner(value: object) -> Iterator[object]:
    """The arrays and objects directly in a JSON value; scalars count as a part of it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (each for each in inner if isinstance(each, dict | list))


def translate(pattern: str) -> str:
    """An ECMAScript expression in the library's syntax, which has other blanks and another dot."""
    in_class = False

    def part(found: re.Match[str]) -> str:
        nonlocal in_class
        text = found[0]
        if in_class and text in ("[", "."):
            return "\\" + text  # characters there, but a class of its own in the library's syntax
        in_class = (in_class or text == "[") and text != "]"
        return _JS_CLASSES.get(text, text)

    return re.sub(r"\\.|[\[\].]", part, pattern, flags=re.DOTALL)


@dataclass(slots=True)
class _Node:
    """One schema of a document.

    Attributes:
        place: its JSON pointer.
        base: URI that its references are relative to.
        target: the schema that its ``$ref`` names.
        is_part: it is a part of a combination.
    """

    schema: Schema
    place: str
    base: str
    target: _Node | None = None
    is_part: bool = False
    members: dict[str, list[_Node]] = field(default_factory=dict)

    @property
    def parts(self) -> Iterator[_Node]:
        """The schemas that apply to the same value as this one, one level deep."""
        for members in self.members.values():
            yield from members
        if self.target is not None:
            yield self.target

    @property
    def is_only_object_or_array(self) -> bool:
        """Whether every value is an object or an array."""
        kinds = self.schema.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
        return bool(kinds) and kinds <= {"object", "array"}


class _Document:
    """All schemas of a document; the construction checks each of them, except for endless values."""

    def __init__(self, root: Schema) -> None:
        self.places: dict[str, list[str]] = {}
        self._nodes: dict[int, _Node] = {}
        self._by_uri: dict[str, Any] = {}
        self._num_properties = 0
        self._num_combined = 0
        self._root = root
        self._id = "id" if "draft-04" in str(root.get("$schema")) else "$id"
        self._index(root)
        waiting = [self._node(root, "#", "")]
        while waiting:
            waiting.extend(self._check(waiting.pop()))

    def _index(self, root: Schema) -> None:
        """Find the parts of the document that have a URI or an anchor."""
        waiting: list[tuple[object, str]] = [(root, "")]
        while waiting:
            value, base = waiting.pop()
            if isinstance(value, dict):
                if isinstance(value.get(self._id), str):
                    base = urljoin(base, value[self._id])
                    self._by_uri.setdefault(base.removesuffix("#"), value)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(value.get(key), str):
                        self._by_uri.setdefault(f"{urldefrag(base).url}#{value[key]}", value)
            waiting.extend((each, base) for each in _inner(value))

    def _node(self, schema: Schema, place: str, base: str) -> _Node:
        return self._nodes.setdefault(id(schema), _Node(schema=schema, place=place, base=base))

    def _check(self, node: _Node) -> list[_Node]:
        """Check one schema; returns the schemas in it that are new."""
        pace()
        schema, place = node.schema, node.place
        if isinstance(schema.get(self._id), str):
            node.base = urljoin(node.base, schema[self._id])
        self._check_keywords(schema, place)
        known = len(self._nodes)
        for key in _ONE:
            value = schema.get(key)
            if isinstance(value, list) and key == "items":
                self._several(node, key, value)
            elif key in schema:
                self._one(node, value, f"{place}/{key}")
        for key in (*_NAMED, *_DEFINITIONS):
            self._named(node, key)
        if "prefixItems" in schema:
            self._several(node, "prefixItems", schema["prefixItems"])
        for key in _IN_PLACE:
            if key in schema:
                node.members[key] = self._several(node, key, schema[key])
        if "$ref" in schema:
            node.target = self._target(node)
        return list(self._nodes.values())[known:]

    def _check_keywords(self, schema: Schema, place: str) -> None:
        for key in _NEUTRAL:
            if key in schema and schema[key] in _NEUTRAL[key]:
                del schema[key]
        for key in _UNSUPPORTED:
            if key in schema:
                raise RequestError(f"{key} at {place}/{key} cannot be enforced; leave it out, or check the answer afterwards")
        for key in _WITHOUT_EFFECT:
            schema.pop(key, None)
        form = schema.get("format")
        if form is not None and not (isinstance(form, str) and form in _FORMATS):
            del schema["format"]
        elif form is not None and _FORMATS[form] and isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", ()), dict(_FORMATS[form])]
        for key in _COUNTS:
            value = schema.get(key)
            if isinstance(value, int | float) and value > MAX_COUNT:
                raise RequestError(f"{key}={shown(value)} at {place}/{key} is too large; use at most {MAX_COUNT}")
            if isinstance(value, float) and value.is_integer():
                schema[key] = int(value)  # the library reads no 2.0 here
        pattern = schema.get("pattern")
        for text, at in [(pattern, "pattern"), *((each, "patternProperties") for each in schema.get("patternProperties") or ())]:
            if isinstance(text, str) and len(text.encode()) > MAX_REGEX_BYTES:
                raise RequestError(f"the regex at {place}/{at} has more than {MAX_REGEX_BYTES} bytes; shorten it")
        if isinstance(pattern, str):
            schema["pattern"] = translate(pattern)
        if isinstance(schema.get("patternProperties"), dict):
            schema["patternProperties"] = {translate(each): value for each, value in schema["patternProperties"].items()}
        for key in _EXPLAINED:
            if key in schema:
                self.places.setdefault(key, []).append(f"{place}/{key}")

    def _one(self, node: _Node, value: object, place: str) -> _Node | None:
        if isinstance(value, dict):
            return self._node(value, place, node.base)
        if not isinstance(value, bool):
            raise RequestError(f"the JSON schema has {shown(value)} at {place}; give a schema: an object, true or false")
        return None

    def _several(self, node: _Node, key: str, value: object) -> list[_Node]:
        if not isinstance(value, list):
            raise RequestError(f"the JSON schema has {shown(value)} at {node.place}/{key}; give a list of schemas")
        made = [self._one(node, each, f"{node.place}/{key}/{number}") for number, each in enumerate(value)]
        return [each for each in made if each is not None]

    def _named(self, node: _Node, key: str) -> None:
        value = node.schema.get(key)
        if value is None:
            return
        if not isinstance(value, dict):
            raise RequestError(f"the JSON schema has {shown(value)} at {node.place}/{key}; give an object of schemas")
        if key in _NAMED:
            self._num_properties += len(value)
            if self._num_properties > MAX_PROPERTIES:
                raise RequestError(f"the JSON schema has more than {MAX_PROPERTIES} properties; use fewer")
        for name, each in value.items():
            self._one(node, each, f"{node.place}/{key}/{name.replace('~', '~0').replace('/', '~1')}")

    def _target(self, node: _Node) -> _Node | None:
        """The schema that ``$ref`` names; None if it is ``true`` or ``false``."""
        given, place = node.schema["$ref"], f"{node.place}/$ref"
        if not isinstance(given, str):
            raise RequestError(f"$ref at {place} is {shown(given)}; give a string such as #/$defs/name")
        uri, fragment = urldefrag(urljoin(node.base, given))
        whole = f"{uri}#{fragment}"
        found: Any
        if fragment and not fragment.startswith("/") and whole in self._by_uri:
            found = self._by_uri[whole]
        else:
            if given.startswith("#") or uri == urldefrag(node.base).url:
                found = self._by_uri.get(uri, self._root)
            elif uri in self._by_uri:
                found = self._by_uri[uri]
            else:
                raise RequestError(f"$ref at {place} names another document, {shown(given)}; copy its schema into $defs")
            for step in fragment.split("/")[1:] if fragment.startswith("/") else [fragment] if fragment else []:
                name = unquote(step).replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                    found = found[int(name)]
                elif isinstance(found, dict) and name in found:
                    found = found[name]
                else:
                    raise RequestError(f"$ref at {place} names {shown(given)}, which does not exist; correct it")
        return self._one(node, found, given if given.startswith("#") else place)

    def check_endings(self) -> None:
        """Refuse schemas that apply to a value only through themselves, and schemas that only endless values satisfy."""
        self._check_cycles()
        counts: dict[int, int] = {}
        users: dict[int, list[tuple[int, dict[str, bool]]]] = {}
        ended: list[int] = []
        for key, node in self._nodes.items():
            pace()
            groups = [(members, {"open": True}) for members in self._needs(node)]
            counts[key] = len(groups)
            for members, state in groups:
                for member in members:
                    users.setdefault(id(member.schema), []).append((key, state))
            if not groups:
                ended.append(key)
        while ended:
            for key, state in users.get(ended.pop(), ()):
                if state["open"]:
                    state["open"] = False
                    counts[key] -= 1
                    if counts[key] == 0:
                        ended.append(key)
        for key, node in self._nodes.items():
            if counts[key]:
                raise RequestError(f"the JSON schema at {node.place} needs a value without end; make a property in it optional")

    def _check_cycles(self) -> None:
        done: set[int] = set()
        for start in self._nodes.values():
            path: list[tuple[_Node, Iterator[_Node]]] = [(start, iter(start.parts))]
            on_path = {id(start)}
            while path and id(path[-1][0]) not in done:
                node, rest = path[-1]
                part = next(rest, None)
                if part is None:
                    done.add(id(node))
                elif id(part) in on_path:
                    raise RequestError(
                        f"the JSON schema at {part.place} refers to itself without a value in between; remove a $ref"
                    )
                else:
                    path.append((part, iter(part.parts)))
                    on_path.add(id(part))
                while path and id(path[-1][0]) in done:
                    on_path.discard(id(path.pop()[0]))

    def _needs(self, node: _Node) -> Iterator[list[_Node]]:
        """Groups of schemas; a finite value exists only if one schema of each group has one."""
        schema = node.schema
        if "const" in schema or "enum" in schema:
            return
        for key, members in node.members.items():
            if key == "allOf":
                yield from ([each] for each in members)
            elif len(members) == len(schema[key]):  # no alternative is true or false
                yield members
        if node.target is not None:
            yield [node.target]
        if not node.is_only_object_or_array:
            return
        kinds = schema["type"]
        properties, required = schema.get("properties") or {}, schema.get("required")
        if kinds in ("object", ["object"]) and isinstance(required, list):
            for name in required:
                each = properties.get(name) if isinstance(name, str) else None
                if isinstance(each, dict):
                    yield [self._nodes[id(each)]]
        items = schema.get("items")
        least = schema.get("minItems")
        is_needed = isinstance(least, int) and len(schema.get("prefixItems") or ()) < least
        if kinds in ("array", ["array"]) and isinstance(items, dict) and is_needed:
            yield [self._nodes[id(items)]]

    def close(self) -> None:
        """Add ``additionalProperties: false`` where the schema is strict without saying so."""
        for node in self._nodes.values():
            if self._is_combination(node):
                for part in self._tree(node)[1:]:
                    part.is_part = True
        for node in self._nodes.values():  # a property that two parts name is a combination too
            if not node.is_part and self._is_combination(node):
                named: dict[str, list[Any]] = {}
                for part in self._tree(node):
                    for name, each in (part.schema.get("properties") or {}).items():
                        named.setdefault(name, []).append(each)
                for schemas in named.values():
                    for each in schemas if len(schemas) > 1 else ():
                        if isinstance(each, dict):
                            for part in self._tree(self._nodes[id(each)]):
                                part.is_part = True
        for node in list(self._nodes.values()):
            if not node.is_part:
                self._close(node)

    def _close(self, node: _Node) -> None:
        pace()
        tree = self._tree(node) if self._is_combination(node) else [node]
        schemas = [each.schema for each in tree]
        has_names = any(key in each for each in schemas for key in _NAMED)
        if not has_names or any("additionalProperties" in each for each in schemas):
            return
        names: dict[str, Any] = {}
        patterns: dict[str, Any] = {}
        for each in schemas:
            names.update(dict.fromkeys(each.get("properties") or {}, True))
            patterns.update(dict.fromkeys(each.get("patternProperties") or {}, True))
        for each in schemas:
            required = each.get("required")
            names.update(
                {
                    name: True
                    for name in (required if isinstance(required, list) else ())
                    if isinstance(name, str) and not patterns
                }
            )
            least = each.get("minProperties")
            if isinstance(least, int | float) and least > len(names) and not patterns:
                return  # other names are needed
        if len(tree) == 1:
            node.schema["properties"] = {**names, **(node.schema.get("properties") or {})}
            node.schema["additionalProperties"] = False
        else:
            shell: Schema = {"properties": names, "additionalProperties": False}
            if patterns:
                shell["patternProperties"] = patterns
            node.schema["allOf"] = [*node.schema.get("allOf", ()), shell]

    @staticmethod
    def _is_combination(node: _Node) -> bool:
        """Whether several schemas that name properties apply to one value."""
        has_own = any(key in node.schema for key in ("properties", "patternProperties", "required", "additionalProperties"))
        sources = sum(len(members) if key == "allOf" else 1 for key, members in node.members.items()) + (node.target is not None)
        return sources + has_own > 1

    def _tree(self, node: _Node) -> list[_Node]:
        """A schema and all schemas that apply to the same value."""
        seen = {id(node): node}
        waiting = [node]
        while waiting:
            pace()
            for part in waiting.pop().parts:
                self._num_combined += 1
                if self._num_combined > _MAX_COMBINED:
                    raise RequestError(f"the JSON schema at {node.place} combines too many schemas; join some of them")
                if id(part) not in seen:
                    seen[id(part)] = part
                    waiting.append(part)
        return list(seen.values())
