"""``rlmath bisect RUN_A RUN_B``: the first step and phase where two runs part."""
