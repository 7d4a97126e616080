"""Arrays come back to the last bit, or the file is refused."""

import io
import math

import numpy as np
import pytest

from rlmath.utils.array_file import BrokenFile, read_arrays, read_header, write_arrays

ARRAYS = {
    "tokens": np.random.default_rng(0).integers(0, 2**17, 5000, np.int32),
    "log_probs": np.array([-0.0, math.nan, -math.inf, 1e-45, -3.5], np.float32),
    "nan_bits": np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32),
    "lengths": np.array([1, 2**40, -1], np.int64),
    "mask": np.random.default_rng(1).random(77) < 0.5,
    "table": np.arange(12, dtype=np.float32).reshape(4, 3),
    "no_columns": np.empty((4, 0), np.float32),
    "empty": np.empty(0, np.int32),
    "nobody": np.empty(0, np.bool_),
    "swapped": np.array([1, 2], ">i4"),
}


def written(path, **header):
    with path.open("wb") as file:
        write_arrays(file, header, ARRAYS)
    return path


def test_everything_comes_back(tmp_path):
    path = written(tmp_path / "a.bin", step=3, keys=["p/0", "\ud800"])
    header, arrays = read_arrays(path)
    assert header == {"step": 3, "keys": ["p/0", "\ud800"]}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        found = arrays[name]
        assert found.shape == array.shape and found.dtype == array.dtype.newbyteorder("=")
        assert found.tobytes() == array.astype(found.dtype).tobytes(), name
        assert found.flags.writeable
    assert read_header(path)["step"] == 3


def test_a_changed_byte_changes_nothing_or_is_noticed_and_so_is_every_cut(tmp_path):
    path = tmp_path / "a.bin"
    small = {"mask": ARRAYS["mask"], "log_probs": ARRAYS["log_probs"]}
    whole = io.BytesIO()
    write_arrays(whole, {"step": 1}, small)
    data, refused = whole.getvalue(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            header, found = read_arrays(path)
        except BrokenFile:
            refused += 1
            continue
        # Of a date, or of who may read it.
        assert header == {"step": 1} and found.keys() == small.keys()
        assert all(found[name].tobytes() == small[name].tobytes() for name in small)
    assert refused > len(data) // 2
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(BrokenFile):
            read_arrays(path)


def test_what_compresses_is_small_and_what_does_not_hardly_grows(tmp_path):
    draw = np.random.default_rng(0)
    for array, most in (
        (np.full(100_000, 151_643, np.int32), 0.01),
        (draw.integers(0, 2**16, 100_000, np.int32), 0.67),
        (draw.integers(-(2**31), 2**31 - 1, 100_000, np.int32), 1.01),
    ):
        path = tmp_path / "a.bin"
        with path.open("wb") as file:
            write_arrays(file, {}, {"a": array})
        assert path.stat().st_size <= most * array.nbytes
