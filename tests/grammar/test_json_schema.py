"""JSON schemas: what is refused, what is strict, and answers under masks against another validator."""

import json
import random

import jsonschema
import pytest

from deepinfer.errors import RequestError
from deepinfer.grammar.compiler import compile_grammar
from deepinfer.grammar.json_schema import MAX_DEPTH, MAX_PROPERTIES, MAX_SCHEMA_BYTES, prepare
from deepinfer.request import StructuredOutput
from tests.grammar.walks import accepts, matcher, random_answer


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "is not JSON"),
        ("3", "is 3; give an object"),
        ("false", "is false, so no value"),
        ('{"const": NaN}', "has NaN, which is not JSON"),
        ('{"minimum": 1e999}', "too large for a double"),
        (r'{"const": "\ud83d"}', "holds a lone surrogate"),
        (r'{"properties": {"\uDE00": {"pattern": "\udfff"}}}', "holds a lone surrogate"),
        ('{"title": "a", "title": "b"}', "the name 'title' twice"),
        (nested(MAX_DEPTH), f"deeper than {MAX_DEPTH} levels"),
        ("[" * 100_000, f"deeper than {MAX_DEPTH} levels"),
        ({"title": "x" * MAX_SCHEMA_BYTES}, f"more than {MAX_SCHEMA_BYTES} bytes"),
        ({"properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}, f"more than {MAX_PROPERTIES} properties"),
        ({"properties": {"a": {"not": {}}}}, "not at #/properties/a/not cannot be enforced"),
        ({"properties": {"a/b~": {"items": {"if": {}}}}}, "if at #/properties/a~1b~0/items/if"),
        ({"uniqueItems": True}, "uniqueItems at #/uniqueItems"),
        ({"$defs": {"x": {"dependentRequired": {"a": ["b"]}}}}, "dependentRequired at #/\\$defs/x/dependentRequired"),
        ({"anyOf": [{}, {"contains": {}}]}, "contains at #/anyOf/1/contains"),
        ({"$ref": "https://example.com/other.json"}, "names another document"),
        ({"$ref": "other.json#/a"}, "names another document"),
        ({"$ref": "#/$defs/x"}, "names '#/\\$defs/x', which does not exist"),
        ({"$ref": 3}, "give a string such as"),
        ({"$ref": "#"}, "refers to itself without a value"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "refers to itself",
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "at # needs a value without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "needs a value without end"),
        ({"properties": 3}, "has 3 at #/properties"),
        ({"items": "x"}, "has 'x' at #/items"),
        ({"anyOf": {}}, "give a list of schemas"),
        ({"maxLength": 10**9}, "maxLength=1000000000 at #/maxLength is too large"),
        ({"pattern": "x" * 9000}, "the regex at #/pattern has more than"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 0}]}, r"oneOf with alternatives that may overlap.*\(at #/oneOf\)"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, r"look-around.*\(at #/properties/a/pattern\)"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be compiled"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, says, vocabulary):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(RequestError, match=says):
        compile_grammar(StructuredOutput.read({"schema_type": "json", "schema": text}), vocabulary)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({}, ["1", "null", '{"a": [true]}', '"x"'], ["", "nul", "{"]),
        (True, ["-1.5e3", "[]"], ["01"]),
        ({"type": "object"}, ['{"a": 1}', "{}"], ["[]"]),
        ({"properties": {"a": {}}}, ['{"a": 1}', "{}", "3"], ['{"b": 1}']),
        ({"properties": {"a": {}}, "additionalProperties": True}, ['{"b": 1}'], []),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}']),
        ({"patternProperties": {"^x": {}}}, ['{"x1": 1}'], ['{"y": 1}']),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ['{"a": 1, "b": 2}'], ['{"c": 1}']),
        (
            {"properties": {"k": {}}, "anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}]},
            ['{"k": 1, "a": 2}', '{"k": 1, "b": 2}'],
            ['{"k": 1, "c": 2}'],
        ),
        (
            {"$defs": {"base": {"properties": {"a": {}}}}, "$ref": "#/$defs/base", "properties": {"b": {}}},
            ['{"a": 1, "b": 2}'],
            ['{"c": 1}'],
        ),
        ({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}, ['{"a": 1}', "null"], ['{"b": 1}']),
        ({"format": "unknown", "type": "string"}, ['"x"'], ["1"]),
        ({"format": "date"}, ['"2024-02-29"', "3"], ['"2023-02-29"', '"x"']),
        ({"format": "time"}, ['"10:20:30Z"'], ['"10:20:60Z"']),
        ({"format": "hostname"}, ['"a.example"'], ['"xn--a"', f'"{"a." * 127}"']),
        ({"type": "string", "pattern": "^\\S.$"}, ['"ab"'], ['"\ufeffb"', '"a\u2028"']),
        ({"type": "string", "pattern": r"^[[.\s]\.$"}, ['"[."', '".."', '"\u3000."'], ['"a."', '"[a"']),
        ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
        ({"uniqueItems": False, "then": {}, "x-mine": 1, "type": "null"}, ["null"], ["1"]),
        ({"$id": "http://a.example/b", "$ref": "c", "$defs": {"c": {"$id": "c", "type": "null"}}}, ["null"], ["1"]),
        ({"$ref": "#name", "$defs": {"c": {"$anchor": "name", "type": "null"}}}, ["null"], ["1"]),
        ({"type": "array", "maxItems": 2}, [f"[1,{' ' * 8}2]", "[ ]"], [f"[1,{' ' * 9}2]", " []"]),
    ],
)
def test_schemas_are_strict_and_blanks_are_bounded(schema, valid, invalid, tokenizer, vocabulary):
    made = matcher(vocabulary, "json", schema)
    assert [text for text in valid if not accepts(made, vocabulary, tokenizer.encode(text))] == []
    assert [text for text in invalid if accepts(made, vocabulary, tokenizer.encode(text))] == []


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}}, "required": ["a"]},
    {"type": "array", "items": {"enum": [1, "x", None, {"a": 1}]}, "minItems": 1, "maxItems": 4},
    {
        "$defs": {"t": {"type": "object", "properties": {"v": {"type": "number"}, "n": {"$ref": "#/$defs/t"}}}},
        "$ref": "#/$defs/t",
    },
    {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,6}$"}, {"type": "boolean"}, {"const": [1, {"b": 2}]}]},
    {"type": "object", "patternProperties": {"^[xy]+$": {"type": "null"}}, "properties": {"k": {"enum": ["a", "b"]}}},
    {"type": "string", "format": "uuid"},
    {"type": "number", "minimum": -5, "exclusiveMaximum": 7.5, "multipleOf": 0.5},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}}, {"required": ["a"]}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_answers_satisfy_the_schema(schema, tokenizer, vocabulary, seed):
    made, rng = matcher(vocabulary, "json", schema), random.Random(seed)
    judge = jsonschema.Draft202012Validator(schema)
    num_ended = 0
    for _ in range(12):
        ids, is_ended = random_answer(made, vocabulary, tokenizer, rng)
        num_ended += is_ended
        if is_ended:
            judge.validate(json.loads(tokenizer.decode(ids)))
    assert num_ended >= 6


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        (SCHEMAS[0], [{"a": -3}, {"a": 0, "b": "äö\n"}, {"a": 1, "b": ""}]),
        (SCHEMAS[1], [[1], ["x", None, {"a": 1}, 1]]),
        (SCHEMAS[2], [{}, {"v": 1.5e-7, "n": {"n": {"v": 2}}}]),
        (SCHEMAS[4], [{"k": "a"}, {"k": "b", "x": None, "yx": None}]),
        (SCHEMAS[6], [-5, 0.5, 7]),
        ({}, [{"a": [1, {"b": '\\ " / \t ☃'}]}, "", 0, -1.25, [], {}]),
    ],
)
def test_every_valid_instance_can_be_written(schema, instances, tokenizer, vocabulary):
    made = matcher(vocabulary, "json", schema)
    for instance in instances:
        for indent in (None, 2):
            text = json.dumps(instance, ensure_ascii=False, indent=indent)
            assert accepts(made, vocabulary, tokenizer.encode(text)), text


def test_a_prepared_schema_can_be_prepared_again():
    once = prepare({"properties": {"a": {"format": "date"}}, "required": ["a"]})
    assert prepare(json.loads(once.text)).text
