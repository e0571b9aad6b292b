"""Arguments of callers, at the async client: they are served or refused with a message, and the core never gets bad ones."""

import asyncio
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import SamplingParams
from deepinfer.errors import ContextTooLong, RequestError
from deepinfer.request import RequestOutput
from tests.engine.test_client import collect, greedy, tokens, with_fake

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 10**5000, object(), {1: 2}, {5}, 1j, int, np.float64(2), torch.ones(2, 2), [[1]], "\ud800"]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(-1, 300), st.floats(), st.booleans(), st.binary(max_size=2), st.none()), max_size=3),
)
ADD = {"request_id": "r", "prompt_token_ids": [1], "params": greedy(2)}


def assert_is_a_sentence(told):
    assert len(told) < 400
    assert "0x" not in told


def test_whatever_is_handed_over_is_served_or_refused_and_the_core_goes_on():
    async def test(client):
        loop = asyncio.get_running_loop()

        @settings(max_examples=75)
        @given(st.sampled_from([*ADD, "images", "priority", "salt"]), JUNK)
        def try_it(name, value):
            asyncio.run_coroutine_threadsafe(one(name, value), loop).result()

        async def one(name, value):
            try:
                async for output in client.generate(**{**ADD, name: value}):
                    assert isinstance(output, RequestOutput)
            except RequestError as error:
                assert_is_a_sentence(str(error))

        await asyncio.to_thread(try_it)
        assert await tokens(client, "r", [1], greedy(2)) == [2, 3]
        assert not client._streams
        assert not client._open_ids

    with_fake(test)


def test_what_people_have_is_taken():
    async def test(client):
        given = {"priority": np.int64(-3), "salt": bytearray(b"tenant"), "images": ()}
        kinds = [
            np.array([5, 1], np.uint8),
            torch.tensor([5, 1]),
            (5, 1),
            iter([5, 1]),
            [np.int64(5), torch.tensor(1)],
            range(5, 0, -4),
        ]
        for number, ids in enumerate(kinds):
            records = [each async for each in client.generate(np.str_(number), ids, greedy(2), **given)]
            assert [each.token_id for each in records] == [2, 3]
            assert records[0].prompt_len == 2
        stream = client.generate("a", [1], greedy(10**6))
        await anext(stream)
        assert (await client.abort("a"))[0] == 1, "an id alone is one id, not its letters"

    with_fake(test)


MISTAKES = [
    ({"params": None}, RequestError, "params of type NoneType"),
    ({"params": {"n": 2}}, RequestError, "params of type dict"),
    ({"params": SamplingParams(stop_token_ids=range(10**5))}, RequestError, "stop_token_ids has 400, outside the vocabulary"),
    ({"images": b"file"}, RequestError, "images of type bytes"),
    ({"priority": True}, RequestError, "priority of type bool"),
    ({"priority": 2**63}, RequestError, "cannot be sent"),
    ({"prompt_token_ids": [True]}, RequestError, "has True at position 0"),
    ({"prompt_token_ids": [1, True]}, RequestError, "has True at position 1"),
    ({"prompt_token_ids": [[1]]}, RequestError, "has a list of 1"),
    ({"prompt_token_ids": [None] * 10**6}, ContextTooLong, "1000000 tokens leaves no room"),
    ({"prompt_token_ids": np.zeros(300, np.int8), "images": [b""]}, ContextTooLong, "300 tokens leaves no room"),
    ({"prompt_token_ids": np.zeros(1001, np.int8)}, ContextTooLong, "ignore_len=1000"),
]


def test_mistakes_are_told_before_anything_is_sent():
    async def test(client):
        for wrong, error, says in MISTAKES:
            begin = time.process_time()
            with pytest.raises(error, match=says):
                async for _ in client.generate(**{**ADD, **wrong}):
                    pass
            assert time.process_time() - begin < 1
        assert not (await client.stats()).metrics.values["admission_rejections"], "the core heard of none of them"

    with_fake(test, ignore_len=1000)


def test_a_wait_that_is_none_closes_nothing_and_only_ids_are_aborted():
    async def test(client):
        for seconds in ("x", float("nan"), -1, True, None, 1j):
            with pytest.raises(RequestError, match="finish_within_s"):
                await client.close(finish_within_s=seconds)
        for ids in (5, None, [5], b"x", {"a": 1}, object()):
            with pytest.raises(RequestError, match="request_ids"):
                await client.abort(ids)
        assert await tokens(client, "r", [1], greedy(2)) == [2, 3]

    with_fake(test)


@pytest.mark.parametrize("seconds", [float("inf"), 10**400], ids=["infinite", "huge"])
def test_a_wait_may_be_as_long_as_it_likes(seconds):
    async def test(client):
        task = asyncio.create_task(collect(client, "a", [1], greedy(50)))
        await asyncio.sleep(0.01)
        await client.close(finish_within_s=seconds)
        assert len(await task) == 50

    with_fake(test)
