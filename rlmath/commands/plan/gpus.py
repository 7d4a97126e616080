"""Data-sheet figures of GPUs and networks, and the share of each that a plan assumes."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.commands.plan.measured import MEASURED
from rlmath.errors import UserError
from rlmath.utils.close_names import did_you_mean


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    peak_tflops: float  # bfloat16 matrix products without sparsity, in 10^12 operations a second.
    memory_gb_per_s: float  # Memory bandwidth, in 10^9 bytes a second.
    link_gb_per_s: float  # Rate to the other cards of its node, in one direction.
    runs: bool = True  # rlmath has builds for it; false: a plan for comparison only.
    fp8_tflops: float | None = None  # Matrix products in FP8, as peak_tflops; None: no actor.fp8.
    capability: tuple[int, int] = (9, 0)  # CUDA's compute capability.


# From the makers' data sheets of the SXM and OAM cards; the memory is what the driver shows.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 40.0, 312, 1555, 300, capability=(8, 0)),
        Gpu("a100-80", 80.0, 312, 2039, 300, capability=(8, 0)),
        Gpu("h20", 95.5, 148, 4000, 450, fp8_tflops=296),
        Gpu("h800", 80.0, 989, 3350, 200, fp8_tflops=1979),
        Gpu("h100", 80.0, 989, 3350, 450, fp8_tflops=1979),
        Gpu("h200", 140.0, 989, 4800, 450, fp8_tflops=1979),
        Gpu("b200", 179.0, 2250, 8000, 900, fp8_tflops=4500, capability=(10, 0)),
        Gpu("mi300x", 191.5, 1307, 5300, 448, runs=False),
    )
}


def gpu_named(name: str) -> Gpu:
    """A card by its name or the beginning of it. Raises UserError: there is none, or several begin
    so."""
    found = [gpu for key, gpu in GPUS.items() if key.startswith(name.lower())]
    exact = GPUS.get(name.lower())
    if exact is not None or len(found) == 1:
        return exact or found[0]
    if found:
        names = ", ".join(gpu.name for gpu in found)
        raise UserError(f"--gpu {name}: is the beginning of {names}; give one of them")
    hint = did_you_mean(name.lower(), GPUS)
    raise UserError(f"--gpu {name}: known are {', '.join(GPUS)}{hint}")


@dataclass(frozen=True)
class Efficiency:
    """Shares of those figures that a step gets.

    The values, and where each was measured, are in ``measured.json``.
    """

    # Share of the peak that forward and backward passes reach with 16,384 tokens in a micro-batch,
    # recomputation included. Megatron-LM reports 0.44 to 0.57 for dense models (Narayanan et al.
    # 2021, table 1).
    mfu: float = MEASURED["mfu"]
    # Least time of the forward pass of a layer, in which the host launches its kernels; the
    # backward pass takes two. A layer of experts waits for the device's token counts, so that its
    # launches come after its kernels and not beside them.
    layer_launch_s: float = MEASURED["layer_launch_s"]
    # Fixed time of a decoding step: scheduling, sampling.
    decode_step_s: float = MEASURED["decode_step_s"]
    # Share of the memory bandwidth that decoding reaches.
    decode_bandwidth: float = MEASURED["decode_bandwidth"]
    link: float = MEASURED["link"]  # Share of a link's rate that a collective reaches.
    # Rate between a GPU and page-locked host memory, in one direction, while all eight GPUs of a
    # node copy: PCIe 5.0 x16 has 63 GB/s, and the node's memory limits it.
    host_gb_per_s: float = MEASURED["host_gb_per_s"]
    # Rate of each GPU to other nodes, in one direction: 400 Gbit/s.
    network_gb_per_s: float = MEASURED["network_gb_per_s"]
    # Latency of a small all-reduce between the ranks of an engine.
    all_reduce_s: float = MEASURED["all_reduce_s"]
    # Latency of a message between stages; unless stages are interleaved, the device is synchronized
    # after it.
    pipeline_message_s: float = MEASURED["pipeline_message_s"]
    # Launch time of a layer's attention, for each further context rank.
    context_step_s: float = MEASURED["context_step_s"]
    # Share of an engine's sequences that run to the longest response.
    tail_share: float = MEASURED["tail_share"]
