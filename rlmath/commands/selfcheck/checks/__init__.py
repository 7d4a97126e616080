"""One file per check; each has ``run(node, record)``."""
