"""Checks of a run's settings against its model, data and machine, before anything starts."""
