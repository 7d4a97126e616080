"""``rlmath explain``: what a change between two windows of steps is made of."""
