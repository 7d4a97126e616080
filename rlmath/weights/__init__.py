"""Model weights in Megatron, Hugging Face files and vLLM engines, and the transfer between them."""
