"""The `alignkit watch` server: its responses, its rejections and its listening addresses.

Most tests use starlette's test client; some start the command. `runs.py` writes the records.
"""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markupsafe import escape
from starlette.testclient import TestClient

from alignkit.drift.monitor.records import records_name
from alignkit.errors import InputError, UnsupportedError
from alignkit.watch import plot, server
from tests.cli.conftest import alignkit, without_modules  # noqa: F401

from . import browser, runs

ADDRESSES = ("/", "/live", "/data.json", "/drift.svg", "/watch.js", "/watch.css")


@pytest.fixture
def client(tmp_path):
    return TestClient(server.app(tmp_path, ["localhost", "127.0.0.1"]), base_url="http://127.0.0.1")


def cells(html, table):
    """Return the rows of cells of the table with this id."""

    class Parser(HTMLParser):
        rows, inside, cell = [], False, None

        def handle_starttag(self, tag, attributes):
            self.inside = self.inside or (tag == "table" and dict(attributes).get("id") == table)
            if self.inside and tag == "tr":
                self.rows.append([])
            self.cell = [] if self.inside and tag == "td" else self.cell

        def handle_endtag(self, tag):
            self.inside = self.inside and tag != "table"
            if tag == "td" and self.cell is not None:
                self.rows[-1].append("".join(self.cell))
                self.cell = None

        def handle_data(self, data):
            if self.cell is not None:
                self.cell.append(data)

    parser = Parser()
    parser.rows = []
    parser.feed(html)
    return [row for row in parser.rows if row]


def test_the_page_shows_the_run(tmp_path, client):
    runs.write(tmp_path, range(6), off={4: 0.5}, names="verl")
    runs.write(tmp_path, range(3), rank=1)
    page = client.get("/").text
    assert "1 of 72 logprobs are not bit-equal." in page and runs.CONTRACT in page
    first = " ".join(re.search(r'<p id="first">(.*?)</p>', page, re.DOTALL)[1].split())
    assert first == (
        "First difference: step 4, rank 0, sequence 1, position 2, token 4321: rollout -1.5 "
        "(0xbfc00000), training -1 (0xbf800000)."
    )
    assert [(row[0], row[1], *row[3:]) for row in cells(page, "ranks")] == [
        ("0", "5", "6", "48", "1", "0.5"),
        ("1", "2", "3", "24", "0", "0"),
    ]
    assert '<p id="causes">Cause: unknown: epochs of rollout, weights of rollout and training' in page
    assert cells(page, "worst") == [["4", "0", "1", "2", "4321", "-1.5", "0xbfc00000", "-1", "0xbf800000", "0.5"]]
    assert "replay-rank00000-step4.safetensors" in page
    assert ["drift/max_abs", "0"] in cells(page, "latest")
    assert client.get("/live").text in page
    data = client.get("/data.json").json()
    assert (data["unequal"], data["tokens"]) == (1, 72)
    svg = client.get("/drift.svg")
    assert svg.headers["content-type"] == "image/svg+xml" and xml.etree.ElementTree.fromstring(svg.content)
    assert "<script" not in svg.text


def test_the_page_follows_a_directory_from_empty_to_growing(tmp_path, client):
    assert "No records yet." in client.get("/").text and client.get("/drift.svg").status_code == 200
    runs.write(tmp_path, range(2))
    before, plot_before = client.get("/live").text, client.get("/drift.svg").content
    assert "All 16 logprobs are bit-equal." in before
    assert client.get("/live").text == before and client.get("/drift.svg").content == plot_before
    runs.append(tmp_path, step=2)
    after = client.get("/live").text
    assert "All 24 logprobs are bit-equal." in after and client.get("/drift.svg").content != plot_before
    assert re.search(r"/drift.svg\?\w+", after)[0] != re.search(r"/drift.svg\?\w+", before)[0]


def test_ranks_with_different_contracts_give_a_warning(tmp_path, client):
    runs.write(tmp_path, [0])
    runs.write(tmp_path, [0], rank=1, contract="stock")
    assert "different contracts" in client.get("/").text


def test_causes_follow_the_first_difference(tmp_path, client):
    runs.write(tmp_path, [0])
    runs.append(tmp_path, step=1)
    assert "Cause" not in client.get("/").text
    token = {**dict.fromkeys(("sequence", "position", "token"), 1), "rollout": -1.0, "training": -2.0}
    token |= {"rollout_bits": "0x", "training_bits": "0x"}
    runs.append(tmp_path, step=2, first_difference=token, causes=["<b>", "x" * 300] + ["more"] * 20)
    runs.append(tmp_path, step=3, first_difference=token, causes=["later"])
    shown = re.search(r'<p id="causes">(.*?)</p>', client.get("/").text, re.DOTALL)[1]
    assert shown == f"Causes: &lt;b&gt;; {'x' * 200}; {'; '.join(['more'] * 6)}."


def test_records_without_causes_are_shown(tmp_path, client):
    """Version 0.2 wrote no causes."""
    runs.write(tmp_path, [0], off={0: 0.5})
    path = tmp_path / records_name(0)
    record = json.loads(path.read_text())
    del record["causes"]
    path.write_text(json.dumps(record) + "\n")
    page = client.get("/").text
    assert "First difference: step 0" in page and "Cause" not in page


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&lt;", "{{ 7 * 7 }}"])
def test_text_from_files_is_escaped(tmp_path, text):
    directory = tmp_path / f"run {text.replace('/', '')}"
    runs.write(directory, [0], off={0: 0.5})
    record = json.loads((directory / records_name(0)).read_text())
    bits = {**record["worst"][0], "rollout_bits": text, "training_bits": text}
    runs.append(directory, contract=text, metrics={text: 1.0}, worst=[bits], first_difference=bits)
    client = TestClient(server.app(directory, ["*"]))
    for page in (client.get("/").text, client.get("/live").text):
        assert page.count(str(escape(text))) >= 4 and "<img src=x" not in page and "<script>" not in page
        assert [[text, "1"]] == cells(page, "latest")


def test_every_response_has_security_headers(tmp_path, client):
    runs.write(tmp_path, [0])
    for address in ADDRESSES:
        answer = client.get(address)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "frame-ancestors 'none'" in policy
        assert policy.startswith("default-src 'none'; style-src" if address == "/drift.svg" else "default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store" and answer.headers["referrer-policy"] == "no-referrer"
    page = client.get("/").text
    assert not re.search(r"https?://|<style|style=|<script>|\son\w+=", page)  # content that the policy blocks


def test_other_methods_and_hosts_are_rejected(client):
    for address in ADDRESSES:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.request(method, address).status_code == 405
        assert client.get(address, headers={"host": "evil.example"}).status_code == 400
    assert client.get("/live", headers={"host": "localhost:8765"}).status_code == 200


def test_no_path_serves_another_file(tmp_path):
    directory = tmp_path / "run"
    runs.write(directory, [0])
    secret = "the secret of this test"
    (tmp_path / "secret.txt").write_text(secret)
    (directory / "inside.txt").write_text(secret)
    (directory / "monitor-rank00007.jsonl").symlink_to(tmp_path / "secret.txt")
    with browser.watch(directory) as (_, url):
        address = urlsplit(url)
        for path in (
            "/inside.txt",
            f"/{records_name(0)}",
            "/monitor-rank00007.jsonl",
            "/../secret.txt",
            "//secret.txt",
            "/%2e%2e/secret.txt",
            "/..%2fsecret.txt",
            "/watch.js/../../../../etc/passwd",
            f"/{tmp_path}/secret.txt",
            "/live/../inside.txt",
            "/%00",
            "/data.json%00.txt",
            "/static/server.py",
            "/watch.js/",
            "/server.py",
            "/page.html.j2",
            "*",
            "http://127.0.0.1/inside.txt",
        ):
            # HTTP clients would normalize the path.
            with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
                raw.sendall(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
            assert re.match(r"HTTP/1.1 40[04] ", answer), (path, answer[:100])
            assert secret not in answer and "root:" not in answer
        for query in ("?file=../secret.txt", f"?path={tmp_path}/secret.txt", "?dir=/etc&name=passwd"):
            connection = http.client.HTTPConnection(address.netloc, timeout=30)
            connection.request("GET", "/data.json" + query)
            body = connection.getresponse().read().decode()
            assert secret not in body and len(json.loads(body)["ranks"]) == 1
            connection.close()


def test_the_server_listens_only_on_loopback(tmp_path):
    """Read the bound address from the kernel."""
    with browser.watch(tmp_path) as (process, url):
        port = urlsplit(url).port
        tables = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()
        ]
        # State 0A is LISTEN.
        bound = [row[1].rpartition(":")[0] for row in tables if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
        assert bound == ["0100007F"] and url == f"http://127.0.0.1:{port}/"


@pytest.mark.parametrize(
    "host,accepts_any_host",
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("192.168.0.7", True),
        ("machine", True),
    ],
)
def test_allowed_hosts_depend_on_the_listen_address(host, accepts_any_host):
    assert (server._allowed_hosts(host) == ["*"]) == accepts_any_host


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(tmp_path, number):
    with browser.watch(tmp_path) as (process, _):
        process.send_signal(number)
        assert process.wait(60) == 130
        assert process.stdout.read() == b""


def test_the_command_rejects_invalid_arguments(tmp_path, alignkit, without_modules):  # noqa: F811
    status, _, err = alignkit("watch", tmp_path / "absent")
    assert status == 3 and "DIR: must be an existing directory, got " in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = alignkit("watch", tmp_path, "--port", taken.getsockname()[1])
        assert (
            status == 3 and f"--port: must be free on 127.0.0.1, got {taken.getsockname()[1]}, which is in use" in err
        )
    assert alignkit("watch", tmp_path, "--port", "65536")[0] == 3
    assert alignkit("watch")[0] == 2
    without_modules("uvicorn", "starlette")
    status, _, err = alignkit("watch", tmp_path)
    assert status == 3 and "missing packages: starlette, uvicorn. Run pip install 'alignkit[watch]'" in err


def test_errors_are_alignkit_errors(tmp_path, without_modules):  # noqa: F811
    with pytest.raises(InputError, match="DIR"):
        server.app(tmp_path / "absent", ["*"])
    without_modules("jinja2")
    with pytest.raises(UnsupportedError, match="missing packages: jinja2"):
        server.require_libraries()


def test_importing_the_server_imports_no_web_library():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, alignkit.cli, alignkit.drift, alignkit.watch.server\n"
            "print({'starlette', 'uvicorn', 'matplotlib', 'jinja2'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() in ("set()", "{'jinja2'}"), done.stdout + done.stderr  # torch imports jinja2


def test_many_ranks_are_merged_into_one_curve():
    curves = [{"rank": rank, "points": [[0, 0, 8, rank, None], [1, 1, 8, 0, rank * 0.5]]} for rank in range(9)]
    assert plot._all_ranks(curves) == [[0, 0, 72, 36, None], [1, 1, 72, 0, 4.0]]
    assert plot.svg(curves) != plot.svg(curves[:8]) and xml.etree.ElementTree.fromstring(plot.svg(curves))
