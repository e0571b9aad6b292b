"""Files of packages -> plain text: pages of manuals, novels, dictionaries, programs.

Every reader takes a path and yields texts.  Manuals are filtered to running prose, because most of a manual is signatures,
tables and indices, and a model that reads those learns to write them.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import re
import subprocess
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lxml import etree, html

_PROSE_CHARS = 60
_PROSE_WORDS = 9
_PROSE_LETTERS = 0.72
_COMMON = frozenset(re.findall(r"\w+", "the of to and a in is that for it as with be this are you on or by not if can from an"))
_COMMON_SHARE = 0.15
_LISTING_CHARS = 1_200
_PROGRAM_CHARS = range(300, 200_000)
_LONGEST_LINE_CHARS = 200
_ASCII_SHARE = 0.985

_BLOCKS = frozenset({"p", "li", "dd", "dt", "pre", "h1", "h2", "h3", "h4", "blockquote"})
_HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
_POD_CODE = re.compile(r"[A-Z]<(?:<+ )?([^<>]*?)(?: >+)?>")
_R_STRING = re.compile(rb"\x00[\x00-\x0f]\x00\x09(....)", re.DOTALL)
_BIBLE_VERSE = re.compile(r"^(\w+?)(\d+):(\d+) (.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a heading or a listing of a page."""

    kind: str
    text: str


def is_prose(text: str) -> bool:
    """Whether a paragraph is running English: long enough, of words, and with the small words that every sentence has."""
    words = text.split()
    if len(text) < _PROSE_CHARS or len(words) < _PROSE_WORDS:
        return False
    letters = sum(char.isalpha() or char == " " for char in text)
    common = sum(word.lower() in _COMMON for word in words)
    return letters >= _PROSE_LETTERS * len(text) and common >= _COMMON_SHARE * len(words) and text.isprintable()


def prose(blocks: Iterable[Block]) -> list[str]:
    """The running prose of a page, with the headings above it and the short listings that it introduces."""
    kept: list[str] = []
    heading = ""
    is_introduced = False
    for block in blocks:
        if block.kind == "heading":
            heading, is_introduced = block.text, False
        elif block.kind == "listing":
            if is_introduced and 0 < len(block.text) <= _LISTING_CHARS:
                kept.append(block.text)
            is_introduced = False
        elif is_prose(block.text):
            if heading:
                kept.append(heading)
                heading = ""
            kept.append(block.text)
            is_introduced = True
        else:
            is_introduced = False
    return kept


def html_page(path: Path) -> Iterator[list[str]]:
    """The prose of one HTML page as its paragraphs."""
    with contextlib.suppress(etree.ParserError):  # an empty page
        root = html.fromstring(_bytes(path), parser=html.HTMLParser(encoding="utf-8"))
        yield prose(_html_blocks(root))


def _html_blocks(root: html.HtmlElement) -> Iterator[Block]:
    for element in root.iter(*_BLOCKS):
        if element.tag == "pre":
            yield Block("listing", element.text_content().strip("\n").rstrip())
        elif element.tag in _HEADINGS:
            yield Block("heading", _line(element.text_content()))
        elif not any(child.tag in _BLOCKS for child in element.iterdescendants()):
            yield Block("text", _line(element.text_content()))


def pod_page(path: Path) -> Iterator[list[str]]:
    """The prose of a Perl manual page as its paragraphs."""
    yield prose(_pod_blocks(_bytes(path).decode("utf-8", "replace")))


def _pod_blocks(text: str) -> Iterator[Block]:
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("=head"):
            yield Block("heading", _pod_line(paragraph.split("\n")[0].partition(" ")[2]))
        elif paragraph[:1] in (" ", "\t"):
            yield Block("listing", paragraph.rstrip())
        elif not paragraph.startswith("="):
            yield Block("text", _pod_line(paragraph))


def _pod_line(text: str) -> str:
    while (plain := _POD_CODE.sub(lambda found: found[1].rpartition("|")[0] or found[1].lstrip("/"), text)) != text:
        text = plain
    return _line(text)


def jargon_file(path: Path) -> Iterator[list[str]]:
    """The entries of a long plain text in paragraphs, some thousand characters at a time."""
    paragraphs = (_line(each) for each in re.split(r"\n\s*\n", _bytes(path).decode("utf-8", "replace")))
    yield from _chapters(each for each in paragraphs if is_prose(each))


def devils_dictionary(path: Path) -> Iterator[list[str]]:
    """The entries of a dictionary whose paragraphs are separated by blank lines; the compressed file is a gzip file."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    yield from _chapters(line for each in re.split(r"\n\s*\n", text) if len(line := _line(each)) > _PROSE_CHARS)


def novels(path: Path) -> Iterator[list[str]]:
    """The chapters of novels that an R data file holds as lines.

    The file is a row of records: the length of the content (4 bytes, big-endian) and a zlib stream of R's serialization, in
    which a string is the flags of a CHARSXP, its length and its bytes.
    """
    data = path.read_bytes()
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        content = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        lines = list(_r_strings(content))
        chapter: list[str] = []
        for paragraph in "\n".join(lines).split("\n\n"):
            line = _line(paragraph).replace("_", "")
            if re.match(r"(chapter|volume) ", line, re.IGNORECASE) and len(line) < _PROSE_CHARS:
                yield chapter
                chapter = []
            elif line:
                chapter.append(line)
        yield chapter


def _r_strings(content: bytes) -> Iterator[str]:
    at = 0
    while found := _R_STRING.search(content, at):
        size = int.from_bytes(found[1], "big")
        yield content[found.end() : found.end() + size].decode("utf-8", "replace")
        at = found.end() + size


def verse(path: Path) -> Iterator[list[str]]:
    """A plain text of verse, lines kept, some thousand characters a document."""
    lines = (line.strip() for line in _bytes(path).decode("utf-8", "replace").splitlines())
    yield from (["\n".join(group)] for group in _chapters(line for line in lines if line))


def bible(path: Path) -> Iterator[list[str]]:
    """The chapters of the King James text; ``path`` is the program that prints it, which finds its data in ``../lib``."""
    printed = subprocess.run(
        [path.resolve(), "-f", "gen1:1-rev22:21"], cwd=path.resolve().parent.parent / "lib", capture_output=True, check=True
    )
    chapter, verses = ("", ""), list[str]()
    for line in printed.stdout.decode().splitlines():
        if found := _BIBLE_VERSE.match(line):
            if chapter != (found[1], found[2]):
                yield [" ".join(verses)] if verses else []
                chapter, verses = (found[1], found[2]), []
            verses.append(found[4])
    yield [" ".join(verses)]


def program(path: Path) -> Iterator[list[str]]:
    """A source file as one text; none if it is a table, generated, or not English."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return
    if len(text) not in _PROGRAM_CHARS or max(map(len, text.splitlines()), default=0) > _LONGEST_LINE_CHARS:
        return
    digits = sum(char.isdigit() for char in text)
    if sum(map(str.isascii, text)) >= _ASCII_SHARE * len(text) and digits < 0.08 * len(text):
        yield [text.replace("\t", "    ").rstrip() + "\n"]


@dataclass(frozen=True, slots=True)
class Sense:
    """One meaning in WordNet: the words that have it, its part of speech, definition and examples."""

    words: tuple[str, ...]
    part: str
    definition: str
    examples: tuple[str, ...]


def wordnet_senses(path: Path) -> Iterator[Sense]:
    """The senses of one ``data.*`` file of WordNet."""
    parts = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue  # the licence
        fields, _, gloss = line.partition(" | ")
        columns = fields.split()
        count = int(columns[3], 16)
        words = tuple(columns[4 + 2 * number].partition("(")[0].replace("_", " ") for number in range(count))
        quoted = re.findall(r'"([^"]+)"', gloss)
        definition = gloss.partition('"')[0].strip().rstrip(";: ")
        if definition:
            yield Sense(words, parts[columns[2]], definition, tuple(quoted))


def _chapters(paragraphs: Iterable[str], size: int = 6_000) -> Iterator[list[str]]:
    """Paragraphs in groups of about ``size`` characters."""
    group: list[str] = []
    for paragraph in paragraphs:
        group.append(paragraph)
        if sum(map(len, group)) >= size:
            yield group
            group = []
    yield group


def _bytes(path: Path) -> bytes:
    """Content of a file, unpacked if its name says that it is packed."""
    packed = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
    return packed(path.read_bytes()) if packed else path.read_bytes()


def _line(text: str) -> str:
    return " ".join(text.replace("¶", "").replace("\u00a0", " ").split())


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Unpack the text files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [each for each in archive.namelist() if each.endswith((".py", ".txt"))])
