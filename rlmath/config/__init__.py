"""Typed settings for Hydra and the checks that explain the arithmetic."""
