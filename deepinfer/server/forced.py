"""Which grammar an answer must follow: formats, required calls, strict tools, one call, and the end of reasoning.

Grammars come from the schemas as the client sent them.  While the model thinks, the text is free; the grammar begins after the
token that ends the reasoning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.grammar.tools import tool_call_grammar
from deepinfer.server.failures import HttpError

_ANYTHING = "(?s:.*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Format of an answer: a JSON schema, or a regex."""

    schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an answer must be like.

    Attributes:
        tools: functions that may be called, each with ``name`` and ``parameters``; none if calls are excluded.
        choice: ``auto``, ``required``, or the name of the function to call.
        is_parallel: whether several calls may come at once.
        strict: names of the functions whose schemas are enforced although no call is required.
        format: format of an answer without calls.
        thinking_budget: most tokens of reasoning.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    is_parallel: bool = True
    strict: Collection[str] = ()
    format: Format | None = None
    thinking_budget: int | None = None

    @property
    def is_forced(self) -> bool:
        """Whether a call must come."""
        return bool(self.tools) and self.choice != "auto"

    def so_args(self, *, in_reasoning: bool, is_opened: bool, dsml_id: int, think_end_id: int) -> dict[str, Any] | None:
        """The engine's structured output, or None if the answer is free.

        Args:
            in_reasoning: the prompt ends inside the reasoning.
            is_opened: the prompt ends inside an opened block of calls.
            dsml_id: id of the mark of calls.
            think_end_id: id of the token that ends the reasoning.

        Raises:
            RequestError: a schema cannot be enforced.
            HttpError: 400 for formats that do not go together.
        """
        budget = self.thinking_budget if in_reasoning else None
        grammar = self._grammar(dsml_id, is_opened=is_opened)
        if grammar is None:
            if budget is None:
                return None
            grammar = _free(dsml_id) if self.tools else {"schema_type": "regex", "schema": _ANYTHING}
        if in_reasoning:
            grammar |= {"trigger_token_ids": [think_end_id], "end_needs_trigger": True}
        if budget is not None:
            grammar["max_free_tokens"] = budget
        return grammar

    def _grammar(self, dsml_id: int, *, is_opened: bool) -> dict[str, Any] | None:
        answer = self.format
        if self.tools and (self.is_forced or self.strict or not self.is_parallel or answer is not None):
            if answer is not None and answer.regex is not None and not self.is_forced:
                raise HttpError(400, "a regex format cannot be combined with tools; use a JSON schema, or leave tools out")
            schema = answer.schema if answer is not None and not self.is_forced else None
            text = tool_call_grammar(
                self.tools,
                dsml_id=dsml_id,
                choice=self.choice,
                parallel=self.is_parallel,
                answer_schema=schema,
                is_opened=is_opened,
                loose=() if self.is_forced else [each["name"] for each in self.tools if each["name"] not in self.strict],
            )
            return {"schema_type": "lark", "schema": text}
        if answer is None:
            return None
        if answer.regex is not None:
            return {"schema_type": "regex", "schema": answer.regex}
        return {"schema_type": "json", "schema": answer.schema}


def _free(dsml_id: int) -> dict[str, Any]:
    """Any text, and the mark of calls anywhere."""
    return {"schema_type": "lark", "schema": f"start: TEXT? (<[{dsml_id}]> TEXT?)*\nTEXT: /(?s:.+)/\n"}


def closed(schema: object) -> Any:  # noqa: ANN401  (any JSON value)
    """A schema whose objects allow no other keys than their properties, as strict formats ask."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    names = ("properties", "$defs", "definitions")
    made = {
        key: {name: closed(each) for name, each in value.items()}
        if key in names and isinstance(value, Mapping)
        else value
        if key in ("enum", "const", "default", "examples")
        else closed(value)
        for key, value in schema.items()
    }
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return made
