"""``rlmath why RUN STEP/PROBLEM/INDEX``: everything about one sample."""
