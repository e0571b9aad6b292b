"""Prompts against those of the vendor's encoder."""

import json
import random

import pytest

from deepinfer.bench.tasks import make_task

recipe = pytest.importorskip("deepseek_recipe", reason="deepseek-recipe, the vendor's encoder, is not installed")

EFFORTS = {None: "none", 50: "low", 75: "high", 100: "max"}


@pytest.fixture(scope="module")
def vendor_prompt():
    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special)
    versions = {"nano": recipe.ModelVersion.DeepseekV41Flash}
    options = recipe.ConversionOptions().with_special_tokens(special).with_model_versions_by_name(versions)

    def prompt(body):
        request = recipe.ChatCompletionRequest(json.dumps(body).encode())
        return encoding.render_conversation(request.convert(options).conversation).prompt

    return prompt


def request_of(task):
    messages, open_calls = [], []
    for message in task.messages:
        body = {"role": message.role, "content": message.content}
        if message.reasoning:
            body["reasoning_content"] = message.reasoning
        if message.calls:
            open_calls = [f"call-{number}" for number in range(len(message.calls))]
            body["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for call_id, call in zip(open_calls, message.calls, strict=True)
            ]
        if message.role == "tool":
            body["tool_call_id"] = open_calls.pop(0)
        messages.append(body)
    body = {"model": "nano", "messages": messages, "reasoning_effort": EFFORTS[task.effort]}
    if task.tools:
        body["tools"] = [{"type": "function", "function": each} for each in task.tools]
    if task.schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "form", "schema": task.schema}}
    return body


def test_prompts_of_tasks_equal_those_of_the_vendor(vendor_prompt):
    for seed in range(1_000):
        task = make_task(random.Random(f"vendor {seed}"))
        assert "".join(task.prompt()) == vendor_prompt(request_of(task))
