"""Scenes of an :class:`AsyncEngineClient` with a fake core; run as a program, the module plays them.

The number in a line "core …" is the process id of the core, which must end with the scene.
"""

# ruff: noqa: T201  (what a scene prints is its result)

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from deepinfer import SamplingParams
from deepinfer.config import EngineArgs
from deepinfer.engine.client import AsyncEngineClient
from tests.engine.scenes import play

FAKE = [sys.executable, str(Path(__file__).with_name("fake_core.py"))]
FOREVER = 10**7
kept = []


def is_gone(pid):
    """Whether a process ends soon; a zombie counts as ended."""
    until = time.monotonic() + 15
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


def is_removed(folder):
    """Whether a folder is removed soon: the thread that ends a core removes it after the core."""
    until = time.monotonic() + 15
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return not folder.exists()


async def start():
    args = EngineArgs(model="fake", max_num_seqs=8, max_model_len=256, disable_log_stats=True)
    client = await AsyncEngineClient.start(args, progress=False, program=FAKE)
    print("core", client.pid, flush=True)
    return client


def stream(client, name="a", max_tokens=FOREVER):
    return client.generate(name, [1], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


async def tokens(client, name="b"):
    return [each.token_id async for each in stream(client, name, 3)]


async def error_of(use):
    try:
        return f"no error but {await use!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def uses(client, opened):
    """The error of every kind of use; each must come at once."""
    begin = time.monotonic()
    found = {await error_of(each) for each in (anext(opened), tokens(client), client.stats(), client.abort(["a"]))}
    assert time.monotonic() - begin < 2
    return sorted(found - {"StopAsyncIteration: "})  # the error of a stream that has ended


async def begin():
    client = await start()
    opened = stream(client)
    await anext(opened)
    return client, opened


def left_open():
    """A client that is never closed and an open stream; both are global variables."""

    async def main():
        kept.extend(await begin())

    asyncio.run(main())


def left_open_with_its_loop():
    loop = asyncio.new_event_loop()
    kept.extend((loop, *loop.run_until_complete(begin())))


def left_open_in_a_thread():
    ready = threading.Event()

    async def main():
        kept.extend(await begin())
        ready.set()
        await asyncio.sleep(3600)

    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    ready.wait()


def ctrl_c():
    async def main():
        client, _ = await begin()
        others = [asyncio.create_task(tokens_for_ever(client, str(number))) for number in range(3)]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.gather(*others)

    async def tokens_for_ever(client, name):
        async for _ in stream(client, name):
            pass

    asyncio.run(main())


def ctrl_c_while_it_starts():
    async def main():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        await start()

    asyncio.run(main())


def another_loop():
    client, opened = asyncio.run(begin())
    print(*asyncio.run(uses(client, opened)))
    print("gone", is_gone(client.pid))
    asyncio.run(client.close())
    print("gone", is_removed(client._link._folder))


def a_loop_closed_by_hand():
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(start())
    loop.close()
    print("gone", is_gone(client.pid))


def a_loop_that_stands_still():
    loop = asyncio.new_event_loop()
    client, opened = loop.run_until_complete(begin())
    print(*asyncio.run(uses(client, opened)))
    asyncio.run(client.close())
    print("gone", is_gone(client.pid), is_removed(client._link._folder))
    loop.close()


def a_loop_in_another_thread():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(what):
        return asyncio.run_coroutine_threadsafe(what, loop)

    client, opened = there(begin()).result()
    print(*asyncio.run(uses(client, opened)))
    print(there(tokens(client)).result())
    waiting = there(error_of(tokens_for_ever(client)))
    there(asyncio.sleep(0.1)).result()
    asyncio.run(client.close())
    print(waiting.result())
    print("gone", is_gone(client.pid), is_removed(client._link._folder))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def tokens_for_ever(client):
    last = None
    async for each in stream(client, "for ever"):
        last = each
    return last.finish_reason


def garbage():
    async def main():
        client = await start()
        pid, folder = client.pid, client._link._folder
        print(await tokens(client))
        del client
        gc.collect()
        print("gone", await asyncio.to_thread(is_gone, pid), await asyncio.to_thread(is_removed, folder))

    asyncio.run(main())


def in_a_child(client, opened):
    async def check():
        found = await uses(client, opened)
        assert len(found) == 1, found
        assert found.pop().startswith(
            f"ConfigError: this client was made in process {os.getppid()}, and process {os.getpid()} is"
        )
        assert not client.is_alive
        await opened.aclose()
        await client.close()

    asyncio.run(check())
    print("child", flush=True)


def forks():
    async def main():
        client, opened = await begin()
        other = multiprocessing.get_context("fork").Process(target=in_a_child, args=(client, opened))
        other.start()
        await asyncio.to_thread(other.join)
        print(other.exitcode, client.is_alive, (await anext(opened)).num_output_tokens, await tokens(client))
        return client, opened

    async def more(client, opened):
        await opened.aclose()
        await client.close()

    with asyncio.Runner() as runner:
        client, opened = runner.run(main())
        if not (pid := os.fork()):
            threading.Thread(target=in_a_child, args=(client, opened)).start()  # a thread without a running loop
            for each in threading.enumerate():
                if each is not threading.current_thread():
                    each.join()
            del client, opened
            gc.collect()
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        runner.run(asyncio.sleep(0.1))
        print(client.is_alive, runner.run(tokens(client)), client._link._folder.exists())
        runner.run(more(client, opened))


def killed_with_a_child_that_lives_on(closing=False):
    """The program dies, but two forked helpers live on; one of them was forked during the start."""

    async def main():
        import socket

        pair = socket.socketpair

        def forking():
            ends = pair()
            helper()
            return ends

        def helper():
            if not (pid := os.fork()):
                os.close(1)
                os.close(2)
                time.sleep(60)
                os._exit(0)
            print("helper", pid, flush=True)

        from deepinfer.engine import link

        link.socket.socketpair, before = forking, link.socket.socketpair
        try:
            client = await AsyncEngineClient.start(
                EngineArgs(model="fake", max_num_seqs=8, max_model_len=256, disable_log_stats=True), progress=False, program=FAKE
            )
        finally:
            link.socket.socketpair = before
        helper()
        print("core", client.pid, flush=True)
        opened = stream(client)
        await anext(opened)
        if closing:
            os.kill(client.pid, signal.SIGKILL)
            begin = time.monotonic()
            with contextlib.suppress(StopAsyncIteration):
                while "core process" not in (told := await error_of(anext(opened))):
                    pass
            print(told)
            print(time.monotonic() - begin < 5, *await uses(client, opened))
            await client.close()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


def a_core_killed_with_helpers_that_live_on():
    killed_with_a_child_that_lives_on(closing=True)


def behind_a_wrapper():
    """The program is a shell that starts the core and waits for it."""

    async def main():
        args = EngineArgs(model="fake", max_num_seqs=8, max_model_len=256, disable_log_stats=True)
        wrapper = ["sh", "-c", '"$@"; exit 0', "sh", *FAKE]
        client = await AsyncEngineClient.start(args, progress=False, program=wrapper)
        print("core", client.pid, flush=True)
        print(await tokens(client), "fake_core" in Path(f"/proc/{client.pid}/cmdline").read_text())
        os.kill(client.pid, signal.SIGSTOP)
        from deepinfer.engine import client as module

        module.END_S = 0.2  # the core does not react, so it is killed
        await client.close()
        print("gone", is_gone(client.pid))

    asyncio.run(main())


if __name__ == "__main__":
    play(globals(), sys.argv[1:])
