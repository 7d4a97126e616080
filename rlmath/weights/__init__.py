"""Weights on their way: Megatron, Hugging Face files and vLLM engines hold the same model."""
