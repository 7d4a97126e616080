"""Engines: what is asked of one, and vLLM, the one that there is."""
