"""``rlmath explain``: the causes of a change between two windows of steps."""
