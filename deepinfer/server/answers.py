"""Answers of the three protocols of conversations: recipe's events, finished for the clients that read them.

Recipe makes the events.  This module numbers the choices of ``n`` answers, places the usage where each protocol wants it, and
ends broken streams.  All records of a step are one push.  With stop strings each token is one push, because recipe counts the
tokens of a push as a whole, so a push must not go beyond a stop string.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import deepseek_recipe as recipe
import msgspec

from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.asked import DONE, data_frame
from deepinfer.server.failures import HttpError, error_body, error_value
from deepinfer.tokenizer import Tokenizer

_LEAST_LOGPROB: Final = -9999.0
_Chunk: Final = recipe.InferenceChunk
_tokens: Final = recipe.InferenceChunk.tokens
_decode = msgspec.json.decode
_encode = msgspec.json.encode


class Shape(Protocol):
    """How one protocol writes what recipe's processors say."""

    @property
    def wholes(self) -> Sequence[Any]:
        """Recipe's whole answers, one for each answer; events are accumulated in them if the answer is not streamed."""

    @property
    def deltas(self) -> Sequence[str]:
        """What stands in an event before its text, if events with other texts differ in nothing else."""

    def frame(self, sample_idx: int, event: Any) -> bytes:  # noqa: ANN401  (recipe's classes have no common type)
        """One event of a stream."""

    def last_frames(self) -> bytes:
        """What ends a stream."""

    def whole(self) -> bytes:
        """The whole answer."""

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """The event that ends a stream with an error."""


class PlainTexts(dict[int, str]):
    """Token id -> its text as the inside of a JSON string, or "" if recipe may hold the text back.

    Recipe holds back newlines, and "<", which may begin a block of calls, and incomplete characters.  Special tokens change the
    stage.  Any other text leaves recipe at once and unchanged.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the texts of ``tokenizer`` on first use."""
        super().__init__()
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_ids)

    def __missing__(self, token_id: int) -> str:
        """Read one text."""
        found = ""
        if token_id not in self._special:
            with contextlib.suppress(UnicodeDecodeError):
                text = self._tokenizer.token_bytes(token_id).decode()
                found = _encode(text).decode()[1:-1] if "\n" not in text and "<" not in text else ""
        self[token_id] = found
        return found


class _Answer:
    """One answer: its stream processor, and where its events go.

    After a plain token, the event of the next plain token differs in its text only.  So the event is made from the one before it,
    and recipe gets the token later, together with others, which takes a tenth of the time.

    Invariant: with a ``_template``, recipe has given out all text of the tokens that it has got.
    """

    def __init__(
        self,
        sample_idx: int,
        processor: recipe.StreamProcessor,
        shape: Shape,
        plain: PlainTexts,
        *,
        is_stream: bool,
        has_stops: bool,
        eos_id: int,
        has_logprobs: bool,
    ) -> None:
        self.processor = processor
        self.is_open = True  # until the processor has finished or the last record has come
        self._sample_idx = sample_idx
        self._shape = shape
        self._plain = plain
        self._is_stream = is_stream
        self._has_stops = has_stops
        self._eos_id = eos_id
        self._has_logprobs = has_logprobs
        self._is_begun = False
        self._template: tuple[bytes, bytes] | None = None
        self._late_ids: list[int] = []

    def push(self, records: Sequence[RequestOutput]) -> bytes:
        """Take the next records; returns the events of a stream that they complete.

        Cost: 0.7 µs for a plain token after another one, 3 µs for other tokens.
        """
        if not self.is_open:
            return b""
        last = records[-1]
        if self._template is not None and not last.finished:
            ids = [each.token_id for each in records if each.token_id is not None]
            texts = [self._plain[each] for each in ids]
            if all(texts):
                self._late_ids += ids
                head, tail = self._template
                return head + "".join(texts).encode() + tail
        return self._push_all(records, last)

    def _push_all(self, records: Sequence[RequestOutput], last: RequestOutput) -> bytes:
        """Take records through recipe."""
        if self._late_ids:
            self.processor.push(_tokens(self._late_ids, None))  # the events were sent already
            self._late_ids = []
        events = self._parse(records, last)
        if not self._is_stream:
            for event in events:
                self._shape.wholes[self._sample_idx].accumulate(event)
            return b""
        made = b"".join([self._shape.frame(self._sample_idx, event) for event in events])
        self._template = self._find_template(made, records[0].token_id) if len(events) == len(records) == 1 else None
        return made

    def _find_template(self, made: bytes, token_id: int | None) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of the event of one plain token; None if the event is of another kind."""
        text = "" if token_id is None or self._has_stops or self._has_logprobs else self._plain[token_id]
        for delta in self._shape.deltas if text else ():
            head, found, tail = made.partition(f'{delta}{text}"'.encode())
            if found:
                return head + delta.encode(), b'"' + tail
        return None

    def _parse(self, records: Sequence[RequestOutput], last: RequestOutput) -> list[Any]:
        """Recipe's events of the records."""
        events: list[Any] = []
        if not self._is_begun:
            self._is_begun = True
            usage = recipe.PromptUsage(prompt_tokens=records[0].prompt_len, prompt_cache_hit_tokens=records[0].num_cached_tokens)
            events += self.processor.push(_Chunk.ready(prompt_usage=usage))
        if last.token_id is None or last.finish_reason == FinishReason.STOP:
            records = records[:-1]  # the last token is no text
        texts = [each for each in records if each.token_id != self._eos_id]
        for part in [[each] for each in texts] if self._has_stops else [texts] if texts else []:
            logprobs = [_logprob(each) for each in part] if self._has_logprobs else None
            events += self.processor.push(_tokens([each.token_id for each in part if each.token_id is not None], logprobs))
            if self.processor.finished:
                self.is_open = False
                return events
        if last.finished:
            self.is_open = False
            reasons = recipe.InferenceFinishReason
            is_cut = last.finish_reason == FinishReason.LENGTH
            events += self.processor.push(_Chunk.finish(reasons.Length if is_cut else reasons.Stop))
        return events


class ConversationWriter:
    """Writes the answers of one conversation: recipe parses the tokens, and a shape writes the events."""

    def __init__(
        self,
        shape: Shape,
        processors: Sequence[recipe.StreamProcessor],
        plain: PlainTexts,
        *,
        is_stream: bool,
        has_stops: bool,
        eos_id: int,
        has_logprobs: bool,
    ) -> None:
        """Write one answer for each processor."""
        self.is_stream = is_stream
        self._shape = shape
        self._answers = [
            _Answer(
                number,
                each,
                shape,
                plain,
                is_stream=is_stream,
                has_stops=has_stops,
                eos_id=eos_id,
                has_logprobs=has_logprobs,
            )
            for number, each in enumerate(processors)
        ]

    def is_complete(self, prompt_idx: int) -> bool:
        """See :class:`deepinfer.server.asked.Writer`."""
        return not any(each.is_open for each in self._answers)

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        if len(self._answers) == 1:
            return self._answers[0].push(records)
        by_sample: dict[int, list[RequestOutput]] = {}
        for each in records:
            by_sample.setdefault(each.sample_idx, []).append(each)
        return b"".join([self._answers[sample_idx].push(several) for sample_idx, several in by_sample.items()])

    def finish(self) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return self._shape.last_frames() if self.is_stream else self._shape.whole()

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return self._shape.failure(error, request_id)

    def close(self) -> None:
        """Release the processors."""
        for each in self._answers:
            each.processor.close()


def _logprob(record: RequestOutput) -> tuple[float, list[tuple[int, float]]]:
    assert record.token_logprobs is not None, "the engine reports it for every token"
    top = zip(record.top_token_ids, record.top_logprobs, strict=True)
    return max(record.token_logprobs, _LEAST_LOGPROB), [(token_id, max(each, _LEAST_LOGPROB)) for token_id, each in top]


class ChatShape:
    """Chat Completions."""

    deltas = ('"delta":{"content":"', '"delta":{"content":null,"reasoning_content":"')

    def __init__(self, *, answer_id: str, model: str, n: int, include_usage: bool) -> None:
        """Write ``n`` answers; ``include_usage`` adds a last chunk of usage to a stream."""
        created = int(time.time())
        self.wholes = [recipe.ChatCompletionResponse(answer_id, model, created, 0, 0) for _ in range(n)]
        self._include_usage = include_usage
        self._head = {"id": answer_id, "created": created, "model": model}
        self._usages: list[dict[str, Any]] = []

    def frame(self, sample_idx: int, event: Any) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        text = event.to_json()
        if not sample_idx and '"usage":{' not in text:  # quotes inside strings are escaped
            return data_frame(text.encode())
        chunk = _decode(text)
        if chunk.get("usage") is not None:
            self._usages.append(chunk["usage"])
            chunk["usage"] = None
        chunk["choices"][0]["index"] = sample_idx
        return data_frame(_encode(chunk))

    def last_frames(self) -> bytes:
        """See :class:`Shape`."""
        last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _sum(self._usages)}
        return (data_frame(_encode(last)) if self._include_usage else b"") + DONE

    def whole(self) -> bytes:
        """See :class:`Shape`."""
        answers = [_decode(each.to_json()) for each in self.wholes]
        for sample_idx, answer in enumerate(answers):
            answer["choices"][0]["index"] = sample_idx
            for call in answer["choices"][0]["message"].get("tool_calls") or ():
                call.pop("index", None)
        first = answers[0]
        first["choices"] = [answer["choices"][0] for answer in answers]
        first["usage"] = _sum([answer["usage"] for answer in answers])
        return _encode(first)

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`Shape`."""
        return data_frame(error_body(error, "openai", request_id))


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


class MessagesShape:
    """Messages; the protocol has one answer."""

    deltas = ('"delta":{"type":"text_delta","text":"', '"delta":{"type":"thinking_delta","thinking":"')

    def __init__(self, *, answer_id: str, model: str) -> None:
        """Write the only answer."""
        self.wholes = [recipe.MessagesResponse(answer_id, model, int(time.time()), 0, 0)]

    def frame(self, sample_idx: int, event: Any) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        return _named(recipe.MessagesResponse.sse_event_name(event), event.to_json())

    def last_frames(self) -> bytes:
        """See :class:`Shape`."""
        return b""

    def whole(self) -> bytes:
        """See :class:`Shape`."""
        return self.wholes[0].to_json().encode()

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`Shape`."""
        return b"event: error\n" + data_frame(error_body(error, "anthropic", request_id))


def _named(name: str | None, text: str) -> bytes:
    return f"event: {name}\ndata: {text}\n\n".encode()


class ResponsesShape:
    """Responses; the protocol has one answer."""

    deltas = ()  # each event has another number

    def __init__(self, *, answer_id: str, model: str, echo: dict[str, Any]) -> None:
        """Write the only answer; ``echo`` has fields of the response that recipe does not know from the request."""
        self.wholes = [recipe.ResponsesResponse(answer_id, model, int(time.time()), 0, 0)]
        self._echo = echo
        self._response: dict[str, Any] = {}
        self._num_events = 0

    def frame(self, sample_idx: int, event: Any) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        self._num_events += 1
        name, text = recipe.ResponsesResponse.sse_event_name(event), event.to_json()
        if '"response":{' not in text:
            return _named(name, text)
        changed = _decode(text)
        self._response = changed["response"] = changed["response"] | self._echo
        return _named(name, _encode(changed).decode())

    def last_frames(self) -> bytes:
        """See :class:`Shape`."""
        return b""

    def whole(self) -> bytes:
        """See :class:`Shape`."""
        return _encode(_decode(self.wholes[0].to_json()) | self._echo)

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`Shape`."""
        told = {"code": "server_error", "message": error_value(error, "openai", request_id)["error"]["message"]}
        response = {**self._response, "status": "failed", "error": told}
        event = {"type": "response.failed", "response": response, "sequence_number": self._num_events}
        return _named("response.failed", _encode(event).decode())
