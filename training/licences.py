"""Licences of the training texts: ``python -m training.licences --text DIR --cache DIR > deepinfer/bench/SOURCES.md``.

The table compares the licence that :mod:`training.sources` names with what the package itself says: the stanza for all files of a
Debian package's ``copyright`` file, or the metadata of a wheel.
"""

from __future__ import annotations

import argparse
import email
import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from deepinfer.bench.texts import held_out_texts

_HEAD = """# Sources of the texts

`nano` is trained on texts of these sources.  `held_out.jsonl.xz` has texts of the sources that are marked; it was not used for
training.  The texts keep their licences and their copyright.  `LICENCES.txt` has the texts of the licences.

The column "in the package" has what the package says about itself.
"copyright file" is the stanza for all files of the Debian package's `copyright` file.
"free form" is a `copyright` file without such a stanza; no program compared it.
"wheel" is the metadata of the PyPI package.
"not checked" is a licence that only `training/sources.py` names.
"""
_MOST_HOLDERS = 3


class Found(NamedTuple):
    """What a package says about itself."""

    licence: str
    holders: tuple[str, ...] = ()


def in_copyright_file(folder: Path) -> Found | None:
    """The stanza for all files of the first ``copyright`` file below ``folder``; None without such a file."""
    for path in sorted(folder.rglob("copyright")):
        stanzas = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
        for fields in (dict(re.findall(r"^([A-Za-z-]+):[ \t]*((?:.*)(?:\n[ \t].*)*)", each, re.MULTILINE)) for each in stanzas):
            if "*" in fields.get("Files", "").split() and "License" in fields:
                lines = [line.strip() for line in fields.get("Copyright", "").splitlines() if line.strip()]
                return Found(f"{fields['License'].splitlines()[0]} (copyright file)", tuple(lines[:_MOST_HOLDERS]))
        return Found("free form (copyright file)")
    return None


def in_wheel(folder: Path) -> Found | None:
    """The metadata of the first wheel of ``folder``; None without a wheel."""
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            text = wheel.read(next(each for each in names if each.endswith(".dist-info/METADATA"))).decode()
            licences = [each for each in names if re.search(r"\.dist-info/.*(LICEN[CS]E|COPYING)[^/]*$", each)]
            lines = [line for each in licences[:1] for line in wheel.read(each).decode(errors="replace").splitlines()]
        fields = email.message_from_string(text)
        classified = [each.split(" :: ")[-1] for each in fields.get_all("Classifier", []) if each.startswith("License ::")]
        licence = fields["License-Expression"] or "; ".join(classified) or (fields["License"] or "none").splitlines()[0]
        holders = [line.strip() for line in lines if re.match(r"\s*Copyright (\(c\) )?\d{4}", line, re.IGNORECASE)]
        return Found(f"{licence} (wheel)", tuple(holders[:1]))
    return None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of the text shards")
    parser.add_argument("--cache", type=Path, required=True, help="folder of downloaded packages")
    args = parser.parse_args()
    held_out = {each.source for each in held_out_texts()}
    rows = []
    for source in json.loads((args.text / "meta.json").read_text(encoding="utf-8"))["sources"]:
        name = source["name"]
        found = in_copyright_file(args.cache / name) or in_wheel(args.cache / "packages" / name) or Found("not checked")
        holders = re.sub(r" ?<[^>]*@[^>]*>", "", "; ".join(found.holders))
        cells = [name, " ".join(source["packages"]), source["licence"], found.licence, holders]
        rows.append([*cells, f"{source['bytes'] / 1e6:.1f}", "yes" if name in held_out else ""])
    headers = ["source", "package", "licence", "in the package", "copyright, first lines", "MB", "held-out texts"]
    print(f"{_HEAD}\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}")  # noqa: T201


if __name__ == "__main__":
    main()
