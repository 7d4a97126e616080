"""``rlmath plan schedule``: a run's schedule under a virtual clock."""
