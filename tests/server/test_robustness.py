"""Bodies, keys, queues, deadlines and slow clients: raw HTTP against replayed answers."""

import asyncio
import gc
import json
import os
import re
import socket
import threading
import time

import httpx
import pytest

from deepinfer.server.app import make_admin
from tests.server.scripted import Server

ASK = {"model": "nano", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def strict():
    """A server with keys and small limits."""
    made = Server(api_keys=("one", "two"), max_body_bytes=100_000, max_waiting=2, keep_alive_s=0.1, deadline_s=30)
    yield made
    made.close()


@pytest.fixture
def guarded(strict):
    strict.engine.reset()
    with httpx.Client(base_url=strict.url, headers={"authorization": "Bearer one"}, timeout=20) as made:
        yield made


def wait_for(is_true, seconds=5):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b'{"a": "\\ud800"}', b"[" * 90_000,
        b'{"model": "nano", "messages": ' + b"[" * 40_000, b'{"model": "nano"}', b'{"model": 3, "messages": []}',
        b'{"model": "nano", "messages": [3]}', b'{"model": "nano", "messages": [{"role": "x", "content": "a"}]}',
        b'{"model": "nano", "messages": [{"role": "user", "content": null}]}',
        b'{"model": "nano", "messages": [], "tools": [3]}', b'{"model": "nano", "messages": [], "tools": {}}',
        b'{"model": "nano", "messages": [], "response_format": 3}', b'{"model": "nano", "messages": [], "stop": {}}',
        b'{"model": "nano", "messages": [], "thinking": 3}', b'{"model": "nano", "messages": [], "stream_options": 3}',
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", [PATH, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
)
def test_malformed_bodies_are_client_errors(guarded, path, body):
    answer = guarded.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert answer.headers["x-request-id"] == answer.headers["request-id"]


def test_duplicate_keys_take_the_last_value(guarded):
    body = json.dumps(ASK)[:-1] + ', "model": "unknown"}'
    assert guarded.post(PATH, content=body, headers={"content-type": "application/json"}).status_code == 404


def test_bodies_of_other_types_and_encodings_are_refused(guarded):
    assert guarded.post(PATH, data={"a": "b"}).status_code == 415
    assert guarded.post(PATH, json=ASK, headers={"content-encoding": "gzip"}).status_code == 415


def test_an_oversized_body_is_refused_while_it_is_read(guarded):
    assert guarded.post(PATH, json=ASK | {"user": "x" * 200_000}).status_code == 413

    def pieces():
        for _ in range(30):
            yield b"x" * 10_000

    assert guarded.post(PATH, content=pieces(), headers={"content-type": "application/json"}).status_code == 413


def test_unknown_paths_and_methods_have_json_errors(guarded):
    for path, status in (("/nowhere", 404), ("/v1/responses/resp_1", 404), (PATH, 405)):
        answer = guarded.get(path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert answer.headers["allow"] == "POST"
    named = guarded.get("/nowhere", headers={"anthropic-version": "2023-06-01"}).json()
    assert named["type"] == "error"


def test_keys_are_needed_everywhere_but_for_probes(strict):
    with httpx.Client(base_url=strict.url) as stranger:
        for path in ("/v1/models", "/nowhere"):
            assert stranger.get(path).status_code == 401
            assert stranger.get(path, headers={"x-api-key": "three"}).status_code == 401
        assert stranger.get("/v1/models", headers={"x-api-key": "two"}).status_code == 200
        assert stranger.get("/v1/models", headers={"authorization": "bearer one"}).status_code == 200
        for path in ("/health", "/ready", "/live", "/version", "/metrics", "/"):
            assert stranger.get(path).status_code == 200
        assert stranger.head("/metrics").status_code == 200


def test_the_key_gives_the_tenant_unless_the_body_does(strict, guarded):
    salts = []
    for headers, fields in (({}, {}), ({"authorization": "Bearer two"}, {}), ({}, {"cache_salt": "x"}), ({}, {})):
        assert guarded.post(PATH, json=ASK | fields, headers=headers).status_code == 200
        salts.append(strict.engine.asked[-1].salt)
    assert salts[0] == salts[3]
    assert len(set(salts)) == 3


def test_a_full_queue_refuses_its_class_only(strict, guarded):
    strict.engine.first_pause_s = 1.5
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(guarded.post(PATH, json=ASK))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: strict.service.gate.num_waiting["normal"] == 2)
    refused = guarded.post(PATH, json=ASK)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert "x-should-retry" not in refused.headers
    strict.engine.first_pause_s = 0
    assert guarded.post(PATH, json=ASK, headers={"x-priority": "high"}).status_code == 200
    assert strict.engine.asked[-1].priority == 1
    assert guarded.post(PATH, json=ASK, headers={"x-priority": "urgent"}).status_code == 400
    for thread in threads:
        thread.join()
    assert [each.status_code for each in answers] == [200, 200]
    assert guarded.post(PATH, json=ASK).status_code == 200


def test_a_deadline_ends_a_request(strict, guarded):
    strict.engine.say("x" * 1000)
    strict.engine.pause_s = 0.05
    late = guarded.post(PATH, json=ASK, headers={"x-deadline-ms": "200"})
    assert late.status_code == 408
    streamed = guarded.post(PATH, json=ASK | {"stream": True}, headers={"x-deadline-ms": "300"}).text
    assert "deadline of 0.3 s" in streamed.rpartition("data: ")[2]
    wait_for(lambda: not strict.engine.open)
    assert guarded.post(PATH, json=ASK, headers={"x-deadline-ms": "-1"}).status_code == 400


def test_a_stream_that_waits_gives_signs_of_life(strict, guarded):
    strict.engine.first_pause_s = 0.5
    for path, body in ((PATH, ASK), ("/v1/messages", ASK | {"max_tokens": 9})):
        text = guarded.post(path, json=body | {"stream": True}).text
        assert text.startswith(": keep-alive\n\n")
        assert text.count(": keep-alive") >= 3


def raw_request(port, body, path=PATH):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + data)
    return connection


def test_a_half_closed_connection_ends_its_request(server):
    server.engine.say("x" * 5000)
    server.engine.pause_s = 0.01
    with raw_request(server.port, ASK | {"stream": True}) as connection:
        connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: not server.engine.open)


def slow_reader(port, body):
    """A connection with a small buffer, on which a request was sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_slow_reader_delays_nobody_and_gets_few_events(server):
    server.engine.say("</think>" + "x" * 15000)
    server.engine.chunk = 1
    with slow_reader(server.port, ASK | {"stream": True}) as connection:
        wait_for(lambda: server.engine.num_steps > 14000)  # the engine did not wait for the reader
        begin = time.monotonic()
        assert httpx.post(f"{server.url}{PATH}", json=ASK | {"max_tokens": 5}).status_code == 200
        assert time.monotonic() - begin < 1
        received = b""
        while not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            received += connection.recv(1 << 20)
    events = [json.loads(each) for each in re.findall(rb"data: (\{.*\})\n", received)]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "x" * 15000
    assert len(events) < 12_000


def test_what_slow_readers_leave_takes_little_memory(server):
    """Waiting tokens are kept as text, so 40 streams of 15,000 tokens do not take the memory of 600,000 records."""
    server.engine.say("</think>" + "x" * 15000)
    server.engine.chunk = 50
    before = memory_bytes()
    connections = [slow_reader(server.port, ASK | {"stream": True}) for _ in range(40)]
    wait_for(lambda: server.engine.num_steps >= 40 * 301, seconds=30)
    assert memory_bytes() - before < 40 << 20
    for connection in connections:
        connection.close()


def memory_bytes():
    """Memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_body_in_tiny_pieces_and_pipelined_requests(server):
    data = json.dumps(ASK).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for at in range(0, len(head + data), 7):
            connection.sendall((head + data)[at : at + 7])
        received = b""
        while b"hello" not in received:
            received += connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        get = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
        connection.sendall(get * 3)
        received = b""
        while received.count(b'"live"') < 3:
            received += connection.recv(4096)


def test_tokens_and_texts(server):
    told = httpx.post(f"{server.url}/tokenize", json={"prompt": "ab"}).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == ([0, 100, 101], 3, 16384)
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": ASK["messages"]}).json()
    assert chat["count"] == httpx.post(f"{server.url}{PATH}", json=ASK).json()["usage"]["prompt_tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": [100, 101]}).json() == {"prompt": "ab"}
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": [10**6]}).status_code == 400
    bare = httpx.post(f"{server.url}/tokenize", json={"prompt": "ab", "add_special_tokens": False, "model": None}).json()
    assert bare["tokens"] == [100, 101]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (
        httpx.post(f"{server.url}/tokenize", json={"messages": ASK["messages"]} | {"tools": tools}).json()["count"]
        > chat["count"]
    )
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": ASK["messages"]}),
        ("/detokenize", {"tokens": [5]}),
    ):
        refused = httpx.post(f"{server.url}{path}", json=body | {"unknown": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "unknown")
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404


def test_a_draining_server_refuses_and_says_so(server):
    server.service.gate.is_draining = True
    try:
        refused = httpx.post(f"{server.url}{PATH}", json=ASK)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/live").status_code == 200
    finally:
        server.service.gate.is_draining = False


def test_metrics_have_our_names_and_those_of_dashboards(server):
    text = httpx.get(f"{server.url}/metrics").text
    assert 'deepinfer_num_requests_running{engine="0"}' in text
    assert 'vllm:num_requests_running{engine="0",model_name="nano"}' in text


@pytest.mark.parametrize("kind", ["x\r\nset-cookie: a=b", "\u2603", "y" * 999])
def test_names_in_headers_cannot_break_the_answer(server, kind):
    body = {"model": "nano", "input": "hi", "tools": [{"type": kind}]}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert len(answer.headers["x-deepinfer-left-out"]) <= 60


def test_the_admin_application_drains_with_its_token_only(server):
    drained = []
    app = make_admin(server.service, "secret", lambda: drained.append(1))

    async def ask(key):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            return (await client.post("/drain", headers={"x-api-key": key})).status_code

    assert asyncio.run(ask("wrong")) == 401
    assert not drained
    assert asyncio.run(ask("secret")) == 200
    assert drained


def nested(depth, kind):
    """A JSON text with so many levels."""
    if kind == "list":
        return "[" * depth + "]" * depth
    if kind == "object":
        return '{"a": ' * depth + "1" + "}" * depth
    return '{"type": "object", "properties": {"a": ' * depth + '{"type": "string"}' + "}}" * depth


@pytest.mark.parametrize("depth", [60, 130, 300, 480, 700, 990, 3000])
@pytest.mark.parametrize("kind", ["list", "object", "schema"])
def test_deep_bodies_are_client_errors_wherever_they_are_deep(guarded, depth, kind):
    deep = nested(depth, kind)
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "a", "strict": true, "schema": {deep}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "strict": true, "parameters": {deep}}}}}'
    bodies = {
        "/v1/chat/completions": [
            f'"messages": {deep}', f'"messages": [], "metadata": {deep}', f'"messages": [{{"role": "user", "content": {deep}}}]',
            f'"messages": [{{"role": "user", "content": "a"}}], "response_format": {schema}',
            f'"messages": [{{"role": "user", "content": "a"}}], "tools": [{tool}], "tool_choice": "required"',
        ],
        "/v1/responses": [
            f'"input": {deep}', f'"input": "a", "metadata": {deep}',
            f'"input": "a", "text": {{"format": {{"type": "json_schema", "name": "a", "strict": true, "schema": {deep}}}}}',
        ],
        "/v1/messages": [
            f'"max_tokens": 9, "messages": {deep}',
            f'"max_tokens": 9, "messages": [], "tools": [{{"name": "f", "input_schema": {deep}}}]',
            f'"max_tokens": 9, "messages": [], "output_format": {{"type": "json_schema", "schema": {deep}}}',
        ],
        "/v1/completions": [f'"prompt": {deep}', f'"prompt": "a", "logit_bias": {deep}', f'"prompt": "a", "stop": {deep}'],
    }  # fmt: skip
    for path, several in bodies.items():
        for body in several:
            content = f'{{"model": "nano", {body}}}'
            answer = guarded.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 413), (path, body[:80], answer.text)


def test_a_body_of_100_megabytes_does_not_stop_the_server(server):
    """It is read and parsed while other requests are answered, and the memory is given back."""
    longest = [0.0]
    is_over = threading.Event()

    def look():
        with httpx.Client(base_url=server.url) as client:
            while not is_over.is_set():
                begin = time.monotonic()
                assert client.get("/live").status_code == 200
                longest[0] = max(longest[0], time.monotonic() - begin)
                time.sleep(0.01)

    before = memory_bytes()
    looking = threading.Thread(target=look)
    looking.start()
    piece = b"x" * 1_000_000
    begin, end = b'{"model": "nano", "messages": [{"role": "user", "content": "hi"}], "user": "', b'"}'

    def pieces(count):
        yield begin
        for _ in range(count):
            yield piece
        yield end

    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post(PATH, content=pieces(100), headers=headers).status_code == 200
        assert client.post(PATH, content=pieces(140), headers=headers).status_code == 413
    is_over.set()
    looking.join()
    assert longest[0] < 2
    gc.collect()
    assert memory_bytes() - before < 50 << 20
