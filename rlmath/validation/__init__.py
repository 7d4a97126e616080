"""Whether Megatron, transformers and vLLM compute the same model, and where they diverge."""
