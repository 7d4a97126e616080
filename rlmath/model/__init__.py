"""Model descriptions: sizes, families, parallel layout and precision."""
