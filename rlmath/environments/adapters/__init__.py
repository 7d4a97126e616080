"""Environments of other packages, a file each, with the methods that
:mod:`rlmath.environments.classes` calls; see docs/tools.md."""
