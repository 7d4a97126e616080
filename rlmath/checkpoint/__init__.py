"""Atomic checkpoints, from which a run resumes.

Ranks write the model, the optimizer, the schedule and their random streams with
:mod:`rlmath.checkpoint.state`; the driver adds its own state and makes a checkpoint of it::

    store = CheckpointStore(run_dir / "checkpoints", keep=3, best={"eval/accuracy": "max"})
    found = store.resume("auto")                 # driver, at the start
    load_model(actor, found.path)                # every rank, if one was found

    folder = store.begin(step)                   # driver
    save_model(actor, folder)                    # every rank
    store.commit(step, driver_state, metrics)    # driver; store.abandon(step) when ranks failed

A model is anything with a ``checkpoint_state``. The package itself imports neither torch nor
Megatron.
"""

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.space import DiskFull, checkpoint_bytes, held_bytes, naming_full_disk
from rlmath.checkpoint.store import Checkpoint, CheckpointStore
