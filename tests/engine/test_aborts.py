"""A thousand callers that abort or disconnect leave no request, page or slot in use."""

import asyncio
import random

from deepinfer.config import EngineArgs
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.request import SamplingParams

NUM_CALLERS = 1000
AT_ONCE = 48


async def caller(client, number, rng, gate):
    """Read a few tokens, then leave in one of the possible ways; returns the number of tokens read."""
    async with gate:
        name = f"caller-{number}"
        prompt = [0, *(rng.randrange(3, 259) for _ in range(rng.randrange(1, 40)))]
        params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 8), ignore_eos=True)
        stream = client.generate(name, prompt, params)
        leave_after, way = rng.randrange(0, 4), rng.choice(["abort", "close", "cancel", "stay"])
        seen = 0
        if leave_after == 0 and way == "cancel":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return seen
        async for _ in stream:
            seen += 1
            if way != "stay" and seen > leave_after:
                break
        if way == "abort":
            await client.abort([name])
        await stream.aclose()
        return seen


async def thousand_callers(args):
    client = await AsyncEngineClient.start(args, progress=False)
    try:
        gate = asyncio.Semaphore(AT_ONCE)
        rng = random.Random(7)
        seen = await asyncio.gather(*(caller(client, number, random.Random(rng.random()), gate) for number in range(NUM_CALLERS)))
        for _ in range(200):  # the core may not have received the last aborts yet
            stats = (await client.stats()).scheduler
            if not (stats.num_running or stats.num_waiting or stats.num_held_pages or stats.num_held_slots):
                break
            await asyncio.sleep(0.05)
        return sum(seen), stats
    finally:
        await client.close()


def test_a_thousand_aborts_and_disconnects_leave_pool_and_slots_as_at_the_start():
    args = EngineArgs(
        model="random",
        device="cpu",
        max_num_seqs=32,
        max_model_len=128,
        max_num_batched_tokens=256,
        enable_prefix_cache=False,
        num_drafts=1,
    )
    num_seen, stats = asyncio.run(thousand_callers(args))
    assert num_seen > NUM_CALLERS / 2
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages, stats.num_held_slots) == (0, 0, 0, 0)
    assert stats.num_cached_pages == stats.num_saved_states == 0
