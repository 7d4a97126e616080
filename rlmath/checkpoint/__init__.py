"""Checkpoints: what a run leaves so that it can go on, whole or not at all.

Ranks write the model, the optimizer, the schedule and their random streams with
:mod:`rlmath.checkpoint.actor_state`; the driver adds its own state and makes a checkpoint of it
with :class:`CheckpointStore`. This package imports neither torch nor Megatron by itself.
"""

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.space import DiskFull, check_space, checkpoint_bytes
from rlmath.checkpoint.store import Checkpoint, CheckpointStore, Newest, Skipped

__all__ = [
    "BrokenCheckpoint",
    "Checkpoint",
    "CheckpointStore",
    "DiskFull",
    "Newest",
    "Skipped",
    "check_space",
    "checkpoint_bytes",
]
