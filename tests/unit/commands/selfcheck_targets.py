"""Checks that end in every way in which one can end, as the selfcheck's processes import them."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path


def good(node, record):
    record.figure("folder", node.folder)
    record.figure("rate", 1234.5678, "tokens/s", limit=">= 1", key=True)


def hangs(node, record):
    record.figure("before", 1, key=True)
    # In its own session, as Ray's processes and vLLM's workers are.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (Path(node.folder) / "child").write_text(str(child.pid))
    with record.phase("the long one"):
        time.sleep(600)


def leaves_an_orphan(node, record):
    code = "from subprocess import *; print(Popen(['sleep', '600'], stdout=2, stderr=2).pid)"
    made = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    (Path(node.folder) / "child").write_text(made.stdout)


def raises(node, record):
    raise ValueError("an unlucky \x1b[31mword")


def segfaults(node, record):
    with record.phase("the kernel"):
        ctypes.string_at(0)


def exits(node, record):
    os._exit(7)


def is_wrong(node, record):
    record.fail("3 is more than 2", "Take 2.")
    record.fail("4 is more than 2")


def not_here(node, record):
    record.not_applicable("", "there is no GPU")


def in_part(node, record):
    record.not_applicable("TP 2", "it needs 2 GPUs, there is 1")
    record.not_applicable("CP 2", "it needs 2 GPUs, there is 1")
