"""Comparison of Megatron, transformers and vLLM on one model, and search for divergences."""
