"""Triton's fingerprints beside torch's on a CPU; prints those that differ as JSON.

In Triton's interpreter, or on the device that the command line names.
"""

import json
import sys

import torch

from rlmath.weights import fingerprint_triton
from rlmath.weights.fingerprint import fingerprint

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (0, 4), (3, 0), (1,), (70,), (5, 3), (17, 16), (4, 40), (2, 3, 7))


def bits_of(shape, dtype):
    """Random bits: NaN, infinities, subnormal numbers and both zeros among them."""
    random = torch.Generator().manual_seed(len(shape))
    size = torch.empty((), dtype=dtype).element_size()
    drawn = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=random)
    if dtype is torch.bool:
        return drawn.squeeze(-1) > 127
    values = drawn.view(dtype).squeeze(-1)
    if values.numel() > 2 and dtype.is_floating_point:
        values.view(-1)[:2] = torch.tensor([-0.0, 0.5 * torch.finfo(dtype).tiny], dtype=dtype)
    return values


def cases():
    """Name, part, first row and first column of each."""
    for dtype in (*DTYPES, *INTEGERS):
        for shape in SHAPES:
            yield f"{dtype} {shape}", bits_of(shape, dtype).to(DEVICE), 0, 0
    whole = bits_of((40, 24), torch.bfloat16).to(DEVICE)
    yield "rows", whole[7:31], 7, 0
    yield "columns", whole[:, 3:20], 0, 3
    yield "transposed", whole.t(), 0, 0
    yield "every second", whole[::2, ::2], 0, 0
    yield "experts", bits_of((3, 5, 4), torch.float32).to(DEVICE)[1:, 2:], 1, 2
    yield "far", whole, 2**33, 2**35


def difference(part, first_row, first_column):
    """The fingerprint on the device, where a GPU is played by the CPU, less that of a CPU."""
    expected = fingerprint(part.cpu(), first_row, first_column)
    return fingerprint(part.as_subclass(OnCuda), first_row, first_column) - expected


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU, wherever it is."""

    is_cuda = True


def main():
    calls, total = [], fingerprint_triton.total
    fingerprint_triton.total = lambda *given: (calls.append(given), total(*given))[1]
    found = {name: difference(*case) for name, *case in cases()}
    # Several blocks of rows and columns, the last of which are not full.
    fingerprint_triton.BLOCK, fingerprint_triton.MOST_COLUMNS = 64, 16
    found |= {f"blocks, {name}": difference(*case) for name, *case in cases()}
    differ = [name for name, value in found.items() if value]
    json.dump({"cases": len(found), "calls": len(calls), "differ": differ}, sys.stdout)


if __name__ == "__main__":
    main()
