"""The training loop: steps, checkpoints, start and restart of a run."""
