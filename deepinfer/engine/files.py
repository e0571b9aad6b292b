"""Files that commands read and write.  An output file is complete or unchanged, and finished results are never lost.

:class:`OutputFile` is the output of one command.  Its constructor checks that the file can be written, before the command spends
minutes; the check changes no file.  Ordinary files are replaced by a rename.  Terminals, pipes and devices are written directly.

:class:`ResultLines` are the results of many prompts, which arrive in any order.  Each result is written at once to
``NAME.partial`` in the same directory.  When all results are complete, they replace the file in the order of the prompts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType

from deepinfer.errors import RequestError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")
_MAX_LINKS = 40
_MAX_NAME_BYTES = 255
_COPY_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_file(path: Path) -> bytes:
    """The content of a file, without a byte-order mark at its start.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        return path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check the path") from error


def _problem(path: Path, error: Exception, advice: str = "check the path and the space on its disk") -> RequestError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RequestError(f"cannot write {path}: {reason}; {advice}")


class OutputFile:
    """A checked path to write to.

    Attributes:
        path: the path that was given.
        descriptor: a file descriptor of this process if the path names one (``/dev/stdout``), else None.
        is_replaced: whether a new file replaces the path by a rename; False writes to the path directly.
    """

    def __init__(self, path: Path, *, apart_from: Sequence[Path] = ()) -> None:
        """Check that the file can be written; ``apart_from`` are other files that the command reads or writes.

        Raises:
            RequestError: the file cannot be written, or is one of the other files.
        """
        self.path = path
        self.descriptor = _descriptor(path)
        self.is_replaced = False
        self._target = path
        try:
            self._check()
        except (OSError, ValueError, RuntimeError) as error:
            raise _problem(path, error, "check the path") from error
        for other in apart_from:
            self._check_apart(other)

    @property
    def partial(self) -> Path:
        """The file that holds results until all results are complete."""
        return self._target.with_name(f"{self._target.name}.partial")

    def _check(self) -> None:
        if self.descriptor is not None:
            if fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise PermissionError(None, "it is open for reading")
            return
        self._target = self.path.resolve()  # the target of a link is replaced, not the link
        try:
            mode = self._target.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(None, "it is a directory")
        if mode is not None and not os.access(self._target, os.W_OK):
            raise PermissionError(None, "Permission denied")
        if mode is not None and not stat.S_ISREG(mode):
            return
        try:
            with tempfile.TemporaryFile(dir=self._target.parent):
                self.is_replaced = len(os.fsencode(self.partial.name)) <= _MAX_NAME_BYTES
        except OSError:
            if mode is None:
                raise
            with self._target.open("r+b"):  # the directory allows no new file, but the file itself can be written
                pass

    def _check_apart(self, other: Path) -> None:
        places = [self._target, self.partial] if self.is_replaced else [self._target]
        mine = [_stat(each) for each in places] if self.descriptor is None else [os.fstat(self.descriptor)]
        theirs = _stat(other)
        if theirs is None:  # a file that does not exist can only be compared by its name
            is_same = self.descriptor is None and other.resolve() in places
        else:
            is_same = stat.S_ISREG(theirs.st_mode) and any(each and os.path.samestat(each, theirs) for each in mine)
        if is_same:
            raise RequestError(
                f"{self.path} and {other} are the same file, which writing would destroy; name another file to write"
            )

    def open_in_place(self) -> FileIO:
        """Open the path itself; a regular file keeps its content until the first write."""
        if self.descriptor is not None:
            return os.fdopen(os.dup(self.descriptor), "wb", buffering=0)
        return self._target.open("r+b" if self._target.is_file() else "wb", buffering=0)

    def replace(self, content: bytes) -> None:
        """Replace the file's content.

        Raises:
            RequestError: the file cannot be written; an old file is unchanged.
        """
        try:
            if not self.is_replaced:
                with self.open_in_place() as file:
                    _empty(file, self)
                    _write_all(file, content)
                return
            with self.replacement() as file:
                _write_all(file, content)
        except OSError as error:
            raise _problem(self.path, error) from error

    @contextlib.contextmanager
    def replacement(self) -> Iterator[FileIO]:
        """A new file in the same directory.  It replaces the path when the block ends, and is removed if the block fails."""
        scratch = self._target.with_name(f".{self._target.name}.{os.getpid()}.new")
        try:
            with scratch.open("wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            self.take(scratch)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise

    def take(self, scratch: Path) -> None:
        """Rename a finished file to the path; it gets the permissions of the old file."""
        before = _stat(self._target)
        if before is not None:
            scratch.chmod(stat.S_IMODE(before.st_mode))
        scratch.replace(self._target)


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path such as ``/dev/stdout`` names, or None."""
    place = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        named = _DESCRIPTOR.fullmatch(place)
        if named is not None:
            return int(named[1])
        try:
            place = os.path.join(os.path.dirname(place), os.readlink(place))
        except (OSError, ValueError):
            return None
    return None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _empty(file: FileIO, output: OutputFile) -> None:
    """Empty a regular file before it is written directly; a file that a descriptor of this process names keeps its content."""
    if output.descriptor is None and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


class ResultLines:
    """Writes the results of ``num_prompts`` prompts into a file; use it with ``with``.

    A file that is replaced stays unchanged until all results are complete.  ``NAME.partial`` holds the results until then, in the
    order of their arrival.  An output that is written directly gets the lines in the order of the prompts.

    Attributes:
        num_written: prompts whose lines are written.
    """

    def __init__(self, output: OutputFile, num_prompts: int) -> None:
        """Prepare without opening a file; ``with`` opens it."""
        self.output = output
        self.num_written = 0
        self._num_prompts = num_prompts
        self._waiting: dict[int, bytes] = {}  # direct output: lines that wait for earlier prompts
        self._places: dict[int, tuple[int, int]] = {}  # prompt -> offset and length of its lines
        self._end = 0
        self._is_reported = False
        self._file: FileIO

    def __enter__(self) -> ResultLines:
        """Open the file.

        Raises:
            RequestError: the file cannot be opened, or another run writes it.
        """
        try:
            self._file = self._open_partial() if self.output.is_replaced else self.output.open_in_place()
        except OSError as error:
            raise _problem(self.output.path, error) from error
        return self

    def _open_partial(self) -> FileIO:
        path = self.output.partial
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        file = FileIO(descriptor, "r+b")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), path.stat()):
                raise BlockingIOError
            file.truncate(0)
        except (BlockingIOError, FileNotFoundError):
            file.close()
            raise RequestError(f"another run writes {path} now; wait for its end, or name another file to write") from None
        return file

    def write(self, index: int, lines: bytes) -> None:
        """Add the lines of prompt ``index``; the system has them when this returns.

        Raises:
            RequestError: the lines cannot be written; the message names the file with the earlier results.
        """
        try:
            if self.output.is_replaced:
                self._append(index, lines)
                return
            self._waiting[index] = lines
            while self.num_written in self._waiting:
                if self.num_written == 0:
                    _empty(self._file, self.output)
                self._append(self.num_written, self._waiting.pop(self.num_written))
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.output.descriptor is not None:
                raise  # the reader of the pipe has ended; this is no error of the file
            self._is_reported = True
            raise _problem(self.output.path, error, f"{self._where()}; make room, or name another file") from error

    def _append(self, index: int, lines: bytes) -> None:
        try:
            _write_all(self._file, lines)
        except BaseException:
            if self.output.is_replaced:  # keep only complete lines
                self._file.truncate(self._end)
            raise
        self._places[index] = (self._end, len(lines))
        self._end += len(lines)
        self.num_written += 1

    def _where(self) -> str:
        if not self.num_written:
            return "no result was written"
        where = self.output.partial if self.output.is_replaced else self.output.path
        return f"{where} holds the results of {self.num_written} of {self._num_prompts} prompts"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Replace the file if the block succeeded; otherwise add a note to the error that names the file with the results.

        Raises:
            RequestError: the file cannot be replaced.
        """
        try:
            if kind is None and self.output.is_replaced:
                self._finish()
        except OSError as problem:
            raise _problem(self.output.path, problem, f"{self._where()}; make room, and sort it by id") from problem
        finally:
            self._close()
        if error is not None and not self._is_reported:
            error.add_note(self._where())

    def _finish(self) -> None:
        os.fsync(self._file.fileno())
        if list(self._places) == sorted(self._places):
            self.output.take(self.output.partial)
            return
        with self.output.replacement() as file:
            for index in sorted(self._places):
                start, left = self._places[index]
                self._file.seek(start)
                while left:
                    piece = self._file.read(min(left, _COPY_BYTES))
                    _write_all(file, piece)
                    left -= len(piece)
        self.output.partial.unlink()

    def _close(self) -> None:
        if self.output.is_replaced and not self.num_written:
            self.output.partial.unlink(missing_ok=True)
        self._file.close()
