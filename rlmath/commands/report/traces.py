"""Traces of profiled steps, as links of the page."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from rlmath.config.profile import PROFILE_FOLDER

# Most links of a run on many ranks; the folder has all traces.
MAX_LINKS = 100


def traces_of(run_dir: Path, page_dir: Path) -> list[list[str]]:
    """Name and relative address (from ``page_dir``) of each trace in a run's folder, then of the
    folder where there are more than ``MAX_LINKS``."""
    folder = run_dir / PROFILE_FOLDER
    files = [file for file in sorted(folder.rglob("[!.]*")) if file.is_file()]
    named = [(str(file.relative_to(folder)), file) for file in files[:MAX_LINKS]]
    if len(files) > MAX_LINKS:
        named.append((f"and {len(files) - MAX_LINKS:,} more", folder))
    return [[name, quote(os.path.relpath(file, page_dir))] for name, file in named]
