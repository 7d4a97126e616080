"""POST JSON and get JSON, with a deadline for the whole exchange.

A socket timeout restarts with every byte, so a slow server could block a caller forever. Here a
watchdog closes the connection at the deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 3.0


class CallFailed(Exception):
    """One call to a server failed."""

    def __init__(self, message: str, *, retry: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry = retry  # Whether the same call may succeed later or on another server.
        # Pause that the server asked for, in seconds; 0 if none.
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Endpoint:
    url: str
    https: bool
    host: str
    port: int | None
    path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises ValueError if ``url`` is not an http(s) address."""
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(url.strip(), parts.scheme == "https", parts.hostname, parts.port, path)

    @property
    def port_number(self) -> int:
        return self.port or (443 if self.https else 80)


def unreachable(endpoint: Endpoint) -> str | None:
    """Why the server cannot be reached; ``None`` if it can."""
    try:
        socket.create_connection((endpoint.host, endpoint.port_number), PROBE_TIMEOUT_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return None


def post_json(
    endpoint: Endpoint,
    body: Any,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    max_reply_mib: int = 64,
) -> Any:
    """Send ``body`` and return the reply. Raises CallFailed: no connection, no reply in time, a
    status other than 2xx, or invalid JSON."""
    data = json.dumps(body, default=str).encode()
    deadline = time.monotonic() + timeout_s
    make = http.client.HTTPSConnection if endpoint.https else http.client.HTTPConnection
    connection = make(endpoint.host, endpoint.port, timeout=timeout_s)
    expired = threading.Event()

    def cut(sock: socket.socket) -> None:
        expired.set()
        with contextlib.suppress(OSError):  # It may be closed already.
            sock.shutdown(socket.SHUT_RDWR)

    watchdog: threading.Timer | None = None
    try:
        connection.connect()
        # http.client forgets the socket of a reply that ends with the connection.
        remaining_s = max(0.0, deadline - time.monotonic())
        watchdog = threading.Timer(remaining_s, cut, args=(connection.sock,))
        watchdog.daemon = True
        watchdog.start()
        connection.request(
            "POST",
            endpoint.path,
            body=data,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        response = connection.getresponse()
        limit = max_reply_mib * 2**20
        raw = response.read(limit + 1)
        if expired.is_set():
            raise TimeoutError
        if len(raw) > limit:
            raise CallFailed(f"{endpoint.url}: a reply over {max_reply_mib} MiB", retry=False)
        return _decode(endpoint, response, raw)
    except (OSError, http.client.HTTPException) as error:
        if expired.is_set() or isinstance(error, TimeoutError):
            raise CallFailed(f"{endpoint.url}: no reply within {timeout_s:g} s") from error
        raise CallFailed(f"{endpoint.url}: {type(error).__name__}: {error}") from error
    finally:
        if watchdog is not None:
            watchdog.cancel()
        connection.close()


def _decode(endpoint: Endpoint, response: http.client.HTTPResponse, raw: bytes) -> Any:
    if not 200 <= response.status < 300:
        text = raw[:200].decode("utf-8", "replace")
        # A rejected request stays rejected; overload and server errors may pass.
        passing = response.status in (408, 425, 429) or response.status >= 500
        after = response.headers.get("Retry-After", "")
        raise CallFailed(
            f"{endpoint.url}: status {response.status}: {text}",
            retry=passing,
            retry_after_s=float(after) if after.isdigit() else 0.0,
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CallFailed(
            f"{endpoint.url}: the reply is no JSON: {raw[:80].decode('utf-8', 'replace')!r}"
        ) from error
