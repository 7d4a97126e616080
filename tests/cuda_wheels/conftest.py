"""Collected by ``launchers/test.sh cuda-wheels`` alone, which says so in the environment."""

import os

if os.environ.get("RLMATH_CUDA_WHEELS") != "1":
    collect_ignore_glob = ["*"]
