"""Records of NCCL collectives, which show the ranks that did not enter one that timed out.

Each rank records its collectives. When one times out, torch writes all ranks' records to the run's
logs and the ranks end; torch's own analyzer then compares the records.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Followed by a rank's number.
PREFIX = "nccl_trace_rank_"
RECORDS = 2000
TIMEOUT_S = 120.0
MOST_LINES = 40


def recorder_environment(log_dir: str) -> dict[str, str]:
    """Environment variables that make a rank record and write its records to a folder."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(RECORDS),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{log_dir}/{PREFIX}",
    }


def remove_records(log_dir: str) -> None:
    for file in Path(log_dir).glob(f"{PREFIX}*"):
        file.unlink(missing_ok=True)


def explain_records(log_dir: str) -> str:
    """The report of torch's analyzer on the ranks' records, for the end of an error message; empty
    when there are none."""
    if not list(Path(log_dir).glob(f"{PREFIX}*")):
        return ""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.flight_recorder.fr_trace"]
    command += ["--allow-incomplete-ranks", "--prefix", PREFIX, log_dir]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"\n(no analysis within {TIMEOUT_S:g} s: {' '.join(command)})"
    said = [line for line in done.stdout.splitlines() if line.strip() and "tabulate" not in line]
    lines = said[:MOST_LINES]
    return "\n".join([f"\n--- collectives that ranks did not all enter ({log_dir})", *lines, "---"])
