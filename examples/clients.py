"""Ask ``deepinfer serve`` with the clients of OpenAI and Anthropic.

deepinfer serve                                     # in another terminal: the small model nano, on this machine
python examples/clients.py http://127.0.0.1:8000

The clients are the packages openai and anthropic.
"""

from __future__ import annotations

import argparse
import sys
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

QUESTION = "What is 23 + 45?"
NO_REASONING = {"thinking": {"type": "disabled"}}


class Sky(BaseModel):
    """A part of an answer."""

    cover: Literal["clear", "cloudy"]


class Weather(BaseModel):
    """An answer with a schema; the server enforces it by a grammar."""

    sky: Sky
    wind: Literal["calm", "storm"]


def say(text: str) -> None:
    """Print a text as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def ask_with_openai(url: str, key: str) -> None:
    """Stream an answer, get one with a schema, and answer a call of a function."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id
    say("OpenAI, reasoning and answer: ")
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=100, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            say(getattr(choice.delta, "reasoning_content", None) or choice.delta.content or "")
    parsed = client.responses.parse(
        model=model, input="The weather?", text_format=Weather, max_output_tokens=300, reasoning={"effort": "none"}
    )
    say(f"\nOpenAI, answer with a schema: {parsed.output_parsed!r}\n")
    messages: list[dict[str, object]] = [{"role": "user", "content": "What is the weather in Rome?"}]
    tool = openai.pydantic_function_tool(Sky, name="report_sky")
    called = client.chat.completions.parse(
        model=model,
        messages=messages,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        extra_body=NO_REASONING,
    ).choices[0].message  # fmt: skip
    call = called.tool_calls[0]
    say(f"OpenAI, call: {call.function.name}({call.function.arguments})\n")
    messages += [called.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
    last = client.chat.completions.create(
        model=model, messages=messages, tools=[tool], max_tokens=50, extra_body=NO_REASONING
    )  # fmt: skip
    say(f"OpenAI, answer after the call: {last.choices[0].message.content}\n")


def ask_with_anthropic(url: str, key: str) -> None:
    """Stream an answer, and get one with a schema."""
    client = anthropic.Anthropic(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    say("Anthropic, answer: ")
    with client.messages.stream(model=model, max_tokens=100, messages=[{"role": "user", "content": QUESTION}]) as stream:
        for text in stream.text_stream:
            say(text)
        say(f"\nAnthropic, tokens: {stream.get_final_message().usage.output_tokens}\n")
    parsed = client.messages.parse(
        model=model,
        max_tokens=300,
        messages=[{"role": "user", "content": "The weather?"}],
        thinking={"type": "disabled"},
        output_format=Weather,
    )
    say(f"Anthropic, answer with a schema: {parsed.parsed_output!r}\n")


def main() -> int:
    """Ask the server at the address of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask deepinfer serve with the clients of OpenAI and Anthropic.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--key", default="none", help="API key of the server")
    options = parser.parse_args()
    try:
        ask_with_openai(options.url, options.key)
        ask_with_anthropic(options.url, options.key)
    except (openai.APIConnectionError, anthropic.APIConnectionError):
        sys.stderr.write(f"Error: {options.url} does not answer; start deepinfer serve, or give its address\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
