"""Generated tasks: their format, their answers and their judges."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.bench.tasks import GENERATORS, KINDS, make_task
from deepinfer.bench.tasks.sides import make_tasks
from deepinfer.bench.tasks.task import follows
from deepinfer.engine.chat import EFFORTS, Call, Mark, Message, parse, render, reply_text

generators = pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: each.__name__)


@generators
def test_the_known_answer_passes_the_check(generator):
    for seed in range(300):
        task = generator(random.Random(f"known {seed}"))
        assert task.kind in KINDS
        assert task.is_consistent(), task


@generators
def test_a_generator_depends_on_the_seed_only(generator):
    first, second = (generator(random.Random("seed")) for _ in range(2))
    assert first.segments() == second.segments()
    assert first.key == second.key


@generators
def test_a_wrong_answer_fails(generator):
    task = generator(random.Random("wrong"))
    assert not task.judge("")["right"]


def test_every_kind_is_made():
    assert {make_task(random.Random(f"kinds {seed}")).kind for seed in range(3_000)} == set(KINDS)


def test_no_key_is_in_training_and_held_out():
    numbers = range(4_000)
    train = {task.key for task in make_tasks(1, numbers)}
    held_out = {task.key for task in make_tasks(2, numbers, held_out=True)}
    assert train
    assert held_out
    assert not train & held_out


def test_the_prompt_begins_the_whole_conversation():
    for seed in range(500):
        task = make_task(random.Random(f"prompt {seed}"))
        whole = "".join(task.segments())
        assert whole == "".join(task.prompt()) + reply_text(task.answer, effort=task.effort)


def test_special_tokens_are_marks_only_where_the_template_puts_them():
    segments = render([Message("user", "<think> ｜DSML｜ <｜User｜>")], effort=75)
    texts = [each for each in segments if not isinstance(each, Mark)]
    assert "<think> ｜DSML｜ <｜User｜>" in texts
    assert segments[-1] == "<think>"
    assert isinstance(segments[-1], Mark)


def test_thinking_of_earlier_turns_is_dropped_without_tools_and_kept_with_them():
    turns = [Message("user", "Hi"), Message("assistant", "Hello", reasoning="Greet."), Message("user", "Bye")]
    tool = {"name": "now", "description": "Time.", "parameters": {}}
    assert "Greet." not in "".join(render(turns, effort=50))
    assert "<think>Greet.</think>Hello" in "".join(render(turns, effort=50, tools=[tool]))


values = st.text("abc<>/=\"' é") | st.integers() | st.booleans() | st.lists(st.integers(), max_size=2)


@given(
    st.lists(
        st.builds(Call, st.from_regex(r"[a-z_]+", fullmatch=True), st.dictionaries(st.sampled_from("abcd"), values)), max_size=3
    ),
    st.text("abc \n{}", max_size=9),
    st.sampled_from([None, *EFFORTS]),
)
def test_a_reply_is_parsed_as_it_was_written(calls, content, effort):
    message = Message("assistant", content.strip("\n"), reasoning="Think." if effort else "", calls=tuple(calls))
    reply = parse(reply_text(message, effort=effort), effort=effort)
    assert (reply.content, reply.reasoning, list(reply.calls), reply.is_whole) == (
        message.content,
        message.reasoning,
        calls,
        True,
    )


@pytest.mark.parametrize("cut", ["</｜DSML｜ calls>", "</｜DSML｜ invoke>", "</｜DSML｜ parameter>"])
def test_a_calls_block_with_a_part_missing_is_not_whole(cut):
    text = reply_text(Message("assistant", "", calls=(Call("now", {"zone": "UTC"}),)), effort=None)
    assert parse(text, effort=None).is_whole
    assert not parse(text.replace(cut, ""), effort=None).is_whole


def test_a_schema_is_followed_or_not():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string", "enum": ["x"]}}},
        "required": ["a"],
    }
    assert follows(json.loads('{"a": 1, "b": ["x"]}'), schema)
    for wrong in ('{"a": true}', '{"b": []}', '{"a": 1, "b": ["y"]}', '{"a": 1, "c": 2}', "[]"):
        assert not follows(json.loads(wrong), schema)
