"""``rlmath import``: another framework's settings as an experiment, and docs/coming_from.md."""
