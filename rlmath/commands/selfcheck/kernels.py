"""Triton's kernels against torch: the softmax of a chunk of logits (``actor.logits=triton``), and
the fingerprint of a tensor."""

from __future__ import annotations

import time
from types import ModuleType

import torch
from torch import Tensor

from rlmath.actor import softmax_tables
from rlmath.actor.logprobs import Distribution
from rlmath.commands.selfcheck.record import Record
from rlmath.device import Platform
from rlmath.weights.fingerprint import fingerprint_on_device

# Log-probs are float32 sums over the vocabulary in two orders; gradients are rounded to the type
# of the logits, bfloat16, from nearly equal numbers.
LARGEST_DIFFERENCE = 1e-4
LARGEST_ROUNDING = 2**-7
REPEATS = 5
# Several blocks of columns, of which the last is not full.
FINGERPRINT_COLUMNS = 1536 + 3


def compare_softmax(
    platform: Platform, record: Record, vocab_size: int, rows: int, dtype: torch.dtype
) -> None:
    """Values of both on the same random logits ``[rows, vocab_size]``, and their times."""
    from rlmath.actor import softmax_triton

    random = torch.Generator(platform.torch_device).manual_seed(0)
    keys = {"device": platform.torch_device, "generator": random}
    logits = (2 * torch.randn(rows, vocab_size, **keys)).to(dtype)
    targets = torch.randint(vocab_size, (rows,), **keys)
    grads = torch.randn(2, rows, **keys)
    (tables, tables_s), (kernels, kernels_s) = (
        _time_passes(platform, softmax, logits, targets, grads)
        for softmax in (softmax_tables, softmax_triton)
    )
    pairs = list(zip(tables, kernels, strict=True))
    difference = max(float((one - other).abs().max()) for one, other in pairs[:-1])
    scale = float(tables[-1].float().abs().max())
    rounding = float((tables[-1].float() - kernels[-1].float()).abs().max()) / scale
    limits = f"<= {LARGEST_DIFFERENCE:g}", f"<= {LARGEST_ROUNDING:g}"
    record.figure("softmax in tables", 1e3 * tables_s, "ms")
    record.figure("softmax in Triton", 1e3 * kernels_s, "ms")
    record.figure("softmax, Triton's log-probs", difference, "nats", limit=limits[0])
    record.figure("softmax, Triton's gradient", rounding, "of the largest", limit=limits[1])
    record.require(
        difference <= LARGEST_DIFFERENCE and rounding <= LARGEST_ROUNDING,
        f"Triton's softmax differs from torch's by {difference:.2g} nats, and its gradient by "
        f"{rounding:.2g} of the largest",
        "Use actor.logits=chunked, which takes torch's, and report this with the file.",
    )


def compare_fingerprints(platform: Platform, record: Record, rows: int) -> None:
    """Fingerprints of the same random bits here and on a CPU, and the rate of reading them."""
    for dtype in (torch.bfloat16, torch.float32):
        size = rows, FINGERPRINT_COLUMNS * dtype.itemsize
        drawn = torch.randint(256, size, dtype=torch.uint8).view(dtype)
        values, best_s = drawn.to(platform.torch_device), float("inf")
        for _ in range(REPEATS):  # The first compiles.
            platform.synchronize()
            started_s = time.perf_counter()
            found = fingerprint_on_device(values)
            platform.synchronize()
            best_s = min(best_s, time.perf_counter() - started_s)
        name = str(dtype).removeprefix("torch.")
        record.figure(f"fingerprint of {name}", values.nbytes / best_s / 1e9, "GB/s")
        record.require(
            bool(found.cpu() == fingerprint_on_device(drawn)),
            f"Triton's fingerprint of {name} differs from that of a CPU",
            "Do not trust comparisons of weights and digests of runs on this machine; report this "
            "with the file.",
        )


def _time_passes(
    platform: Platform, softmax: ModuleType, logits: Tensor, targets: Tensor, grads: Tensor
) -> tuple[list[Tensor], float]:
    """Log Z, log-probs, entropies and the gradient of the logits; seconds of both passes."""
    vocab = Distribution(1.0, logits.size(1)).slice(logits.size(1))
    local, mine = vocab.places(targets)
    best_s = float("inf")
    for _ in range(REPEATS):  # The first compiles.
        written = logits.clone()
        platform.synchronize()
        started_s = time.perf_counter()
        log_z, log_probs, entropy = softmax.statistics(vocab, written, local, mine)
        softmax.write_gradient(vocab, written, log_z, entropy, local, mine, grads[0], grads[1])
        platform.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return [log_z, log_probs, entropy, written], best_s
