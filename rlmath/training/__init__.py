"""The training loop: what a step does, when it is saved, and how a run starts and restarts."""
