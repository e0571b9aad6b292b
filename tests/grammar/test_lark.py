"""Users' Lark grammars: what is refused, and what is changed."""

import pytest

from deepinfer.errors import RequestError
from deepinfer.grammar.lark import prepare_lark
from tests.grammar.walks import accepts, allowed, matcher


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: a\na[max_tokens=3]: /x/", "line 2, column 1: the option max_tokens"),
        ("start[stop=/x/]: /a/", "the option stop "),
        ('start[capture, temperature=0.7]: "a"', "the option temperature"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "the option 'allow_invalid_utf8' is not supported"),
        ("start: <[1]>", "names the end token"),
        ("start: <[0-9]>", "names the end token"),
        ("start: <[*]>", "does not list token ids"),
        ("start: <[^3]>", "does not list token ids"),
        ("start: <[3000]>", "outside the vocabulary"),
        ("start: <nobody>", "<nobody> is not a special token"),
        ("start: @other", "@other names another grammar"),
        ('start: "x" %json {"not": {}}', "line 1, column 12: not at #/not cannot be enforced"),
        ("start: %json {", "the JSON here cannot be read"),
        ("start: /" + "x" * 9000 + "/", "a regex has more than 8000 bytes"),
        ("".join(f"a{i}: /x/\n" for i in range(3000)), "more than 2000 rules and terminals"),
        ("start: " + " | ".join(['"a"'] * 3000), "rules have more than 2000 alternatives"),
    ],
)
def test_what_is_refused_has_a_line_and_a_column(grammar, says, vocabulary):
    with pytest.raises(RequestError, match=says):
        prepare_lark(grammar, vocabulary)


def test_only_tokens_outside_texts_are_named(vocabulary, tokenizer):
    grammar = 'start: "<[259]> <think>" T </think> <[97-99,260]> // <[261]>\nT: /<[262]>\\/<think>/ # <think>\n'
    assert prepare_lark(grammar, vocabulary).token_ids == (260, tokenizer.special("</think>"))


def test_a_long_list_of_words_may_be_a_terminal(vocabulary, tokenizer):
    made = matcher(vocabulary, "lark", "start: WORD+\nWORD: " + " | ".join(f'"w{i}."' for i in range(3000)))
    assert accepts(made, vocabulary, tokenizer.encode("w17.w2999."))


def test_embedded_schemas_are_strict_with_bounded_blanks(vocabulary, tokenizer):
    made = matcher(vocabulary, "lark", 'start: "<" %json {"properties": {"a": {"format": "date"}}, "type": "object"} ">"')
    blanks = " " * 8
    assert accepts(made, vocabulary, tokenizer.encode(f'<{{{blanks}"a":"2024-02-29"}}>'))
    assert not accepts(made, vocabulary, tokenizer.encode(f'<{{{blanks} "a":"2024-02-29"}}>'))
    assert not accepts(made, vocabulary, tokenizer.encode('<{"a":"2023-02-29"}>'))
    assert not accepts(made, vocabulary, tokenizer.encode('<{"b":1}>'))


def test_a_text_that_describes_a_list_of_grammars_is_not_one(vocabulary):
    with pytest.raises(RequestError, match=r"it begins with \{"):
        matcher(vocabulary, "lark", '{"grammars": [{"lark_grammar": "start: /a/"}]}')


def test_named_tokens_stand_where_the_grammar_has_them(vocabulary, tokenizer):
    think, end = tokenizer.special("<think>"), tokenizer.special("</think>")
    made = matcher(vocabulary, "lark", "start: <think> /[ab]*/ </think> /c?/")
    assert allowed(made, vocabulary) == [think]
    made.advance([think])
    assert allowed(made, vocabulary) == [*tokenizer.encode("ab"), end]
    made.advance([*tokenizer.encode("ab"), end])
    assert allowed(made, vocabulary) == [vocabulary.eos_token_id, *tokenizer.encode("c")]
