"""Environments of other packages, a file each; see docs/tools.md."""
