"""Conversations become prompts, and tokens become messages, by the vendor's package ``deepseek-recipe``.

The package parses Chat Completions, Responses and Messages, renders the prompt, and parses reasoning and calls out of the model's
tokens.  This module changes bodies before it, so that nothing gets lost that the package does not know, and takes schemas and
sampling parameters from the body as sent.  All methods of :class:`ChatReader` are pure and run in threads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
import secrets
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import deepseek_recipe as recipe
import msgspec
from PIL import Image

from deepinfer.config import ModelConfig
from deepinfer.engine.ipc import Ready
from deepinfer.errors import CONVERSION_ERRORS, ConfigError, RequestError, reason, shown
from deepinfer.grammar.tools import DSML
from deepinfer.images import FORMATS, plan_image
from deepinfer.server.answers import ChatShape, ConversationWriter, MessagesShape, PlainTexts, Reading, ResponsesShape, Shape
from deepinfer.server.asked import Asked
from deepinfer.server.failures import HttpError
from deepinfer.server.forced import Format, Rules, closed
from deepinfer.server.protocol import (
    as_count,
    as_switch,
    check_fields,
    make_params,
    stop_strings,
    take_sampling,
    usage_options,
)
from deepinfer.tokenizer import IMAGE, Tokenizer

ChatApi = Literal["chat", "responses", "messages"]
THINK_END: Final = "</think>"
_REQUESTS: Final[Mapping[ChatApi, Any]] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
_PREFIXES: Final[Mapping[ChatApi, str]] = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}
_LIMIT_FIELDS: Final[Mapping[ChatApi, str]] = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
_BILLING: Final = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of Claude Code's system prompt that changes with every request, so no prefix would be found in the cache."""
_EFFORT: Final = "Reasoning Effort: 75 "
_JSON_OBJECT: Final = Format(schema={"type": "object"})
_MAX_TOOLS, _MAX_MESSAGES, _MAX_IMAGES = 512, 100_000, 600
_MAX_TOOLS_BYTES: Final = 1 << 20

Fetch = Callable[[str], bytes]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(16)


class Encoder:
    """Prompts of one tokenizer, rendered and encoded by recipe.

    Attributes:
        tokenizer: recipe's tokenizer, which stream processors decode with.
        plain: texts of the tokens that need no stream processor.
        dsml_id, think_end_id, image_id: ids of the special tokens that the server must know.
    """

    def __init__(self, tokenizer: Tokenizer, model_names: Sequence[str]) -> None:
        """Prepare a tokenizer.

        Raises:
            ConfigError: the tokenizer lacks a special token of prompts.
        """
        self.dsml_id, self.think_end_id, self.image_id = map(tokenizer.special, (DSML, THINK_END, IMAGE))
        self._tokenizer = tokenizer
        self.plain = PlainTexts(tokenizer)
        special = recipe.SpecialTokens(image=IMAGE)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer.source)
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(self.tokenizer)
        self.options = (
            recipe.ConversionOptions()
            .with_special_tokens(special)
            .with_messages_web_search(recipe.WebSearchBehavior.Drop)
            .with_model_versions_by_name(dict.fromkeys(model_names, recipe.ModelVersion.DeepseekV41Flash))
        )
        self._check()

    def encode(self, conversation: recipe.Conversation, effort: int | None) -> list[int]:
        """Ids of a prompt; ``effort`` replaces the number in the line of the effort."""
        if effort is None:
            return self._encoding.encode(conversation)
        rendered = self._encoding.render_conversation(conversation)
        ids, at = [], 0
        for start, end in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
            text = rendered.prompt[at:start]
            if text.startswith(_EFFORT):
                text, effort = text.replace(_EFFORT, f"Reasoning Effort: {effort} ", 1), None
            ids += self._tokenizer.encode(text)
            if start < end:
                ids.append(self._tokenizer.special(rendered.prompt[start:end]))
            at = end
        return ids

    def images(self, conversation: recipe.Conversation) -> list[recipe.ImageSource]:
        """The images of a conversation, in the order of their placeholders."""
        return self._encoding.render_conversation(conversation).image_sources

    def _check(self) -> None:
        """Encode a conversation that uses every special token of prompts."""
        image = recipe.BytesImageSource(b"")
        conversation = recipe.Conversation(
            [
                recipe.SystemMessage("a"),
                recipe.UserMessage(f"b{IMAGE}", [image], image_token=IMAGE),
                recipe.LatestReminderMessage("c"),
                recipe.AssistantMessage("d", "e", [recipe.ToolCall("1", "f", "{}")]),
                recipe.ToolMessage("g", "1"),
            ],
            tools=[recipe.ToolDefinition("f")],
        )
        try:
            ids = self._encoding.encode(conversation)
        except RuntimeError as error:
            raise ConfigError(
                f"the tokenizer cannot encode conversations ({reason(error)}); use the checkpoint's tokenizer.json"
            ) from error
        if ids.count(self.image_id) != 1:
            raise ConfigError(f"the tokenizer does not encode {IMAGE!r} as one token; use the checkpoint's tokenizer.json")


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """What the body asks for beyond what recipe reads."""

    sampling: dict[str, Any]
    is_stream: bool
    include_usage: bool = False
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    format: Format | None = None
    choice: str = "auto"
    is_parallel: bool = True
    strict: set[str] = field(default_factory=set)
    budget: int | None = None
    effort: int | None = None
    left_out: tuple[str, ...] = ()
    metadata: Any = None


class ChatReader:
    """Reads the bodies of one server's conversations."""

    def __init__(
        self, encoder: Encoder, config: ModelConfig, facts: Ready, model_names: Sequence[str], fetch: Fetch | None
    ) -> None:
        """Read for an engine with these ``facts``; ``fetch`` gets images from addresses, and None refuses addresses."""
        self._encoder = encoder
        self._config = config
        self._facts = facts
        self._model_names = model_names
        self._fetch = fetch

    def read(self, api: ChatApi, body: dict[str, Any]) -> Asked:
        """Convert a body into what the engine is asked for.

        Raises:
            RequestError: the request cannot be served.
            HttpError: the same, with another status or the field's name.
        """
        check_model(body, self._model_names)
        check_fields(api, body)
        salt = take_salt(body)
        body = dict(body)
        wanted = self._take(api, body)
        conversation, sources = self._convert(api, body, wanted)
        ids, images = self._prompt(conversation, sources, wanted)
        parsing = conversation.parsing_options  # a copy
        parsing.stop_sequences = list(stop_strings(wanted.sampling.pop("stop", None)))
        parsing.parse_json_output = False  # the grammar leaves nothing around the JSON text
        stage = parsing.thinking_initial_stage
        definitions = [
            {"name": each.name, "parameters": each.parameters}
            for each in conversation.conversation.tools
            if conversation.conversation.tool_choice != "none"
        ]
        rules = Rules(
            tools=definitions,
            choice=wanted.choice,
            is_parallel=wanted.is_parallel,
            strict=wanted.strict,
            format=wanted.format,
            thinking_budget=wanted.budget,
        )
        if wanted.choice != "auto" and not definitions:
            raise HttpError(400, "tool_choice asks for a call, and the request has no tools; add them", param="tool_choice")
        so_args = rules.so_args(
            in_reasoning=stage is not None and stage.starts_in_reasoning(),
            is_opened=parsing.starts_in_tool_calls,
            dsml_id=self._encoder.dsml_id,
            think_end_id=self._encoder.think_end_id,
        )
        params = make_params(
            wanted.sampling,
            n=wanted.n,
            max_tokens=self._max_tokens(api, conversation, body, len(ids) + self._extra_tokens(images)),
            top_logprobs=wanted.top_logprobs,
            so_args=so_args,
            banned_token_ids=() if definitions else (self._encoder.dsml_id,),
        )
        return Asked(
            model=str(body["model"]),
            prompts=[ids],
            params=params,
            images=images,
            salt=salt,
            writer=self._writer(api, conversation, parsing, body, wanted),
            left_out=wanted.left_out,
        )

    def count(self, api: ChatApi, body: dict[str, Any]) -> int:
        """Number of tokens of a body's prompt, images included.

        Raises:
            RequestError, HttpError: as :meth:`read`.
        """
        check_model(body, self._model_names)
        check_fields(api, body)
        body = dict(body)
        wanted = self._take(api, body)
        body[_LIMIT_FIELDS[api]] = 1
        ids, images = self._prompt(*self._convert(api, body, wanted), wanted)
        return len(ids) + self._extra_tokens(images)

    # What recipe does not read.

    def _take(self, api: ChatApi, body: dict[str, Any]) -> _Wanted:
        """Change a body into one that recipe reads as it is meant, and return what the body asks for besides."""
        is_stream = as_switch("stream", body.get("stream"), default=False)
        include_usage = usage_options(body, is_stream=is_stream) if api == "chat" else False
        if api == "responses":
            body.pop("stream_options", None)
        wanted = _Wanted(
            sampling=take_sampling(body, self._facts.sampling_defaults), is_stream=is_stream, include_usage=include_usage
        )
        wanted.metadata = body.get("metadata")
        wanted.sampling["stop"] = body.pop("stop_sequences" if api == "messages" else "stop", None)
        budget = body.pop("thinking_token_budget", None)
        thinking = body.get("thinking")
        if isinstance(thinking, Mapping) and thinking.get("type") != "disabled":
            budget = thinking.get("budget_tokens", budget)
        if budget is not None:
            wanted.budget = as_count("thinking budget", budget, 0, 2**31 - 1)
        match api:
            case "chat":
                _take_chat(body, wanted)
            case "responses":
                _take_responses(body, wanted)
            case "messages":
                _take_messages(body, wanted)
        return wanted

    def _convert(
        self, api: ChatApi, body: dict[str, Any], wanted: _Wanted
    ) -> tuple[recipe.ConversationRequest, list[recipe.ImageSource]]:
        """Recipe's conversation.

        A call that is forced without reasoning is opened in the prompt, as the vendor does it.  Recipe refuses forced calls with
        reasoning, so the first conversion asks for none, and only the grammar forces the call.
        """
        choice = body.pop("tool_choice", None) if wanted.choice != "auto" else None
        converted = self._convert_once(api, body)
        if choice is not None and not converted.conversation.thinking_mode:
            body["tool_choice"] = choice
            converted = self._convert_once(api, body)
        return converted, self._encoder.images(converted.conversation)

    def _convert_once(self, api: ChatApi, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return _REQUESTS[api](msgspec.json.encode(body)).convert(self._encoder.options)  # type: ignore[no-any-return]
        except recipe.ConversionError as error:
            raise HttpError(400, json.loads(error.body)["error"]["message"]) from error
        except ValueError as error:
            raise HttpError(400, f"the body cannot be read: {reason(error)}; change it") from error

    # Prompts, images and limits.

    def _prompt(
        self, converted: recipe.ConversationRequest, sources: Sequence[recipe.ImageSource], wanted: _Wanted
    ) -> tuple[list[int], list[bytes]]:
        conversation = converted.conversation
        if sources and not self._facts.takes_images:
            raise RequestError("this model cannot take images; send text only")
        if len(sources) > _MAX_IMAGES:
            raise RequestError(f"the request has {len(sources)} images, the limit is {_MAX_IMAGES}; send fewer")
        effort = wanted.effort if conversation.thinking_mode else None
        return self._encoder.encode(conversation, effort), [self._image(each) for each in sources]

    def _image(self, source: recipe.ImageSource) -> bytes:
        if source.url is not None:
            if self._fetch is None:
                raise RequestError(
                    f"the image at {source.path} is an address, which this server does not fetch; send a data URL instead"
                )
            return self._fetch(source.url)
        _, _, rest = (source.data_url or "").partition(":")
        head, comma, data = rest.partition(",")
        try:
            if not comma:
                raise ValueError("it has no comma")
            if head.endswith(";base64"):
                return base64.b64decode("".join(data.split()), validate=True)
            return urllib.parse.unquote_to_bytes(data)
        except (ValueError, binascii.Error) as error:
            raise RequestError(f"the image at {source.path} is no data URL ({reason(error)}); encode it in base64") from error

    def _extra_tokens(self, images: Sequence[bytes]) -> int:
        """Tokens of images beyond one placeholder for each."""
        assert self._config.vision is not None or not images, "_prompt() checked it"
        total = 0
        for number, data in enumerate(images):
            try:
                width, height = Image.open(io.BytesIO(data), formats=FORMATS).size
            except (*CONVERSION_ERRORS, OSError, Image.DecompressionBombError) as error:
                raise RequestError(f"image {number} cannot be decoded ({reason(error)}); send PNG, JPEG, WebP or GIF") from error
            assert self._config.vision is not None
            total += plan_image(width, height, self._config.vision).span_tokens - 1
        return total

    def _max_tokens(self, api: ChatApi, converted: recipe.ConversationRequest, body: Mapping[str, Any], num_prompt: int) -> int:
        """Most output tokens.  Messages must name a limit, and agents always name a large one, so it is lowered there."""
        limit = self._facts.max_model_len
        if api == "messages" and num_prompt < limit:
            return max(1, min(converted.inference_options.max_tokens or limit, limit - num_prompt))
        try:
            return converted.resolve_max_tokens(num_prompt, limit)
        except recipe.ConversionError:
            asked = body.get(_LIMIT_FIELDS[api])
            more = "" if asked is None else f" plus {_LIMIT_FIELDS[api]}={asked}"
            raise HttpError(
                400,
                f"prompt of {num_prompt} tokens{more} exceeds the context limit of {limit}; shorten the prompt or lower "
                f"{_LIMIT_FIELDS[api]}",
                code="context_length_exceeded",
            ) from None

    def _writer(
        self,
        api: ChatApi,
        converted: recipe.ConversationRequest,
        parsing: recipe.ParsingOptions,
        body: dict[str, Any],
        wanted: _Wanted,
    ) -> ConversationWriter:
        answer_id, model = new_id(_PREFIXES[api]), str(body["model"])
        names: Any = {}
        match api:
            case "chat":
                shape: Shape = ChatShape(answer_id=answer_id, model=model, n=wanted.n, include_usage=wanted.include_usage)
            case "messages":
                shape = MessagesShape(answer_id=answer_id, model=model)
            case "responses":
                request = recipe.ResponsesRequest(msgspec.json.encode(body))
                names = request.namespace_tool_map(self._encoder.options)
                echo = {"parallel_tool_calls": wanted.is_parallel, "metadata": wanted.metadata or {}}
                shape = ResponsesShape(answer_id=answer_id, model=model, echo=echo)
        processors = []
        for _ in range(wanted.n):
            generator = _REQUESTS[api].chunk_generator(converted, answer_id, model)
            if api == "responses":
                generator = generator.with_namespace_tool_map(names).with_echo(request.echo())
            processors.append(recipe.StreamProcessor(generator, parsing, self._encoder.tokenizer))
        encoder, stage = self._encoder, parsing.thinking_initial_stage
        reading = Reading(
            plain=encoder.plain,
            eos_id=self._facts.eos_token_id,
            think_end_id=encoder.think_end_id,
            dsml_id=encoder.dsml_id,
            in_reasoning=stage is not None and stage.starts_in_reasoning(),
            is_stream=wanted.is_stream,
            has_stops=bool(parsing.stop_sequences),
            has_logprobs=wanted.logprobs,
        )
        return ConversationWriter(shape, processors, reading)


def check_model(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse an unknown model; raises :class:`HttpError`."""
    model = body.get("model")
    if not isinstance(model, str):
        raise HttpError(400, f"model={shown(model)} is not a name; use one of {', '.join(names)}", param="model")
    if model not in names:
        raise HttpError(404, f"the model {shown(model)} does not exist; use one of {', '.join(names)}", param="model",
                        code="model_not_found")  # fmt: skip


def take_salt(body: dict[str, Any]) -> bytes:
    """Remove ``cache_salt`` from a body, and return the tenant that it names; b"" for none."""
    given = body.pop("cache_salt", None)
    if given is None:
        return b""
    if not isinstance(given, str) or not given:
        raise RequestError(f"cache_salt={shown(given)} is not a text; give a string that only your requests use")
    return hashlib.blake2b(given.encode("utf-8", "replace"), digest_size=16, person=b"cache_salt").digest()


# The three bodies.


def _take_chat(body: dict[str, Any], wanted: _Wanted) -> None:
    wanted.n = as_count("n", body.pop("n", None) or 1, 1, 128)
    wanted.logprobs = as_switch("logprobs", body.get("logprobs"), default=False)
    wanted.top_logprobs = as_count("top_logprobs", body.get("top_logprobs") or 0, 0, 20)
    if "max_completion_tokens" in body:
        given = body.pop("max_completion_tokens")
        body["max_tokens"] = body.get("max_tokens") if given is None else given
    _take_template(body)
    effort = body.get("reasoning_effort")
    if isinstance(effort, int) and not isinstance(effort, bool):
        wanted.effort = as_count("reasoning_effort", effort, 1, 100)
        body["reasoning_effort"] = "high"
    wanted.format = _take_format(body, "response_format")
    _take_tools(body, wanted, body.get("tools"), lambda tool: tool.get("function") if tool.get("type") == "function" else None)
    choice = body.get("tool_choice")
    _take_choice(wanted, choice.get("function") if isinstance(choice, Mapping) else choice)
    wanted.is_parallel = as_switch("parallel_tool_calls", body.pop("parallel_tool_calls", None), default=True)
    messages = _several(body, "messages", _MAX_MESSAGES)
    body["messages"] = [_chat_message(each) for each in messages]


def _take_template(body: dict[str, Any]) -> None:
    """Read the options that other servers take for the chat template."""
    given = body.pop("chat_template_kwargs", None)
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs={shown(given)} is not an object; give thinking or reasoning_effort")
    for name, value in given.items():
        if name in ("thinking", "enable_thinking"):
            body.setdefault("thinking", {"type": "enabled" if as_switch(name, value, default=True) else "disabled"})
        elif name == "reasoning_effort":
            body.setdefault("reasoning_effort", value)
        else:
            raise HttpError(400, f"chat_template_kwargs has the unknown field {shown(name)}; leave it out", param=name)


def _chat_message(message: object) -> object:
    """A message with the role and the field of reasoning that recipe knows."""
    if not isinstance(message, Mapping):
        return message
    made = dict(message)
    if made.get("role") == "developer":
        made["role"] = "system"
    reasoning = made.pop("reasoning", None)
    if made.get("role") == "assistant" and made.get("reasoning_content") is None and isinstance(reasoning, str):
        made["reasoning_content"] = reasoning
    return made


def _take_format(body: dict[str, Any], name: str) -> Format | None:
    """Read the format of Chat Completions; only a JSON schema stays for the prompt."""
    given = body.get(name)
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            del body[name]
            return _JSON_OBJECT
        case "regex":
            del body[name]
            if not isinstance(given.get("regex"), str):
                raise HttpError(400, f"{name} has no regex; give it as text", param=name)
            return Format(regex=given["regex"])
        case "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
                raise HttpError(400, f"{name}.json_schema has no schema; give it", param=name)
            strict = as_switch(f"{name}.json_schema.strict", inner.get("strict"), default=False)
            body[name] = {**given, "json_schema": {key: value for key, value in inner.items() if key != "strict"}}
            return Format(schema=closed(inner["schema"]) if strict else inner["schema"])
        case _:
            raise HttpError(
                400, f"{name}={shown(kind or given)} is unknown; use text, json_object, json_schema or regex", param=name
            )


def _take_tools(
    body: dict[str, Any],
    wanted: _Wanted,
    tools: object,
    function_of: Callable[[dict[str, Any]], Any],
    schema_key: str = "parameters",
) -> None:
    """Take ``strict`` out of tools, and replace empty schemas, which recipe refuses."""
    if tools is None:
        return
    made = []
    for tool in _several(body, "tools", _MAX_TOOLS):
        copied = dict(tool) if isinstance(tool, Mapping) else tool
        function = function_of(copied) if isinstance(copied, dict) else None
        if isinstance(function, Mapping):
            cleaned = {key: value for key, value in function.items() if key != "strict"}
            if as_switch("strict", function.get("strict"), default=False):
                wanted.strict.add(str(function.get("name")))
            if cleaned.get(schema_key) == {}:
                cleaned[schema_key] = {"type": "object", "properties": {}}
            if function is copied:
                copied = cleaned
            else:
                copied["function"] = cleaned
        made.append(copied)
    if (size := len(msgspec.json.encode(made))) > _MAX_TOOLS_BYTES:
        raise HttpError(400, f"tools has {size} bytes, the limit is {_MAX_TOOLS_BYTES}; shorten the schemas", param="tools")
    if made:
        body["tools"] = made
    else:
        del body["tools"]


def _take_choice(wanted: _Wanted, choice: object) -> None:
    """Read a choice of tools: a word, or an object with the name of a function."""
    if isinstance(choice, Mapping):
        if not isinstance(choice.get("name"), str):
            raise HttpError(400, f"tool_choice={shown(choice)} names no function; give its name", param="tool_choice")
        wanted.choice = choice["name"]
    elif choice in ("required", "any"):
        wanted.choice = "required"
    elif choice not in (None, "auto", "none"):
        raise HttpError(
            400, f"tool_choice={shown(choice)} is unknown; use auto, none, required or a function", param="tool_choice"
        )


def _leave_out(body: dict[str, Any], wanted: _Wanted, is_ours: Callable[[Mapping[str, Any]], bool]) -> None:
    """Remove the tools that only a vendor runs."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    gone = [each for each in tools if isinstance(each, Mapping) and not is_ours(each)]
    wanted.left_out = tuple(re.sub(r"[^A-Za-z0-9_.-]", "_", str(each.get("type")))[:60] for each in gone)  # a header shows them
    body["tools"] = [each for each in tools if not any(each is other for other in gone)]


def _take_responses(body: dict[str, Any], wanted: _Wanted) -> None:
    wanted.top_logprobs = as_count("top_logprobs", body.get("top_logprobs") or 0, 0, 20)
    wanted.logprobs = wanted.top_logprobs > 0
    for item in body["input"] if isinstance(body.get("input"), list) else ():
        if isinstance(item, Mapping) and item.get("type") == "item_reference":
            raise HttpError(
                400, "input has an item_reference, and this server stores no items; send the item itself", param="input"
            )
    text = body.get("text")
    if isinstance(text, Mapping) and isinstance(text.get("format"), Mapping):
        given = dict(text["format"])
        if given.get("type") == "json_schema":
            given = {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}
        wrapped: dict[str, Any] = {"text.format": given}
        wanted.format = _take_format(wrapped, "text.format")
        kept = wrapped.get("text.format")
        if kept is None:
            body["text"] = {key: value for key, value in text.items() if key != "format"}
        elif kept.get("type") == "json_schema":
            body["text"] = {**text, "format": {"type": "json_schema", **kept["json_schema"]}}
    _leave_out(body, wanted, lambda tool: tool.get("type") in ("function", "namespace", "custom"))
    _take_tools(body, wanted, body.get("tools"), lambda tool: tool if tool.get("type") == "function" else None)
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") not in ("function", "custom"):
        raise HttpError(
            400, f"tool_choice of type {shown(choice.get('type'))} is not supported; name a function", param="tool_choice"
        )
    if isinstance(choice, Mapping) and isinstance(choice.get("namespace"), str):
        choice = body["tool_choice"] = {
            "type": "function",
            "name": f"{choice['namespace']}::{choice.get('name')}",
        }  # recipe's name
    _take_choice(wanted, choice)
    wanted.is_parallel = as_switch("parallel_tool_calls", body.pop("parallel_tool_calls", None), default=True)


def _take_messages(body: dict[str, Any], wanted: _Wanted) -> None:
    _leave_out(body, wanted, lambda tool: tool.get("type") in (None, "custom"))
    for tool in body["tools"] if isinstance(body.get("tools"), list) else ():
        if isinstance(tool, dict):
            tool.pop("type", None)
    _take_tools(body, wanted, body.get("tools"), lambda tool: tool, "input_schema")
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        wanted.is_parallel = not as_switch("disable_parallel_tool_use", choice.get("disable_parallel_tool_use"), default=False)
        _take_choice(wanted, choice if choice.get("type") == "tool" else choice.get("type"))
    body["system"] = _without_billing(body.get("system"))
    if body["system"] is None:
        del body["system"]
    _take_output_format(body, wanted)
    messages = _several(body, "messages", _MAX_MESSAGES)
    body["messages"] = [_message(each) for each in messages]


def _without_billing(system: object) -> object:
    if isinstance(system, str):
        return _BILLING.sub("", system)
    if not isinstance(system, list):
        return system
    blocks = []
    for block in system:
        if isinstance(block, Mapping) and isinstance(block.get("text"), str):
            text = _BILLING.sub("", block["text"])
            if not text and block["text"]:
                continue
            block = {**block, "text": text}
        blocks.append(block)
    return blocks


def _take_output_format(body: dict[str, Any], wanted: _Wanted) -> None:
    """Read the schema of an answer in Messages; recipe ignores it, so the prompt gets its text here."""
    config = body.get("output_config")
    given = body.pop("output_format", None)
    if isinstance(config, Mapping) and config.get("format") is not None:
        given = config["format"]
        body["output_config"] = {key: value for key, value in config.items() if key != "format"}
    if given is None:
        return
    if not isinstance(given, Mapping) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise HttpError(400, f"the output format {shown(given)} is unknown; use json_schema with a schema", param="output_config")
    wanted.format = Format(schema=closed(given["schema"]))
    text = f"## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{json.dumps(given['schema'])}"
    system = body.get("system")
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) and system else list(system or ())
    body["system"] = [*blocks, {"type": "text", "text": text}]


def _message(message: object) -> object:
    """A message of Messages without the blocks that only the vendor can read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": list(_blocks(message["content"]))}


def _blocks(blocks: Sequence[object]) -> Iterator[object]:
    for block in blocks:
        if not (isinstance(block, Mapping) and block.get("type") == "redacted_thinking"):
            yield block


def _several(body: Mapping[str, Any], name: str, limit: int) -> list[Any]:
    given = body.get(name)
    if not isinstance(given, list):
        raise HttpError(400, f"{name}={shown(given)} is not a list; give a list", param=name)
    if len(given) > limit:
        raise HttpError(400, f"{name} has {len(given)} entries, the limit is {limit}; send fewer", param=name)
    return given
