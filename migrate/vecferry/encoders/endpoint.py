"""A model behind an OpenAI-compatible server: POST {base}/embeddings."""

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import logging
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vecferry.encoders.prompts import Prompt, fill
from vecferry.errors import DataError, StoppedError, UsageError
from vecferry.linear import Floats

log = logging.getLogger("vecferry")

KEY_VARIABLE = "OPENAI_API_KEY"
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LONGEST_WAIT = 600.0
"""Seconds; a server that asks for more (a quota used up) is left, and the work can be taken up later."""
MOST_BYTES = 1 << 28
"""Of an answer: 2,000 vectors of 4,096 numbers as text are a fifth of it."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: the key would go to wherever the answer points."""


class EndpointBackend:
    """Ask a server for vectors; a `Backend`.

    The key, if the server wants one, is read from the environment for each request, and is in no attribute, log or
    message. What may pass (no connection, 429, 5xx, a broken answer) is tried again, `tries` times in all, after
    Retry-After or waits that double from `first_wait` seconds; then StoppedError is raised. `requests_per_minute` is
    the pace to keep.
    """

    pooling = "server"
    max_length: int | None = None
    prompt: Prompt | None = None

    def __init__(
        self,
        url: str,
        model: str,
        *,
        revision: str = "",
        key_variable: str = KEY_VARIABLE,
        requests_per_minute: float | None = None,
        timeout: float = 120.0,
        tries: int = 6,
        first_wait: float = 1.0,
    ) -> None:
        self.name, self.revision = model, revision
        self._url = _checked(url, key_variable)
        self._variable = key_variable
        self._pause = 60 / requests_per_minute if requests_per_minute else 0.0
        self._timeout, self._tries, self._first_wait = timeout, tries, first_wait
        self._next = 0.0
        # what is on this machine is asked directly: a proxy would be handed the key in the open
        direct = [urllib.request.ProxyHandler({})] if _is_here(urlsplit(self._url).hostname or "") else []
        self._opener = urllib.request.build_opener(_NoRedirect, *direct)
        self.dim = 0
        (probe,) = self._ask(["dimension"])
        self.dim = len(probe)
        self.normalized = bool(abs(np.linalg.norm(probe) - 1) < 1e-3)

    def embed(self, template: str, texts: list[str]) -> Floats:
        """Return the vectors `[n, dim]` of one batch, from one request."""
        return self._ask([fill(template, text)[0] for text in texts])

    def _ask(self, texts: list[str]) -> Floats:
        body = json.dumps({"model": self.name, "input": texts, "encoding_format": "float"}).encode()
        for attempt in range(self._tries):
            self._keep_pace()
            try:
                return self._vectors(self._post(body), len(texts))
            except _Passing as fault:
                if attempt == self._tries - 1 or fault.wait > LONGEST_WAIT:
                    asked = f" and asks to wait {fault.wait:,.0f} s" if fault.wait > LONGEST_WAIT else ""
                    raise StoppedError(
                        f"{self._url}: {fault}{asked}; given up after {attempt + 1} tries: the same command goes on "
                        "from what was encoded and kept"
                    ) from None
                wait = fault.wait or self._first_wait * 2**attempt * random.uniform(0.75, 1.25)
                log.info("%s: %s; next try in %.1f s", self._url, fault, wait)
                time.sleep(wait)
        raise UsageError(f"{self._tries} tries are none: choose 1 or more")

    def _keep_pace(self) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._pause

    def _post(self, body: bytes) -> bytes:
        """Return the answer's bytes; raise _Passing for what may be gone at the next try."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self._variable, "")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with self._opener.open(request, timeout=self._timeout) as answer:
                data: bytes = answer.read(MOST_BYTES + 1)
                told = answer.headers.get("Content-Length")
        except urllib.error.HTTPError as error:
            raise self._refusal(error, key) from None
        except ValueError:  # what urllib says of a header holds the header
            raise UsageError(f"the key in ${self._variable} holds characters that no key has") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise UsageError(f"{self._url}: no secure connection: {reason}") from None
            raise _Passing(f"no answer ({type(reason).__name__}: {reason})") from None
        if len(data) > MOST_BYTES:
            raise DataError(f"{self._url} answers with more than {MOST_BYTES:,} bytes: lower --batch-size")
        if told is not None and told.isdigit() and len(data) < int(told):
            raise _Passing(f"the answer ends after {len(data)} of {told} bytes")
        return data

    def _refusal(self, error: urllib.error.HTTPError, key: str) -> Exception:
        """Return what to raise for a status that isn't success."""
        try:
            said = error.read(2000).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            said = ""
        said = " ".join((said.replace(key, "***") if key else said).split())[:300]
        status = f"{error.code} {http.client.responses.get(error.code, '')}".strip() + (f": {said}" if said else "")
        if error.code in TRANSIENT:
            return _Passing(status, _retry_after(error.headers.get("Retry-After")))
        if error.code in (401, 403):
            having = "refuses the key in" if key else "wants a key, and none is in"
            return UsageError(f"{self._url} {having} ${self._variable} ({status})")
        if 300 <= error.code < 400:
            return UsageError(f"{self._url} points to another address ({status}): give that one as --endpoint")
        if error.code in (404, 405):
            return UsageError(
                f"{self._url} has no model {self.name!r}, or is no OpenAI-compatible address ({status}): the base "
                "often ends in /v1"
            )
        return DataError(
            f"{self._url} refuses the request ({status}): a text may be too long, or --batch-size too large"
        )

    def _vectors(self, data: bytes, count: int) -> Floats:
        """Read the vectors out of an answer, in the order of the texts."""
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Passing(
                f"the answer is no JSON, or cut short ({len(data):,} bytes): {type(error).__name__}"
            ) from None
        where = f"{self._url}, model {self.name!r}"
        try:
            rows = {int(item["index"]): _numbers(item["embedding"]) for item in answer["data"]}
            given = len(answer["data"])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise DataError(f"{where}: the answer isn't that of /v1/embeddings: {error!r}") from None
        if given != count or sorted(rows) != list(range(count)):
            raise DataError(
                f"{where}: {count} texts were sent, {given} vectors with {len(rows)} different indexes came back"
            )
        dims = sorted({len(row) for row in rows.values()})
        if len(dims) > 1 or (self.dim and dims != [self.dim]):
            wanted = f"{self.dim} dimensions" if self.dim else "vectors of one dimension"
            raise DataError(f"{where}: {wanted} expected, the answer has {' and '.join(map(str, dims))}")
        return np.stack([rows[i] for i in range(count)])


class _Passing(Exception):
    """Raised for what may be gone at the next try; `wait` are the seconds that the server asks for, 0 for none."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def _checked(url: str, key_variable: str) -> str:
    """Return the address to post to; refuse what would send a key in the open or keep one in an address."""
    parts = urlsplit(url)
    try:
        host = parts.hostname
        known = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        host, known = None, False
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            f"--endpoint is {parts.scheme}://HOST/v1, without a key or anything else in it: the key is read from "
            f"${key_variable}"
        )
    if not known or host is None:
        raise UsageError(f"{url}: an endpoint is an address such as https://api.example.com/v1")
    if parts.scheme == "http" and os.environ.get(key_variable) and not _is_here(host):
        raise UsageError(f"{url}: the key in ${key_variable} would go over the network in the open: use https")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}" + ("" if path.endswith("/embeddings") else "/embeddings")


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _numbers(given: Any) -> Floats:
    """Return one vector, from a list of numbers or from base64 of little-endian float32."""
    if isinstance(given, str):
        return np.frombuffer(base64.b64decode(given, validate=True), "<f4").astype(np.float32)
    vector = np.array(given, np.float64).astype(np.float32)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"an embedding is {type(given).__name__} of shape {list(vector.shape)}")
    return vector


def _retry_after(value: str | None) -> float:
    """Return the seconds of a Retry-After header, which holds a number or a date; 0 for none or nonsense."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
