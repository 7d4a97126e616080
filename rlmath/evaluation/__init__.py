"""Benchmarks, and what their samples are worth: avg@n, pass@k, maj@k, files, tables and plots."""
