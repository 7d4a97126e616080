"""``rlmath test plugin``: a user's part is held to the invariants of rlmath's own."""
