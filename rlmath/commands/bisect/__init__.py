"""``rlmath bisect RUN_A RUN_B``: the first step and phase in which two runs diverge."""
