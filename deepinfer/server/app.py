"""Routes: who may ask, how a body is read, which reader and writer answer it, and what an error looks like.

The vendor's paths without ``/v1`` and below ``/anthropic`` lead to the same handlers.  Bodies are counted while they are read, so
an oversized one never fills the memory.  Conversion runs in threads; the event loop only moves tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from deepinfer import __version__
from deepinfer.config import ModelConfig, ServerArgs
from deepinfer.errors import EngineError, RequestError, StepFailed, shown
from deepinfer.metrics import exposition
from deepinfer.request import as_text, as_whole_numbers
from deepinfer.server.asked import Asked, Engine
from deepinfer.server.bodies import ChatBody, CompletionsBody, DetokenizeBody, MessagesBody, ResponsesBody, TokenizeBody
from deepinfer.server.chat import ChatReader, Encoder, Fetch, check_model, new_id
from deepinfer.server.completions import CompletionsReader
from deepinfer.server.failures import Family, HttpError, as_http, error_body, error_headers
from deepinfer.server.gate import Gate
from deepinfer.server.openapi import openapi
from deepinfer.server.protocol import as_switch, check_known
from deepinfer.server.stream import Disconnected, Generation, send_whole
from deepinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from deepinfer.server.tracing import Tracer  # imports an extra

logger = logging.getLogger(__name__)

T = TypeVar("T")
_THREADS: Final = 2
"""Threads that convert bodies."""
_FETCHING_THREADS: Final = 8
"""Threads that convert bodies with addresses of images, which may answer slowly."""
_ADDRESS: Final = re.compile(rb'"https?:', re.IGNORECASE)
_OPEN_PATHS: Final = ("/", "/health", "/ready", "/live", "/version", "/metrics", "/openapi.json")
"""Paths without a key: probes, metrics, the description, and the page, which asks for the key itself."""
_MAX_REQUEST_ID: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all handlers share.

    Attributes:
        engine: makes tokens.
        args: settings of the server.
        gate: admission.
        tokenizer: the model's vocabulary.
        chat, completions: readers of bodies.
        threads: where bodies are converted.
        tracer: makes spans of requests; None for no spans.
        fetching_threads: where bodies with addresses are converted; None if no images are fetched.
        started_s: time of the start, in seconds of the epoch.
    """

    engine: Engine
    args: ServerArgs
    gate: Gate
    tokenizer: Tokenizer
    chat: ChatReader
    completions: CompletionsReader
    threads: ThreadPoolExecutor
    fetching_threads: ThreadPoolExecutor | None
    tracer: Tracer | None
    started_s: int


def make_service(
    engine: Engine,
    args: ServerArgs,
    config: ModelConfig,
    tokenizer: Tokenizer,
    fetch: Fetch | None = None,
    tracer: Tracer | None = None,
) -> Service:
    """Everything that :func:`make_app` needs.

    Raises:
        ConfigError: the tokenizer cannot encode conversations.
    """
    names = args.served_model_names
    return Service(
        engine=engine,
        args=args,
        gate=Gate(args.max_waiting),
        tokenizer=tokenizer,
        chat=ChatReader(Encoder(tokenizer, names), config, engine.facts, names, fetch),
        completions=CompletionsReader(tokenizer, engine.facts, names),
        threads=ThreadPoolExecutor(_THREADS, thread_name_prefix="deepinfer-convert"),
        fetching_threads=None if fetch is None else ThreadPoolExecutor(_FETCHING_THREADS, thread_name_prefix="deepinfer-fetch"),
        tracer=tracer,
        started_s=int(time.time()),
    )


class Door:
    """The outermost application: request ids, keys, and errors as JSON."""

    def __init__(self, app: Router, keys: Sequence[str]) -> None:
        """Let those in who have one of ``keys``; without keys, everybody."""
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key", b"x-request-id")}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if given.isprintable() and 0 < len(given) <= _MAX_REQUEST_ID else new_id("req_")
        scope["request_id"] = request_id
        scope["app"] = self  # starlette's routes then raise an error for an unknown path or method
        begin_s, status = time.monotonic(), 0

        def tell(message: Any) -> Awaitable[None]:  # noqa: ANN401  (an ASGI message)
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = request_id.encode("latin-1")
                message = {**message, "headers": [*message["headers"], (b"x-request-id", told), (b"request-id", told)]}
            return send(message)

        try:
            scope["tenant"] = self._tenant(scope["path"], headers)
            await self._app(scope, receive, tell)
        except Disconnected:
            status = 499
        except Exception as error:
            failure = _no_route(scope, error.status_code) if isinstance(error, HTTPException) else as_http(error)
            if failure.status == 500 and not isinstance(error, EngineError):
                logger.exception("request %s failed", request_id)
            if not status:
                allowed = error.headers if isinstance(error, HTTPException) else None  # the methods of the path, with 405
                headers = {**error_headers(failure), **(allowed or {})}
                await send_whole(tell, failure.status, headers, error_body(failure, family(scope), request_id))
        took_ms = 1000 * (time.monotonic() - begin_s)
        logger.info("%s %s %d %.0f ms %s", scope["method"], scope["path"], status, took_ms, request_id)

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> bytes:
        """The salt of a request's key.

        Raises:
            HttpError: 401 if there is no right key.
        """
        if not self._keys or path in _OPEN_PATHS:
            return b""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key") or (bearer.strip() if scheme.lower() == b"bearer" else b"")
        is_right = False
        for key in self._keys:  # all of them, so that the time tells nothing
            is_right |= hmac.compare_digest(hashlib.sha256(key).digest(), hashlib.sha256(given).digest())
        if not is_right:
            what = "is wrong" if given else "is missing"
            raise HttpError(
                401, f"the API key {what}; send it as Authorization: Bearer KEY or as x-api-key", code="invalid_api_key"
            )
        return hashlib.blake2b(given, digest_size=16, person=b"api_key").digest()


def _no_route(scope: Scope, status: int) -> HttpError:
    if status == 405:
        return HttpError(405, f"{scope['method']} is not allowed for {shown(scope['path'])}; use another method")
    return HttpError(404, f"there is no {shown(scope['path'])} here; see docs/serving.md for the paths", code="not_found")


def family(scope: Scope) -> Family:
    """Whose clients read the answer."""
    is_anthropic = scope["path"].removeprefix("/anthropic").startswith(("/v1/messages", "/messages"))
    has_version = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return "anthropic" if is_anthropic or has_version else "openai"


def make_app(service: Service) -> Door:
    """The ASGI application of the API."""
    handlers = _Handlers(service)
    routes = [
        *_posts(handlers.chat, ChatBody, "/v1/chat/completions", "/chat/completions"),
        *_posts(handlers.complete, CompletionsBody, "/v1/completions", "/completions", "/beta/completions"),
        *_posts(handlers.respond, ResponsesBody, "/v1/responses", "/responses"),
        *_posts(handlers.count_response, ResponsesBody, "/v1/responses/input_tokens", "/responses/input_tokens", generates=False),
        *_posts(handlers.message, MessagesBody, "/v1/messages", "/anthropic/v1/messages"),
        *_posts(
            handlers.count_message,
            MessagesBody,
            "/v1/messages/count_tokens",
            "/anthropic/v1/messages/count_tokens",
            generates=False,
        ),
        *_posts(handlers.tokenize, TokenizeBody, "/tokenize", generates=False),
        *_posts(handlers.detokenize, DetokenizeBody, "/detokenize", generates=False),
        Route("/", handlers.page),
        Route("/health", handlers.health),
        Route("/ready", handlers.ready),
        Route("/live", handlers.live),
        Route("/version", handlers.version),
        Route("/metrics", handlers.metrics),
    ]
    for path in ("/v1/models", "/models", "/anthropic/v1/models"):
        routes += [Route(path, handlers.models), Route(path + "/{name:path}", handlers.model)]

    async def describe(_request: Request) -> Response:
        """This document."""
        return Response(document, media_type="application/json")

    routes.append(Route("/openapi.json", describe))
    keys = service.args.api_keys
    document = msgspec.json.encode(openapi(routes, service.args.served_model_names, _OPEN_PATHS, has_keys=bool(keys)))
    return Door(Router(routes, redirect_slashes=False), keys)


def make_admin(service: Service, token: str, drain: Callable[[], None]) -> Door:
    """The ASGI application of the admin port; ``drain`` begins the end of the server."""

    async def start_drain(_request: Request) -> Response:
        drain()
        return _json({"draining": True})

    return Door(Router([Route("/drain", start_drain, methods=["POST"])], redirect_slashes=False), (token,))


def _posts(
    handler: Callable[[Scope, Receive, Send], Awaitable[None]], body: type[Struct], *paths: str, generates: bool = True
) -> list[Route]:
    return [Route(path, _Endpoint(handler, body, generates=generates), methods=["POST"]) for path in paths]


class _Endpoint:
    """A handler that sends its answer itself; starlette takes objects as ASGI applications.

    Attributes:
        body: describes the JSON of requests.
        generates: whether tokens are generated, and can be streamed.
    """

    def __init__(
        self, handler: Callable[[Scope, Receive, Send], Awaitable[None]], body: type[Struct], *, generates: bool
    ) -> None:
        self._handler = handler
        self.body = body
        self.generates = generates
        self.__doc__ = handler.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _Handlers:
    """One method for each route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # Generation.

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Chat Completions: answer a conversation."""
        await self._generate("chat", scope, receive, send, lambda body: self._service.chat.read("chat", body))

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responses: answer a conversation."""
        await self._generate("chat", scope, receive, send, lambda body: self._service.chat.read("responses", body))

    async def message(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Messages: answer a conversation."""
        await self._generate("chat", scope, receive, send, lambda body: self._service.chat.read("messages", body))

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Completions: continue one or several prompts."""
        await self._generate("text_completion", scope, receive, send, self._service.completions.read)

    async def _generate(
        self, operation: str, scope: Scope, receive: Receive, send: Send, read: Callable[[dict[str, Any]], Asked]
    ) -> None:
        """Answer a request with generated tokens; ``operation`` is its name in traces."""
        service, request = self._service, Request(scope, receive)
        if not service.engine.is_alive:
            raise StepFailed("the engine has ended; send the request to another server")
        deadline_s = min(service.args.deadline_s, _deadline(request.headers.get("x-deadline-ms")))
        tracer = service.tracer
        tracing = contextlib.nullcontext() if tracer is None else tracer.request(operation, scope["request_id"], request.headers)
        with tracing as trace, service.gate.enter(request.headers.get("x-priority", "normal")) as ticket:
            asked = await self._in_thread(await self._body(request), read)  # the body must not live as long as its answer
            if trace is not None:
                trace.sent(asked)
            generation = Generation(
                service.engine,
                asked,
                request_id=scope["request_id"],
                priority=request.headers.get("x-priority", "normal"),
                salt=asked.salt or scope["tenant"],
                ticket=ticket,
                keep_alive_s=service.args.keep_alive_s,
                trace=trace,
            )
            headers = {"x-deepinfer-left-out": ", ".join(asked.left_out)} if asked.left_out else {}
            await generation.run(receive, send, headers, deadline_s)

    # Other answers to bodies.

    async def count_message(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Number of tokens of the prompt of Messages."""
        count = await self._convert(scope, receive, lambda body: self._service.chat.count("messages", body))
        await _json({"input_tokens": count})(scope, receive, send)

    async def count_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Number of tokens of the prompt of Responses."""
        count = await self._convert(scope, receive, lambda body: self._service.chat.count("responses", body))
        await _json({"object": "response.input_tokens", "input_tokens": count})(scope, receive, send)

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ids of a text, or of the prompt of a conversation."""
        found = await self._convert(scope, receive, self._tokenize)
        await _json(found)(scope, receive, send)

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        service = self._service
        check_known(TokenizeBody.__struct_fields__, body)
        body = {"model": service.args.served_model_names[0]} | {name: each for name, each in body.items() if each is not None}
        check_model(body, service.args.served_model_names)
        has_begin = as_switch("add_special_tokens", body.pop("add_special_tokens", None), default=True)
        if "messages" in body:
            ids = list(service.chat.read("chat", body).prompts[0])
        else:
            ids = service.completions.text_ids(as_text("prompt", body.get("prompt")))[0 if has_begin else 1 :]
        return {"tokens": ids, "count": len(ids), "max_model_len": service.engine.facts.max_model_len}

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The text of ids."""

        def convert(body: dict[str, Any]) -> dict[str, Any]:
            check_known(DetokenizeBody.__struct_fields__, body)
            ids = as_whole_numbers("tokens", body.get("tokens"), things="token ids")
            return {"prompt": self._service.tokenizer.decode(ids)}

        found = await self._convert(scope, receive, convert)
        await _json(found)(scope, receive, send)

    async def _convert(self, scope: Scope, receive: Receive, convert: Callable[[dict[str, Any]], T]) -> T:
        return await self._in_thread(await self._body(Request(scope, receive)), convert)

    async def _in_thread(self, raw: bytearray, convert: Callable[[dict[str, Any]], T]) -> T:
        """Convert a body in a thread.  A host that answers slowly delays only other bodies with addresses."""
        fetching = self._service.fetching_threads
        threads = fetching if fetching is not None and _ADDRESS.search(raw) else self._service.threads
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: convert(_object(raw)))

    async def _body(self, request: Request) -> bytearray:
        """Read a JSON body of limited size.

        Raises:
            HttpError: 413 or 415.
            Disconnected: the client left.
        """
        limit = self._service.args.max_body_bytes
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"the body has the type {shown(kind)}; send application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HttpError(415, "the body is compressed, which this server does not read; send it as it is")
        too_large = HttpError(413, f"the body has more than {limit} bytes; send less")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        body = bytearray()  # one large block of memory, which goes back to the system
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_large
                body += chunk
        except ClientDisconnect:
            raise Disconnected from None
        return body

    # Facts.

    async def models(self, _request: Request) -> Response:
        """All models."""
        listed = [self._model(name) for name in self._service.args.served_model_names]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return _json({"object": "list", "data": listed, **ends})

    async def model(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["name"]
        if name not in self._service.args.served_model_names:
            known = ", ".join(self._service.args.served_model_names)
            raise HttpError(404, f"the model {shown(name)} does not exist; use one of {known}", code="model_not_found")
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        created = self._service.started_s
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "deepinfer",
            "max_model_len": self._service.engine.facts.max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        }

    async def health(self, _request: Request) -> Response:
        """The engine answers."""
        await asyncio.wait_for(self._service.engine.stats(), self._service.args.keep_alive_s)
        return _json({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """The server takes requests."""
        if not self._service.engine.is_alive or self._service.gate.is_draining:
            raise HttpError(503, "the server takes no requests, because it shuts down; send them to another server")
        return _json({"ready": True})

    async def live(self, _request: Request) -> Response:
        """The event loop runs."""
        return _json({"live": True})

    async def version(self, _request: Request) -> Response:
        """The version of the server."""
        return _json({"version": __version__})

    async def metrics(self, _request: Request) -> Response:
        """Counters and histograms in the text format of Prometheus."""
        stats = await self._service.engine.stats()
        name = self._service.args.served_model_names[0]
        text = exposition({"0": stats.metrics}) + exposition({"0": stats.metrics}, prefix="vllm:", model_name=name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, _request: Request) -> Response:
        """A chat page for people."""
        text = files("deepinfer.server").joinpath("page.html").read_bytes()
        return Response(text, media_type="text/html; charset=utf-8")


def _object(raw: bytearray) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        HttpError: 400.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise HttpError(400, f"the body is not JSON ({error}); send a JSON object") from error
    if not isinstance(body, dict):
        raise HttpError(400, f"the body is {shown(body)}, not an object; send a JSON object")
    return body


def _deadline(given: str | None) -> float:
    """Seconds of a header in milliseconds; infinity without the header."""
    if given is None:
        return math.inf
    if not given.isdecimal() or not int(given[:12]) > 0:
        raise RequestError(f"x-deadline-ms={shown(given)} is not a positive number; give milliseconds")
    return int(given[:12]) / 1000
