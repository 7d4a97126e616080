"""Environments answer a model's turns, with the output of a tool or with the end of an episode."""
