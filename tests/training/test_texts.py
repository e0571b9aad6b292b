"""Documents of a corpus: once each, in portions, and quotations from them."""

import pytest

pytest.importorskip("lxml", reason="lxml is not installed; install the extra `training`")

from deepinfer.bench.tasks.sides import make_tasks
from deepinfer.bench.texts import Text
from deepinfer.engine.chat import Mark
from training.readers import program
from training.sources import _PORTION_CHARS, SOURCES, Corpus, Source, _portions
from training.texts import quotations

PARAGRAPH = (
    "This is the paragraph number {} of a text that is long enough to be the prose of a manual about the things of the world."
)


def source_of(kind):
    return Source(name="test", origin="debian", licence="MIT", kind=kind, reader=program, patterns=())


@pytest.fixture
def corpus(tmp_path):
    return Corpus(cache=tmp_path)


def test_a_paragraph_that_was_seen_is_left_out(corpus):
    paragraphs = [PARAGRAPH.format(number) for number in range(8)]
    (first,) = corpus._document(source_of("prose"), paragraphs[:5])
    (second,) = corpus._document(source_of("prose"), paragraphs)
    assert first.segments == ("\n\n".join(paragraphs[:5]),)
    assert second.segments == ("\n\n".join(paragraphs[5:]),)


def test_a_program_of_mostly_seen_lines_is_left_out(corpus):
    lines = [f"def function_number_{number}(argument):\n    return argument + {number}\n" for number in range(30)]
    assert list(corpus._document(source_of("code"), ["\n\n".join(lines)]))
    assert not list(corpus._document(source_of("code"), ["\n\n".join(lines[:25])]))


@pytest.mark.parametrize("size", [10, 1_000, 2 * _PORTION_CHARS])
def test_portions_lose_nothing_and_are_short(size):
    parts = [str(number % 10) * size for number in range(40)]
    found = list(_portions(parts, "\n\n"))
    assert "\n\n".join(found).split("\n\n") == parts
    assert max(map(len, found)) <= max(size, _PORTION_CHARS + 2 * len(parts))


def test_quotations_are_conversations_about_the_text():
    made = []
    for number in range(20):
        text = "\n\n".join(PARAGRAPH.format(f"{number} {each}") for each in range(30))
        made += quotations(Text(kind="prose", source="test", segments=(text,)))
    assert {each.kind for each in made} == {"copy", "needle"}
    for each in made:
        assert isinstance(each.segments[0], Mark)
        assert "This is the paragraph number" in "".join(each.segments)


def test_code_is_not_quoted():
    assert not list(quotations(Text(kind="code", source="test", segments=("x = 1\n" * 500,))))


def test_every_source_has_a_licence_and_packages():
    for source in SOURCES:
        assert source.licence
        assert source.packages or source.origin == "stdlib"
        assert "GFDL" not in source.licence
    assert len({source.name for source in SOURCES}) == len(SOURCES)


def test_held_out_tasks_are_not_told_in_training():
    held_out = {task.key for task in make_tasks(5, range(3_000), held_out=True)}
    told = {part for task in make_tasks(6, range(3_000)) for part in task.parts}
    assert told
    assert not held_out & told
