"""A model behind a server: a real one on this machine, which speaks the protocol, and speaks it badly."""

from __future__ import annotations

import base64
import email.utils
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from embedding_server import DIM, Handler, changed, serving, status, true_vector, usual

from vecferry import load_encoder
from vecferry.encoders import endpoint as module
from vecferry.encoders.endpoint import EndpointBackend
from vecferry.errors import DataError, StoppedError, UsageError

KEY = "sk-secret-0123456789"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens: what is here is asked directly
    with serving() as made:
        yield made


def backend(server: Any, **options: Any) -> EndpointBackend:
    return EndpointBackend(server.url, "m", **({"first_wait": 0.01, "timeout": 5.0} | options))


def expected(texts: list[str]) -> np.ndarray:
    return np.array([true_vector(t) for t in texts], np.float32)


def test_the_request_is_that_of_the_protocol_and_rows_come_back_in_order(server):
    encoder = load_encoder("m", endpoint=server.url + "/", prompt="doc: {text}", query_prompt="ask: {text}")
    texts = ["b", "a much longer text", "cc", "d"]
    out = encoder.encode(texts, batch_size=3)
    np.testing.assert_allclose(out, expected([f"doc: {t}" for t in texts]), atol=1e-6)
    np.testing.assert_allclose(encoder.encode(["b"], side="query"), expected(["ask: b"]), atol=1e-6)
    _, path, headers, asked = server.seen[1]
    assert path == "/v1/embeddings"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert asked == {"model": "m", "encoding_format": "float", "input": [f"doc: {texts[i]}" for i in (1, 2, 0)]}
    assert [len(s[3]["input"]) for s in server.seen] == [1, 3, 1, 1]  # the probe for the dimension, 4 texts, 1 query
    assert (encoder.dim, encoder.normalize, encoder.max_length) == (DIM, True, None)
    assert encoder.identity.startswith("m@")


def test_shuffled_rows_are_put_in_order_by_index(server):
    def shuffle(reply: dict[str, Any]) -> None:
        reply["data"] = reply["data"][::-1]

    one = backend(server)
    server.script = [changed(shuffle)]
    texts = ["x", "y", "z"]
    np.testing.assert_array_equal(one.embed("{text}", texts), expected(texts))


def test_base64_is_read_as_little_endian_float32(server):
    def encode(reply: dict[str, Any]) -> None:
        for item in reply["data"]:
            item["embedding"] = base64.b64encode(np.array(item["embedding"], "<f4").tobytes()).decode()

    server.script = [changed(encode), changed(encode)]
    np.testing.assert_array_equal(backend(server).embed("{text}", ["x", "y"]), expected(["x", "y"]))


def drop_last(reply: dict[str, Any]) -> None:
    reply["data"].pop()


def same_index(reply: dict[str, Any]) -> None:
    reply["data"][1]["index"] = 0


def other_dim(reply: dict[str, Any]) -> None:
    for item in reply["data"]:
        item["embedding"] = item["embedding"][:4]


def ragged(reply: dict[str, Any]) -> None:
    reply["data"][1]["embedding"] = [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_last, "2 texts were sent, 1 vectors with 1 different indexes came back"),
        (same_index, "2 texts were sent, 2 vectors with 1 different indexes came back"),
        (other_dim, "6 dimensions expected, the answer has 4"),
        (ragged, "6 dimensions expected, the answer has 1 and 6"),
        (lambda reply: {"error": "no"}, "the answer isn't that of /v1/embeddings: KeyError"),
        (lambda reply: [1], "the answer isn't that of /v1/embeddings"),
        (lambda reply: {"data": [{"index": 0, "embedding": [[1.0]]}]}, "the answer isn't that of /v1/embeddings"),
        (lambda reply: {"data": [{"index": 0, "embedding": "?"}]}, "the answer isn't that of /v1/embeddings"),
    ],
)
def test_answers_that_are_wrong_are_refused_at_once(server, change, message):
    one = backend(server)
    server.script, before = [changed(change)], len(server.seen)
    with pytest.raises(DataError) as error:
        one.embed("{text}", ["x", "y"])
    assert message in str(error.value)
    assert len(server.seen) == before + 1


@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_may_pass_is_tried_again_after_waits_that_double(server, code):
    one = backend(server, first_wait=0.1)
    server.script, before = [status(code), status(code), status(code)], len(server.seen)
    np.testing.assert_array_equal(one.embed("{text}", ["x"]), expected(["x"]))
    times = np.array([s[0] for s in server.seen[before:]])
    assert len(times) == 4
    for wait, due in zip(np.diff(times), (0.1, 0.2, 0.4), strict=True):
        assert 0.75 * due <= wait < 1.25 * due + 0.5


def test_retry_after_is_obeyed_as_seconds_and_as_a_date(server):
    one = backend(server)
    server.script, before = [status(429, Retry_After="0.4")], len(server.seen)
    one.embed("{text}", ["x"])
    first, second = (s[0] for s in server.seen[before:])
    assert second - first >= 0.4
    assert module._retry_after("7") == 7
    assert module._retry_after("nonsense") == module._retry_after(None) == 0
    at = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 28 < module._retry_after(at) <= 30


def test_a_quota_that_is_used_up_for_long_stops_the_work_at_once(server):
    one = backend(server)
    server.script, before = [status(429, Retry_After="86400")], len(server.seen)
    with pytest.raises(StoppedError, match=r"429 Too Many Requests: busy and asks to wait 86,400 s"):
        one.embed("{text}", ["x"])
    assert len(server.seen) == before + 1


def test_an_answer_that_is_cut_short_is_asked_for_again(server):
    def cut(handler: Handler, asked: dict[str, Any]) -> None:
        body = json.dumps(usual(asked["input"])).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])

    def no_json(handler: Handler, asked: dict[str, Any]) -> None:
        handler.send(200, json.dumps(usual(asked["input"])).encode()[:40])

    one = backend(server)
    server.script, before = [cut, no_json], len(server.seen)
    np.testing.assert_array_equal(one.embed("{text}", ["x"]), expected(["x"]))
    assert len(server.seen) == before + 3


def test_a_server_that_is_too_slow_is_given_up_and_says_that_work_is_kept(server):
    def slow(handler: Handler, asked: dict[str, Any]) -> None:
        time.sleep(0.6)

    one = backend(server, timeout=0.2, tries=2)
    server.script = [slow, slow]
    with pytest.raises(StoppedError, match=r"no answer \(TimeoutError.*given up after 2 tries") as error:
        one.embed("{text}", ["x"])
    assert error.value.exit_code == 5


def test_nobody_listening_is_a_stop_and_not_a_traceback(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(StoppedError, match="ConnectionRefusedError"):
        backend(server, tries=2)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (401, UsageError, "wants a key, and none is in $OPENAI_API_KEY (401 Unauthorized: busy)"),
        (404, UsageError, "has no model 'm', or is no OpenAI-compatible address"),
        (400, DataError, "refuses the request (400 Bad Request: busy)"),
        (307, UsageError, "points to another address"),
    ],
)
def test_refusals_are_not_tried_again(server, code, kind, message):
    one = backend(server)
    server.script, before = [status(code, Location=server.url + "/elsewhere")], len(server.seen)
    with pytest.raises(kind) as error:
        one.embed("{text}", ["x"])
    assert message in str(error.value)
    assert len(server.seen) == before + 1


def test_the_key_is_sent_and_seen_nowhere_else(server, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OTHER_KEY", KEY)
    encoder = load_encoder("m", endpoint=server.url, key_variable="OTHER_KEY")
    assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"
    messages = []
    for code in (401, 400, 302):
        server.script = [status(code, f"Incorrect API key provided: {KEY}".encode(), Location="http://127.0.0.1:1/")]
        with pytest.raises((UsageError, DataError)) as error:
            encoder.encode(["x"])
        messages.append(str(error.value))
    assert "refuses the key in $OTHER_KEY (401 Unauthorized: Incorrect API key provided: ***)" in messages[0]
    held = [repr(vars(encoder.backend)), repr(encoder), encoder.identity, str(encoder.facts()), caplog.text, *messages]
    assert not any(KEY in text for text in held)
    monkeypatch.setenv("OTHER_KEY", KEY + "\nX-Injected: 1")
    with pytest.raises(UsageError, match=r"the key in \$OTHER_KEY holds characters that no key has") as error:
        encoder.encode(["x"])
    assert KEY not in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:pass@host/v1", "without a key or anything else in it"),
        ("https://host/v1?key=abc", "without a key or anything else in it"),
        ("ftp://host/v1", "an endpoint is an address such as"),
        ("host:80", "an endpoint is an address such as"),
        ("http://host:99999/v1", "an endpoint is an address such as"),
        ("http://example.com/v1", "would go over the network in the open: use https"),
    ],
)
def test_addresses_that_would_leak_a_key_are_refused(monkeypatch, url, message):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UsageError) as error:
        EndpointBackend(url, "m")
    assert message in str(error.value)
    assert not any(secret in str(error.value) for secret in (KEY, "pass", "abc"))


def test_requests_keep_the_pace_that_was_asked_for(server):
    encoder = load_encoder("m", endpoint=server.url, requests_per_minute=600)
    encoder.encode(["a", "b", "c"], batch_size=1)
    times = np.array([s[0] for s in server.seen])
    assert np.diff(times).min() > 0.09


def test_what_runs_on_a_server_is_not_pooled_here(server):
    for options in ({"pooling": "mean"}, {"max_length": 9}, {"prompt": "promptEOL"}):
        with pytest.raises(UsageError, match="are for models that run here"):
            load_encoder("m", endpoint=server.url, **options)
