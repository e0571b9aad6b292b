"""Spans of OpenTelemetry: one for each request, with children for the queue, the prompt and the output.

The names are those of the semantic conventions for generative AI.  A span has counts and settings, and no text of a prompt or an
answer.  A request with the header ``traceparent`` continues the trace of its client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from deepinfer import __version__
from deepinfer.request import RequestOutput
from deepinfer.server.asked import Asked
from deepinfer.server.failures import as_http

_S: Final = 1_000_000_000
"""Nanoseconds of a second."""


def otlp_provider(endpoint: str | None) -> TracerProvider:
    """Spans go to an OTLP collector.

    Args:
        endpoint: its base address, such as http://127.0.0.1:4318; None reads the standard variables of the environment.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "deepinfer", "service.version": __version__}))
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class Tracer:
    """Makes the spans of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        """Give spans to ``provider``."""
        self._provider = provider
        self._tracer = provider.get_tracer("deepinfer", __version__)

    @contextmanager
    def request(self, operation: str, request_id: str, headers: Mapping[str, str]) -> Iterator[RequestTrace]:
        """A span for the time of the context; an error in it is the span's error."""
        span: Any = self._tracer.start_span(operation, extract(headers), SpanKind.SERVER)
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.provider.name", "deepinfer")
        span.set_attribute("deepinfer.request_id", request_id)
        trace = RequestTrace(self._tracer, span, operation)
        try:
            yield trace
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            trace.end()

    def close(self) -> None:
        """Send the last spans."""
        self._provider.shutdown()


class RequestTrace:
    """The span of one request, and the times of its phases."""

    def __init__(self, tracer: Any, span: Span, operation: str) -> None:  # noqa: ANN401  (the class differs between versions)
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._sent_ns = 0
        self._begun_ns: int | None = None
        self._first_ns: int | None = None
        self._num_input = self._num_cached = self._num_output = 0
        self._reasons: set[str] = set()

    def sent(self, asked: Asked) -> None:
        """The request goes to the engine."""
        self._sent_ns = time.time_ns()
        params = asked.params
        self._span.update_name(f"{self._operation} {asked.model}")
        self._span.set_attributes(
            {
                "gen_ai.request.model": asked.model,
                "gen_ai.response.model": asked.model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": params.n,
            }
        )

    def took(self, records: Sequence[RequestOutput]) -> None:
        """Records have come."""
        for record in records:
            if record.num_output_tokens == 1 and not record.sample_idx:
                self._num_input += record.prompt_len
                self._num_cached += record.num_cached_tokens
                if self._first_ns is None:
                    self._first_ns = time.time_ns()
                    if record.queue_s is not None:
                        self._begun_ns = self._sent_ns + int(record.queue_s * _S)
            self._num_output += record.token_id is not None
            if record.finish_reason is not None:
                self._reasons.add(str(record.finish_reason))

    def failed(self, error: BaseException) -> None:
        """The request has failed, or its client has left."""
        name = f"http_{as_http(error).status}" if isinstance(error, Exception) else "cancelled"
        self._span.set_attribute("error.type", name)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        """End the span and write its children."""
        now = time.time_ns()
        if self._sent_ns:
            first = self._first_ns or now
            begun = min(self._begun_ns or first, first)
            phases = [("queue", self._sent_ns, begun), ("prefill", begun, first), ("decode", first, now)]
            for name, start, end in phases[: 3 if self._first_ns is not None else 1]:
                child = self._tracer.start_span(name, set_span_in_context(self._span), start_time=start)
                child.end(end)
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self._num_input,
                    "gen_ai.usage.cache_read.input_tokens": self._num_cached,
                    "gen_ai.usage.output_tokens": self._num_output,
                    "gen_ai.response.finish_reasons": sorted(self._reasons),
                }
            )
        self._span.end(now)
