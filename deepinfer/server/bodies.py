"""The bodies of requests: names, types and limits of all fields that have an effect.

The OpenAPI document is made from these classes, and :mod:`deepinfer.server.protocol` takes the names of the honoured fields from
them.  They describe and do not parse: the vendor's package parses conversations, and the readers check the rest, with messages
that name the field.  Parts of conversations have their usual fields here; the vendor's package knows more of them.

Source: the API references of OpenAI and Anthropic, and the fields that agents were seen to send.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Budget = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Answers = Annotated[int, Meta(ge=1, le=128)]
NumTop = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Schema = dict[str, Any]
Url = Annotated[str, Meta(pattern="^(data:image/|https?://)")]


class Sampling(Struct, kw_only=True):
    """How tokens are chosen.  Defaults come from the checkpoint."""

    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=1000)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Budget | None = None


class Body(Sampling, kw_only=True):
    """What all protocols have in common."""

    model: str
    stream: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


# Chat Completions.


class StreamOptions(Struct):
    """Options of a stream; only with ``stream``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TextPart(Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImageUrl(Struct):
    """A data URL, or an address if the server fetches images."""

    url: Url


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image; only for models that take images."""

    image_url: ImageUrl


Content = str | list[TextPart | ImagePart]


class SystemTurn(Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: Content


class DeveloperTurn(Struct, tag_field="role", tag="developer"):
    """Instructions, as ``system``."""

    content: Content


class UserTurn(Struct, tag_field="role", tag="user"):
    """What the user says."""

    content: Content


class FunctionCall(Struct):
    """A function and its arguments as JSON text."""

    name: Name
    arguments: str


class ChatCall(Struct, tag_field="type", tag="function"):
    """A call that the model made."""

    id: str
    function: FunctionCall


class AssistantTurn(Struct, tag_field="role", tag="assistant"):
    """An earlier answer; ``prefix`` continues the last one."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None
    prefix: bool = False


class ToolTurn(Struct, tag_field="role", tag="tool"):
    """The result of a call."""

    content: Content
    tool_call_id: str


class Function(Struct):
    """A function that the model may call; ``strict`` enforces its schema."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ChatTool(Struct, tag_field="type", tag="function"):
    """A function that the model may call."""

    function: Function


class FunctionName(Struct):
    """A function's name."""

    name: Name


class ChatChoice(Struct, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class TextFormat(Struct, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(Struct, tag_field="type", tag="json_object"):
    """A JSON object."""


class RegexFormat(Struct, tag_field="type", tag="regex"):
    """A text that matches a regular expression."""

    regex: str


class NamedSchema(Struct):
    """A JSON schema; ``strict`` allows no other keys than the named ones."""

    name: Name
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """A JSON text that follows a schema."""

    json_schema: NamedSchema


class Thinking(Struct):
    """Whether the model reasons first, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class Template(Struct):
    """What other servers take for their chat templates."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None


Turns = Annotated[list[SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn], Meta(min_length=1)]


class ChatBody(Body, kw_only=True):
    """Chat Completions."""

    messages: Turns
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Answers | None = None
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | ObjectFormat | RegexFormat | SchemaFormat | None = None
    reasoning_effort: Effort | Annotated[int, Meta(ge=1, le=100)] | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: Template | None = None


# Completions.


class CompletionsBody(Body, kw_only=True):
    """Completions; ``prompt`` is a text, token ids, or a list of one of them."""

    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    max_tokens: Budget | None = None
    n: Answers | None = None
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    logprobs: NumTop | None = None
    echo: bool | None = None


# Responses.


class InputText(Struct, tag_field="type", tag="input_text"):
    """A text of the user."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image: a data URL, or an address if the server fetches images."""

    image_url: Url


class MessageItem(Struct, tag_field="type", tag="message"):
    """A turn of the conversation; its type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage]


class CallItem(Struct, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: Name
    arguments: str


class CallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool that the model made."""

    call_id: str
    name: str
    input: str


class CustomOutputItem(Struct, tag_field="type", tag="custom_tool_call_output"):
    """The result of a call of a custom tool."""

    call_id: str
    output: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer."""

    summary: list[SummaryText]


Item = MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem


class FunctionTool(Function, tag_field="type", tag="function"):
    """A function that the model may call."""


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool that takes text; the model knows ``apply_patch``."""

    name: Literal["apply_patch"]


class SearchTool(Struct, tag_field="type", tag="web_search"):
    """A tool that only the vendor runs; it is left out."""


class ShellTool(Struct, tag_field="type", tag="local_shell"):
    """A tool that only the vendor runs; it is left out."""


class NamespaceTool(Struct, tag_field="type", tag="namespace"):
    """Functions with a common prefix."""

    name: Name
    description: str
    tools: list[FunctionTool]


class FunctionChoice(FunctionName, tag_field="type", tag="function"):
    """The function that must be called."""


class FlatSchemaFormat(NamedSchema, tag_field="type", tag="json_schema"):
    """A JSON text that follows a schema."""


class TextOptions(Struct):
    """The format of an answer."""

    format: TextFormat | ObjectFormat | FlatSchemaFormat | None = None


class ReasoningOptions(Struct):
    """How much the model reasons."""

    effort: Effort | None = None


class ResponsesBody(Body, kw_only=True):
    """Responses.  Tools that only the vendor runs are left out, and a header of the answer names them."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool | CustomTool | NamespaceTool | SearchTool | ShellTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: NumTop | None = None
    thinking_token_budget: Budget | None = None


# Messages.


class ImageSource(Struct, tag_field="type", tag="base64"):
    """An encoded file."""

    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image; only for models that take images."""

    source: ImageSource


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str


class RedactedBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only the vendor can read; it is left out."""

    data: str


class UseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: Name
    input: dict[str, Any]


class ResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    """What the user says, and the results of calls."""

    content: str | Annotated[list[TextPart | ImageBlock | ResultBlock], Meta(min_length=1)]


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """An earlier answer."""

    content: str | Annotated[list[TextPart | ThinkingBlock | RedactedBlock | UseBlock], Meta(min_length=1)]


class SystemMessage(Struct, tag_field="role", tag="system"):
    """Instructions within a conversation."""

    content: str | Annotated[list[TextPart], Meta(min_length=1)]


class MessagesTool(Struct):
    """A function that the model may call; ``strict`` enforces its schema.  Tools of other types than ``custom`` are left out."""

    name: Name
    type: str | None = None
    input_schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class MessagesChoice(Struct):
    """Whether a call must come; ``tool`` needs the name of the function."""

    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, tag_field="type", tag="json_schema"):
    """A JSON text that follows a schema."""

    schema: Schema


class OutputOptions(Struct):
    """The format of an answer, and how much the model reasons."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesBody(Body, kw_only=True):
    """Messages.  Tools that only the vendor runs are left out, and a header of the answer names them."""

    messages: Annotated[list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1)]
    max_tokens: Count | None = None
    system: str | list[TextPart] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    thinking: Thinking | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None


# Tokens.


class TokenizeBody(Struct, kw_only=True):
    """A text, or a conversation as in Chat Completions; ``add_special_tokens: false`` leaves the begin token of a text out."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Turns | None = None
    tools: list[ChatTool] | None = None
    reasoning_effort: Effort | Annotated[int, Meta(ge=1, le=100)] | None = None
    thinking: Thinking | None = None


class DetokenizeBody(Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
