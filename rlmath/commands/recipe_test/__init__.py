"""``rlmath test``: thirty steps of a recipe on a tiny model, on this machine's CPU."""
