"""``deepinfer serve``: starts the engine, listens, and ends well.

The first SIGTERM or SIGINT, or ``/drain``, ends the server in order: it is unready at once, refuses new requests, finishes open
ones, and exits with 0.  A second signal aborts the open requests.  If the engine ends by itself, every open stream gets an error
event and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import deepseek_recipe as recipe
import uvicorn
import uvloop
from starlette.types import ASGIApp

from deepinfer.config import EngineArgs, ServerArgs, load_config
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.loader import model_directory
from deepinfer.errors import ConfigError, RequestError, reason
from deepinfer.grammar.tools import DSML
from deepinfer.server.app import Service, make_admin, make_app, make_service
from deepinfer.server.banner import banner
from deepinfer.server.chat import THINK_END
from deepinfer.tokenizer import EOS, Tokenizer

if TYPE_CHECKING:
    from deepinfer.server.tracing import Tracer  # imports an extra

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S: Final = 0.2
"""Seconds between two looks at the engine."""
_ANSWER_S: Final = 5.0
"""Seconds for the last bytes of open answers."""
_MAX_FETCH_BYTES: Final = 32 << 20
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that NAT64 translates to IPv4."""


class _Listener(uvicorn.Server):
    """A server whose signals the caller handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(args: ServerArgs, engine_args: EngineArgs) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        ConfigError: settings or files are not usable.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    return run_loop(_serve(args, engine_args))


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in the event loop that the server is made for."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def banned_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """All special tokens but the end, the end of reasoning and the mark of calls.  Text would show their spelling."""
    kept = {tokenizer.special(each) for each in (EOS, THINK_END, DSML)}
    return tuple(each for each in tokenizer.special_ids if each not in kept)


async def _serve(args: ServerArgs, engine_args: EngineArgs) -> int:
    model_dir = model_directory(engine_args.model)
    tokenizer = Tokenizer.from_dir(Path(engine_args.tokenizer).expanduser() if engine_args.tokenizer else model_dir)
    config = load_config(model_dir)
    banned = dict.fromkeys([*engine_args.banned_token_ids, *banned_token_ids(tokenizer)])
    tracer = _tracer(args)
    client = await AsyncEngineClient.start(dataclasses.replace(engine_args, banned_token_ids=tuple(banned)))
    try:
        service = make_service(client, args, config, tokenizer, fetch_image if args.allow_image_urls else None, tracer)
        return await _Lifetime(service, client, f"{engine_args.model}, {config.num_hidden_layers} layers").run()
    finally:
        await client.close()
        if tracer is not None:
            tracer.close()


def _tracer(args: ServerArgs) -> Tracer | None:
    if not args.is_traced:
        return None
    try:
        from deepinfer.server.tracing import Tracer, otlp_provider
    except ModuleNotFoundError as error:
        raise ConfigError(f"tracing needs {error.name}, which is not installed; run pip install 'deepinfer[tracing]'") from error
    return Tracer(otlp_provider(args.otlp_endpoint))


class _Lifetime:
    """The listeners of one server, from the first connection to the exit code."""

    def __init__(self, service: Service, client: AsyncEngineClient, description: str) -> None:
        self._service = service
        self._client = client
        self._description = description
        self._ending = asyncio.Event()
        self._is_aborting = asyncio.Event()

    async def run(self) -> int:
        """Listen until the end; returns the exit code."""
        args = self._service.args
        listeners = [make_listener(make_app(self._service), args.host, args.port)]
        if args.admin_port is not None and args.admin_token is not None:
            listeners.append(make_listener(make_admin(self._service, args.admin_token, self.end), args.host, args.admin_port))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end)
        tasks = [asyncio.ensure_future(_listen(each)) for each in listeners]
        try:
            while not all(each.started for each in listeners):
                if any(task.done() for task in tasks):
                    raise ConfigError(f"cannot listen on {args.host}:{args.port}; choose another port")
                await asyncio.sleep(0.01)
            port = listeners[0].servers[0].sockets[0].getsockname()[1]
            sys.stdout.write(banner(args, self._client.facts, port, self._description) + "\n")
            sys.stdout.flush()
            code = await self._wait()
        finally:
            for each in listeners:
                each.should_exit = True
            await asyncio.wait(tasks, timeout=_ANSWER_S)
        return code

    def end(self) -> None:
        """End in order; the second call aborts open requests."""
        if self._ending.is_set():
            self._is_aborting.set()
        self._service.gate.is_draining = True
        self._ending.set()

    async def _wait(self) -> int:
        """Wait for the engine's end, or for a signal and the end of the open requests."""
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_S)
            if not self._client.is_alive:
                logger.critical("the engine has ended; the server stops")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._service.gate.wait_idle(), _ANSWER_S)
                return 1
        logger.info("the server finishes %d open request(s) within %g s", self._service.gate.num_open, self._service.args.drain_s)
        idle = asyncio.ensure_future(self._service.gate.wait_idle())
        abort = asyncio.ensure_future(self._is_aborting.wait())
        await asyncio.wait({idle, abort}, timeout=self._service.args.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, abort):
            task.cancel()
        await self._client.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.gate.wait_idle(), _ANSWER_S)
        return 0


def make_listener(app: ASGIApp, host: str, port: int) -> uvicorn.Server:
    """The HTTP server around an application; port 0 takes a free port."""
    return _Listener(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="uvloop",
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_ANSWER_S),
        )
    )


async def _listen(listener: uvicorn.Server) -> None:
    with contextlib.suppress(SystemExit):  # the port is in use; uvicorn has logged it
        await listener.serve()


def fetch_image(url: str, is_allowed: Callable[[str, str], bool] | None = None) -> bytes:
    """Fetch an image from a global address.

    Args:
        url: where the image is.
        is_allowed: judges a host and an address in the place of :func:`is_global`.

    Raises:
        RequestError: an address is not allowed, or does not answer with a file of at most 32 MiB.
    """
    fetcher = recipe.ReqwestImageFetcher.with_max_bytes(_MAX_FETCH_BYTES).with_destination_filter(is_allowed or is_global)
    try:
        return fetcher.fetch(url)
    except recipe.ImageError as error:
        raise RequestError(f"the image {url[:200]!r} cannot be fetched ({reason(error)}); send a data URL instead") from error


def is_global(_host: str, address: str) -> bool:
    """Whether an address belongs to the public internet.

    recipe calls it for every address that a name has, at every redirect, and connects to the addresses that it has judged.
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found in _TRANSLATED or found.sixtofour is not None or found.teredo is not None:
            return False  # a gateway would pass it on to the IPv4 address inside
        found = found.ipv4_mapped or found
    return found.is_global and not found.is_multicast
