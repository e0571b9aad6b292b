"""Print the lines of code of each folder, and their change against ``main``; the last step of ``make check``.

A line of code contains code, not only blanks, comments or docstrings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("deepinfer", "tests", "scripts")
BASES = ("origin/main", "main")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> None:
    """Print the table."""
    now = lines_per_folder({str(path.relative_to(ROOT)): path.read_text() for top in FOLDERS for path in sources(ROOT / top)})
    base, before = lines_of_main()
    width = max(map(len, [*now, *before, "total"]))
    out = [f"{'code lines'.ljust(width)}  now  {f'against {base}' if base else '(no main branch to compare with)'}"]
    for folder in [*sorted({*now, *before}), "total"]:
        count = now.total() if folder == "total" else now[folder]
        base_count = before.total() if folder == "total" else before[folder]
        out.append(f"{folder.ljust(width)} {count:>5}" + (f"  {count - base_count:+d}" if base else ""))
    sys.stdout.write("\n".join(out) + "\n")


def sources(folder: Path) -> list[Path]:
    """All Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def lines_of_main() -> tuple[str, Counter[str]]:
    """The name of the branch to compare with ("" if there is none) and its lines per folder."""
    for base in BASES:
        archive = subprocess.run(["git", "archive", base], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                texts = {
                    member.name: file.read().decode()
                    for member in files
                    if member.name.endswith(".py") and member.name.startswith(FOLDERS) and (file := files.extractfile(member))
                }
            return base, lines_per_folder(texts)
    return "", Counter()


def lines_per_folder(texts: dict[str, str]) -> Counter[str]:
    """Lines of code of each folder; ``texts`` maps paths to sources."""
    counts: Counter[str] = Counter()
    for path, text in texts.items():
        counts[str(Path(path).parent)] += code_lines(text)
    return counts


def code_lines(text: str) -> int:
    """Number of lines of one source that contain code."""
    covered: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            covered.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            covered.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(covered)


if __name__ == "__main__":
    main()
