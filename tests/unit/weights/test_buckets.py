"""Places of tensors in a bucket's flat buffer."""

import pytest
import torch

from rlmath.weights.buckets import TensorMeta, cut_into_buckets, view_in_buffer


@pytest.mark.parametrize(
    ("shape", "dtype", "stride_bytes"),
    [
        # 1280 x 4 = 5120 bytes = 80 cache lines, an even number: one more.
        ((7, 1280), torch.float32, 5120 + 64),
        ((7, 1296), torch.float32, 1296 * 4),
        ((7, 1280), torch.bfloat16, 2560 + 64),
        ((7, 33), torch.bfloat16, 66),
        ((0, 1280), torch.float32, 5120 + 64),
        ((7,), torch.float32, 0),
        ((2, 3, 64), torch.float32, 0),
    ],
)
def test_rows_of_a_matrix_are_an_odd_number_of_cache_lines_apart(shape, dtype, stride_bytes):
    meta = TensorMeta("one", shape, dtype)
    assert meta.row_stride_bytes == stride_bytes
    (bucket,) = cut_into_buckets([meta], 1)
    view = view_in_buffer(torch.zeros(bucket.num_bytes, dtype=torch.uint8), bucket.tensors[0])
    assert view.shape == torch.Size(shape)
    if stride_bytes and shape[0]:
        assert view.stride() == (stride_bytes // dtype.itemsize, 1)
    assert meta.num_bytes == torch.Size(shape).numel() * dtype.itemsize


def test_tensors_of_a_bucket_keep_out_of_each_others_way():
    metas = [
        TensorMeta(str(i), shape, dtype)
        for i, (shape, dtype) in enumerate(
            [
                ((5, 64), torch.float32),
                ((3,), torch.bfloat16),
                ((9, 17), torch.float32),
                ((4, 2, 32), torch.float32),
                ((16, 128), torch.bfloat16),
            ]
        )
    ]
    (bucket,) = cut_into_buckets(metas, 1)
    buffer = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
    values = {meta.name: torch.randn(meta.shape).to(meta.dtype) for meta in metas}
    for tensor in bucket.tensors:
        view_in_buffer(buffer, tensor).copy_(values[tensor.meta.name])
    for tensor in bucket.tensors:
        assert view_in_buffer(buffer, tensor).equal(values[tensor.meta.name])
        assert tensor.offset_bytes % 64 == 0
    # Written and read, the gaps stay what they were.
    written = sum(meta.num_bytes for meta in metas)
    assert (buffer == 255).sum() >= bucket.num_bytes - written


def test_a_bucket_counts_the_gaps():
    metas = [TensorMeta(str(i), (16, 32), torch.float32) for i in range(5)]
    # 16 rows of 128 + 64 bytes = 3072; two fit in 6144, and the first bucket has an eighth.
    buckets = cut_into_buckets(metas, 6144 / 2**20)
    assert [len(bucket.tensors) for bucket in buckets] == [1, 2, 2]
    assert [bucket.num_bytes for bucket in buckets] == [3072, 6144, 6144]
