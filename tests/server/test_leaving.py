"""Many clients that leave at random moments: in the queue, before the first token, and in the stream."""

import asyncio
import json
import random

import pytest

from tests.server.scripted import Server

BODY = json.dumps({"model": "nano", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"


async def leave(port, rng):
    """Send a part of a request or all of it, read for a random time, and close the connection."""
    data = HEAD.encode() + BODY
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
    patience_s = rng.choice([0, 0.01, 0.1, 0.5])
    try:
        async with asyncio.timeout(patience_s):
            while await reader.read(4096):
                pass
    except TimeoutError:
        pass
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_leave_at_random_moments_leave_nothing(count):
    server = Server(max_waiting=count)
    server.engine.say("x" * 2000)
    server.engine.pause_s, server.engine.first_pause_s = 0.01, 0.05
    rng = random.Random(count)

    async def crowd():
        await asyncio.gather(*(leave(server.port, rng) for _ in range(count)))
        for _ in range(200):
            if not server.engine.open and not server.service.gate.num_open:
                return
            await asyncio.sleep(0.02)

    asyncio.run(crowd())
    assert len(server.engine.asked) > count // 4
    assert (server.engine.open, server.service.gate.num_open) == (0, 0)
    assert sum(server.service.gate.num_waiting.values()) == 0
    assert server.num_tasks() <= 3
    server.close()


def test_waiting_requests_are_bounded_and_the_others_refused():
    server = Server(max_waiting=300)
    server.engine.first_pause_s = 3600

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD.encode() + BODY)
        try:
            async with asyncio.timeout(2):
                return (await reader.readline()).split()[1], writer
        except TimeoutError:
            return b"", writer

    async def crowd():
        answers = await asyncio.gather(*(ask() for _ in range(800)))
        assert server.service.gate.num_waiting["normal"] == 300
        for _, writer in answers:
            writer.close()
        return [status for status, _ in answers]

    statuses = asyncio.run(crowd())
    assert statuses.count(b"429") == 500
    assert statuses.count(b"") == 300
    server.close()
    assert server.service.gate.num_open == 0
