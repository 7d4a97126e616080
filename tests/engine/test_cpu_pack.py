"""A matrix with gaps between its rows, packed for the CPU's kernels, is the same matrix."""

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from rlmath.engines.transports.cpu_load import _join


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()


def _make_gapped(rows, columns, gap):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns + gap, generator=generator)[:, :columns]


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (200, 1280), (7, 33)])
def test_rows_with_gaps_are_packed_as_they_are(rows, columns):
    matrix = _make_gapped(rows, columns, 16)
    runs = [matrix[: rows // 2], matrix[rows // 2 :]]
    joined = _join(runs)
    # No copy was made.
    assert joined.data_ptr() == matrix.data_ptr()
    assert joined.equal(matrix)
    x = torch.randn(5, columns)
    packed, plain = (ops.create_onednn_mm(w.t(), 32) for w in (joined, matrix.contiguous()))
    assert ops.onednn_mm(packed, x, None).equal(ops.onednn_mm(plain, x, None))


def test_runs_apart_are_copied_together():
    a, b = _make_gapped(8, 64, 16), _make_gapped(9, 64, 16)
    assert _join([a, b]).equal(torch.cat([a, b]))
    assert _join([b[4:], b[:4]]).equal(torch.cat([b[4:], b[:4]]))
    plain = torch.randn(8, 64)
    assert _join([plain[:3], plain[3:]]).data_ptr() == plain.data_ptr()
    assert _join([plain, a]).equal(torch.cat([plain, a]))
    # A tensor rank's columns.
    columns = plain[:, 16:32]
    assert _join([columns]).equal(columns)


def test_other_packing_libraries_get_no_gaps(monkeypatch):
    matrix = _make_gapped(8, 64, 16)
    assert not _join([matrix]).is_contiguous()
    import vllm.model_executor.layers.utils as utils

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda n, k, dtype: True)
    joined = _join([matrix])
    assert joined.is_contiguous()
    assert joined.equal(matrix)
