"""Files of packages to prose, definitions and programs."""

import pytest

pytest.importorskip("lxml", reason="lxml is not installed; install the extra `training`")

from training import readers

PROSE = "The function returns the number of items that are in the list, or zero if there are none of them."


def test_a_page_gives_its_running_prose_with_heading_and_listing(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        f"<h1>Lists¶</h1><p>{PROSE}</p><pre>len([1])\n</pre><h2>Index</h2><p>a, b, c</p><pre>unrelated</pre>"
        f"<ul><li>{PROSE} <b>Always.</b></li></ul>"
    )
    (found,) = readers.html_page(page)
    assert found == ["Lists", PROSE, "len([1])", "Index", f"{PROSE} Always."]


def test_an_empty_page_gives_nothing(tmp_path):
    (tmp_path / "empty.html").write_text("")
    assert list(readers.html_page(tmp_path / "empty.html")) in ([], [[]])


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be prose.",
        "Function foo(int a, int b, int c) -> int; Function bar(int a); Function baz(void); Function qux(void);",
        "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Omicron Sigma Upsilon Omega",
    ],
)
def test_signatures_and_lists_are_not_prose(text):
    assert not readers.is_prose(text)


def test_marks_of_perl_manuals_are_removed(tmp_path):
    page = tmp_path / "page.pod"
    page.write_text(f"=head1 NAME X<name>\n\nC<< $x >> and L<the other page|other>: {PROSE}\n\n    my $x;\n\n=cut\n")
    (found,) = readers.pod_page(page)
    assert found[1:] == [f"$x and the other page: {PROSE}", "    my $x;"]


def test_a_sense_has_words_definition_and_examples(tmp_path):
    path = tmp_path / "data.noun"
    path.write_text(
        '  1 licence text\n00001740 03 n 02 small_house 0 cottage 0 000 | a house that is small; "they bought a cottage"\n'
    )
    (sense,) = readers.wordnet_senses(path)
    assert sense == readers.Sense(("small house", "cottage"), "noun", "a house that is small", ("they bought a cottage",))


@pytest.mark.parametrize(
    ("text", "is_kept"), [("x = y\n" * 100, True), ("1234567890\n" * 100, False), ("é = 1\n" * 100, False), ("x = y\n", False)]
)
def test_tables_and_short_files_are_no_programs(tmp_path, text, is_kept):
    path = tmp_path / "program.py"
    path.write_text(text)
    assert bool(list(readers.program(path))) == is_kept
