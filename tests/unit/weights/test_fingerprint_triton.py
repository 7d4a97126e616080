"""The kernel for fingerprints on CUDA, in Triton's interpreter, against torch's operators."""

from pathlib import Path

import pytest

from tests.unit.interpreted import run_interpreted

pytestmark = pytest.mark.process


def test_the_kernel_has_torchs_fingerprints(tmp_path):
    """All types, shapes, strides and corners; NaN, infinities, subnormals and both zeros."""
    found = run_interpreted(Path(__file__).with_name("fingerprint_program.py"), tmp_path)
    assert found["cases"] == found["calls"] == 212
    assert found["differ"] == []
