"""``rlmath report``: a run, or two beside each other, as one HTML file that needs nothing else."""
