"""The HTML file: one page with its style, its script and its data, and nothing from elsewhere.

Text of the model is only in the data. The data is JSON in a block that no browser runs, in ASCII
and without ``<``, so nothing in it can end the block. The script shows texts as text nodes only.
A Content-Security-Policy in the page forbids every request, and every script and style but the two
whose hashes it has.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rlmath.monitor.files import finite

FOLDER = Path(__file__).parent / "page"
# In the order in which they need each other.
SCRIPTS = (
    "base",
    "charts",
    "curves",
    "times",
    "problems",
    "compare",
    "changes",
    "tokens",
    "samples",
    "main",
)


def page(data: Mapping[str, Any], title: str, refresh_s: int | None = None) -> str:
    """The page's text. ``refresh_s``: the page loads itself again after so long; ``None``: it does
    not."""
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    scripts = "\n".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}\n}})();\n'
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    parts = {
        "POLICY": escape(policy, quote=True).replace("&#x27;", "'"),
        "REFRESH": refresh,
        "TITLE": escape(title),
        "STYLE": style,
        "DATA": to_script_json(data),
        "SCRIPT": script,
    }
    template = (FOLDER / "report.html").read_text(encoding="utf-8")
    # One pass, so that no part can contain the name of another.
    pieces = template.split("@@")
    return "".join(piece if at % 2 == 0 else parts[piece] for at, piece in enumerate(pieces))


def to_script_json(value: Any) -> str:
    """JSON in ASCII that can stand in a ``<script>`` block; U+2028 and single surrogates are
    escapes."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
