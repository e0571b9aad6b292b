"""What a task is, and the judges of answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.bench.tasks.words import SYSTEMS
from deepinfer.engine.chat import EFFORTS, Call, Message, Reply, parse, render, reply_text

Check = Callable[[Reply], dict[str, bool]]
"""Judges a reply: name of a measure -> whether the reply meets it.  Every task has the measure "right"."""

SYSTEM_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A conversation whose last answer is known.

    Attributes:
        kind: name of the generator.
        messages: up to the last message before the answer.
        answer: what a perfect model says.
        check: judges what a model says.
        key: what is asked, whatever the words.  Tasks of one key are all held out, or none is.
        parts: keys of other tasks whose answers this conversation tells.
        tools: name, description and parameters of the tools that the model may call.
        effort: of thinking; None is no thinking.
        schema: JSON schema that the prompt's response format names.
    """

    kind: str
    messages: tuple[Message, ...]
    answer: Message
    check: Check
    key: str
    parts: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    effort: int | None = None
    schema: dict[str, Any] | None = None

    def prompt(self) -> list[str]:
        """The segments that a model gets."""
        return render(self.messages, tools=self.tools, effort=self.effort, schema=self.schema)

    def segments(self) -> list[str]:
        """The segments of the whole conversation, which a model learns."""
        messages = [*self.messages, self.answer]
        return render(messages, tools=self.tools, effort=self.effort, schema=self.schema)

    def judge(self, generated: str) -> dict[str, bool]:
        """Judge what a model generated after the prompt, special tokens spelled out."""
        return self.check(parse(generated, effort=self.effort))

    def is_consistent(self) -> bool:
        """Whether the known answer passes the check."""
        return all(self.judge(reply_text(self.answer, effort=self.effort)).values())


def simple(
    rng: random.Random,
    kind: str,
    question: str,
    answer: str,
    *,
    key: str,
    parts: tuple[str, ...] = (),
    check: Check | None = None,
    reasoning: Callable[[int], str] | None = None,
    thinking_share: float = 0.3,
) -> Task:
    """A task of one question, sometimes with a system message, sometimes with thinking.

    Args:
        check: of the answer; by default it must be the same text.
        reasoning: effort -> what is thought; without it the task is never one of thinking.
    """
    messages: tuple[Message, ...] = (Message("user", question),)
    if rng.random() < SYSTEM_SHARE:
        messages = (Message("system", rng.choice(SYSTEMS)), *messages)
    effort = rng.choice(EFFORTS) if reasoning and rng.random() < thinking_share else None
    thought = reasoning(effort) if reasoning and effort else ""
    return Task(
        kind=kind,
        messages=messages,
        answer=Message("assistant", answer, reasoning=thought),
        check=check or same_text(answer),
        key=f"{kind} {key}",
        parts=parts,
        effort=effort,
    )


def same_text(expected: str) -> Check:
    """The answer is this text, white space at the ends aside."""

    def check(reply: Reply) -> dict[str, bool]:
        return {"right": reply.content.strip() == expected.strip()}

    return check


def last_number(expected: int) -> Check:
    """The last number of the answer is this one."""

    def check(reply: Reply) -> dict[str, bool]:
        found = re.findall(r"-?\d+", reply.content)
        return {"right": bool(found) and int(found[-1]) == expected}

    return check


def contains(expected: str) -> Check:
    """The answer has this text in it, whatever the case."""

    def check(reply: Reply) -> dict[str, bool]:
        return {"right": expected.lower() in reply.content.lower()}

    return check


def is_reply() -> Check:
    """The answer is some text; there is no single right one."""

    def check(reply: Reply) -> dict[str, bool]:
        return {"right": bool(reply.content.strip()) and not reply.calls}

    return check


def filled(schema: dict[str, Any], expected: dict[str, Any]) -> Check:
    """The answer is JSON that follows the schema ("valid") and has the expected values ("right")."""

    def check(reply: Reply) -> dict[str, bool]:
        try:
            value = json.loads(reply.content)
        except ValueError:
            return {"valid": False, "right": False}
        return {"valid": follows(value, schema), "right": value == expected}

    return check


def calls(expected: Sequence[Call]) -> Check:
    """The reply calls the expected tools: block well-formed ("form"), names ("tool"), names and arguments ("right")."""

    def check(reply: Reply) -> dict[str, bool]:
        has_form = reply.is_whole and bool(reply.calls)
        names = [call.name for call in reply.calls] == [call.name for call in expected]
        return {"form": has_form, "tool": has_form and names, "right": has_form and list(reply.calls) == list(expected)}

    return check


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def follows(value: object, schema: dict[str, Any]) -> bool:
    """Whether a JSON value follows a schema of the keywords type, enum, properties, required and items; objects are closed."""
    named = schema.get("type", [])
    allowed = [named] if isinstance(named, str) else named
    if "enum" in schema and value not in schema["enum"]:
        return False
    if allowed and not any(_is_of_type(value, each) for each in allowed):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= set(value) <= set(properties):
            return False
        return all(follows(each, properties[name]) for name, each in value.items())
    if isinstance(value, list):
        return all(follows(each, schema.get("items", {})) for each in value)
    return True


def _is_of_type(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
