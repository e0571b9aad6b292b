"""The async client and its core process: equal results, clean ends, and every crash raises an error."""

import asyncio
import contextlib
import io
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from PIL import Image

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine import ipc
from deepinfer.engine import link as link_module
from deepinfer.engine import process as process_module
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.errors import ConfigError, ContextTooLong, Overloaded, RequestError, StepFailed
from deepinfer.metrics import exposition
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.tokenizer import IMAGE

FAKE = [sys.executable, str(Path(__file__).with_name("fake_core.py"))]
RAISES, STICKS, PAUSES = 301, 302, 303
"""Last ids of prompts that make the fake core fail."""
LIMITS = {"max_num_seqs": 8, "max_model_len": 256, "tokens_per_block": 16, "device": "cpu"}
NANO = EngineArgs(model="random", **LIMITS)


def greedy(max_tokens=6, **given):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **given)


def png(color):
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(buffer, "PNG")
    return buffer.getvalue()


async def collect(client, request_id, ids, params, images=()):
    return [each async for each in client.generate(request_id, ids, params, images)]


async def tokens(client, request_id, ids, params, images=()):
    return [each.token_id for each in await collect(client, request_id, ids, params, images)]


def cpu_seconds(pid):
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def with_fake(test, **given):
    """Run an async test with a fake core, which is closed afterwards."""

    async def run():
        args = EngineArgs(model="fake", **{**LIMITS, "disable_log_stats": True, **given})
        client = await AsyncEngineClient.start(args, progress=False, program=FAKE)
        try:
            return await test(client)
        finally:
            await client.close()

    return asyncio.run(run())


# With the nano model.


@pytest.fixture(scope="module")
def llm():
    made = LLM("random", progress=False, **LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def run():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def nano(run):
    client = run(AsyncEngineClient.start(NANO, progress=False))
    yield client
    run(client.close())


def in_process(llm, ids, params, **given):
    records = llm.generate_records(prompt_token_ids=ids, sampling_params=params, use_tqdm=False, **given)
    return [[each.token_id for each in one] for one in records]


def prompts(count):
    return [[0, *(3 + (number * 31 + at * 7) % 250 for at in range(1 + number * 5 % 20))] for number in range(count)]


def test_fifty_requests_at_once_give_what_the_offline_interface_gives(llm, nano, run):
    ids = prompts(50)
    params = [
        greedy(1 + number % 4) if number % 2 else SamplingParams(seq_seed=number, max_tokens=3, ignore_eos=True, top_k=20)
        for number in range(50)
    ]

    async def all_at_once():
        return await asyncio.gather(*(tokens(nano, f"r{n}", ids[n], params[n]) for n in range(50)))

    assert run(all_at_once()) == in_process(llm, ids, params)


def test_records_arrive_whole_and_in_order(nano, run):
    records = run(collect(nano, "mine", prompts(3)[2], greedy(5, top_logprobs=2)))
    assert [each.num_output_tokens for each in records] == [1, 2, 3, 4, 5]
    assert {each.request_id for each in records} == {"mine"}
    assert [each.finish_reason for each in records] == [None] * 4 + [FinishReason.LENGTH]
    assert isinstance(records[-1].finish_reason, FinishReason)
    assert all(len(each.top_token_ids) == 2 and each.top_token_ids[0] == each.token_id for each in records)


def test_what_records_say_of_rounds_and_prompts_crosses_the_border(llm, nano, run):
    params = SamplingParams(max_tokens=12, ignore_eos=True, seq_seed=4, prompt_logprobs=True, top_logprobs=2)
    ids = [0, 77, 31, 5]
    expected = llm.generate_records(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)[0]
    got = run(collect(nano, "rounds", ids, params))
    assert [replace(each, request_id="") for each in got] == [replace(each, request_id="") for each in expected]
    assert len(got[0].prompt_logprobs) == 4
    assert sum(each.draft_tok for each in got) > sum(each.accept_tok for each in got)
    assert any(each.confidence_score is not None for each in got)


def test_every_field_of_a_record_crosses_the_border():
    record = RequestOutput(
        request_id="x",
        prompt_len=3,
        token_id=7,
        finished=True,
        finish_reason=FinishReason.LENGTH,
        num_output_tokens=4,
        max_num_batched_tokens=64,
        num_cached_tokens=2,
        token_logprobs=-0.5,
        top_token_ids=(7, 8),
        top_logprobs=(-0.5, -1.0),
        prompt_logprobs=(None, -2.5, -0.25),
        prompt_top_token_ids=((), (7, 8), (9, 7)),
        prompt_top_logprobs=((), (-0.5, -2.5), (-0.25, -1.5)),
        draft_tok=5,
        accept_tok=3,
        confidence_score=0.75,
        sample_idx=1,
        message="why",
        queue_s=0.5,
    )
    plain = RequestOutput(
        request_id="",
        prompt_len=0,
        token_id=None,
        finished=False,
        finish_reason=None,
        num_output_tokens=0,
        max_num_batched_tokens=0,
    )
    untouched = [each.name for each in fields(record) if getattr(record, each.name) == getattr(plain, each.name)]
    assert untouched == ["nextn_logprobs", "sum_smaller_probs"], "the record says something in every field"
    assert ipc.from_core(ipc.pack(ipc.Outputs(numbers=[9], records=[record]))).records == [record]


def test_images_cross_the_border(llm, nano, run):
    ids = [0, 72, llm.get_tokenizer().special(IMAGE), 75]
    images = [png("red")]
    expected = in_process(llm, [ids], greedy(), multi_modal_data=[{"image_bytes": images}])
    assert [run(tokens(nano, "picture", ids, greedy(), images))] == expected


def test_without_a_seed_every_request_draws_its_own_and_with_one_text_repeats(nano, run):
    async def six(params):
        return await asyncio.gather(*(tokens(nano, f"seed {n}", [0, 5, 6], params) for n in range(6)))

    shared = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len({tuple(each) for each in run(six(shared))}) == 6
    assert len({tuple(each) for each in run(six(replace(shared, seq_seed=3)))}) == 1


def test_closing_an_iterator_ends_its_request_and_gives_everything_back(nano, run):
    async def stop_early():
        stream = nano.generate("early", [0, 5, 6], greedy(200))
        async for _ in stream:
            break
        await stream.aclose()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect(nano, "cancelled", [0, 7], greedy(240)), 0.05)
        return await nano.stats()

    stats = run(stop_early()).scheduler
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages, stats.num_held_slots) == (0, 0, 0, 0)


BAD = [
    ([], (), RequestError, "prompt is empty"),
    ([5] * 256, (), ContextTooLong, "256 tokens leaves no room"),
    ([0, 9999], (), RequestError, "token id 9999 at position 1"),
    ([0, 2**40], (), RequestError, "more than 32 bits"),
    ([0.5], (), RequestError, "give token ids as integers"),
    ("text", (), RequestError, "give token ids as integers"),
    ([0, 5], (b"x",), RequestError, "0 image placeholder"),
    ([0, 270], (b"no image",), RequestError, "cannot be decoded"),
]


def test_bad_requests_fail_alone_each_with_its_reason(nano, run):
    async def beside_a_good_one():
        bad = [collect(nano, f"bad {n}", ids, greedy(), images) for n, (ids, images, _, _) in enumerate(BAD)]
        return await asyncio.gather(tokens(nano, "good", [0, 5], greedy(12)), *bad, return_exceptions=True)

    good, *errors = run(beside_a_good_one())
    assert good == run(tokens(nano, "good", [0, 5], greedy(12)))
    for error, (_, _, kind, says) in zip(errors, BAD, strict=True):
        assert type(error) is kind
        assert says in str(error)


def test_an_abort_gives_a_last_record_and_counts(nano, run):
    async def abort_two():
        tasks = [asyncio.create_task(collect(nano, name, [0, 5], greedy(200))) for name in "ab"]
        await asyncio.sleep(0.05)
        counts = await nano.abort(["a", "b", "unknown"])
        return counts, [(await each)[-1] for each in tasks], await nano.abort(["a"])

    (count, num_tokens), ends, again = run(abort_two())
    assert count == 2
    assert num_tokens >= sum(each.prompt_len + each.num_output_tokens for each in ends)
    assert [(each.token_id, each.finished, each.finish_reason) for each in ends] == [(None, True, FinishReason.ABORT)] * 2
    assert again == (0, 0)


def test_stats_count_what_happened(nano, run):
    async def serve_three():
        before = await nano.stats()
        await asyncio.gather(*(tokens(nano, str(n), [0, 5 + n], greedy(4)) for n in range(3)))
        return before.metrics, (await nano.stats()).metrics

    before, after = run(serve_three())

    def grown(name, label=""):
        return after.values[name].get(label, 0) - before.values[name].get(label, 0)

    assert (grown("prompt_tokens"), grown("generation_tokens"), grown("request_success", "length")) == (6, 12, 3)
    assert grown("steps") >= 4
    for name, count in (("time_to_first_token_seconds", 3), ("inter_token_latency_seconds", 9), ("request_prompt_tokens", 3)):
        assert sum(after.counts[name]) - sum(before.counts[name]) == count
    assert b'deepinfer_generation_tokens_total{engine="0"}' in exposition({"0": after})


def test_both_processes_sleep_when_there_is_nothing_to_do(nano, run):
    run(tokens(nano, "last", [0, 5], greedy()))
    core, own = cpu_seconds(nano.pid), time.process_time()
    run(asyncio.sleep(1))
    assert cpu_seconds(nano.pid) - core <= 0.02
    assert time.process_time() - own <= 0.02


# With a core that has no model.


def test_an_id_can_be_used_again_but_not_twice_at_once():
    async def test(client):
        stream = client.generate("same", [PAUSES], greedy(100))
        await anext(stream)
        with pytest.raises(RequestError, match="'same' is in use"):
            await collect(client, "same", [1], greedy())
        await stream.aclose()
        assert await tokens(client, "same", [1], greedy(3)) == [2, 3, 4]

    with_fake(test)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"request_id": 5}, "request_id of type int"),
        ({"request_id": "\ud800"}, "cannot be sent"),
        ({"images": ["path.png"]}, "an image of type str"),
        ({"priority": "high"}, "priority of type str"),
        ({"priority": 2**70}, "cannot be sent"),
        ({"salt": "tenant"}, "salt of type str"),
    ],
)
def test_values_of_a_wrong_type_never_reach_the_core(given, says):
    async def test(client):
        with pytest.raises(RequestError, match=says):
            async for _ in client.generate(**{"request_id": "r", "prompt_token_ids": [1], "params": greedy(), **given}):
                pass
        assert await tokens(client, "r", [1], greedy(2)) == [2, 3]

    with_fake(test)


def test_a_slow_reader_delays_no_other_and_misses_nothing():
    async def test(client):
        slow = client.generate("slow", [1], greedy(200))
        first = await anext(slow)
        assert await tokens(client, "quick", [1], greedy(200)) == list(range(2, 202))
        assert [first.token_id] + [each.token_id async for each in slow] == list(range(2, 202))

    with_fake(test)


async def failures(*tasks):
    begin = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return results, time.monotonic() - begin


def test_a_killed_core_fails_every_wait_and_every_later_call():
    async def test(client):
        tasks = [asyncio.create_task(collect(client, str(n), [PAUSES], greedy(100))) for n in range(5)]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(client.stats()))
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        results, seconds = await failures(*tasks)
        assert seconds < 1
        assert [type(each) for each in results] == [StepFailed] * 6
        assert "SIGKILL" in str(results[0])
        assert not client.is_alive
        later, _ = await failures(collect(client, "late", [1], greedy()), client.stats(), client.abort(["0"]))
        assert [type(each) for each in later] == [StepFailed] * 3

    with_fake(test)


@pytest.mark.parametrize("limit_s", [0.01, 600.0, 1e12, 1.7e308, math.inf])
def test_a_watchdog_watches_whatever_its_limit(limit_s, monkeypatch, tmp_path, capfd):
    ended = threading.Event()
    monkeypatch.setattr(process_module.os, "_exit", lambda _code: (ended.set(), time.sleep(60)))
    monkeypatch.setattr(process_module, "_ORPHAN_GRACE_S", 0)
    ours, theirs = socket.socketpair()
    lifeline = process_module.Lifeline(theirs.detach(), None, tmp_path / "socket")
    watchdog = process_module.Watchdog(lifeline, warn_s=0.01, limit_s=limit_s)
    with watchdog:
        time.sleep(0.05)
        assert ended.is_set() == (limit_s == 0.01), "a step was running while it looked"
        ours.close()
        assert ended.wait(5), "it still sees that the client is gone"
    watchdog.stop()
    lifeline.close()
    capfd.readouterr()  # discards the stacks of the slow step


def test_settings_at_their_ends_reach_the_core():
    async def test(client):
        assert len(await collect(client, "0", [1], greedy(3))) == 3

    with_fake(
        test,
        step_limit_s=math.inf,
        step_warn_s=1e300,
        logging_interval_steps=2**63 - 1,
        gc_interval_steps=2**63 - 1,
        max_num_batched_tokens=2**63 - 1,
        banned_token_ids=tuple(range(2, 60_000)),
        seed=-(2**63),
    )


@pytest.mark.parametrize(("prompt", "says"), [(RAISES, "ZeroDivisionError: the fake was asked to"), (STICKS, "step_limit_s=0.6")])
def test_a_step_that_fails_or_sticks_ends_everything_with_its_reason(prompt, says, capfd):
    async def test(client):
        healthy = asyncio.create_task(collect(client, "healthy", [1], greedy(10**6)))
        await asyncio.sleep(0.05)
        results, seconds = await failures(healthy, collect(client, "bad", [prompt], greedy()))
        assert seconds < 3
        assert [type(each) for each in results] == [StepFailed] * 2
        assert says in str(results[0])

    with_fake(test, step_warn_s=0.2, step_limit_s=0.6)
    assert "fake_core.py" in capfd.readouterr().err, "the stacks are in the log"


@pytest.mark.parametrize(
    ("model", "error", "says"), [("refused", ConfigError, "name another"), ("broken", StepFailed, "cannot load")]
)
def test_a_core_that_cannot_start_says_why(model, error, says):
    with pytest.raises(error, match=says):
        asyncio.run(AsyncEngineClient.start(EngineArgs(model=model), progress=False, program=FAKE))


def test_a_program_that_is_no_core_is_noticed():
    with pytest.raises(StepFailed, match=r"ended with code 3|closed its lifeline"):
        asyncio.run(AsyncEngineClient.start(NANO, progress=False, program=[sys.executable, "-c", "raise SystemExit(3)"]))


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(link_module.tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        asyncio.run(AsyncEngineClient.start(NANO, progress=False, program=FAKE))
    assert list(deep.iterdir()) == []


def test_close_lets_requests_finish_or_aborts_them():
    async def test(client):
        task = asyncio.create_task(tokens(client, "a", [1], greedy(1000)))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(client.close(finish_within_s=20))
        await asyncio.sleep(0)
        with pytest.raises(StepFailed, match="was closed"):
            await collect(client, "late", [1], greedy())
        await closing
        assert len(await task) == 1000

    with_fake(test)

    async def abort(client):
        task = asyncio.create_task(collect(client, "a", [1], greedy(10**7)))
        await asyncio.sleep(0.05)
        await client.close()
        assert (await task)[-1].finish_reason == FinishReason.ABORT

    with_fake(abort)


async def until(claim):
    end = time.monotonic() + 5
    while not claim() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert claim()


def test_sigterm_finishes_what_runs_and_takes_nothing_new():
    async def test(client):
        stream = client.generate("a", [PAUSES], greedy(3))
        await anext(stream)
        os.kill(client.pid, signal.SIGTERM)
        with pytest.raises(Overloaded, match="shuts down"):
            await collect(client, "b", [1], greedy())
        assert [each.token_id async for each in stream] == [PAUSES + 2, PAUSES + 3]
        await until(lambda: not client.is_alive)
        with pytest.raises(StepFailed):
            await client.stats()

    with_fake(test)

    async def idle(client):
        os.kill(client.pid, signal.SIGTERM)
        await until(lambda: not is_running(client.pid))
        with pytest.raises(StepFailed):
            await client.stats()

    with_fake(idle)


def test_a_clean_end_leaves_no_process_no_file_and_no_thread():
    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    async def test():
        before = threads()
        client = await AsyncEngineClient.start(EngineArgs(model="fake", **LIMITS), progress=False, program=FAKE)
        pid, folder = client.pid, client._link._folder
        assert folder.exists()
        assert await tokens(client, "a", [1], greedy(3)) == [2, 3, 4]
        await client.close()
        await client.close()
        assert not is_running(pid)
        assert not folder.exists()
        assert threads() <= before

    asyncio.run(test())


def test_the_core_dies_with_its_client(tmp_path):
    script = f"""
        import asyncio, os, signal
        from deepinfer.config import EngineArgs
        from deepinfer.engine.client import AsyncEngineClient

        async def main():
            client = await AsyncEngineClient.start(EngineArgs(model="fake"), progress=False, program={FAKE!r})
            print(client.pid, client._link._folder, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    pid, folder = done.stdout.split()
    until = time.monotonic() + 5
    while is_running(int(pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(int(pid))
    assert not Path(folder).exists()


def test_records_that_are_taken_equal_those_of_steps():
    async def test(client):
        taken = []
        await client.follow("a", [5, 6], greedy(7), take=lambda records: taken.extend(records) or True)
        assert [each.token_id for each in taken] == await tokens(client, "b", [5, 6], greedy(7))
        assert taken[-1].finished

    with_fake(test)


def test_a_taker_that_wants_no_more_or_fails_ends_its_request_only():
    async def test(client):
        other = asyncio.ensure_future(tokens(client, "other", [5, 6], greedy(200)))
        taken = []
        await client.follow("a", [5, 6], greedy(200), take=lambda records: bool(taken.extend(records)))
        assert not taken[-1].finished

        def fail(records):
            raise ZeroDivisionError("its own")

        with pytest.raises(ZeroDivisionError, match="its own"):
            await client.follow("b", [5, 6], greedy(200), take=fail)
        with pytest.raises(RequestError):
            await client.follow("c", [], greedy(200), take=fail)
        assert len(await other) == 200
        assert (await client.stats()).scheduler.num_running == 0

    with_fake(test)


def test_the_death_of_the_core_ends_what_is_followed():
    async def test(client):
        def kill(records):
            os.kill(client.pid, signal.SIGKILL)
            return True

        with pytest.raises(StepFailed):
            await client.follow("a", [5, 6], greedy(200), take=kill)

    with_fake(test)
