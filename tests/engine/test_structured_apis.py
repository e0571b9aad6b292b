"""Structured outputs through the three APIs: a refused grammar is told in the way of each API, and nothing else is harmed."""

import asyncio
import json
import re
import resource
import time

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.errors import RequestError
from deepinfer.request import FinishReason

LIMITS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512}
CODE = SamplingParams(max_tokens=20, seq_seed=1, so_args={"schema_type": "regex", "schema": "[a-z]{3}-[0-9]{3}"})
BAD = SamplingParams(max_tokens=20, so_args={"schema_type": "json", "schema": {"not": {"type": "string"}}})
FREE = SamplingParams(max_tokens=4, ignore_eos=True, seq_seed=2)


@pytest.fixture(scope="module")
def llm():
    made = LLM("random", progress=False, **LIMITS)
    yield made
    made.close()


def test_llm_gives_texts_that_follow_the_grammar(llm):
    texts = llm.generate(["one", "two", "three"], [CODE, FREE, CODE], use_tqdm=False)
    assert all(re.fullmatch("[a-z]{3}-[0-9]{3}", texts[number]) for number in (0, 2))


def test_llm_raises_before_it_generates(llm):
    with pytest.raises(RequestError, match="not"):
        llm.generate(["one", "two"], [CODE, BAD], use_tqdm=False)
    assert llm._core.num_unfinished == 0


def test_llm_engine_gives_a_last_record_with_the_reason(llm):
    engine = LLMEngine.from_engine_args(EngineArgs(model="random", **LIMITS), progress=False)
    engine.add_request(0, "bad", BAD, [3, 4])
    engine.add_request(0, "good", CODE, [3, 4])
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                last[output.request_id] = output
    assert last["bad"].finish_reason == FinishReason.GRAMMAR_ERROR
    assert last["bad"].message
    assert last["good"].finish_reason == FinishReason.STOP
    values = engine.metrics().values
    assert values["grammar_refusals"][""] == 1
    assert sum(engine.metrics().counts["grammar_mask_seconds"]) > 0
    engine.close()


async def answer(client, name, params):
    return [each async for each in client.generate(name, [3, 4, 5], params)]


async def scene():
    client = await AsyncEngineClient.start(EngineArgs(model="random", **LIMITS), progress=False)
    try:
        with pytest.raises(RequestError, match="not"):
            await answer(client, "bad", BAD)
        records = await answer(client, "good", CODE)
        assert records[-1].finish_reason == FinishReason.STOP
        assert records[-1].message is None
    finally:
        await client.close()


def test_the_client_raises_and_other_requests_go_on():
    asyncio.run(scene())


def test_a_line_of_a_batch_may_have_so_args(tmp_path):
    from click.testing import CliRunner

    from deepinfer.cli import main

    lines = [{"prompt": "a", "so_args": {"schema_type": "regex", "schema": "[a-z]{3}-[0-9]{3}"}}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = ["generate", "--model", "random", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(main, [*given, "--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "2"])
    assert result.exit_code == 0, result.output
    assert re.fullmatch("[a-z]{3}-[0-9]{3}", json.loads((tmp_path / "out.jsonl").read_text())["text"])


def test_waiting_for_a_grammar_costs_no_processor(monkeypatch):
    from deepinfer.grammar import compiler

    compile_grammar = compiler.compile_grammar

    def slow(*given):
        time.sleep(1.5)
        return compile_grammar(*given)

    engine = LLMEngine.from_engine_args(EngineArgs(model="random", **LIMITS), progress=False)
    monkeypatch.setattr(compiler, "compile_grammar", slow)
    engine.add_request(0, "a", CODE, [3, 4])
    before, start, num_steps = resource.getrusage(resource.RUSAGE_SELF), time.monotonic(), 0
    while engine.driver.core.waits_for_grammars:
        engine.step()
        num_steps += 1
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert num_steps < 200, "a turn sleeps"
    assert busy < 0.3 * (time.monotonic() - start)
    engine.abort_request("a")
    engine.close()
