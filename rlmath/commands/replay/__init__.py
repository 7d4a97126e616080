"""``rlmath replay``: redo an update of a run from its kept batch."""
