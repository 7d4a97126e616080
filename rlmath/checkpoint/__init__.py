"""Checkpoints: what a run leaves so that it can go on, whole or not at all.

Ranks write the model, the optimizer, the schedule and their random streams with
:mod:`rlmath.checkpoint.actor_state`; the driver adds its own state and makes a checkpoint of it::

    store = CheckpointStore(run_dir / "checkpoints", keep=3, best={"eval/accuracy": "max"})
    found = store.resume("auto")                 # driver, at the start
    load_actor(actor, found.path)                # every rank, if something was found

    folder = store.begin(step)                   # driver
    save_actor(actor, folder)                    # every rank
    store.commit(step, driver_state, metrics)    # driver; store.abandon(step) when ranks failed

This package imports neither torch nor Megatron by itself.
"""

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.space import DiskFull, checkpoint_bytes, held_bytes
from rlmath.checkpoint.store import Checkpoint, CheckpointStore, Newest, Skipped

__all__ = [
    "BrokenCheckpoint",
    "Checkpoint",
    "CheckpointStore",
    "DiskFull",
    "Newest",
    "Skipped",
    "checkpoint_bytes",
    "held_bytes",
]
