"""``rlmath replay``: an update of a run again, from what the run has kept."""
