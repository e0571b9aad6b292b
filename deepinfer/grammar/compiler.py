"""Compiling grammars: threads, a time limit, and a cache.

A :class:`GrammarCompiler` turns the ``so_args`` of requests into :class:`CompiledGrammar`.  Work happens in a bounded number of
threads, so hostile grammars cannot take more.  The library releases the interpreter's lock while it compiles.

The checks come in this order: the size of the text; what the modules of each language refuse; the library's limits; the time
limit.  A thread cannot be killed.  When the time is over, the waiting requests fail at once, and the grammar is remembered as
refused.  The thread works until the library's own limits stop it.

Cache: entries belong to salts and are never shared among them.  When the cache is too large, the salt that holds the most bytes
loses its least recently used entry.  A salt that holds less than its share, the limit divided by the number of salts, therefore
never loses an entry because of others.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import llguidance
import numpy as np

from deepinfer.errors import Overloaded, RequestError, reason
from deepinfer.grammar.ebnf import convert
from deepinfer.grammar.json_schema import MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, prepare
from deepinfer.grammar.lark import prepare_lark
from deepinfer.grammar.vocabulary import Vocabulary, Words
from deepinfer.request import StructuredOutput

logger = logging.getLogger(__name__)

_STACK_BYTES: Final = 256 << 20
"""Stack of a compiling thread.  The library recurses through references: 40,000 levels take 130 MB, and 8 MB end the process at
3,000 levels.  Only the part that is used takes memory."""
_MAX_FIRST_MASK_S: Final = 0.5
"""A mask of usual grammars takes 0.1 ms, on busy cores 10 ms.  Its limits do not bound the library in all cases."""
_MAX_REFUSED: Final = 4_096
"""Refused grammars that are remembered."""
_BASE_BYTES: Final = 50_000
_BYTES_PER_BYTE: Final = 25
"""Estimate of a compiled grammar's memory, from the length of its text.  The process grew by 34 kB and 17 bytes for each byte of
text, averaged over 709 schemas."""

LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The library's limits of one grammar, and of one mask; a mask at its limit takes about 15 ms."""

_KINDS: Final = {"regex": "regex", "json": "JSON schema", "ebnf": "EBNF grammar", "lark": "Lark grammar"}
_POSSESSIVE: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<wrong>[*+?}]\+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A grammar that matchers are made from.

    Attributes:
        vocabulary: the tokens that it was compiled for.
        start: the library's matcher before the first token; only copies of it advance.
        allowed: [num_words] int32, tokens that text of this grammar may contain at all.
        num_bytes: estimate of its memory.
    """

    vocabulary: Vocabulary
    start: llguidance.LLMatcher
    allowed: Words
    num_bytes: int


def compile_grammar(args: StructuredOutput, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile a grammar in this thread.

    Raises:
        RequestError: the grammar is refused.  The message names what is wrong and what to do.
    """
    _check_size(args)
    text = args.schema
    named: tuple[int, ...] = ()
    if args.schema_type == "json":
        schema = prepare(text)
        start = _matcher(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(schema.text))
        if start.is_error():
            raise RequestError(
                f"the JSON schema cannot be compiled: {schema.explain(start.get_error(), _cause(start))}; change the schema"
            )
    else:
        if args.schema_type == "regex":
            _check_regex(text)
            grammar = llguidance.LLMatcher.grammar_from_regex(text)
        elif args.schema_type == "ebnf":
            grammar = llguidance.LLMatcher.grammar_from_lark(convert(text))
        else:
            lark = prepare_lark(text, vocabulary)
            grammar, named = llguidance.LLMatcher.grammar_from_lark(lark.text), lark.token_ids
        start = _matcher(vocabulary, grammar)
        if start.is_error():
            raise RequestError(f"the {_KINDS[args.schema_type]} cannot be compiled: {_cause(start)}; change it")
    allowed = vocabulary.mask_with(named) if named else vocabulary.text_mask
    _check_begin(start, allowed)
    return CompiledGrammar(
        vocabulary=vocabulary,
        start=start,
        allowed=allowed,
        num_bytes=_BASE_BYTES + _BYTES_PER_BYTE * len(text),
    )


def _check_size(args: StructuredOutput) -> None:
    if len(args.schema.encode()) > MAX_SCHEMA_BYTES:
        raise RequestError(f"the {_KINDS[args.schema_type]} has more than {MAX_SCHEMA_BYTES} bytes; shorten it")


def _matcher(vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(vocabulary.library, grammar, log_level=0, limits=LIMITS)


def _check_regex(text: str) -> None:
    if len(text.encode()) > MAX_REGEX_BYTES:
        raise RequestError(f"the regex has more than {MAX_REGEX_BYTES} bytes; shorten it")
    for found in _POSSESSIVE.finditer(text):
        if found["wrong"]:
            raise RequestError(
                f"the regex has the possessive repetition {found['wrong']}, which cannot be enforced; remove the +"
            )


def _check_begin(start: llguidance.LLMatcher, allowed: Words) -> None:
    """Refuse a grammar that allows no first token."""
    copy = start.deep_copy()
    begin_s = time.monotonic()
    mask = np.frombuffer(copy.compute_bitmask(), dtype=np.int32)[: len(allowed)]
    if copy.is_error():
        raise RequestError(f"the grammar allows no first token ({_cause(copy)}); change it")
    if time.monotonic() - begin_s > _MAX_FIRST_MASK_S:
        raise RequestError("the grammar takes too long for its first token; use fewer alternatives")
    if not (mask & allowed).any():
        raise RequestError("the grammar allows no first token; change it, or name the special token that it begins with by id")


def _cause(matcher: llguidance.LLMatcher) -> str:
    """The library's error as one short line, without its excerpt of the grammar."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    inner = re.search(r"^error: (.*)", text, re.MULTILINE)
    if inner:
        return reason(ValueError(inner[1]))
    return reason(ValueError(re.sub(r"\n\s*\d* \|.*", "", text, flags=re.DOTALL)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerCounts:
    """What a compiler did since it was made.

    Attributes:
        num_hits: requests whose grammar was in the cache, or was being compiled for another request.
        num_misses: requests whose grammar had to be compiled.
        num_timeouts: grammars that exceeded the time limit.
        num_refused: requests whose grammar was refused, time-outs included.
        compile_s: seconds spent in compiling.
        num_cached: entries of the cache.
        cached_bytes: estimate of their memory.
    """

    num_hits: int
    num_misses: int
    num_timeouts: int
    num_refused: int
    compile_s: float
    num_cached: int
    cached_bytes: int


Key = tuple[bytes, bytes]
"""Salt, and hash of language and text."""


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar that requests wait for."""

    key: Key
    args: StructuredOutput
    deadline: float
    waiting: list[Future[CompiledGrammar]] = field(default_factory=list)
    is_started: bool = False
    is_done: bool = False


class GrammarCompiler:
    """Compiles grammars for requests; all methods may be called from any thread.

    Invariant: at most ``num_threads`` threads compile, and the cache holds at most ``cache_bytes``.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float,
        num_threads: int,
        cache_bytes: int,
        is_debug: bool = False,
    ) -> None:
        """Start without threads; the first request starts them.

        Args:
            vocabulary: gives the model's tokens; called in a thread when the first grammar comes, because it takes a second.
            timeout_s: time limit from :meth:`submit` to the result.
            num_threads: most threads that compile.
            cache_bytes: size of the cache; 0 keeps nothing.
            is_debug: log every grammar that is compiled.
        """
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._is_debug = is_debug
        self._cache = _Cache(cache_bytes)
        self._refused: OrderedDict[Key, str] = OrderedDict()
        self._changed = threading.Condition()
        self._jobs: dict[Key, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._deadlines: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False
        self._durations_s: list[float] = []
        self._compile_s = 0.0
        self._num_hits = self._num_misses = self._num_timeouts = self._num_refused = 0

    def submit(self, args: StructuredOutput, salt: bytes) -> Future[CompiledGrammar]:
        """Compile a grammar, or find it; never waits.

        Returns:
            A future.  It fails with :class:`RequestError` if the grammar is refused or exceeds the time limit, and with
            :class:`Overloaded` if no thread became free within the time limit.  Cancelling it takes back only this request.
        """
        future: Future[CompiledGrammar] = Future()
        try:  # what needs no thread
            _check_size(args)
        except RequestError as error:
            self._refuse([future], str(error))
            return future
        text = args.schema.encode()
        key = salt, hashlib.blake2b(text, digest_size=16, person=args.schema_type.encode()).digest()
        with self._changed:
            found = self._cache.get(key)
            message = self._refused.get(key)
            job = self._jobs.get(key)
            if found is not None or job is not None:
                self._num_hits += 1
            if job is not None:
                job.waiting.append(future)
                return future
            if found is None and message is None:
                self._num_misses += 1
                job = _Job(key, args, time.monotonic() + self._timeout_s, [future])
                self._jobs[key] = job
                self._queue.append(job)
                self._deadlines.append(job)
                self._start_threads()
                self._changed.notify_all()
                return future
        if found is not None:
            _resolve([future], found)
        else:
            assert message is not None
            self._refuse([future], message)
        return future

    def counts(self) -> CompilerCounts:
        """The counts now."""
        with self._changed:
            return CompilerCounts(
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_timeouts=self._num_timeouts,
                num_refused=self._num_refused,
                compile_s=self._compile_s,
                num_cached=self._cache.num_entries,
                cached_bytes=self._cache.num_bytes,
            )

    def take_durations(self) -> list[float]:
        """Seconds of each compile that ended since the last call, for a histogram."""
        with self._changed:
            taken, self._durations_s = self._durations_s, []
        return taken

    def close(self) -> None:
        """Fail all requests that wait, and let the threads end; a thread that compiles ends after that."""
        with self._changed:
            self._is_closed = True
            jobs = [each for each in self._jobs.values() if not each.is_done]
            self._jobs.clear()
            self._queue.clear()
            self._deadlines.clear()
            waiting = [future for each in jobs for future in self._finish(each)]
            self._changed.notify_all()
        _resolve(waiting, Overloaded("the engine is closing; send the request to another one"))

    def _start_threads(self) -> None:
        if self._num_idle < len(self._queue) and len(self._threads) < self._num_threads + 1:
            with _stack_lock:
                before = threading.stack_size(_STACK_BYTES)
                try:
                    targets = [self._compile_jobs] if self._threads else [self._watch, self._compile_jobs]
                    for target in targets:
                        thread = threading.Thread(target=target, name="grammar", daemon=True)
                        thread.start()
                        self._threads.append(thread)
                finally:
                    threading.stack_size(before)

    def _finish(self, job: _Job) -> list[Future[CompiledGrammar]]:
        """Take the waiting requests of a job that ends; called with the lock."""
        job.is_done = True
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        waiting, job.waiting = job.waiting, []
        return waiting

    def _refuse(self, waiting: list[Future[CompiledGrammar]], message: str) -> None:
        with self._changed:
            self._num_refused += len(waiting)
        _resolve(waiting, RequestError(message))

    def _remember(self, key: Key, message: str) -> None:
        self._refused[key] = message
        self._refused.move_to_end(key)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _watch(self) -> None:
        """Fail jobs at their deadline.  All jobs have the same limit, so the oldest is the next."""
        while True:
            with self._changed:
                while not self._is_closed and not self._deadlines:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._deadlines[0]
                rest_s = job.deadline - time.monotonic()
                if not job.is_done and rest_s > 0:
                    self._changed.wait(rest_s)
                    continue
                self._deadlines.popleft()
                if job.is_done:
                    continue
                waiting = self._finish(job)
                message = f"the grammar was not compiled within {self._timeout_s:g} s; make it simpler"
                if job.is_started:
                    self._remember(job.key, message)
                    self._num_timeouts += 1
                else:
                    self._queue.remove(job)
            if job.is_started:
                self._refuse(waiting, message)
            else:
                _resolve(waiting, Overloaded("all threads that compile grammars are busy; try again later"))

    def _compile_jobs(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._is_closed and not self._queue:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_closed:
                    return
                job = self._queue.popleft()
                job.waiting = [each for each in job.waiting if not each.cancelled()]
                if not job.waiting:
                    self._finish(job)
                    continue
                job.is_started = True
            self._compile(job)

    def _compile(self, job: _Job) -> None:
        if self._is_debug:
            logger.info("compiling a %s grammar: %s", job.args.schema_type, job.args.schema)
        start = time.monotonic()
        result: CompiledGrammar | RequestError
        try:
            result = compile_grammar(job.args, self._vocabulary())
        except RequestError as error:
            result = error
        except BaseException as error:  # a panic of the library is not an Exception
            logger.exception("compiling a %s grammar failed", job.args.schema_type)
            result = RequestError(f"the grammar cannot be compiled ({reason(error)}); change it")
        took_s = time.monotonic() - start
        with self._changed:
            self._durations_s.append(took_s)
            self._compile_s += took_s
            if job.is_done:  # too late
                return
            waiting = self._finish(job)
            if isinstance(result, CompiledGrammar):
                self._cache.put(job.key, result)
            else:
                self._remember(job.key, str(result))
        if isinstance(result, CompiledGrammar):
            _resolve(waiting, result)
        else:
            self._refuse(waiting, str(result))


_stack_lock: Final = threading.Lock()
"""Guards the size of new threads' stacks, which is one value of the process."""


def _resolve(waiting: list[Future[CompiledGrammar]], result: CompiledGrammar | RequestError | Overloaded) -> None:
    """Give the requests their result; called without the lock, because callbacks of futures run here."""
    for future in waiting:
        if future.set_running_or_notify_cancel():
            if isinstance(result, CompiledGrammar):
                future.set_result(result)
            else:
                future.set_exception(type(result)(str(result)))


class _Cache:
    """Compiled grammars by key; see the module for the rule of eviction.

    Invariant: ``num_bytes`` is the sum of all entries and at most the limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._salts: dict[bytes, OrderedDict[Key, CompiledGrammar]] = {}
        self._bytes_of: dict[bytes, int] = {}
        self.num_bytes = 0

    @property
    def num_entries(self) -> int:
        """Entries of all salts."""
        return sum(map(len, self._salts.values()))

    def get(self, key: Key) -> CompiledGrammar | None:
        """An entry, which becomes the most recently used one of its salt."""
        entries = self._salts.get(key[0])
        found = entries.get(key) if entries else None
        if entries and found is not None:
            entries.move_to_end(key)
        return found

    def put(self, key: Key, grammar: CompiledGrammar) -> None:
        """Add an entry, and evict others while the cache is too large; an entry above the limit is not kept."""
        if grammar.num_bytes > self._max_bytes:
            return
        salt = key[0]
        self._salts.setdefault(salt, OrderedDict())[key] = grammar
        self._bytes_of[salt] = self._bytes_of.get(salt, 0) + grammar.num_bytes
        self.num_bytes += grammar.num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            _, evicted = self._salts[largest].popitem(last=False)
            self._bytes_of[largest] -= evicted.num_bytes
            self.num_bytes -= evicted.num_bytes
            if not self._salts[largest]:
                del self._salts[largest], self._bytes_of[largest]
