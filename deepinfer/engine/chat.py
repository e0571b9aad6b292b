"""Conversations -> the model's prompt format, and generated text -> reasoning, answer and tool calls.

Text and special tokens stay apart: :func:`render` returns segments, and a segment that is the spelling of a special token is
that token only if it is a :class:`Mark`.  A user's text therefore never becomes a special token.

Source: the prompts that the vendor's encoder makes for V4.1; ``tests/training`` compares the two where that package is
installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.tokenizer import BOS, EOS, Tokenizer


class Mark(str):
    """The spelling of a special token that stands for the token."""

    __slots__ = ()


_BEGIN, _END = Mark(BOS), Mark(EOS)
_SYSTEM, _USER, _ASSISTANT = Mark("<｜System｜>"), Mark("<｜User｜>"), Mark("<｜Assistant｜>")
_THINK, _END_THINK = Mark("<think>"), Mark("</think>")
_DSML = Mark("｜DSML｜")

EFFORTS = (50, 75, 100)
"""The numbers that the efforts low, high and max become; None is no thinking."""

_TOOLS_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜ calls>" \
block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE \
any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_FORMAT_HEAD = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system" (first only), "user", "assistant" or "tool".
        reasoning: of an assistant: what stands before the answer, in thinking mode.
        calls: of an assistant: the tools it calls.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model generated after a prompt.  ``is_whole`` is False if the calls block cannot be parsed."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = field(default=())
    is_whole: bool = True


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] = (),
    effort: int | None = None,
    schema: dict[str, Any] | None = None,
) -> list[str]:
    """The segments of a conversation; where the last message is not an assistant's, the prompt for its answer.

    Args:
        messages: in order; tool results follow the calls in the order of the calls.
        tools: name, description and parameters of each.
        effort: a number of :data:`EFFORTS`, or None for no thinking.
        schema: the JSON schema that the answer must follow.
    """
    parts: list[str] = [_BEGIN]
    turns = list(messages)
    system = turns.pop(0).content if turns and turns[0].role == "system" else ""
    if system or tools or effort or schema is not None:
        parts.append(_SYSTEM)
        if effort:
            parts.append(f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n")
        parts.append(system)
        if tools:
            listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools)
            parts += ["\n\n", *_marked(_TOOLS_HEAD), listed, _TOOLS_TAIL]
        if schema is not None:
            parts += [_FORMAT_HEAD, json.dumps(schema, ensure_ascii=False)]
    last_user = max((at for at, each in enumerate(turns) if each.role == "user"), default=-1)
    before = ""
    for at, turn in enumerate(turns):
        if turn.role == "assistant":
            parts.append(_ASSISTANT)
            parts += [_THINK, turn.reasoning, _END_THINK] if effort and (tools or at > last_user) else [_END_THINK]
            parts += [turn.content, *_calls(turn.calls), _END]
        else:
            parts.append("\n\n" if before in ("user", "tool") else _USER)
            parts.append(turn.content if turn.role == "user" else f"<tool_result>{turn.content}</tool_result>")
        before = turn.role
    if before != "assistant":
        parts += [_ASSISTANT, _THINK if effort else _END_THINK]
    return _joined(parts)


def encode(tokenizer: Tokenizer, segments: Iterable[str]) -> list[int]:
    """The token ids of :func:`render`'s segments."""
    ids: list[int] = []
    for segment in segments:
        ids += [tokenizer.special(segment)] if isinstance(segment, Mark) else tokenizer.encode(segment)
    return ids


def reply_text(message: Message, *, effort: int | None) -> str:
    """What a model generates to say ``message``, special tokens spelled out, after a prompt with this effort."""
    head = f"{message.reasoning}{_END_THINK}" if effort else ""
    return "".join([head, message.content, *_calls(message.calls), _END])


def parse(text: str, *, effort: int | None) -> Reply:
    """Take generated text apart.

    Args:
        text: what follows the prompt, special tokens spelled out, with or without the end token.
        effort: the prompt's.
    """
    text = text.partition(BOS)[0].partition(EOS)[0]
    reasoning, ended, answer = text.partition(_END_THINK) if effort else ("", _END_THINK, text)
    if not ended:
        return Reply(reasoning=reasoning, is_whole=False)
    content, has_calls, block = answer.partition(f"<{_DSML} calls>\n")
    if not has_calls:
        return Reply(reasoning=reasoning.strip("\n"), content=content.strip("\n"))
    calls, is_whole = _parsed_calls(block)
    return Reply(reasoning=reasoning.strip("\n"), content=content.strip("\n"), calls=calls, is_whole=is_whole)


_INVOKE = re.compile(rf'<{_DSML} invoke name="([^"]+)">\n(.*?)\n</{_DSML} invoke>\n', re.DOTALL)
_PARAMETER = re.compile(rf'<{_DSML} parameter name="([^"]+)" string="(true|false)">(.*?)</{_DSML} parameter>\n', re.DOTALL)


def _parsed_calls(block: str) -> tuple[tuple[Call, ...], bool]:
    """The calls of a block, and whether nothing else is in it."""
    body, ended, after = block.partition(f"</{_DSML} calls>")
    calls: list[Call] = []
    is_whole = bool(ended) and not after.strip() and not _INVOKE.sub("", body)
    for name, inner in _INVOKE.findall(body):
        arguments: dict[str, Any] = {}
        is_whole = is_whole and not _PARAMETER.sub("", f"{inner}\n").strip()
        for key, is_string, value in _PARAMETER.findall(f"{inner}\n"):
            try:
                arguments[key] = value if is_string == "true" else json.loads(value)
            except ValueError:
                is_whole = False
        calls.append(Call(name, arguments))
    return tuple(calls), is_whole and bool(calls)


def _calls(calls: Iterable[Call]) -> list[str]:
    """The segments of a calls block; none without calls."""
    parts: list[str] = []
    for call in calls:
        parts += ["<", _DSML, f' invoke name="{call.name}">\n']
        for number, (name, value) in enumerate(call.arguments.items()):
            is_string = isinstance(value, str)
            shown = value if is_string else json.dumps(value, ensure_ascii=False)
            parts += ["\n" if number else "", "<", _DSML, f' parameter name="{name}" string="{str(is_string).lower()}">{shown}</']
            parts += [_DSML, " parameter>"]
        parts += ["\n</", _DSML, " invoke>\n"]
    return ["\n\n<", _DSML, " calls>\n", *parts, "</", _DSML, " calls>"] if parts else []


def _marked(template: str) -> list[str]:
    """The segments of a template whose special tokens are meant."""
    pattern = "|".join(map(re.escape, (_DSML, _THINK, _END_THINK)))
    return [Mark(each) if re.fullmatch(pattern, each) else each for each in re.split(f"({pattern})", template)]


def _joined(parts: Iterable[str]) -> list[str]:
    """The same segments with neighbouring texts in one."""
    joined: list[str] = []
    for part in parts:
        if isinstance(part, Mark) or not joined or isinstance(joined[-1], Mark):
            if part:
                joined.append(part)
        else:
            joined[-1] += part
    return joined
