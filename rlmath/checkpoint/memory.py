"""Memory of a rank for saving and loading a checkpoint, beside the model and optimizer state.

Pure arithmetic, for the plan; ``optimizer_shards`` keeps to it. Megatron's own way gathers each DDP
bucket (without overlap of gradients: the whole stage) in float32 on the GPU, and keeps 12 bytes a
parameter of the stage in every rank's host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

# Float32 main parameters and Adam's two moments.
STATE_BYTES_PER_PARAMETER = 12
_WEIGHT_BYTES = 2
# Most bytes that the ranks gather at a time, in total.
GATHER_BUFFER_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of one rank in addition to training."""

    gpu_bytes: int  # While its part is gathered, a few seconds; none while it is written.
    host_bytes: int  # Until its part is written.


def checkpoint_bytes_of_rank(
    parameters: int, copies: int, largest_parameter: int, *, background: bool = False
) -> CheckpointBytes:
    """Upper bound for a save with the distributed optimizer. Loading takes no more where there are
    copies, and 12 bytes a parameter of host memory where there are none.

    Ranks that hold the same weights share them out by whole parameters, so each keeps its share
    and at most one parameter more. A load takes the parameters of which the rank's share of the
    optimizer holds any part: two more at most.

    Args:
        parameters: Parameters of the rank's stage. Experts, which have other copies, are a separate
            sum.
        largest_parameter: Elements of the largest Megatron parameter of the rank.
        background: The weights are copied as well (``runner.background_checkpoints``).
    """
    if copies == 1:
        # Written from the tensors themselves.
        copied = STATE_BYTES_PER_PARAMETER + _WEIGHT_BYTES if background else 0
        return CheckpointBytes(0, copied * parameters)
    share = min(parameters, -(-parameters // copies) + 2 * largest_parameter)
    per_parameter = STATE_BYTES_PER_PARAMETER + (_WEIGHT_BYTES if background else 0)
    # Every rank's piece, and its own.
    gathered = min(GATHER_BUFFER_BYTES, 4 * parameters)
    return CheckpointBytes(gathered + -(-gathered // copies), per_parameter * share)
