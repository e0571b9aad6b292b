"""The engine inside a program: shared by threads, interrupted, forked, broken, closed, and never closed."""

import gc
import threading
import time
import weakref

import pytest

from deepinfer.errors import RequestError, StepFailed
from deepinfer.executor.executor import Executor
from deepinfer.executor.thread import SerialThread
from tests.engine.doors import (
    FOREVER,
    error_of,
    expected,
    generate,
    make_engine,
    make_llm,
    params,
    uses_of_engine,
    uses_of_llm,
)
from tests.engine.scenes import played

SCENES = {
    "exit_with_all_left_open": (0, ["[6, 7, 8] 9"]),
    "exit_of_daemons_in_the_middle": (0, ["[[6, 7, 8]]"]),
    "exit_waits_for_threads_of_the_user": (0, ["105"]),
    "exit_and_late_handlers": (0, ["ConfigError: this engine was closed; make a new one"]),
    "forks_while_idle": (0, ["child 0", "child 0", "[6, 7, 8, 9] 1 [[8, 9]]"]),
    "forks_while_busy": (0, ["child 0", "child 0", "True [6, 7, 8, 9] 0"]),
    "a_new_engine_in_a_fork": (0, ["[[6, 7]]"]),
    "ctrl_c_and_on": (0, [f"interrupted {expected(5)} 0 0 0"] * 3),
    "a_storm_of_signals": (0, ["True True", "0 0 0"]),
}


@pytest.fixture(scope="module", params=["", pytest.param("-O", marks=pytest.mark.slow)])
def scenes(request):
    """The results of all scenes, with and without asserts."""
    return played("tests.engine.doors", [*SCENES, "exit_by_ctrl_c"], *filter(None, [request.param]))


@pytest.mark.parametrize("name", SCENES)
def test_a_program_goes_on_or_ends_without_a_word(scenes, name):
    code, lines, seconds = scenes[name]
    assert (code, lines) == SCENES[name]
    assert seconds < 50


def test_ctrl_c_ends_a_program_with_nothing_but_its_own_traceback(scenes):
    code, lines, _ = scenes["exit_by_ctrl_c"]
    assert code == -2
    assert (lines[0], lines[-1]) == ("first", "KeyboardInterrupt")
    assert sum("Traceback" in each for each in lines) == 1


def in_threads(*calls):
    """Results of calls that run at the same time, including errors."""
    results = [None] * len(calls)

    def keep(number, call):
        try:
            results[number] = call()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=keep, args=each) for each in enumerate(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not any(each.is_alive() for each in threads)
    return results


def test_threads_share_a_model():
    llm = make_llm()

    def work(number):
        first, *rest = llm.stream(str(number), params(5))
        return [
            *generate(llm, number, number + 1),
            [each.token_id for each in (first, *rest)],
            *generate(llm, number, max_tokens=1),
        ]

    results = in_threads(*(lambda n=number: work(n) for number in range(1000, 9000, 1000)))
    for number, result in zip(range(1000, 9000, 1000), results, strict=True):
        assert result == [*expected(number, number + 1), *expected(number, max_tokens=5), *expected(number, max_tokens=1)]
    core = llm._core
    assert (core.trespasses, core.num_idle_steps, core.num_unfinished, len(llm._boxes)) == (0, 0, 0, 0)
    llm.close()


def test_a_thread_whose_records_came_with_a_turn_of_another_does_not_turn():
    llm = make_llm(step_s=0.02)
    together = in_threads(*(lambda n=number: generate(llm, n, max_tokens=10) for number in (100, 200, 300, 400)))
    assert together == [expected(number, max_tokens=10) for number in (100, 200, 300, 400)]
    assert llm._core.num_steps < 20, "not one turn a thread and token"
    streams = [llm.stream(str(number), params(10)) for number in (100, 200, 300)]
    before = llm._core.num_steps
    for at in range(10):
        assert [next(each).token_id for each in streams] == [100 + at + 1, 200 + at + 1, 300 + at + 1]
    assert llm._core.num_steps - before <= 12
    llm.close()


def test_a_refused_request_fails_its_own_call_and_no_other():
    llm = make_llm()
    stream = llm.stream("5", params(3))
    first = next(stream)
    with pytest.raises(RequestError, match="leaves no room"):
        llm.generate(prompt_token_ids=[[1], [2] * 300, [3]], sampling_params=params(), use_tqdm=False)
    assert (llm._core.num_unfinished, len(llm._boxes)) == (1, 1)
    assert [first.token_id] + [each.token_id for each in stream] == [6, 7, 8]
    llm.close()


def test_threads_share_an_engine_and_each_record_comes_once():
    engine = make_engine()

    def work(number):
        engine.add_request(1, f"r{number}", params(20), [number])
        got = []
        while engine.has_unfinished_requests():
            got += engine.step()
            engine.get_num_unfinished_requests(), engine.stats(), engine.metrics()
        return got

    results = in_threads(*(lambda n=number: work(n) for number in range(100, 700, 100)))
    texts = {f"r{number}": [] for number in range(100, 700, 100)}
    for record in sorted((each for got in results for each in got), key=lambda each: each.num_output_tokens):
        texts[record.request_id].append(record.token_id)
    assert texts == {f"r{number}": expected(number, max_tokens=20)[0] for number in range(100, 700, 100)}
    assert engine.driver.core.trespasses == 0
    assert engine.metrics().values["generation_tokens"][""] == 120
    engine.close()


class Interrupted(BaseException):
    pass


@pytest.fixture
def alarm():
    """``alarm(seconds)`` makes a signal handler raise in the main thread."""
    import signal

    def ring(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_step_loses_no_record(alarm):
    engine = make_engine(step_s=0.05)
    engine.add_request(1, "a", params(6), [10])
    engine.add_request(1, "b", params(6), [20])
    got = engine.step()
    for _ in range(2):
        alarm(0.01)
        with pytest.raises(Interrupted):
            engine.step()
    assert engine.abort_request("b")[0] == 1
    while engine.has_unfinished_requests():
        got += engine.step()
    assert [each.token_id for each in got if each.request_id == "a"] == expected(10, max_tokens=6)[0]
    assert [each.token_id for each in got if each.request_id == "b"] == [21], "an aborted request's records do not come any more"
    engine.add_request(1, "c", params(1), [30])
    alarm(0.01)
    with pytest.raises(Interrupted):
        engine.step()
    assert engine.has_unfinished_requests(), "there is a record to take"
    assert [each.token_id for each in engine.flush_inflight_reqs()] == [31]
    assert not engine.has_unfinished_requests()
    engine.close()


def test_an_interrupted_add_leaves_nothing_behind_and_others_alone(alarm):
    llm = make_llm(step_s=0.05)
    stream = llm.stream("5", params(3))
    first = next(stream)
    alarm(0.12)
    with pytest.raises(Interrupted):
        generate(llm, *range(100, 120))
    assert (llm._core.num_unfinished, len(llm._boxes), llm._core.trespasses) == (1, 1, 0)
    assert [first.token_id] + [each.token_id for each in stream] == [6, 7, 8]
    llm.close()


def test_a_request_whose_caller_could_not_end_it_ends_with_its_next_record():
    llm = make_llm()
    inbox_less = llm._request(llm._engine.reader.of_text("5"), params(FOREVER))
    llm._engine.driver.add(inbox_less, (), 0.0)
    assert generate(llm, 7) == expected(7)
    assert llm._core.num_unfinished == 0
    llm.close()


@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_step_that_breaks_is_told_to_everybody_at_once(num_threads):
    llm, engine = make_llm(), make_engine()
    stream = llm.stream("5", params(FOREVER))
    next(stream)
    llm._core.breaks_at = llm._core.num_steps + 20
    says = "StepFailed: a step failed (ZeroDivisionError: the step was asked to); restart the engine"
    work = [lambda: generate(llm, 10, max_tokens=FOREVER)] * num_threads + [lambda: list(stream)]
    assert [f"{type(each).__name__}: {each}" for each in in_threads(*work)] == [says] * (num_threads + 1)
    uses = uses_of_llm(llm, stream)
    del uses["an open stream"]  # a generator that has raised is finished
    assert {error_of(use) for use in uses.values()} == {says}
    assert (llm._core.num_steps, len(llm._boxes)) == (llm._core.breaks_at, 0)
    engine.add_request(1, "x", params(), [5])
    engine.driver.core.breaks_at = 0
    assert {error_of(use) for use in [engine.step, *uses_of_engine(engine).values()]} == {says}
    core = llm._core
    for each in (llm, engine):
        each.close()
        each.close()
    assert core.is_closed


def test_closing_reaches_whoever_is_inside():
    llm = make_llm(step_s=0.005)
    stream = llm.stream("5", params(FOREVER))
    next(stream)

    def close():
        time.sleep(0.05)
        llm.close()

    *errors, one, other = in_threads(*[lambda: generate(llm, 10, max_tokens=FOREVER)] * 3, close, close)
    says = "ConfigError: this engine was closed; make a new one"
    assert [f"{type(each).__name__}: {each}" for each in errors] == [says] * 3
    assert one is other is None
    assert {error_of(use) for use in uses_of_llm(llm, stream).values()} == {says}
    assert len(llm._boxes) == 0


def test_a_closed_engine_says_so_whatever_is_asked():
    engine = make_engine()
    engine.add_request(1, "a", params(), [5])
    core = engine.driver.core
    engine.close()
    engine.close()
    says = "ConfigError: this engine was closed; make a new one"
    assert {name: error_of(use) for name, use in uses_of_engine(engine).items()} == dict.fromkeys(uses_of_engine(engine), says)
    assert core.is_closed


def threads_of_engines():
    return {each for each in threading.enumerate() if each.name.startswith("deepinfer-")}


def test_a_model_that_is_garbage_takes_its_threads_along():
    before = threads_of_engines()
    llm, engine = make_llm(), make_engine()
    generate(llm, 5)
    stream = llm.stream("5", params(100))
    next(stream)
    assert len(threads_of_engines() - before) == 4
    ends = [weakref.ref(each) for each in (llm, engine)]
    del llm, engine, stream
    gc.collect()
    assert [each() for each in ends] == [None, None]
    until = time.monotonic() + 5
    while threads_of_engines() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads_of_engines() <= before


# Threads for jobs.


def test_jobs_after_the_end_are_refused_and_jobs_before_it_done():
    for _ in range(200):  # the timing differs each time
        thread = SerialThread("test", StepFailed("over"))
        done = []
        jobs = [thread.submit(done.append, number) for number in range(3)]
        ending = threading.Thread(target=thread.end)
        ending.start()
        late = [thread.submit(lambda: "late") for _ in range(3)]
        assert [each.result() for each in jobs] == [None] * 3
        assert done == [0, 1, 2]
        ending.join()
        for each in late:
            assert error_of(each.result) in ("StepFailed: over", "no error but 'late'")
        thread.join()
        with pytest.raises(StepFailed, match="over"):
            thread.submit(print).result()


class Stuck:
    def __init__(self):
        self.goes_on = threading.Event()

    def add(self, *_):
        pass

    remove = add

    def launch(self, plan):
        if plan == "stuck":
            self.goes_on.wait()
        raise ValueError(plan)


def test_an_executor_closes_twice_and_refuses_what_comes_later():
    executor = Executor(Stuck)
    executor.close()
    executor.close()
    executor.add("x", params(), 1)
    with pytest.raises(StepFailed, match="engine was closed"):
        executor.launch("later").result()
    with pytest.raises(StepFailed, match="closed"):
        executor.call(print)


def test_closing_a_stuck_executor_can_be_interrupted_and_repeated(alarm):
    executor = Executor(Stuck)
    pending = executor.launch("stuck")
    alarm(0.05)
    with pytest.raises(Interrupted):
        executor.close()
    executor.worker.goes_on.set()
    executor.close()
    with pytest.raises(StepFailed, match="ValueError: stuck"):
        pending.result()


def test_a_worker_that_cannot_be_built_leaves_no_thread():
    before = threads_of_engines()
    with pytest.raises(ZeroDivisionError):
        Executor(lambda: 1 / 0)
    gc.collect()
    until = time.monotonic() + 5
    while threads_of_engines() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads_of_engines() <= before
