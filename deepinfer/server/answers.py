"""Answers of the three protocols of conversations: recipe's events, finished for the clients that read them.

Recipe makes the events.  This module numbers the choices of ``n`` answers, places the usage where each protocol wants it, and
ends broken streams.  All records of a step are one push.  With stop strings each token is one push, because recipe counts the
tokens of a push as a whole, so a push must not go beyond a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import deepseek_recipe as recipe
import msgspec

from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.failures import HttpError, error_body, error_value

_LEAST_LOGPROB: Final = -9999.0
_decode = msgspec.json.decode
_encode = msgspec.json.encode


class _Parsers:
    """The stream processors of one request, one for each answer.

    Invariant: an answer is in ``_open`` until its processor has finished or its last record has come.

    Attributes:
        num_verified, num_accepted: drafts of all rounds of all answers.
    """

    def __init__(self, processors: Sequence[recipe.StreamProcessor], *, has_stops: bool, eos_id: int, has_logprobs: bool) -> None:
        self._processors = processors
        self._has_stops = has_stops
        self._eos_id = eos_id
        self._has_logprobs = has_logprobs
        self._open = set(range(len(processors)))
        self._is_begun = [False] * len(processors)
        self.num_verified = self.num_accepted = 0

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return not self._open

    def push(self, records: Sequence[RequestOutput]) -> Iterator[tuple[int, Any]]:
        """The events of a step, each with the index of its answer."""
        self.num_verified += sum(record.draft_tok for record in records)
        self.num_accepted += sum(record.accept_tok for record in records)
        for sample_idx in dict.fromkeys(record.sample_idx for record in records):
            if sample_idx in self._open:
                yield from (
                    (sample_idx, event)
                    for event in self._push_one(sample_idx, [each for each in records if each.sample_idx == sample_idx])
                )

    def _push_one(self, sample_idx: int, records: Sequence[RequestOutput]) -> Iterator[Any]:
        processor = self._processors[sample_idx]
        if not self._is_begun[sample_idx]:
            self._is_begun[sample_idx] = True
            usage = recipe.PromptUsage(prompt_tokens=records[0].prompt_len, prompt_cache_hit_tokens=records[0].num_cached_tokens)
            yield from processor.push(recipe.InferenceChunk.ready(prompt_usage=usage))
        texts = [each for each in records if self._is_text(each)]
        for part in [[each] for each in texts] if self._has_stops else [texts] if texts else []:
            ids = [each.token_id for each in part if each.token_id is not None]
            logprobs = [_logprob(each) for each in part] if self._has_logprobs else None
            yield from processor.push(recipe.InferenceChunk.tokens(ids, logprobs))
            if processor.finished:
                self._open.discard(sample_idx)
                return
        if records[-1].finished:
            self._open.discard(sample_idx)
            reasons = recipe.InferenceFinishReason
            is_cut = records[-1].finish_reason == FinishReason.LENGTH
            yield from processor.push(recipe.InferenceChunk.finish(reasons.Length if is_cut else reasons.Stop))

    def _is_text(self, record: RequestOutput) -> bool:
        return record.token_id not in (None, self._eos_id) and record.finish_reason != FinishReason.STOP

    def close(self) -> None:
        """Release the processors."""
        for processor in self._processors:
            processor.close()


def _logprob(record: RequestOutput) -> tuple[float, list[tuple[int, float]]]:
    assert record.token_logprobs is not None, "the engine reports it for every token"
    top = zip(record.top_token_ids, record.top_logprobs, strict=True)
    return max(record.token_logprobs, _LEAST_LOGPROB), [(token_id, max(each, _LEAST_LOGPROB)) for token_id, each in top]


class ChatWriter:
    """Chat Completions."""

    def __init__(
        self,
        processors: Sequence[recipe.StreamProcessor],
        *,
        answer_id: str,
        model: str,
        n: int,
        is_stream: bool,
        include_usage: bool,
        has_stops: bool,
        eos_id: int,
        has_logprobs: bool,
    ) -> None:
        """Write ``n`` answers; ``include_usage`` adds a last chunk of usage to a stream."""
        self.is_stream = is_stream
        self._parsers = _Parsers(processors, has_stops=has_stops, eos_id=eos_id, has_logprobs=has_logprobs)
        self._include_usage = include_usage
        created = int(time.time())
        self._head = {"id": answer_id, "created": created, "model": model}
        self._wholes = [recipe.ChatCompletionResponse(answer_id, model, created, 0, 0) for _ in range(n)]
        self._usages: list[dict[str, Any]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return self._parsers.is_complete

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        frames = []
        for sample_idx, event in self._parsers.push(records):
            if self.is_stream:
                frames.append(self._chunk(sample_idx, event.to_json()))
            else:
                self._wholes[sample_idx].accumulate(event)
        return b"".join(frames)

    def _chunk(self, sample_idx: int, text: str) -> bytes:
        if not sample_idx and '"usage":{' not in text:  # quotes inside strings are escaped
            return b"data: " + text.encode() + b"\n\n"
        chunk = _decode(text)
        if chunk.get("usage") is not None:
            self._usages.append(chunk["usage"])
            chunk["usage"] = None
        chunk["choices"][0]["index"] = sample_idx
        return _data(chunk)

    def finish(self) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        if self.is_stream:
            last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage(self._usages)}
            return (_data(last) if self._include_usage else b"") + b"data: [DONE]\n\n"
        answers = [_decode(each.to_json()) for each in self._wholes]
        for sample_idx, answer in enumerate(answers):
            answer["choices"][0]["index"] = sample_idx
            for call in answer["choices"][0]["message"].get("tool_calls") or ():
                call.pop("index", None)
        whole = answers[0]
        whole["choices"] = [answer["choices"][0] for answer in answers]
        whole["usage"] = self._usage([answer["usage"] for answer in answers])
        return _encode(whole)

    def _usage(self, usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The usage of all answers; the details count drafts too, which the vendor does not report."""
        total = _sum(usages)
        drafts = {"verified_draft_tokens": self._parsers.num_verified, "accepted_draft_tokens": self._parsers.num_accepted}
        total["completion_tokens_details"] = total.get("completion_tokens_details", {}) | drafts
        return total

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return b"data: " + error_body(error, "openai", request_id) + b"\n\n"

    def close(self) -> None:
        """Release the processors."""
        self._parsers.close()


def _data(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The usage of several answers to one prompt, whose tokens count once."""
    first, *others = usages
    total = dict(first)
    for other in others:
        total["completion_tokens"] += other["completion_tokens"]
        if "completion_tokens_details" in total:
            details = total["completion_tokens_details"]
            more = other["completion_tokens_details"]["reasoning_tokens"]
            total["completion_tokens_details"] = {**details, "reasoning_tokens": details["reasoning_tokens"] + more}
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


class MessagesWriter:
    """Messages."""

    def __init__(
        self,
        processors: Sequence[recipe.StreamProcessor],
        *,
        answer_id: str,
        model: str,
        n: int,
        is_stream: bool,
        has_stops: bool,
        eos_id: int,
        has_logprobs: bool,
    ) -> None:
        """Write the only answer."""
        assert n == 1, "the protocol has one answer"
        self.is_stream = is_stream
        self._parsers = _Parsers(processors, has_stops=has_stops, eos_id=eos_id, has_logprobs=has_logprobs)
        self._whole = recipe.MessagesResponse(answer_id, model, int(time.time()), 0, 0)

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended."""
        return self._parsers.is_complete

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        frames = []
        for _, event in self._parsers.push(records):
            if self.is_stream:
                frames.append(_named(recipe.MessagesResponse.sse_event_name(event), event.to_json()))
            else:
                self._whole.accumulate(event)
        return b"".join(frames)

    def finish(self) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return b"" if self.is_stream else self._whole.to_json().encode()

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return b"event: error\ndata: " + error_body(error, "anthropic", request_id) + b"\n\n"

    def close(self) -> None:
        """Release the processor."""
        self._parsers.close()


def _named(name: str | None, text: str) -> bytes:
    return f"event: {name}\ndata: {text}\n\n".encode()


class ResponsesWriter:
    """Responses.

    Attributes:
        echo: fields of the response that recipe does not know from the request.
    """

    def __init__(
        self,
        processors: Sequence[recipe.StreamProcessor],
        *,
        echo: dict[str, Any],
        answer_id: str,
        model: str,
        n: int,
        is_stream: bool,
        has_stops: bool,
        eos_id: int,
        has_logprobs: bool,
    ) -> None:
        """Write the only answer."""
        assert n == 1, "the protocol has one answer"
        self.is_stream = is_stream
        self.echo = echo
        self._parsers = _Parsers(processors, has_stops=has_stops, eos_id=eos_id, has_logprobs=has_logprobs)
        self._whole = recipe.ResponsesResponse(answer_id, model, int(time.time()), 0, 0)
        self._response: dict[str, Any] = {}
        self._num_events = 0

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended."""
        return self._parsers.is_complete

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        frames = []
        for _, event in self._parsers.push(records):
            if self.is_stream:
                self._num_events += 1
                frames.append(self._frame(recipe.ResponsesResponse.sse_event_name(event), event.to_json()))
            else:
                self._whole.accumulate(event)
        return b"".join(frames)

    def _frame(self, name: str | None, text: str) -> bytes:
        if '"response":{' not in text:
            return _named(name, text)
        event = _decode(text)
        self._response = event["response"] = event["response"] | self.echo
        return _named(name, _encode(event).decode())

    def finish(self) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return b"" if self.is_stream else _encode(_decode(self._whole.to_json()) | self.echo)

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        told = {"code": "server_error", "message": error_value(error, "openai", request_id)["error"]["message"]}
        response = {**self._response, "status": "failed", "error": told}
        event = {"type": "response.failed", "response": response, "sequence_number": self._num_events}
        return _named("response.failed", _encode(event).decode())

    def close(self) -> None:
        """Release the processor."""
        self._parsers.close()


RecipeWriter = ChatWriter | MessagesWriter | ResponsesWriter
