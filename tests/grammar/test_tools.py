"""Tool calls: blocks as the model writes them, raw strings and JSON, and choices."""

import random
import re

import pytest

from deepinfer.errors import RequestError
from deepinfer.grammar.tools import DSML, tool_call_grammar
from tests.grammar.walks import accepts, allowed, matcher

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "unit": {"enum": ["C", "F", "☃😀"]},
                "code": {"type": "string", "pattern": "^[A-Z]{2}|x$", "maxLength": 4},
                "size": {"type": "string", "minLength": 2, "maxLength": 3},
                "at": {"type": ["object", "null", "string"], "properties": {"a": {"type": "number"}}},
                "date": {"type": "string", "format": "date"},
                "list": {"$ref": "#/$defs/List"},
                "any": {},
                "either": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer"}]},
                "never": False,
            },
            "required": ["city"],
            "$defs": {"List": {"type": "array", "items": {"$ref": "#/$defs/Item"}}, "Item": {"enum": [1, "a"]}},
        },
    },
}
NOW = {"name": "now"}
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def dsml_id(tokenizer):
    return tokenizer.special(DSML)


@pytest.fixture
def judge(tokenizer, vocabulary, dsml_id):
    """Whether a grammar of tool calls accepts texts; the mark in a text is the token."""

    def encode(text):
        parts = [tokenizer.encode(part) for part in text.split(DSML)]
        return [token_id for part in parts for token_id in (dsml_id, *part)][1:]

    def judge(texts, tools=(WEATHER, NOW), **options):
        made = matcher(vocabulary, "lark", tool_call_grammar(tools, dsml_id=dsml_id, **options))
        return [accepts(made, vocabulary, encode(text)) for text in texts]

    return judge


def parameter(name, value, is_string=True):
    return f'<{DSML} parameter name="{name}" string="{str(is_string).lower()}">{value}</{DSML} parameter>\n'


def call(name, *parameters):
    return f'<{DSML} invoke name="{name}">\n{"".join(parameters)}</{DSML} invoke>\n'


def block(*calls, before="\n\n"):
    return f"{before}<{DSML} calls>\n{''.join(calls)}</{DSML} calls>"


def weather(*parameters):
    return block(call("get_weather", parameter("city", 'Pa</ris>\n"<b>｜'), *parameters))


def test_blocks_as_the_model_writes_them_are_accepted(judge):
    texts = [
        weather(),
        weather(parameter("days", 3, False), parameter("unit", "F")),
        block(call("now"), call("get_weather", parameter("city", "")), call("now", "\n")),
        block(call("now"), before=""),
        block(call("now"), before="\n"),
    ]
    assert judge(texts) == [True] * len(texts)


def test_what_a_block_may_not_be(judge):
    texts = [
        "",
        "text",
        block(),
        block(call("other")),
        block(call("get_weather")),
        block(call("get_weather", parameter("days", 3, False))),
        weather(parameter("unit", "C"), parameter("days", 3, False)),  # not in the order of the schema
        weather(parameter("extra", 3, False)),
        weather(parameter("never", 3, False)),
        block(call("now")) + "\n",
        block(call("now")) + block(call("now")),
        block(call("now")).replace(DSML, "|DSML|"),
    ]
    assert judge(texts) == [False] * len(texts)


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("days", [("1", False), ("12", False)], [("0", False), ("x", False), ("1", True), ('"1"', False)]),
        ("unit", [("C", True), ("☃😀", True)], [("X", True), ("CC", True), ('"C"', False)]),
        ("code", [("AB", True), ("ABcd", True), ("x", True), ("aax", True)], [("ABcde", True), ("ab", True), ("", True)]),
        ("size", [("ab", True), ("ä☃c", True)], [("a", True), ("abcd", True)]),
        ("at", [("null", False), ("null", True), ('{"a": 1.5}', False)], [('"s"', False), ('{"b": 1}', False), ("3", False)]),
        ("date", [("2024-02-29", True)], [("2023-02-29", True), ("today", True)]),
        ("list", [("[1, 1]", False), ('["a"]', False)], [("[2]", False), ("[1]", True)]),
        ("any", [("x", True), ("[1]", False), ("true", False)], [('"x"', False)]),
        ("either", [("xx", True), ("1", False)], [("x", True), ("1.5", False)]),
    ],
)
def test_values_are_raw_strings_or_json(name, valid, invalid, judge):
    def texts(values):
        return [weather(parameter(name, value, is_string)) for value, is_string in values]

    assert judge(texts(valid)) == [True] * len(valid)
    assert judge(texts(invalid)) == [False] * len(invalid)


def test_a_loose_tool_takes_any_parameters_that_are_well_formed(judge):
    loose = {"name": "loose", "parameters": {"type": "object", "minProperties": 3}}  # a schema that cannot be enforced
    anything = block(call("loose", parameter("b", "</x>\n<"), parameter("a", '{"c": [1]}', False)))
    texts = [
        anything,
        block(call("loose")),
        block(call("loose", "\n"), call("now")),
        block(call("loose", parameter("a", "{", False))),
        block(call("other", parameter("a", "x"))),
        block(call("loose", parameter('a"', "x"))),
        weather(parameter("extra", 3, False)),
        weather(parameter("days", 3, False)),
    ]
    judged = judge(texts, tools=(WEATHER, loose, NOW), choice="auto", loose=["loose"])
    assert judged == [True, True, True, False, False, False, False, True]


def test_choices(judge):
    now, two = block(call("now")), block(call("now"), call("now"))
    assert judge([now, two, weather(), "hi"], choice="now") == [True, True, False, False]
    assert judge([now, two, weather()], choice="any", parallel=False) == [True, False, True]
    assert judge(["", "hi <b>", "hi" + now, now, now + "x"], choice="auto") == [True, True, True, True, False]
    assert judge(["hi" + now, now, "hi"], free_text_before=True) == [True, True, False]
    assert judge(['{"a": 3}', now, "hi", "{}", 'x{"a": 3}'], choice="auto", answer_schema=ANSWER) == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert judge([now.removeprefix(f"\n\n<{DSML} calls>\n"), now], is_opened=True) == [True, False]


@pytest.mark.parametrize(
    ("tools", "options", "says"),
    [
        ([], {}, "no tool matches the choice 'required'"),
        ([NOW], {"choice": "later"}, "no tool matches the choice 'later'; use auto, required, any, or one of now"),
        ([NOW, NOW], {}, "two tools have the name 'now'"),
        ([{}], {}, "has no name"),
        ([{"name": "a b"}], {}, "the tool name 'a b' is not usable"),
        ([{"name": "a", "parameters": 3}], {}, "the parameters of the tool a are 3"),
        ([{"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}], {}, "tool a: not at #/properties/x/not"),
        ([{"name": "a", "parameters": {"minProperties": 1}}], {}, "tool a have minProperties"),
        ([{"name": "a", "parameters": {"required": ["x"]}}], {}, "requires the parameter 'x', which has no schema"),
        ([{"name": "a", "parameters": {"properties": {'"': {}}}}], {}, "cannot stand in quotes"),
        ([{"name": "a", "parameters": {"properties": {"x": {"format": "email"}}}}], {}, "'x' of the tool a has the format email"),
        ([{"name": "a", "parameters": {"properties": {"x": {"allOf": [{}]}}}}], {}, "has allOf"),
        ([{"name": "a", "parameters": {"properties": {"x": {"$ref": "#/properties/y"}, "y": {}}}}], {}, "refer to an entry"),
        ([{"name": "a", "parameters": {"properties": {"x": {"anyOf": [{}], "minLength": 1}}}}], {}, "has minLength beside anyOf"),
        ([{"name": "a", "parameters": {"properties": {"x": {"oneOf": [{}, {"const": "a"}]}}}}], {}, "oneOf with several strings"),
        ([NOW], {"answer_schema": {}}, "answer_schema needs the choice auto"),
        ([NOW], {"choice": "auto", "is_opened": True}, "is_opened excludes"),
    ],
)
def test_tools_that_cannot_be_enforced_are_refused_by_name(tools, options, says, dsml_id):
    with pytest.raises(RequestError, match=says):
        tool_call_grammar(tools, dsml_id=dsml_id, **options)


def test_random_calls_can_be_read(vocabulary, tokenizer, dsml_id, seed):
    rng = random.Random(seed)
    made = matcher(vocabulary, "lark", tool_call_grammar([WEATHER, NOW], dsml_id=dsml_id))
    mark = f"<{DSML} parameter name="
    call_shape = (
        rf'<{DSML} invoke name="(now|get_weather)">\n({mark}"\w+" string="(true|false)">[^{DSML}]*</{DSML} parameter>\n)*\n?'
    )
    shape = re.compile(rf"(\n\n?)?<{DSML} calls>\n({call_shape}</{DSML} invoke>\n)+</{DSML} calls>")
    num_ended = 0
    for _ in range(10):
        ids, is_ended = random_calls(made, vocabulary, rng, dsml_id)
        num_ended += is_ended
        if is_ended:
            assert shape.fullmatch(tokenizer.decode(ids)), tokenizer.decode(ids)
    assert num_ended


def random_calls(made, vocabulary, rng, dsml_id):
    made, ids = made.copy(), []
    while len(ids) < 1500:
        choices = allowed(made, vocabulary)
        likely = [each for each in choices if each in (dsml_id, vocabulary.eos_token_id, *range(97, 130))]
        ids.append(rng.choice(likely if likely and rng.random() < 0.9 else choices))
        assert not {ids[-1]} & (vocabulary.special_ids - {dsml_id, vocabulary.eos_token_id})
        made.advance(ids[-1:])
        if made.state == "ended":
            return ids[:-1], True
    return ids, False


def test_a_name_may_have_a_namespace():
    text = tool_call_grammar([{"name": "team::close"}], dsml_id=7)
    assert 'invoke name=\\"team::close\\"' in text
