"""Headless Chromium over a pipe, by the DevTools protocol, with the standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WITHOUT = (
    "needs chromium, chromium-browser or google-chrome on PATH; the page's structure is tested"
)


HANGS_AFTER_S = 120.0
# Functions of the tests in the page.
HELPERS = """
window.$ = (query) => document.querySelector(query);
window.$$ = (query) => [...document.querySelectorAll(query)];
window.set = (id, value, kind = "input") => {
  const field = document.getElementById(id);
  field.value = value;
  field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : kind, {bubbles: true}));
};
window.choose = (query, value) => {
  const field = $(query);
  field.value = value;
  field.dispatchEvent(new Event("change", {bubbles: true}));
};
window.shown = () => $$("ul.list li").map((item) => item.textContent);
window.count = () => $("#samples [role=status]").textContent;
"""


class Browser:
    """One tab.

    Attributes:
        events: Events that the browser reported, in order.
    """

    def __init__(self, to_browser, from_browser):
        self._to = os.fdopen(to_browser, "wb", buffering=0)
        self._from = os.fdopen(from_browser, "rb", buffering=0)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url):
        """Go to a page, and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script):
        """The value of an expression in the page, or what its promise gives."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression):
        """Until an expression in the page is true."""
        self.run(
            f"""new Promise((done) => {{
              const look = () => ({expression}) ? done() : setTimeout(look, 10);
              look();
            }})"""
        )

    def press(self, key, code, text=""):
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def problems(self):
        """Errors, messages of the console, and requests of anything but files."""
        found = []
        for event in self.events:
            method, said = event["method"], event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(said)[:400])
            if method == "Network.requestWillBeSent":
                url = said["request"]["url"]
                found += [] if url.startswith("file:") else [url]
        return found

    def _read(self):
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._from], [], [], HANGS_AFTER_S)
            assert ready, "the browser says nothing, or what was waited for never came"
            piece = os.read(self._from.fileno(), 1 << 20)
            assert piece, "the browser has ended"
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def open_browser():
    """A browser for the length of the block."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-extensions"]
        options += [f"--user-data-dir={profile}", "about:blank"]
        # The protocol's ends are file descriptors 3 and 4.
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            browser = Browser(ours_out, ours_in)
            yield browser
            browser._session = None
            browser.call("Browser.close")
        finally:
            process.kill()
            process.wait()
