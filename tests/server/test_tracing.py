"""Spans of requests: names, times, the client's trace, errors, and no text."""

import asyncio
import dataclasses
import json

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra tracing")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deepinfer.config import ServerArgs, named_config
from deepinfer.errors import ConfigError
from deepinfer.server.app import make_app, make_service
from deepinfer.server.tracing import Tracer, otlp_provider
from tests.server.scripted import TOKENIZER, ScriptedEngine

ASK = {"model": "nano", "messages": [{"role": "user", "content": "a secret"}], "temperature": 0.5, "max_tokens": 50}


class Queued(ScriptedEngine):
    """Its first record says that it waited for 30 ms."""

    async def steps(self, *args, **kwargs):
        is_first = True
        async for records in super().steps(*args, **kwargs):
            yield [dataclasses.replace(records[0], queue_s=0.03), *records[1:]] if is_first else records
            is_first = False


@pytest.fixture
def traced():
    """Asks a server, and returns the answer and the finished spans by name."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = Queued()
    args = ServerArgs(served_model_names=("nano",), api_keys=())

    def ask(path, body, **headers):
        async def run():
            app = make_app(make_service(engine, args, named_config("random"), TOKENIZER, tracer=Tracer(provider)))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(path, json=body, headers=headers)

        exporter.clear()
        answer = asyncio.run(run())
        return answer, {each.name: each for each in exporter.get_finished_spans()}

    ask.engine = engine
    return ask


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_span_with_its_phases(traced, is_stream):
    traced.engine.say("hello there")
    traced.engine.first_pause_s, traced.engine.pause_s = 0.05, 0.01
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer, spans = traced("/v1/chat/completions", ASK | {"stream": is_stream}, traceparent=parent)
    assert answer.status_code == 200
    assert sorted(spans) == ["chat nano", "decode", "prefill", "queue"]
    span = spans["chat nano"]
    assert span.kind == SpanKind.SERVER
    assert format(span.context.trace_id, "032x") == parent.split("-")[1]
    assert format(span.parent.span_id, "016x") == parent.split("-")[2]
    given = dict(span.attributes)
    assert given["deepinfer.request_id"] == answer.headers["x-request-id"]
    assert given["gen_ai.operation.name"] == "chat"
    assert given["gen_ai.request.model"] == "nano"
    assert given["gen_ai.request.temperature"] == 0.5
    assert given["gen_ai.request.max_tokens"] == 50
    assert given["gen_ai.response.finish_reasons"] == ("stop",)
    assert given["gen_ai.usage.output_tokens"] == len("hello there") + 1
    assert given["gen_ai.usage.input_tokens"] > 4
    assert given["gen_ai.usage.cache_read.input_tokens"] == 4
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert all(each.parent.span_id == span.context.span_id for each in (queue, prefill, decode))
    assert span.start_time <= queue.start_time
    assert queue.end_time - queue.start_time == 30_000_000
    assert (queue.end_time, prefill.end_time, decode.end_time) == (prefill.start_time, decode.start_time, span.end_time)
    assert prefill.end_time - prefill.start_time >= 20_000_000
    assert decode.end_time - decode.start_time >= 20_000_000
    assert "secret" not in "".join(each.to_json() for each in spans.values())
    assert "hello" not in "".join(each.to_json() for each in spans.values())


def test_other_protocols_and_several_prompts(traced):
    _, spans = traced("/v1/completions", {"model": "nano", "prompt": [[5, 6], [7, 8, 9]], "n": 2})
    assert spans["text_completion nano"].attributes["gen_ai.usage.input_tokens"] == 5
    for path in ("/v1/messages", "/v1/responses"):
        _, spans = traced(
            path, {"model": "nano", "max_tokens": 9, **ASK} if "messages" in path else {"model": "nano", "input": "hi"}
        )
        assert "chat nano" in spans


def test_errors_before_and_in_the_stream(traced):
    _, spans = traced("/v1/chat/completions", ASK | {"model": "unknown"})
    assert list(spans) == ["chat"]
    assert spans["chat"].status.status_code == StatusCode.ERROR
    assert spans["chat"].attributes["error.type"] == "http_404"
    traced.engine.fail_after = 1
    answer, spans = traced("/v1/chat/completions", ASK | {"stream": True})
    assert "error" in json.loads(answer.text.rpartition("data: ")[2])
    assert spans["chat nano"].attributes["error.type"] == "http_500"


def test_probes_are_no_spans(traced):
    _, spans = traced("/tokenize", {"prompt": "a"})
    assert spans == {}


def test_the_collector_gets_spans_over_http():
    """A real exporter, and a collector that only listens."""
    received = []

    async def run():
        async def collect(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            received.append((head, await reader.readexactly(size)))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        collector = await asyncio.start_server(collect, "127.0.0.1", 0)
        tracer = Tracer(otlp_provider(f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}/"))
        with tracer.request("chat", "req_1", {}):
            pass
        await asyncio.to_thread(tracer.close)
        collector.close()

    asyncio.run(run())
    ((head, body),) = received
    assert head.startswith(b"POST /v1/traces HTTP/1.1")
    assert b"req_1" in body


def test_tracing_is_off_unless_an_address_is_given(monkeypatch):
    args = {"served_model_names": ("nano",), "api_keys": ()}
    assert not ServerArgs(**args).is_traced
    assert ServerArgs(**args, otlp_endpoint="http://127.0.0.1:4318").is_traced
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert ServerArgs(**args).is_traced
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        ServerArgs(**args, otlp_endpoint="127.0.0.1:4318")
