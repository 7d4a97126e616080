"""Benchmarks and the metrics of their samples: avg@n, pass@k, maj@k, files, tables and plots."""
