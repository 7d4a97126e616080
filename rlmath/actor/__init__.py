"""The Megatron side: the model, its parallel state, log-probs and updates."""
