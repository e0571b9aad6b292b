"""Clients that leave at random moments, in the queue, during the prompt and in the stream, and clients that stay idle."""

import asyncio
import contextlib
import json
import random

import pytest

from deepinfer.config import EngineArgs, ServerArgs, load_config
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.loader import model_directory
from deepinfer.server.app import make_app, make_service
from deepinfer.server.serve import make_listener
from deepinfer.tokenizer import Tokenizer
from tests.server.scripted import Server

PATH = "/v1/chat/completions"


def request(**fields):
    body = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def leave(port, rng, data, patience_s):
    """Send a part of a request or all of it, read for a random time, and close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.choice(patience_s)):
            while await reader.read(4096):
                pass
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def close_all(writers):
    for each in list(writers):
        each.close()
        with contextlib.suppress(OSError):
            await each.wait_closed()


async def wait_for(is_true, seconds=10):
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_leave_a_scripted_engine_leave_nothing(count):
    server = Server(max_waiting=count)
    server.engine.say("x" * 2000)
    server.engine.pause_s, server.engine.first_pause_s = 0.01, 0.05
    rng = random.Random(count)

    async def crowd():
        await asyncio.gather(*(leave(server.port, rng, request(), [0, 0.01, 0.1, 0.5]) for _ in range(count)))
        await wait_for(lambda: not server.engine.open and not server.service.gate.num_open)

    asyncio.run(crowd())
    assert len(server.engine.asked) > count // 4
    assert sum(server.service.gate.num_waiting.values()) == 0
    assert server.num_tasks() <= 3
    server.close()


class Real:
    """The application and a real engine in the running event loop.

    Attributes:
        steps: request id -> number of steps that gave it records.
    """

    def __init__(self, client):
        self.client = client
        self.facts = client.facts
        self.steps = {}

    is_alive = property(lambda self: self.client.is_alive)

    async def follow(self, request_id, *args, take, **given):
        self.steps[request_id] = 0

        def count(records):
            self.steps[request_id] += 1
            return take(records)

        await self.client.follow(request_id, *args, take=count, **given)

    async def stats(self):
        return await self.client.stats()


def with_engine(test, **settings):
    """Run an async test with a real engine, a service, and the port of its server."""

    async def run():
        folder = model_directory("random")
        args = EngineArgs(model="random", device="cpu", num_drafts=0, disable_log_stats=True, **settings)
        client = await AsyncEngineClient.start(args, progress=False)
        engine = Real(client)
        server_args = ServerArgs(served_model_names=("nano",), max_waiting=2000, api_keys=())
        service = make_service(engine, server_args, load_config(folder), Tokenizer.from_dir(folder))
        listener = make_listener(make_app(service), "127.0.0.1", 0)
        serving = asyncio.ensure_future(listener.serve())
        await wait_for(lambda: listener.started)
        try:
            await test(engine, service, listener.servers[0].sockets[0].getsockname()[1])
        finally:
            listener.should_exit = True
            await serving
            await client.close()
            service.threads.shutdown()

    asyncio.run(asyncio.wait_for(run(), 300))


async def answer(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(stream=False, max_tokens=12, seed=3).replace(b"host: x", b"host: x\r\nconnection: close"))
    text = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    await close_all([writer])
    return text


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_leave_a_real_engine_leave_no_page_slot_or_task(count):
    async def test(engine, service, port):
        expected = await answer(port)
        await asyncio.sleep(0.1)
        num_tasks = len(asyncio.all_tasks())
        rng = random.Random(count)
        long = request(messages=[{"role": "user", "content": "word " * 100}], max_tokens=400, n=2)
        clients = (leave(port, rng, rng.choice([request(max_tokens=300), long]), [0, 0.02, 0.3, 1, 3]) for _ in range(count))
        await asyncio.gather(*clients)
        await wait_for(lambda: not service.gate.num_open)
        stats = (await engine.stats()).scheduler
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert (stats.num_held_pages, stats.num_held_slots) == (0, 0)
        assert sum(service.gate.num_waiting.values()) == 0
        await wait_for(lambda: len(asyncio.all_tasks()) == num_tasks)
        assert engine.steps
        assert 0 in engine.steps.values()  # some left before their first token
        assert await answer(port) == expected

    with_engine(test, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256)


def test_a_request_ends_within_a_step_of_its_clients_departure():
    """In the stream, during the prompt, and in the queue; steps are counted by the engine."""

    async def begin(port, **fields):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(**{"max_tokens": 1500, "ignore_eos": True} | fields))
        return reader, writer

    async def test(engine, service, port):
        async def steps():
            return (await engine.stats()).scheduler.num_steps

        async def rest_of_steps(writer):
            """Steps after the client has left."""
            before = await steps()
            writer.transport.abort()
            await wait_for(lambda: not service.gate.num_open)
            return await steps() - before

        # One step is in flight when the client leaves, and one may begin before the message arrives.
        reader, stream = await begin(port)
        await reader.readuntil(b"data: ")
        assert await rest_of_steps(stream) <= 2
        _, prompt = await begin(port, max_tokens=100, messages=[{"role": "user", "content": "word " * 300}])  # 24 steps
        start = await steps()
        while await steps() < start + 3:
            await asyncio.sleep(0.001)
        assert await rest_of_steps(prompt) <= 2
        assert list(engine.steps.values())[-1] == 0  # no token had come

        reader, running = await begin(port)
        await reader.readuntil(b"data: ")
        _, queued = await begin(port)
        await wait_for(lambda: service.gate.num_waiting["normal"] == 1)
        while not (await engine.stats()).scheduler.num_waiting:
            await asyncio.sleep(0.001)
        before = await steps()
        queued.transport.abort()
        await wait_for(lambda: service.gate.num_open == 1)
        assert not (await engine.stats()).scheduler.num_waiting
        assert await steps() - before <= 2
        running.transport.abort()
        await wait_for(lambda: not service.gate.num_open)

    with_engine(test, max_model_len=2048, max_num_seqs=1, max_num_batched_tokens=64)


def test_waiting_requests_are_bounded_and_the_others_refused():
    """2,000 requests wait, 500 more are refused with the time after which they may come again, and urgent ones are not."""
    server = Server(max_waiting=2000)
    server.engine.first_pause_s = 3600

    async def ask(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        return reader, writer

    async def crowd():
        waiting = [await ask(request()) for _ in range(2000)]
        await wait_for(lambda: server.service.gate.num_waiting["normal"] == 2000, 30)
        for _ in range(500):
            reader, writer = await ask(request())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429")
            assert b"retry-after: " in head
            await close_all([writer])
        waiting.append(await ask(request().replace(b"host: x", b"host: x\r\nx-priority: high")))
        await wait_for(lambda: server.service.gate.num_waiting["high"] == 1)
        assert server.service.gate.num_waiting["normal"] == 2000
        await close_all(writer for _, writer in waiting)
        await wait_for(lambda: not server.service.gate.num_open, 30)

    asyncio.run(crowd())
    assert server.num_tasks() <= 3
    server.close()


def test_a_thousand_idle_connections_cost_nothing_but_memory():
    server = Server()

    async def crowd():
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(1000)]
        for reader, writer in idle[::10]:  # some have had an answer and stay open
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'{"live":true}')
        assert server.num_tasks() <= 3
        idle.append(await asyncio.open_connection("127.0.0.1", server.port))
        for reader, writer in (idle[-1], idle[500]):
            writer.write(request(stream=False))
            async with asyncio.timeout(2):
                await reader.readuntil(b"hello")
        await close_all(writer for _, writer in idle)

    asyncio.run(crowd())
    server.close()
