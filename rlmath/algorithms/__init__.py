"""Pure tensor functions of reinforcement learning; formulas and papers in docs/algorithms.md."""
