"""Agents' libraries run as they are: the OpenAI Agents SDK and LangChain, against replayed answers."""

import asyncio
import re
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from tests.server.scripted import call_of, calls_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of these libraries are theirs

SERVING = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
CALL = "I ask.</think>I look." + calls_of(call_of("get_weather", city="Rome"))
END = "Now I know.</think>It is sunny."
JSON = '</think>{"city": {"name": "Rome"}, "sky": "clear"}'


class City(BaseModel):
    name: str


class Weather(BaseModel):
    city: City
    sky: str


EXPECTED = Weather(city=City(name="Rome"), sky="clear")


SNIPPETS = re.findall(r"```python\n(.*?)```", SERVING.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_code_in_the_documentation_runs(server, capsys, number):
    snippet = SNIPPETS[number]
    for module in re.findall(r"^from (\w+)", snippet, re.MULTILINE):
        pytest.importorskip(module, reason="it is in the extra `clients`")
    server.engine.say_in_turn(*([CALL, END] if "get_weather" in snippet else [END]))
    exec(snippet.replace("http://127.0.0.1:8000", server.url), {"__name__": "snippet"})
    assert "It is sunny." in capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_the_agents_sdk_calls_a_tool_and_reads_a_nested_model(server, protocol):
    agents = pytest.importorskip("agents", reason="the OpenAI Agents SDK is in the extra `clients`")
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        seen.append(city)
        return "sunny"

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, protocol)(model="nano", openai_client=client)
            agent = agents.Agent(name="Guide", instructions="Be brief.", tools=[get_weather], model=model)
            server.engine.say_in_turn(CALL, END)
            whole = await agents.Runner.run(agent, "Weather in Rome?")
            server.engine.say_in_turn(CALL, END)
            streamed = agents.Runner.run_streamed(agent, "Weather in Rome?")
            kinds = {event.type async for event in streamed.stream_events()}
            server.engine.say_in_turn(JSON)
            typed = agents.Agent(name="Guide", output_type=Weather, model=model)
            parsed = await agents.Runner.run(typed, "Weather in Rome?")
            return whole, streamed.final_output, kinds, parsed.final_output

    whole, streamed, kinds, parsed = asyncio.run(run())
    assert whole.final_output == streamed == "It is sunny."
    assert whole.context_wrapper.usage.requests == 2
    assert whole.context_wrapper.usage.output_tokens_details.reasoning_tokens > 0
    assert kinds >= {"raw_response_event", "run_item_stream_event"}
    assert seen == ["Rome", "Rome"]
    assert parsed == EXPECTED


def models_of(url):
    """LangChain's models for the three protocols."""
    langchain_openai = pytest.importorskip("langchain_openai", reason="LangChain is in the extra `clients`")
    langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="LangChain is in the extra `clients`")
    common = {"model": "nano", "api_key": "none", "max_retries": 0}
    return {
        "chat": langchain_openai.ChatOpenAI(base_url=f"{url}/v1", **common),
        "responses": langchain_openai.ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **common),
        "messages": langchain_anthropic.ChatAnthropic(base_url=url, **common),
    }


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_langchain_calls_a_tool_streams_and_reads_a_nested_model(server, protocol):
    create_agent = pytest.importorskip("langchain.agents", reason="LangChain is in the extra `clients`").create_agent
    seen = []

    def get_weather(city: str) -> str:
        """Weather of a city."""
        seen.append(city)
        return "sunny"

    model = models_of(server.url)[protocol]
    agent = create_agent(model, [get_weather], system_prompt="Be brief.")
    ask = {"messages": [{"role": "user", "content": "Weather in Rome?"}]}
    server.engine.say_in_turn(CALL, END)
    last = agent.invoke(ask)["messages"][-1]
    assert last.text == "It is sunny."
    assert last.usage_metadata["input_token_details"]["cache_read"] == 4
    server.engine.say_in_turn(CALL, END)
    pieces = [chunk.text for chunk, _ in agent.stream(ask, stream_mode="messages")]
    assert "".join(pieces).endswith("It is sunny.")
    assert len(pieces) > 6
    assert seen == ["Rome", "Rome"]
    server.engine.say_in_turn(JSON)
    assert model.with_structured_output(Weather, method="json_schema").invoke("Weather in Rome?") == EXPECTED
    assert server.engine.asked[-1].params.structured_output is not None
    server.engine.say_in_turn(
        "</think>"
        + calls_of(
            call_of("Weather", city='{"name": "Rome"}', sky="clear").replace(
                'name="city" string="true"', 'name="city" string="false"'
            )
        )
    )
    assert model.with_structured_output(Weather, method="function_calling").invoke("Weather in Rome?") == EXPECTED
