"""``rlmath test plugin``: checks a user's part against the invariants of rlmath's own."""
