"""A run's schedule under a virtual clock, with the real sampler."""
