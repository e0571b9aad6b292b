"""Compiles ``kernels.c`` once for this machine, and loads it.

The file name in the cache holds a hash of the source, the compiler and the processor's instructions, so another machine that
shares the cache compiles its own.  The library appears under its name only when it is whole.  Two processes that start together
both compile, and the later one replaces the file with equal bytes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import cffi

from deepinfer.config import cache_dir
from deepinfer.errors import ConfigError

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).parent / "kernels.c"
_FLAGS: Final = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wno-psabi",
)  # fmt: skip
_TIMEOUT_S: Final = 120


class Unavailable(Exception):
    """The kernels cannot be compiled or loaded here; the message says why, in one line."""


@functools.cache
def library() -> Any:  # noqa: ANN401  (the functions of kernels.c)
    """The loaded kernels; the first call of a machine compiles them (about two seconds).

    OpenMP is the library that torch has loaded: the dynamic loader takes one library for each name, so both share one team of
    threads, and the number of threads of torch holds here too.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if compiler is None:
        raise Unavailable("there is no C compiler")
    source = SOURCE.read_text(encoding="utf-8")
    key = hashlib.blake2b("\0".join([source, *_FLAGS, _version(compiler), _processor()]).encode(), digest_size=12).hexdigest()
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as temporary:
        made = _folder(Path(temporary)) / f"kernels-{key}.so"
        if not made.exists():
            _compile(compiler, made)
        ffi = cffi.FFI()
        ffi.cdef(_declarations(source))
        try:
            loaded = ffi.dlopen(str(made))
        except OSError as error:
            raise Unavailable(f"the compiled kernels cannot be loaded ({error})") from error
    loaded.setup()
    return loaded


@functools.cache
def is_available() -> bool:
    """Whether the kernels can be used; says why not, in one line of the log."""
    try:
        library()
    except Unavailable as error:
        log.warning("%s: the CPU kernels are not used, and steps take several times as long", error)
        return False
    return True


def _declarations(source: str) -> str:
    """What cffi must know: the functions of the source, with addresses in the place of pointers."""
    found = re.findall(r"^void (\w+)\(([^)]*)\) \{", source, flags=re.MULTILINE)
    plain = [(name, re.sub(r"(?:const )?\w+ \*(\w+)", r"uintptr_t \1", arguments)) for name, arguments in found]
    return "\n".join(f"void {name}({arguments});" for name, arguments in plain)


def _folder(temporary: Path) -> Path:
    """Where libraries are kept: the cache, or a folder of this process if the cache cannot be written."""
    try:
        folder = cache_dir() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK) and not any(folder.iterdir()):
            raise PermissionError(f"{folder} is read-only")
    except (OSError, ConfigError) as error:
        log.warning("the cache cannot be used (%s): the CPU kernels are compiled at every start", error)
        return temporary
    return folder


def _compile(compiler: str, path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        made = Path(file.name)
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), str(SOURCE), "-lm"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            lines = [*(line for line in done.stderr.splitlines() if "error" in line), *done.stderr.splitlines(), "no message"]
            raise Unavailable(f"{compiler} cannot compile the kernels ({lines[0]})")
        made.replace(path)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{compiler} takes more than {_TIMEOUT_S} s for the kernels") from error
    finally:
        made.unlink(missing_ok=True)


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
