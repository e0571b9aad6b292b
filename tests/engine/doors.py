"""The APIs inside a program, with a core without a model that detects calls at the wrong time.

Run as a program, the module plays scenes.
"""

# ruff: noqa: T201  (what a scene prints is its result)

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

from tqdm import tqdm

from deepinfer import SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine import llm_engine as engine_module
from deepinfer.engine.llm import LLM
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.executor.executor import Executor
from tests.engine.fake_core import FakeCore
from tests.engine.scenes import play

ARGS = {"model": "fake", "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 256, "device": "cpu"}
FOREVER = 10**9


class StrictCore(FakeCore):
    """A core that counts upwards from the last token of the prompt; a step takes ``step_s``.

    Attributes:
        trespasses: calls during another call, or after a call that an exception interrupted.
        num_idle_steps: steps without work.
        breaks_at: number of the step that raises.
    """

    def __init__(self, args, step_s=0.0005):
        super().__init__(args)
        self.step_s, self.breaks_at = step_s, None
        self._executor = Executor(object)  # steps and ends of requests use its thread, as in a real core
        self.trespasses, self.num_idle_steps, self.is_closed, self._is_busy = 0, 0, False, False

    def _alone(self, call, *given):
        self.trespasses += self._is_busy
        self._is_busy = True
        result = call(*given)
        self._is_busy = False
        return result

    def add(self, request, pictures=(), grammar=None):
        self._alone(lambda: (time.sleep(self.step_s), FakeCore.add(self, request, pictures)))

    def abort(self, request_ids):
        self._executor.call(list)
        return self._alone(FakeCore.abort, self, request_ids)

    def stats(self):
        return FakeCore.stats(self)

    def step(self):
        def step():
            self.num_idle_steps += self.is_idle
            self._executor.call(lambda: time.sleep(self.step_s))
            if self.num_steps == self.breaks_at:
                raise ZeroDivisionError("the step was asked to")
            return FakeCore.step(self)

        return self._alone(step)

    def close(self):
        self._alone(self._executor.close)
        self.is_closed = True


class _Tokenizer:
    bos_id = 0

    def least_tokens(self, text):
        return 0

    def encode(self, text):
        return [int(each) for each in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def _loaded(args, step_s):
    config = SimpleNamespace(vocab_size=10**9, image_token_id=-1, eos_token_id=1, vision=None)
    return SimpleNamespace(config=config, tokenizer=_Tokenizer(), core=StrictCore(args, step_s))


def make_llm(step_s=0.0005, **given):
    engine_module.load, before = (lambda args, *, progress: _loaded(args, step_s)), engine_module.load
    try:
        return LLM(**{**ARGS, **given}, progress=False)
    finally:
        engine_module.load = before


def make_engine(step_s=0.0005):
    args = EngineArgs(**ARGS, disable_log_stats=True)
    return LLMEngine(args, _loaded(args, step_s))


def params(max_tokens=8):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def generate(llm, *firsts, max_tokens=8):
    """Output tokens of each prompt; a prompt is one token."""
    records = llm.generate_records(
        prompt_token_ids=[[each] for each in firsts], sampling_params=params(max_tokens), use_tqdm=False
    )
    return [[each.token_id for each in one] for one in records]


def expected(*firsts, max_tokens=8):
    return [list(range(each + 1, each + 1 + max_tokens)) for each in firsts]


def uses_of_llm(llm, stream):
    """All kinds of use that need the core."""
    return {
        "generate": lambda: generate(llm, 10),
        "generate texts": lambda: llm.generate("10", use_tqdm=False),
        "stream": lambda: next(llm.stream("10", params())),
        "stream, not begun": lambda: llm.stream("10", params()),
        "an open stream": lambda: next(stream),
    }


def uses_of_engine(engine):
    return {
        "add_request": lambda: engine.add_request(1, "x", params(), [10]),
        "abort_request": lambda: engine.abort_request("x"),
        "step": engine.step,
        "flush_inflight_reqs": engine.flush_inflight_reqs,
        "has_unfinished_requests": engine.has_unfinished_requests,
        "get_num_unfinished_requests": engine.get_num_unfinished_requests,
        "get_num_pendings": engine.get_num_pendings,
        "stats": engine.stats,
        "metrics": engine.metrics,
    }


def error_of(use):
    try:
        return f"no error but {use()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Scenes.

kept = []
"""Objects that a program still holds when it ends."""


def exit_with_all_left_open():
    llm, engine = make_llm(), make_engine()
    streams = [llm.stream(each, params(100)) for each in ("5", "6", "7")]
    engine.add_request(1, "a", params(100), [8])
    print([next(each).token_id for each in streams], engine.step()[0].token_id)
    kept.extend((streams[0], engine))
    cycle = [streams[1]]
    cycle.append(cycle)


def exit_of_daemons_in_the_middle():
    llm = make_llm()
    for first in (10, 20):
        threading.Thread(target=generate, args=(llm, first), kwargs={"max_tokens": FOREVER}, daemon=True).start()
    print(generate(llm, 5, max_tokens=3))


def exit_waits_for_threads_of_the_user():
    llm = make_llm()
    threading.Thread(target=lambda: print(generate(llm, 5, max_tokens=100)[0][-1])).start()


def exit_and_late_handlers():
    llm = make_llm()
    stream = llm.stream("5", params(100))
    next(stream)
    from deepinfer.executor import thread

    def late():
        stream.close()
        llm.close()
        print(error_of(lambda: generate(llm, 5)))

    atexit.unregister(thread._exit)
    atexit.register(late)  # handlers run in reverse order: this one runs after the engine's handler
    atexit.register(thread._exit)


def exit_by_ctrl_c():
    llm = make_llm()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    for number, _ in enumerate(llm.stream("5", params(FOREVER))):
        if not number:
            print("first")
            sys.stdout.flush()


def _child(llm, engine, stream):
    """In a forked child every use fails at once, and the child ends without output."""
    begin = time.monotonic()
    errors = {error_of(use) for use in [*uses_of_llm(llm, stream).values(), *uses_of_engine(engine).values()]}
    stream.close()
    llm.close()
    engine.close()
    took = time.monotonic() - begin
    assert len(errors) == 1, errors
    assert errors.pop().startswith(
        f"ConfigError: this engine was made in process {os.getppid()}, and process {os.getpid()} is a fork"
    )
    assert took < 1, took


def _children(llm, engine, stream):
    """Make children with both APIs; the first one ends like a program.  Returns whether this process is the first child."""
    if not (pid := os.fork()):
        _child(llm, engine, stream)
        del llm, stream, engine
        gc.collect()
        return True
    print("child", os.waitpid(pid, 0)[1])
    other = multiprocessing.get_context("fork").Process(target=_child, args=(llm, engine, stream))
    other.start()
    other.join()
    print("child", other.exitcode)
    return False


def forks_while_idle():
    llm, engine = make_llm(), make_engine()
    engine.add_request(1, "a", params(3), [5])
    stream = llm.stream("5", params(4))
    tokens = [next(stream).token_id]
    if _children(llm, engine, stream):
        return
    print(tokens + [each.token_id for each in stream], len(engine.step()), generate(llm, 7, max_tokens=2))


def forks_while_busy():
    llm, engine = make_llm(), make_engine()
    engine.add_request(1, "a", params(3), [5])
    stream = llm.stream("5", params(4))
    tokens = [next(stream).token_id]
    is_over = threading.Event()

    def work(first):
        while not is_over.is_set():
            generate(llm, first, max_tokens=20)

    threads = [threading.Thread(target=work, args=(each,)) for each in (10, 20, 30)]
    for each in threads:
        each.start()
    if _children(llm, engine, stream):
        is_over.set()
        return
    print(all(each.is_alive() for each in threads), tokens + [each.token_id for each in stream], llm._core.trespasses)
    is_over.set()
    for each in threads:
        each.join()


def a_new_engine_in_a_fork():
    before = make_llm()
    generate(before, 5)
    if not (pid := os.fork()):
        print(generate(make_llm(), 5, max_tokens=2))
        return
    os.waitpid(pid, 0)


def ctrl_c_and_on():
    llm = make_llm()
    for seconds in (0.02, 0.05, 0.11):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            generate(llm, 5, 6, 7, max_tokens=FOREVER)
        except KeyboardInterrupt:
            print("interrupted", generate(llm, 5), llm._core.num_unfinished, len(llm._boxes), llm._core.trespasses)
    llm.close()


class _Alarm(Exception):
    pass


def a_storm_of_signals():
    """Exceptions at random times, often several during one cleanup."""
    tqdm.monitor_interval = 0  # no thread of tqdm, because an exception during its start prints a warning
    llm = make_llm(step_s=0.0)
    generate(llm, 5)  # completes all late imports

    def ring(_number, frame):
        while frame is not None:  # interrupt only calls of the engine, not the test itself
            if frame.f_code is generate.__code__:
                raise _Alarm
            frame = frame.f_back

    signal.signal(signal.SIGALRM, ring)
    until, num_rung = time.monotonic() + 2, 0
    while time.monotonic() < until:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.00001 * (num_rung % 97), 0.0003)
            try:
                while True:
                    assert generate(llm, 5, 6, max_tokens=3) == expected(5, 6, max_tokens=3)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _Alarm:
            num_rung += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(num_rung > 20, generate(llm, 5, max_tokens=2000) == expected(5, max_tokens=2000))
    print(llm._core.num_unfinished, len(llm._boxes), llm._core.trespasses)
    llm.close()


if __name__ == "__main__":
    play(globals(), sys.argv[1:])
