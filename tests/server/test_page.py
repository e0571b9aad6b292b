"""The chat page in Chromium: an answer streams in, stop aborts it, errors are shown, calls and schemas work."""

import json
import shutil
import time

import pytest

from tests.server.scripted import Server, call_of, calls_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the driver's warnings are its own
WEATHER_CALL = "I need it.</think>I look." + calls_of(call_of("get_weather", city="Rome"))


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra `clients`")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium; on Debian, install the package chromium")
    with driver.sync_playwright() as running:
        made = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser, server):
    """The page, which may load nothing from elsewhere, and whose scripts may not fail."""
    made = browser.new_page()
    problems = []
    made.on("pageerror", lambda error: problems.append(error))
    made.on(
        "request", lambda request: problems.append(request.url) if not request.url.startswith((server.url, "data:")) else None
    )
    made.set_default_timeout(10_000)
    made.goto(server.url)
    made.wait_for_function("document.getElementById('model').value === 'nano'")
    yield made
    made.close()
    assert not problems


def send(page, text):
    page.fill("#text", text)
    page.keyboard.press("Enter")


def test_an_answer_streams_in_with_its_reasoning_and_its_figures(page, server):
    server.engine.say("I think about it.</think>The answer is " + "long " * 20 + "enough.")
    server.engine.pause_s, server.engine.drafts = 0.05, (5, 2)
    send(page, "Hello?")
    page.wait_for_function("document.querySelector('.reasoning .text').textContent.startsWith('I think')")
    page.wait_for_function("document.querySelector('.turn .text.waiting')?.textContent.startsWith('The answer')")
    assert page.is_visible("#stop")
    assert not page.is_visible("#send")
    page.wait_for_selector(".facts")
    assert page.text_content(".turn:last-child > .text").endswith("enough.")
    facts = page.text_content(".facts")
    assert "tokens/s" in facts
    steps = server.engine.num_steps - 1
    assert f"{2 * steps} of {5 * steps} drafts accepted" in facts
    assert page.is_visible("#send")


def test_stop_aborts_the_request_and_the_conversation_goes_on(page, server):
    server.engine.say("</think>" + "word " * 2000)
    server.engine.pause_s = 0.02
    send(page, "Hello?")
    page.wait_for_function("document.querySelector('.turn .text.waiting')?.textContent.startsWith('word')")
    page.click("#stop")
    page.wait_for_selector("text=stopped after")
    deadline = time.monotonic() + 1
    while server.engine.open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.engine.say("</think>Again.")
    send(page, "Go on")
    page.wait_for_selector("text=Again.")
    assert "word word" in server.engine.asked[-1].prompt


def test_an_error_is_shown_and_the_request_can_be_repeated(page, server):
    server.engine.fail_after = 0
    send(page, "Hello?")
    page.wait_for_selector(".error")
    assert "asked to fail" in page.text_content(".error")
    server.engine.fail_after = None
    page.click("text=Try again")
    page.wait_for_selector("text=hello")
    assert page.query_selector(".error") is None
    server.engine.say("</think>" + "x" * 500)
    server.engine.num_steps, server.engine.fail_after = 0, 3
    send(page, "Once more")
    page.wait_for_selector(".error")
    page.click("#open")
    page.fill("#schema", "{")
    send(page, "And now?")
    page.wait_for_selector("text=The schema is not JSON")


def test_a_call_gets_its_result_in_a_form(page, server):
    server.engine.say_in_turn(WEATHER_CALL, "</think>It is sunny.")
    page.click("#open")
    page.click("[data-example=tools]")
    send(page, "Weather in Rome?")
    page.wait_for_selector(".call form")
    assert page.text_content(".call code") == 'get_weather({"city": "Rome"})'
    page.fill(".call input", "sunny")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=It is sunny.")
    assert "<tool_result>sunny</tool_result>" in server.engine.asked[-1].prompt
    server.engine.say_in_turn(WEATHER_CALL, "</think>As you like.")
    send(page, "And tomorrow?")
    page.wait_for_selector(".call form")
    send(page, "Forget it")
    page.wait_for_selector("text=As you like.")
    assert "The user gave no result." in server.engine.asked[-1].prompt


def test_settings_reach_the_request(page, server):
    server.engine.say('{"answer": 42}')
    page.click("#open")
    page.click("[data-example=schema]")
    page.select_option("#effort", "none")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#limit", "77")
    send(page, "Six times seven?")
    page.wait_for_selector('text={"answer": 42}')
    asked = server.engine.asked[-1]
    assert json.loads(asked.params.structured_output.schema)["required"] == ["answer"]
    assert (asked.params.temperature, asked.params.max_tokens) == (0.5, 77)
    assert "Be brief." in asked.prompt
    assert asked.prompt.endswith("</think>")


def test_a_new_conversation_aborts_and_forgets(page, server):
    server.engine.say("</think>" + "word " * 2000)
    server.engine.pause_s = 0.02
    send(page, "First")
    page.wait_for_selector("#stop:visible")
    page.click("#clear")
    page.wait_for_selector(".empty")
    server.engine.reset()
    send(page, "Second")
    page.wait_for_selector("text=hello")
    assert "First" not in server.engine.asked[-1].prompt


def test_a_key_is_asked_for(browser):
    made = Server(api_keys=("secret",))
    page = browser.new_page()
    page.goto(made.url)
    page.wait_for_selector("#key:visible")
    page.fill("#key", "secret")
    page.keyboard.press("Tab")
    page.wait_for_function("document.getElementById('model').value === 'nano'")
    send(page, "Hello?")
    page.wait_for_selector("text=hello")
    page.close()
    made.close()


@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)])
def test_nothing_is_wider_than_the_window(page, server, width, height):
    server.engine.say("</think>" + "word " * 40 + "x" * 300)
    page.set_viewport_size({"width": width, "height": height})
    page.click("#open")
    send(page, "y" * 300)
    page.wait_for_selector(".facts")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
