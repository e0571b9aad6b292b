"""EBNF: the dialect, errors with line and column, and random grammars against a recogniser of its own."""

import random

import pytest

from deepinfer.errors import RequestError
from deepinfer.grammar.ebnf import convert
from tests.grammar.oracles import ebnf_accepts
from tests.grammar.walks import accepts, matcher, random_answer

JSON = r"""root ::= value  # the usual grammar
value ::= object | array | string | number
  # comments may stand before a |
  | "true" | "false" | "null"
object ::= "{" ws ( pair ( ws "," ws pair )* )? ws "}"
pair ::= string ws ":" ws value
array ::= "[" ws ( value ( ws "," ws value )* )? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \t\n\r]*
"""


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        ("root ::= 'it' | \"x\"", ["it", "x"], ["", "i"]),
        ("root ::= | 'a' |", ["", "a"], ["b"]),
        ('root ::= [a-z]+ "end"', ["aend", "endend"], ["end", "aen"]),
        ('root ::= a "("\n  root ")" | a\na ::= [a-z]+ "end"', ["aend", "endend(xend)"], ["end", "a(b)"]),
        ('root ::= [a-z]* tail\ntail ::= "end" | "(" root ")"', ["end", "endend", "b(xend)", "(end)"], ["x", "(en)"]),
        ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"{,1}', ["aabbc", "aaabbccd"], ["abbc", "aabbcdd", "aabb"]),
        (r'root ::= "\n\t\x41\u00e4\U0001F600\u{2603}\"\\" [\]\-\^a]', ['\n\tAä😀☃"\\]', '\n\tAä😀☃"\\^'], ['\n\tAä😀☃"\\b']),
        ("root ::= [^a-c\\n]", ["d", "☃", "\r"], ["a", "\n", ""]),
        ("root ::= [-a]", ["-", "a"], ["b"]),
        ('root ::= "x" root | "y"', ["y", "xxy"], ["x"]),
        ('root ::= root "x" | "y"', ["y", "yxx"], ["x"]),
        ('root ::= "a" root "b" | ""', ["", "aabb"], ["aab"]),
        ("root ::= a-b c.d\na-b ::= 'x'\nc.d ::= 'y'", ["xy"], ["x"]),
        ("root ::= (('a' | 'b') 'c'?)+ # end", ["a", "bcac"], ["c"]),
        ('root ::= a | "x"\na ::= root', ["x"], ["xx"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\u00e4"]}', "[]", "[ ]", "{}", "0"], ["01", "[1,]", '{"a"}', "tru"]),
    ],
)
def test_the_dialect(grammar, valid, invalid, tokenizer, vocabulary):
    made = matcher(vocabulary, "ebnf", grammar)
    assert [text for text in valid if not accepts(made, vocabulary, tokenizer.encode(text))] == []
    assert [text for text in invalid if accepts(made, vocabulary, tokenizer.encode(text))] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('root ::= "a', "line 1, column 10: a text has no closing quote"),
        ('root ::= "a"\n\n  b', "line 3, column 3: the rule b is not defined"),
        ('root ::= (= "a") "b"', r"column 10: lookahead, \(= …\), cannot be enforced"),
        ("root ::= [a", "a class has no ]"),
        ("root ::= [z-a]", "a range ends before it begins"),
        ("root ::= []", "a class contains no character"),
        (r"root ::= [^\0-\U0010FFFF]", "a class contains no character"),
        ('x ::= "a"', "has no rule root"),
        ('root ::= root "a"', "the rule root of the EBNF grammar never ends"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice"),
        (r'root ::= "\q"', r"the escape \\q is unknown"),
        (r'root ::= "\uD800"', "uD800 is not a character"),
        ('root ::= "a"{3,1}', r"the count \{3,1\} is empty"),
        ('root ::= "a"{}', "a count must be"),
        ('root ::= "a"{9999999}', "a count is above"),
        ('root ::= ("a"', r"a \( has no \)"),
        ('root ::= "a")', r"a \) has no \("),
        ('root = "a"', "a rule must start with its name"),
        ("root ::= $", r"'\$' is not a part of a rule"),
        ("root ::= " + "(" * 100, "nested deeper than 60 levels"),
        ("".join(f"r{i} ::= 'a'\n" for i in range(3000)), "more than 2000 rules"),
        ("", "no rule root"),
    ],
)
def test_errors_name_line_and_column(grammar, says):
    with pytest.raises(RequestError, match=says):
        convert(grammar)


def expression(rng, names, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(['"a"', '"b"', '"ab"', '"ba"', "[ab]", "[a-c]", '"c"', "[^a]", '""'])
    if kind < 0.5:
        return rng.choice(names)
    if kind < 0.7:
        return f"({expression(rng, names, depth - 1)} | {expression(rng, names, depth - 1)})"
    if kind < 0.8:
        return f"({expression(rng, names, depth - 1)}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{,3}'])}"
    return f"{expression(rng, names, depth - 1)} {expression(rng, names, depth - 1)}"


@pytest.mark.parametrize("part", range(5))
def test_random_grammars_accept_what_a_recogniser_accepts(part, tokenizer, vocabulary, seed):
    rng = random.Random(seed)
    texts = ["", *"abc", *(a + b for a in "abc" for b in "abc")]
    num_valid = 0
    for _ in range(60):
        names = ["root", "x", "y", "z"][: rng.randint(1, 4)]
        grammar = "".join(f"{name} ::= {expression(rng, names, 3)} | {expression(rng, names, 2)}\n" for name in names)
        try:
            made = matcher(vocabulary, "ebnf", grammar)
        except RequestError:  # a rule never ends
            continue
        for text in [*texts, *("".join(rng.choices("abc", k=rng.randint(3, 7))) for _ in range(8))]:
            is_valid = ebnf_accepts(grammar, text)
            num_valid += is_valid
            copy = made.copy()
            took = copy.first_refused([*tokenizer.encode(text), vocabulary.eos_token_id])
            assert (took is None) == is_valid, (grammar, text)
    assert num_valid > 50


@pytest.mark.parametrize("grammar", [JSON, 'root ::= [a-z]* tail\ntail ::= "end" | "(" root ")"'], ids=["json", "overlap"])
def test_random_answers_are_in_the_language(grammar, tokenizer, vocabulary, seed):
    made, rng = matcher(vocabulary, "ebnf", grammar), random.Random(seed)
    for _ in range(6):
        ids, is_ended = random_answer(made, vocabulary, tokenizer, rng, short=12, most=60)
        if is_ended:
            assert ebnf_accepts(grammar, tokenizer.decode(ids))
