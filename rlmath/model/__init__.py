"""The only description of a model: sizes, families, parallel layout and precision."""
