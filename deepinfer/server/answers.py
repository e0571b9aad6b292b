"""Answers of the three protocols of conversations: recipe's events, finished for the clients that read them.

Recipe makes the events.  This module numbers the choices of ``n`` answers, places the usage where each protocol wants it, and
ends broken streams.  All records of a step are one push.  With stop strings each token is one push, because recipe counts the
tokens of a push as a whole, so a push must not go beyond a stop string.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import deepseek_recipe as recipe
import msgspec

from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.asked import DONE, data_frame
from deepinfer.server.failures import HttpError, error_body, error_value
from deepinfer.tokenizer import Tokenizer

_LEAST_LOGPROB: Final = -9999.0
_INPUTS: Final = {"completion": "prompt_tokens", "output": "input_tokens"}
_Chunk: Final = recipe.InferenceChunk
_Reason: Final = recipe.InferenceFinishReason
_tokens: Final = recipe.InferenceChunk.tokens
_decode = msgspec.json.decode
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of an answer.

    Attributes:
        num_tokens: all but the end.
        num_reasoning: those before the end of reasoning.
        num_verified, num_accepted: drafts.
    """

    num_tokens: int
    num_reasoning: int
    num_verified: int
    num_accepted: int


class Shape(Protocol):
    """How one protocol writes what recipe's processors say."""

    @property
    def wholes(self) -> Sequence[Any]:
        """Recipe's whole answers, one for each answer; events are accumulated in them if the answer is not streamed."""

    @property
    def deltas(self) -> Sequence[str]:
        """What stands in an event before its text, if events with other texts differ in nothing else."""

    def frame(self, sample_idx: int, event: Any, counts: Counts) -> bytes:  # noqa: ANN401  (recipe's classes have no common type)
        """One event of a stream; ``counts`` are those of its answer."""

    def last_frames(self, counts: Sequence[Counts]) -> bytes:
        """What ends a stream; ``counts`` has one entry for each answer."""

    def whole(self, counts: Sequence[Counts]) -> bytes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the tokens of a request are read.

    Attributes:
        plain: texts of the tokens that need no stream processor.
        eos_id, think_end_id, dsml_id: ids of the end, of the end of reasoning, and of the mark of calls.
        in_reasoning: whether the answer begins with reasoning.
        is_stream: whether the answer is streamed.
        has_stops: whether there are stop strings.
        has_logprobs: whether log-probabilities are reported.
    """

    plain: PlainTexts
    eos_id: int
    think_end_id: int
    dsml_id: int
    in_reasoning: bool
    is_stream: bool
    has_stops: bool
    has_logprobs: bool


class _Answer:
    """One answer: its stream processor, and where its events go.

    After a plain token, the event of the next plain token differs in its text only.  So the event is made from the one before it,
    and recipe gets the token later, together with others, which takes a tenth of the time.

    Tokens are counted here.  Recipe counts a token when its text goes out, and counts wrongly if characters are incomplete.

    Invariant: with a ``_template``, recipe has given out all text of the tokens that it has got.
    """

    def __init__(self, sample_idx: int, processor: recipe.StreamProcessor, shape: Shape, reading: Reading) -> None:
        self.processor = processor
        self.is_open = True  # until the processor has finished or the last record has come
        self._sample_idx = sample_idx
        self._shape = shape
        self._reading = reading
        self._plain = reading.plain
        self._is_begun = False
        self._template: tuple[bytes, bytes] | None = None
        self._late_ids: list[int] = []
        self._num_tokens = self._num_verified = self._num_accepted = 0
        self._num_reasoning = 0 if not reading.in_reasoning else None

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        reasoning = self._num_tokens if self._num_reasoning is None else self._num_reasoning
        return Counts(
            num_tokens=self._num_tokens,
            num_reasoning=reasoning,
            num_verified=self._num_verified,
            num_accepted=self._num_accepted,
        )

    def push(self, records: Sequence[RequestOutput]) -> bytes:
        """Take the next records; returns the events of a stream that they complete.

        Cost: 0.7 µs for a plain token after another one, 3 µs for other tokens.
        """
        if not self.is_open:
            return b""
        for record in records:
            self._num_verified += record.draft_tok
            self._num_accepted += record.accept_tok
        last = records[-1]
        if self._template is not None and not last.finished:
            ids = [each.token_id for each in records if each.token_id is not None]
            texts = [self._plain[each] for each in ids]
            if all(texts):
                self._late_ids += ids
                self._num_tokens += len(ids)
                head, tail = self._template
                return head + "".join(texts).encode() + tail
        return self._push_all(records, last)

    def _push_all(self, records: Sequence[RequestOutput], last: RequestOutput) -> bytes:
        """Take records through recipe."""
        if self._late_ids:
            self.processor.push(_tokens(self._late_ids, None))  # the events were sent already
            self._late_ids = []
        events = self._parse(records, last)
        if not self._reading.is_stream:
            for event in events:
                self._shape.wholes[self._sample_idx].accumulate(event)
            return b""
        made = b"".join([self._shape.frame(self._sample_idx, event, self.counts) for event in events])
        self._template = self._find_template(made, records[0].token_id) if len(events) == len(records) == 1 else None
        return made

    def _find_template(self, made: bytes, token_id: int | None) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of the event of one plain token; None if the event is of another kind."""
        reading = self._reading
        text = "" if token_id is None or reading.has_stops or reading.has_logprobs else self._plain[token_id]
        for delta in self._shape.deltas if text else ():
            head, found, tail = made.partition(f'{delta}{text}"'.encode())
            if found:
                return head + delta.encode(), b'"' + tail
        return None

    def _parse(self, records: Sequence[RequestOutput], last: RequestOutput) -> list[Any]:
        """Recipe's events of the records."""
        events: list[Any] = []
        push, reading = self.processor.push, self._reading
        if not self._is_begun:
            self._is_begun = True
            usage = recipe.PromptUsage(prompt_tokens=records[0].prompt_len, prompt_cache_hit_tokens=records[0].num_cached_tokens)
            events += push(_Chunk.ready(prompt_usage=usage))
        if last.token_id is None or last.finish_reason == FinishReason.STOP:
            records = records[:-1]  # the last token is no text
        texts = [each for each in records if each.token_id != reading.eos_id]
        for part in [[each] for each in texts] if reading.has_stops else [texts] if texts else []:
            logprobs = [_logprob(each) for each in part] if reading.has_logprobs else None
            ids = [each.token_id for each in part if each.token_id is not None]
            self._count(ids)
            events += push(_tokens(ids, logprobs))
            if self.processor.finished:
                self.is_open = False
                return events
        if last.finished:
            self.is_open = False
            is_cut = last.finish_reason == FinishReason.LENGTH
            events += push(_Chunk.finish(_Reason.Length if is_cut else _Reason.Stop))
        return events

    def _count(self, ids: Sequence[int]) -> None:
        if self._num_reasoning is None:
            ends = [at for at, each in enumerate(ids) if each in (self._reading.think_end_id, self._reading.dsml_id)]
            self._num_reasoning = self._num_tokens + ends[0] if ends else None
        self._num_tokens += len(ids)


class ConversationWriter:
    """Writes the answers of one conversation: recipe parses the tokens, and a shape writes the events."""

    def __init__(self, shape: Shape, processors: Sequence[recipe.StreamProcessor], reading: Reading) -> None:
        """Write one answer for each processor."""
        self.is_stream = reading.is_stream
        self._shape = shape
        self._answers = [_Answer(number, each, shape, reading) for number, each in enumerate(processors)]

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
        counts = [each.counts for each in self._answers]
        return self._shape.last_frames(counts) if self.is_stream else self._shape.whole(counts)

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
        self._usage: dict[str, Any] = {}

    def frame(self, sample_idx: int, event: Any, counts: Counts) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        text = event.to_json()
        if not sample_idx and '"usage":{' not in text:  # quotes inside strings are escaped
            return data_frame(text.encode())
        chunk = _decode(text)
        if chunk.get("usage") is not None:
            self._usage, chunk["usage"] = chunk["usage"], None
        chunk["choices"][0]["index"] = sample_idx
        return data_frame(_encode(chunk))

    def last_frames(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        if not self._include_usage:
            return DONE
        usage = _counted(self._usage, "completion", counts)
        last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        return data_frame(_encode(last)) + DONE

    def whole(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        answers = [_decode(each.to_json()) for each in self.wholes]
        for sample_idx, answer in enumerate(answers):
            answer["choices"][0]["index"] = sample_idx
            for call in answer["choices"][0]["message"].get("tool_calls") or ():
                call.pop("index", None)
        first = answers[0]
        first["choices"] = [answer["choices"][0] for answer in answers]
        first["usage"] = _counted(first["usage"], "completion", counts)
        return _encode(first)

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`Shape`."""
        return data_frame(error_body(error, "openai", request_id))


def _counted(usage: dict[str, Any], name: str, counts: Sequence[Counts]) -> dict[str, Any]:
    """A usage of OpenAI's for several answers to one prompt, whose tokens count once; fields of output begin with ``name``.

    The vendor does not report drafts.
    """
    num_output = sum(each.num_tokens for each in counts)
    details = {
        **(usage.get(f"{name}_tokens_details") or {}),
        "reasoning_tokens": sum(each.num_reasoning for each in counts),
        "verified_draft_tokens": sum(each.num_verified for each in counts),
        "accepted_draft_tokens": sum(each.num_accepted for each in counts),
    }
    total = usage[_INPUTS[name]] + num_output
    return {**usage, f"{name}_tokens": num_output, "total_tokens": total, f"{name}_tokens_details": details}


class MessagesShape:
    """Messages; the protocol has one answer."""

    deltas = ('"delta":{"type":"text_delta","text":"', '"delta":{"type":"thinking_delta","thinking":"')

    def __init__(self, *, answer_id: str, model: str) -> None:
        """Write the only answer."""
        self.wholes = [recipe.MessagesResponse(answer_id, model, int(time.time()), 0, 0)]

    def frame(self, sample_idx: int, event: Any, counts: Counts) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        name, text = recipe.MessagesResponse.sse_event_name(event), event.to_json()
        if name != "message_delta":
            return _named(name, text)
        changed = _decode(text)
        changed["usage"]["output_tokens"] = counts.num_tokens
        return _named(name, _encode(changed).decode())

    def last_frames(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        return b""

    def whole(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        message = _decode(self.wholes[0].to_json())
        message["usage"]["output_tokens"] = counts[0].num_tokens
        return _encode(message)

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

    def frame(self, sample_idx: int, event: Any, counts: Counts) -> bytes:  # noqa: ANN401
        """See :class:`Shape`."""
        self._num_events += 1
        name, text = recipe.ResponsesResponse.sse_event_name(event), event.to_json()
        if '"response":{' not in text:
            return _named(name, text)
        changed = _decode(text)
        self._response = changed["response"] = self._echoed(changed["response"], [counts])
        return _named(name, _encode(changed).decode())

    def last_frames(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        return b""

    def whole(self, counts: Sequence[Counts]) -> bytes:
        """See :class:`Shape`."""
        return _encode(self._echoed(_decode(self.wholes[0].to_json()), counts))

    def _echoed(self, response: dict[str, Any], counts: Sequence[Counts]) -> dict[str, Any]:
        if response.get("usage") is not None:
            response["usage"] = _counted(response["usage"], "output", counts)
        return response | self._echo

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`Shape`."""
        told = {"code": "server_error", "message": error_value(error, "openai", request_id)["error"]["message"]}
        response = {**self._response, "status": "failed", "error": told}
        event = {"type": "response.failed", "response": response, "sequence_number": self._num_events}
        return _named("response.failed", _encode(event).decode())
