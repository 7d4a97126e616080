"""The Megatron trainer: model, parallel state, log-probs and updates."""
