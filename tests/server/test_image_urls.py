"""Images from addresses: strangers cannot make the server reach its own network, and an allowed address works."""

import base64
import functools
import http.server
import threading
import time

import httpx
import pytest

from deepinfer.errors import RequestError
from deepinfer.server.serve import fetch_image, is_global
from tests.server.scripted import Server
from tests.server.test_chat import picture

LOOPBACK = ("127.0.0.1", "127.0.0.2")


class Host:
    """Web servers on two addresses of this machine; ``asked`` has the requests that each of them got."""

    def __init__(self):
        self.asked = {each: [] for each in LOOPBACK}
        self.delay_s = 0.0
        host = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                host.asked[self.server.server_address[0]].append(self.path)
                time.sleep(host.delay_s)
                if self.path.startswith("/to/"):
                    self.send_response(302)
                    self.send_header("location", base64.urlsafe_b64decode(self.path[4:]).decode())
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                data = picture(60, 40)
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args):
                pass

        self.servers = [http.server.ThreadingHTTPServer((each, 0), Handler) for each in LOOPBACK]
        self.first, self.second = (f"http://{each.server_address[0]}:{each.server_port}" for each in self.servers)
        for each in self.servers:
            each.daemon_threads = True
            threading.Thread(target=each.serve_forever, daemon=True).start()

    def redirect(self, url):
        """An address on the first server that leads to ``url``."""
        return f"{self.first}/to/{base64.urlsafe_b64encode(url.encode()).decode()}"

    def close(self):
        for each in self.servers:
            each.shutdown()
            each.server_close()


@pytest.fixture(scope="module")
def shared_host():
    made = Host()
    yield made
    made.close()


@pytest.fixture
def host(shared_host):
    for each in shared_host.asked.values():
        each.clear()
    shared_host.delay_s = 0.0
    return shared_host


def is_first(_host, address):
    """The rule of these tests: the first server stands for the public internet."""
    return address == LOOPBACK[0]


fetch = functools.partial(fetch_image, is_allowed=is_first)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True), ("2001:4860:4860::8888", True), ("127.0.0.1", False), ("10.0.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("::1", False), ("::ffff:10.0.0.1", False), ("fe80::1", False),
        ("fd00::1", False), ("224.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False),
    ],
)  # fmt: skip
def test_images_come_from_global_addresses_only(address, expected):
    assert is_global("host", address) is expected


@pytest.mark.parametrize(
    "place",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]",
     "0.0.0.0", "10.0.0.1", "192.168.0.1", "169.254.169.254", "[fe80::1]", "8.8.8.8@127.0.0.1", "[64:ff9b::7f00:1]"],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_fetched(host, place):
    port = host.servers[0].server_port
    begin = time.monotonic()
    with pytest.raises(RequestError, match="cannot be fetched"):
        fetch_image(f"http://{place}:{port}/x.png")
    assert time.monotonic() - begin < 5
    assert not host.asked[LOOPBACK[0]]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "http://", "http://[", "x"])
def test_other_addresses_are_refused(url):
    with pytest.raises(RequestError, match="cannot be fetched"):
        fetch_image(url)


def test_an_allowed_address_gives_its_image(host):
    assert fetch(f"{host.first}/x.png") == picture(60, 40)
    assert fetch(host.redirect(f"{host.first}/y.png")) == picture(60, 40)
    assert len(host.asked[LOOPBACK[0]]) == 3


def test_a_redirect_does_not_lead_to_an_address_that_is_not_allowed(host):
    for target in (f"{host.second}/x.png", f"http://[::ffff:{LOOPBACK[1]}]:{host.servers[1].server_port}/x.png"):
        with pytest.raises(RequestError, match="cannot be fetched"):
            fetch(host.redirect(target))
    with pytest.raises(RequestError, match="cannot be fetched"):
        fetch(host.redirect("file:///etc/passwd"))
    assert not host.asked[LOOPBACK[1]]


def test_a_name_that_changes_its_address_after_the_check_is_not_looked_up_again(host):
    """A second lookup would be judged again, and its address refused."""
    judged = []

    def is_allowed(name, address):
        judged.append((name, address))
        return address == LOOPBACK[0] and judged.count((name, address)) == 1

    url = f"http://localhost:{host.servers[0].server_port}"
    assert fetch_image(f"{url}/x.png", is_allowed) == picture(60, 40)
    assert judged.count(("localhost", LOOPBACK[0])) == 1
    with pytest.raises(RequestError, match="cannot be fetched"):
        fetch_image(f"{url}/x.png", is_allowed)
    assert len(host.asked[LOOPBACK[0]]) == 1


def body(url):
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "nano", "messages": [{"role": "user", "content": content}]}


def test_a_request_with_an_address_through_the_server(host):
    server = Server(fetch=fetch, served_model_names=("nano",))
    with httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.post("/v1/chat/completions", json=body(f"{host.first}/x.png")).status_code == 200
        assert server.engine.asked[-1].images == [picture(60, 40)]
        for refused in (f"{host.second}/x.png", host.redirect(f"{host.second}/x.png")):
            answer = client.post("/v1/chat/completions", json=body(refused))
            assert answer.status_code == 400
            assert "cannot be fetched" in answer.json()["error"]["message"]
    server.close()


def test_hosts_that_answer_slowly_do_not_delay_other_requests(host):
    server = Server(fetch=fetch, served_model_names=("nano",))
    host.delay_s = 2.0
    with httpx.Client(base_url=server.url, timeout=20) as client:
        slow = [
            threading.Thread(target=lambda: client.post("/v1/chat/completions", json=body(f"{host.first}/x.png")))
            for _ in range(5)
        ]
        for each in slow:
            each.start()
        time.sleep(0.2)
        begin = time.monotonic()
        ask = {"model": "nano", "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=ask).status_code == 200
        assert time.monotonic() - begin < 1
        for each in slow:
            each.join()
    server.close()


def test_without_the_option_no_address_is_fetched(server, host):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(f"{host.first}/x.png"))
    assert answer.status_code == 400
    assert not host.asked[LOOPBACK[0]]
