"""Completions: prompts as text or ids, without a chat template.  Evaluation tools measure log-probabilities here.

The text of an answer is that of :class:`deepinfer.tokenizer.TextStream`, so it equals ``LLM.generate``.  With ``echo`` and
``logprobs`` the engine also reports the log-probabilities of the prompt and the most likely tokens at each of its places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deepinfer.engine.ipc import Ready
from deepinfer.errors import ContextTooLong, RequestError, shown
from deepinfer.request import FinishReason, RequestOutput, as_whole, as_whole_numbers, is_list
from deepinfer.server.asked import DONE, Asked, data_frame
from deepinfer.server.chat import check_model, new_id, take_salt
from deepinfer.server.failures import HttpError, error_body
from deepinfer.server.protocol import (
    as_count,
    as_switch,
    check_fields,
    make_params,
    stop_strings,
    take_sampling,
    usage_options,
)
from deepinfer.tokenizer import TextStream, Tokenizer

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


class CompletionsReader:
    """Reads the bodies of Completions."""

    def __init__(self, tokenizer: Tokenizer, facts: Ready, model_names: Sequence[str]) -> None:
        """Read for an engine with these ``facts``."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._model_names = model_names

    def read(self, body: dict[str, Any]) -> Asked:
        """Convert a body into what the engine is asked for.

        Raises:
            RequestError: the request cannot be served.
            HttpError: the same, with another status or the field's name.
        """
        check_model(body, self._model_names)
        check_fields("completions", body)
        body = dict(body)
        salt = take_salt(body)
        is_stream = as_switch("stream", body.get("stream"), default=False)
        include_usage = usage_options(body, is_stream=is_stream)
        stops = stop_strings(body.get("stop"))
        n = as_count("n", body.get("n") or 1, 1, 128)
        echo = as_switch("echo", body.get("echo"), default=False)
        asked = body.get("max_tokens")
        max_tokens = _DEFAULT_MAX_TOKENS if asked is None else as_count("max_tokens", asked, 0, 2**31 - 1)
        if not max_tokens and not echo:
            raise HttpError(400, "max_tokens=0 needs echo=true; ask for at least one token", param="max_tokens")
        num_logprobs = _num_logprobs(body.get("logprobs"))
        prompts = self._prompts(body.get("prompt"))
        num_hidden = 1 if isinstance(_first(body["prompt"]), str) else 0
        for ids in prompts:
            if len(ids) + max(1, max_tokens) > self._facts.max_model_len:
                raise ContextTooLong(
                    f"prompt of {len(ids)} tokens plus max_tokens={max_tokens} exceeds the context limit of "
                    f"{self._facts.max_model_len}; shorten the prompt or lower max_tokens"
                )
        params = make_params(
            take_sampling(body, self._facts.sampling_defaults),
            n=n,
            max_tokens=max(1, max_tokens),
            top_logprobs=num_logprobs or 0,
            prompt_logprobs=echo and num_logprobs is not None,
        )
        writer = CompletionsWriter(
            self._tokenizer,
            model=str(body["model"]),
            prompts=prompts,
            n=n,
            is_stream=is_stream,
            include_usage=include_usage,
            echo_from=num_hidden if echo else None,
            only_prompt=not max_tokens,
            stops=stops,
            num_logprobs=num_logprobs,
        )
        return Asked(model=str(body["model"]), prompts=prompts, params=params, salt=salt, writer=writer)

    def _prompts(self, given: object) -> list[list[int]]:
        """One or several prompts, each as text or ids."""
        if isinstance(given, str):
            return [self.text_ids(given)]
        if not is_list(given):
            raise HttpError(400, f"prompt={shown(given)} is neither text nor ids; give one of them, or a list", param="prompt")
        several = list(given)
        if several and all(as_whole(each) is not None for each in several):
            return [self._ids(several)]
        if not 0 < len(several) <= _MAX_PROMPTS:
            raise HttpError(400, f"prompt has {len(several)} entries; give 1 to {_MAX_PROMPTS}", param="prompt")
        if len({isinstance(each, str) for each in several}) > 1:
            raise HttpError(400, "prompt mixes texts and ids; send them in two requests", param="prompt")
        return [self.text_ids(each) if isinstance(each, str) else self._ids(each) for each in several]

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text, begin token first."""
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text)]

    def _ids(self, given: object) -> list[int]:
        ids = as_whole_numbers("prompt", given, things="token ids")
        if not ids or max(ids) >= self._tokenizer.vocab_size:
            raise RequestError(f"prompt is no list of token ids below {self._tokenizer.vocab_size}; give at least one id")
        return ids


class StopFinder:
    """Finds stop strings in a text that comes in pieces.

    Invariant: text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of ``stops``."""
        self._stops = stops
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """The text that is certain now; after a stop string is found, nothing more comes."""
        text = self._held + piece
        places = [at for each in self._stops if (at := text.find(each)) >= 0]
        if places:
            self.is_found = True
            self._held = ""
            return text[: min(places)]
        keep = max((_overlap(text, each) for each in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are the beginning of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One answer that is being written.

    Attributes:
        stream, finder: make the text of the answer's own tokens.
        counted: decodes the tokens that have an entry of log-probabilities; ``num_chars`` is the length of its text.
    """

    stream: TextStream
    finder: StopFinder
    counted: TextStream
    num_chars: int = 0
    num_tokens: int = 0
    is_begun: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None


class CompletionsWriter:
    """Completions: the answers of all prompts, numbered prompt by prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        prompts: Sequence[Sequence[int]],
        n: int,
        is_stream: bool,
        include_usage: bool,
        echo_from: int | None,
        only_prompt: bool,
        stops: Sequence[str],
        num_logprobs: int | None,
    ) -> None:
        """Write the answers.

        Args:
            n: answers to each prompt.
            echo_from: each answer begins with the prompt from this token on; None for no echo.
            only_prompt: leave the generated token out.
            num_logprobs: most likely tokens to report for each token; None for no log-probabilities.
        """
        self.is_stream = is_stream
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._include_usage = include_usage
        self._echo_from = echo_from
        self._only_prompt = only_prompt
        self._num_logprobs = num_logprobs
        self._choices = [
            _Choice(stream=tokenizer.stream(), finder=StopFinder(stops), counted=tokenizer.stream())
            for _ in range(n * len(prompts))
        ]
        self._num_cached = 0
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model}

    def is_complete(self, prompt_idx: int) -> bool:
        """See :class:`deepinfer.server.asked.Writer`."""
        return all(each.reason is not None for each in self._choices[prompt_idx * self._n : (prompt_idx + 1) * self._n])

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        frames = []
        for index in dict.fromkeys(prompt_idx * self._n + record.sample_idx for record in records):
            choice = self._choices[index]
            if choice.reason is not None:
                continue
            text, logprobs = "", []
            for record in records:
                if prompt_idx * self._n + record.sample_idx == index and choice.reason is None:
                    piece, more = self._take(choice, prompt_idx, record)
                    text += piece
                    logprobs += more
            if self.is_stream:
                if text or logprobs or choice.reason is not None:
                    frames.append(self._frame([_value(index, text, self._logprobs(logprobs), choice.reason)]))
            else:
                choice.texts.append(text)
                choice.logprobs += logprobs
        return b"".join(frames)

    def _take(self, choice: _Choice, prompt_idx: int, record: RequestOutput) -> tuple[str, list[dict[str, Any]]]:
        """The text and the log-probabilities that a record adds."""
        text = ""
        logprobs: list[dict[str, Any]] = []
        if not choice.is_begun:
            choice.is_begun = True
            if not record.sample_idx:
                self._num_cached += record.num_cached_tokens
            if self._echo_from is not None:
                text, logprobs = self._prompt(choice, prompt_idx, record)
        is_end = record.finish_reason == FinishReason.STOP
        choice.num_tokens += record.token_id is not None and not self._only_prompt
        if record.token_id is not None and not self._only_prompt and self._num_logprobs is not None:
            top = zip(record.top_token_ids, record.top_logprobs, strict=True)
            logprobs.append(self._entry(choice, record.token_id, record.token_logprobs, dict(top)))
        if record.token_id is not None and not is_end and not self._only_prompt:
            text += choice.finder.push(choice.stream.push(record.token_id))
        if choice.finder.is_found:
            choice.reason = "stop"
        elif record.finished:
            text += choice.finder.push(choice.stream.finish())
            text += choice.finder.finish()
            choice.reason = "length" if record.finish_reason == FinishReason.LENGTH else "stop"
        return text, logprobs

    def _prompt(self, choice: _Choice, prompt_idx: int, record: RequestOutput) -> tuple[str, list[dict[str, Any]]]:
        assert self._echo_from is not None, "the caller checked it"
        ids = self._prompts[prompt_idx][self._echo_from :]
        logprobs: list[dict[str, Any]] = []
        if record.prompt_logprobs is not None:
            empty = ((),) * record.prompt_len
            top_ids, top_logprobs = record.prompt_top_token_ids or empty, record.prompt_top_logprobs or empty
            columns = zip(
                ids, *(each[self._echo_from :] for each in (record.prompt_logprobs, top_ids, top_logprobs)), strict=True
            )
            for token_id, logprob, *top in columns:
                logprobs.append(self._entry(choice, token_id, logprob, dict(zip(*top, strict=True))))
        return self._tokenizer.decode(ids), logprobs

    def _entry(self, choice: _Choice, token_id: int, logprob: float | None, top: Mapping[int, float]) -> dict[str, Any]:
        """What is told of one token.

        The token has one number in both places: evaluation tools compare them exactly, and a kernel may round them differently.
        """
        entry = {
            "token": self._spelling(token_id),
            "logprob": logprob,
            "top": {self._spelling(each): logprob if each == token_id else value for each, value in top.items()}
            if logprob is not None
            else None,
            "offset": choice.num_chars,
        }
        choice.num_chars += len(choice.counted.push(token_id))
        return entry

    def _spelling(self, token_id: int) -> str:
        """The text of a token.  A part of a character is spelled by its bytes, as OpenAI does it, so that parts differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _logprobs(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        return {
            "tokens": [each["token"] for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            "top_logprobs": [each["top"] for each in entries],
            "text_offset": [each["offset"] for each in entries],
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self._prompts))
        num_output = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _frame(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        return data_frame(msgspec.json.encode({**self._head, "choices": choices, "usage": usage}))

    def finish(self) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        if self.is_stream:
            return (self._frame([], self._usage()) if self._include_usage else b"") + DONE
        choices = [
            _value(index, "".join(choice.texts), self._logprobs(choice.logprobs), choice.reason)
            for index, choice in enumerate(self._choices)
        ]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage()})

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """See :class:`deepinfer.server.asked.Writer`."""
        return data_frame(error_body(error, "openai", request_id))

    def close(self) -> None:
        """Nothing is held."""


def _num_logprobs(given: object) -> int | None:
    """Most likely tokens to report for each token; 0 reports the chosen token only, null and false nothing."""
    if given is None or given is False:
        return None
    return as_count("logprobs", 1 if given is True else given, 0, 20)


def _first(prompt: object) -> object:
    return prompt[0] if isinstance(prompt, list) else prompt


def _value(index: int, text: str, logprobs: Mapping[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
