"""Installs locked packages beside the Python that runs this: ``install.py [pip's arguments]``.

uv fetches and unpacks many packages at once; pip takes minutes for the same. uv does not read
pip's settings, so it gets them as options here. Where uv is not to be had or fails, pip installs.
"""

from __future__ import annotations

import ast
import compileall
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

UV = "uv==0.13.9"
# pip's settings and the options of uv for the same.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
# Python compiles a file when it is first imported, unless PYTHONDONTWRITEBYTECODE is set, as it is
# in many images. Then each process would compile thousands again. Of these files, half of all,
# hardly one is imported.
SELDOM_IMPORTED = re.compile(
    r"/(transformers/models/(?!auto|gemma|llama|qwen)[^/]*|torch/(_inductor|testing/_internal)"
    r"|vllm/(models|entrypoints/(?!openai))[^/]*|ray/(data|llm|rllib|serve|train|tune)"
    r"|anthropic|datasets|dns|fontTools|mypyc?|numba|pandas|pip|pyarrow|sentry_sdk|setuptools"
    r"|sympy/physics|tests?)/"
)


def main(arguments: Sequence[str]) -> int:
    """Install, then compile; the exit code of pip."""
    if not with_uv(arguments):
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", *arguments]
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
    packages = sysconfig.get_path("purelib")
    compileall.compile_dir(packages, quiet=2, workers=0, rx=SELDOM_IMPORTED)  # type: ignore[arg-type]
    return 0


def with_uv(arguments: Sequence[str]) -> bool:
    """Try it; False: pip has to."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", UV]
        if subprocess.run(pip, check=False, stderr=subprocess.DEVNULL).returncode:
            return False
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = pip_settings(listed.stdout)
    environment = dict(os.environ)
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"])
    environment.setdefault("UV_HTTP_TIMEOUT", settings.get("default-timeout", "60"))
    command = [str(uv), "pip", "install", "-q", "--python", sys.executable, "--no-deps"]
    command += [*uv_options(settings, arguments), *arguments]
    return subprocess.run(command, check=False, env=environment).returncode == 0


def pip_settings(listed: str) -> dict[str, str]:
    """Output of ``pip config list`` by name; the environment goes before files."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        match = re.fullmatch(r"(:env:|global|install)\.([a-z-]+)=(.*)", line)
        if match:
            found[match[2]] = str(ast.literal_eval(match[3]))
    return found


def uv_options(settings: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """pip's settings as options of uv. An index among the arguments replaces the others."""
    # As pip does: the best version of all indexes, not those of the first index that has any.
    found = ["--index-strategy", "unsafe-best-match"]
    for name, option in OPTIONS.items():
        if "index" in name and "--index-url" in arguments:
            continue
        for value in settings.get(name, "").split():
            found += [option, value]
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
