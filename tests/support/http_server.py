"""A real HTTP server on this machine whose replies a test decides."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request and the means to answer it."""

    protocol_version = "HTTP/1.0"

    def do_POST(self):
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(self.body)
        self.server.seen_headers.append(dict(self.headers))
        self.do_GET()

    def do_GET(self):
        # The caller may have given up, as some tests mean it to.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.server.answer(self)

    do_HEAD = do_GET

    def reply(self, value, status=200, headers=None):
        self.raw(json.dumps(value).encode(), status, headers)

    def raw(self, data, status=200, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Takes many connections at once: with the usual queue of five, the kernel drops some and tries
    again seconds later."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False


@contextmanager
def serve(answer, path="/reward"):
    """The server, with ``url``, and the ``requests`` and ``seen_headers`` that were posted."""
    server = Server(("127.0.0.1", 0), Exchange)
    server.answer = answer
    server.requests = []
    server.seen_headers = []
    server.url = f"http://127.0.0.1:{server.server_port}{path}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
