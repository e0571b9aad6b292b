"""The compiler: threads, time limit, cache, and grammars that mean harm."""

import contextlib
import gc
import random
import threading
import time

import pytest

from deepinfer.bench.hostile import HOSTILE
from deepinfer.errors import GrammarFailed, Overloaded, RequestError
from deepinfer.grammar import compiler as module
from deepinfer.grammar.compiler import GrammarCompiler, compile_grammar
from deepinfer.grammar.json_schema import MAX_SCHEMA_BYTES
from deepinfer.grammar.matcher import Matcher
from tests.grammar.walks import allowed, structured

WAIT_S = 10


@pytest.fixture
def compiler(vocabulary):
    made = []

    def make(**others):
        values = {"timeout_s": 5.0, "num_threads": 2, "cache_bytes": 10_000_000} | others
        made.append(GrammarCompiler(lambda: vocabulary, **values))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Gate:
    """Compiling that waits until the test opens the gate."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.num_started = 0
        self._started = threading.Condition()
        monkeypatch.setattr(module, "compile_grammar", self._compile)

    def _compile(self, args, vocabulary):
        with self._started:
            self.num_started += 1
            self._started.notify_all()
        self.opened.wait(WAIT_S)
        return compile_grammar(args, vocabulary)

    def wait_for(self, number):
        with self._started:
            assert self._started.wait_for(lambda: self.num_started >= number, WAIT_S)


def test_a_compiled_grammar_is_found_again(compiler):
    made = compiler()
    first = made.submit(structured("regex", "a+"), b"").result(WAIT_S)
    assert made.submit(structured("regex", "a+"), b"").result(0) is first
    second = made.submit(structured("ebnf", 'root ::= "a"'), b"").result(WAIT_S)
    assert second is not first
    counts = made.counts()
    assert (counts.num_hits, counts.num_misses, counts.num_cached, counts.num_refused) == (1, 2, 2, 0)
    assert counts.cached_bytes == first.num_bytes + second.num_bytes
    assert counts.compile_s > 0
    assert len(made.take_durations()) == 2
    assert made.take_durations() == []


def test_salts_share_no_entry(compiler):
    made = compiler()
    first = made.submit(structured("regex", "a+"), b"x").result(WAIT_S)
    assert made.submit(structured("regex", "a+"), b"y").result(WAIT_S) is not first
    assert made.counts().num_hits == 0


def test_an_error_names_what_is_wrong_and_is_remembered(compiler, monkeypatch):
    made = compiler()
    for _ in range(2):
        with pytest.raises(RequestError, match="the regex cannot be compiled: unclosed group; change it"):
            made.submit(structured("regex", "(a"), b"").result(WAIT_S)
    counts = made.counts()
    assert (counts.num_misses, counts.num_refused, len(made.take_durations())) == (1, 2, 1)


def test_waiting_requests_share_one_compile(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler()
    futures = [made.submit(structured("regex", "a+"), b"") for _ in range(5)]
    gate.wait_for(1)
    assert futures[1].cancel()
    gate.opened.set()
    results = [each.result(WAIT_S) for each in futures if not each.cancelled()]
    assert len({id(each) for each in results}) == 1
    assert gate.num_started == 1


def test_a_request_that_nobody_waits_for_is_not_compiled(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler(num_threads=1)
    first = made.submit(structured("regex", "a"), b"")
    gate.wait_for(1)
    second, third = (made.submit(structured("regex", each), b"") for each in "bc")
    second.cancel()
    gate.opened.set()
    assert first.result(WAIT_S)
    assert third.result(WAIT_S)
    assert gate.num_started == 2


def test_a_compile_over_its_time_fails_and_is_refused_from_then_on(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler(timeout_s=0.2)
    start = time.monotonic()
    slow = made.submit(structured("regex", "a"), b"")
    with pytest.raises(RequestError, match=r"not compiled within 0.2 s; make it simpler"):
        slow.result(WAIT_S)
    assert 0.19 < time.monotonic() - start < 2
    gate.opened.set()
    with pytest.raises(RequestError, match=r"not compiled within 0.2 s"):
        made.submit(structured("regex", "a"), b"").result(0)
    assert made.submit(structured("regex", "b"), b"").result(WAIT_S)
    counts = made.counts()
    assert (counts.num_timeouts, counts.num_refused, gate.num_started) == (1, 2, 2)


def test_hostile_grammars_take_only_the_threads_they_have(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler(timeout_s=0.3, num_threads=2)
    futures = [made.submit(structured("regex", each), b"") for each in "abcd"]
    gate.wait_for(2)
    for future in futures[:2]:
        with pytest.raises(RequestError, match="not compiled within"):
            future.result(WAIT_S)
    for future in futures[2:]:
        with pytest.raises(Overloaded, match="all threads that compile grammars are busy"):
            future.result(WAIT_S)
    assert gate.num_started == 2
    gate.opened.set()
    assert made.submit(structured("regex", "c"), b"").result(WAIT_S)  # it was not refused


def test_the_largest_salt_loses_its_oldest_entry(compiler):
    room = 5 * compiler().submit(structured("regex", "a"), b"").result(WAIT_S).num_bytes
    made = compiler(cache_bytes=room)

    def compiled(salt, text):
        before = made.counts().num_misses
        made.submit(structured("regex", text), salt).result(WAIT_S)
        return made.counts().num_misses > before

    for text in "ab":
        assert compiled(b"small", text)
    for text in "abcdefgh":
        assert compiled(b"large", text)
    assert made.counts().cached_bytes <= room
    assert not compiled(b"small", "a")
    assert not compiled(b"small", "b")
    assert [compiled(b"large", text) for text in "hgf"] == [False, False, False]
    assert compiled(b"large", "a")
    assert not compiled(b"large", "f")  # used after g and h, so it stays


@pytest.mark.parametrize("cache_bytes", [0, 1000])
def test_a_cache_without_room_keeps_nothing(cache_bytes, compiler):
    made = compiler(cache_bytes=cache_bytes)
    for _ in range(2):
        assert made.submit(structured("regex", "a"), b"").result(WAIT_S)
    assert (made.counts().num_misses, made.counts().num_cached) == (2, 0)


def test_a_failure_of_the_library_refuses_only_that_grammar(compiler, monkeypatch):
    made = compiler()
    with monkeypatch.context() as patch:
        patch.setattr(module, "compile_grammar", lambda args, vocabulary: 1 // 0)
        with pytest.raises(RequestError, match=r"cannot be compiled \(.*zero\)"):
            made.submit(structured("regex", "a"), b"").result(WAIT_S)
    assert made.submit(structured("regex", "b"), b"").result(WAIT_S)


def test_closing_fails_those_who_wait(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler()
    future = made.submit(structured("regex", "a"), b"")
    gate.wait_for(1)
    made.close()
    with pytest.raises(Overloaded, match="the engine is closing"):
        future.result(WAIT_S)
    gate.opened.set()


def test_debugging_logs_the_grammar(compiler, caplog):
    with caplog.at_level("INFO"):
        compiler(is_debug=True).submit(structured("regex", "a+b"), b"").result(WAIT_S)
    assert "compiling a regex grammar: a+b" in caplog.text


def test_waiting_takes_no_time_of_a_core(compiler, monkeypatch):
    gate, made = Gate(monkeypatch), compiler()
    made.submit(structured("regex", "a"), b"")
    gate.wait_for(1)
    gc.collect()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    gate.opened.set()


@pytest.mark.parametrize(
    ("regex", "says"),
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\bfoo", "lookarounds not supported"),
        ("a++", r"the possessive repetition \+\+"),
        ("[", "unclosed character class"),
        ("a" * 9000, "the regex has more than 8000 bytes"),
        ("(?-u:\\xff)", "invalid UTF-8"),
        ("[a&&b]", "allows no first token|cannot be compiled"),
    ],
)
def test_a_regex_that_cannot_be_enforced_is_refused(regex, says, vocabulary):
    with pytest.raises(RequestError, match=says):
        compile_grammar(structured("regex", regex), vocabulary)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_its_limit(name, compiler, vocabulary, seed):
    made, rng, args = compiler(timeout_s=5.0), random.Random(seed), structured(*HOSTILE[name])
    start = time.monotonic()
    future = made.submit(args, b"")
    error = future.exception(WAIT_S)
    assert time.monotonic() - start < 5.5
    if error is None:
        matcher, slowest_s = Matcher(future.result(), args), 0.0
        with contextlib.suppress(GrammarFailed):
            for _ in range(25):
                start = time.monotonic()
                choices = allowed(matcher, vocabulary)
                matcher.advance([rng.choice(choices)])
                slowest_s = max(slowest_s, time.monotonic() - start)
        assert slowest_s < 0.5
    else:
        assert isinstance(error, RequestError)
        assert len(str(error)) < 400
        assert "\n" not in str(error)


@pytest.mark.parametrize("kind", ["regex", "json", "ebnf", "lark"])
def test_a_text_that_is_too_large_is_refused_before_anything_else(kind, compiler):
    made = compiler()
    with pytest.raises(RequestError, match=f"more than {MAX_SCHEMA_BYTES} bytes"):
        made.submit(structured(kind, "a" * 1_000_000), b"").result(0)
