"""Prompts and results as JSON lines: one object on each line, UTF-8, ended by line feeds.

Invariant: every reader of lines can read the results back, because characters that end a line for some readers are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.engine.files import read_file
from deepinfer.engine.prompt import PromptReader
from deepinfer.errors import RequestError, shown
from deepinfer.request import RequestOutput, SamplingParams
from deepinfer.tokenizer import Tokenizer

LINE_PARAMETERS = (
    "n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "stop_token_ids", "allowed_token_ids", "banned_token_ids", "golden_token_ids", "so_args", "seq_seed",
    "ignore_eos", "first_n_token_no_eos", "top_logprobs",
)  # fmt: skip
"""Sampling parameters that are allowed on a line."""

_MAX_DIGITS = 300
"""Most digits of a whole number: more than any parameter needs, fewer than Python's limits for text and floats."""
_ESCAPES = str.maketrans({code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line with a prompt.

    Attributes:
        number: line number, from 1.
        line_id: the given id, else the line number from 0.
        prompt: text, or None if ``token_ids`` is given.
        token_ids: the given ids, or None if ``prompt`` is given.
        params: sampling parameters.
    """

    number: int
    line_id: str | int | None
    prompt: str | None
    token_ids: list[int] | None
    params: SamplingParams


def read_prompts(path: Path, sampling: Mapping[str, Any]) -> list[PromptLine]:
    """Read and check every line that is not blank; checks that need a model come later.

    Args:
        path: the file.
        sampling: default parameters; a line's own parameters override them.

    Raises:
        RequestError: the file or a line is not usable; the message names the line.
    """
    lines = []
    for number, content in enumerate(read_file(path).split(b"\n"), start=1):
        try:
            text = content.decode("utf-8")
            line = _parsed(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise RequestError(f"{path}, line {number} is not UTF-8 text (byte {error.start}); convert it first") from error
        except RequestError as error:
            raise RequestError(f"{path}, line {number} {error}") from error
        if line is None:
            continue
        own = {key: value for key, value in line.items() if key not in ("prompt", "prompt_token_ids", "id")}
        try:
            params = SamplingParams(**{**sampling, **own})
        except RequestError as error:
            raise RequestError(f"{path}, line {number}: {error}") from error
        lines.append(
            PromptLine(
                number=number,
                line_id=line.get("id", number - 1),
                prompt=line.get("prompt"),
                token_ids=line.get("prompt_token_ids"),
                params=params,
            )
        )
    if not lines:
        raise RequestError(f"{path} holds no prompts; write one JSON object on each line")
    return lines


def _parsed(text: str) -> dict[str, Any]:
    """The object of a line; its keys and the types of its prompt and id are checked."""
    try:
        line = json.loads(text, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise RequestError(f"is not JSON ({error.msg} at column {error.colno}); write one object on each line") from error
    except RecursionError:
        raise RequestError(
            "is nested too deeply; write one object on each line, and nest only lists of token ids and a logit_bias"
        ) from None
    if not isinstance(line, dict) or ("prompt" in line) == ("prompt_token_ids" in line):
        raise RequestError("needs an object with either prompt or prompt_token_ids")
    unknown = sorted(set(line) - {"prompt", "prompt_token_ids", "id", *LINE_PARAMETERS})
    if unknown:
        raise RequestError(f"has the unknown key {shown(unknown[0])}; known are {', '.join(sorted(LINE_PARAMETERS))}")
    line_id, prompt, ids = line.get("id"), line.get("prompt"), line.get("prompt_token_ids")
    if isinstance(line_id, bool) or not isinstance(line_id, str | int | None):
        raise RequestError(f"has id={shown(line_id)}; give a string or a whole number, or leave it out")
    if "prompt" in line and not isinstance(prompt, str):
        raise RequestError(f"has prompt={shown(prompt)}; prompts are strings, ids go to prompt_token_ids")
    if "prompt_token_ids" in line and not (isinstance(ids, list) and ids):
        raise RequestError(f"has prompt_token_ids={shown(ids)}; give a list of at least one token id")
    for name, value in (("id", line_id), ("prompt", prompt)):
        _check_text(name, value)
    bias = line.get("logit_bias")
    if isinstance(bias, dict):  # keys in JSON are always strings
        line["logit_bias"] = {int(key) if key.isdecimal() and len(key) < _MAX_DIGITS else key: bias[key] for key in bias}
    return line


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise RequestError(f"has a whole number of {len(text)} digits, the limit is {_MAX_DIGITS} digits; write a smaller number")
    return int(text)


def _no_constant(name: str) -> object:
    raise RequestError(f"has {name}, which is not JSON; write a finite number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise RequestError(f"has the key {shown(key)} twice; give each key once")
        made[key] = value
    return made


def _check_text(name: str, text: object) -> None:
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"has a lone surrogate at character {error.start} of {name}; send valid Unicode") from error


def token_ids(path: Path, lines: Sequence[PromptLine], reader: PromptReader) -> list[list[int]]:
    """Token ids of every line, checked against the model and the settings of ``reader``.

    Args:
        path: the file, for messages.
        lines: result of :func:`read_prompts`.

    Raises:
        RequestError: a line cannot be served; the message names the line.
    """
    found = []
    for line in lines:
        try:
            prompt = reader.of_ids(line.token_ids) if line.token_ids is not None else reader.of_text(line.prompt)
            reader.check_params(line.params)
        except RequestError as error:
            raise type(error)(f"{path}, line {line.number}: {error}") from error
        found.append(list(prompt.token_ids))
    return found


def result_lines(
    line: PromptLine, answers: Sequence[Sequence[RequestOutput]], tokenizer: Tokenizer, texts: Sequence[str]
) -> bytes:
    """One line for each answer to ``line``, with ``texts`` as the answers' texts.

    A line has id, text, token_ids, finish_reason, prompt_tokens and output_tokens; sample if there is more than one answer;
    top_logprobs if the prompt's line asks for them.
    """
    return b"".join(
        _result_line(line, sample, records, tokenizer, text)
        for sample, (records, text) in enumerate(zip(answers, texts, strict=True))
    )


def _result_line(line: PromptLine, sample: int, records: Sequence[RequestOutput], tokenizer: Tokenizer, text: str) -> bytes:
    ids = [each.token_id for each in records]
    result: dict[str, Any] = {
        "id": line.line_id,
        "text": text,
        "token_ids": ids,
        "finish_reason": records[-1].finish_reason,
        "prompt_tokens": records[-1].prompt_len,
        "output_tokens": len(ids),
    }
    if line.params.n > 1:
        result["sample"] = sample
    if records[0].top_token_ids:
        result["top_logprobs"] = [
            [[tokenizer.decode([top_id]), value] for top_id, value in zip(each.top_token_ids, each.top_logprobs, strict=True)]
            for each in records
        ]
    return (json.dumps(result, ensure_ascii=False).translate(_ESCAPES) + "\n").encode()
