"""Collected by ``launchers/test.sh cuda-wheels`` alone, which says so in the environment."""

from __future__ import annotations

import os

if os.environ.get("RLMATH_CUDA_WHEELS") != "1":
    collect_ignore_glob = ["*"]
