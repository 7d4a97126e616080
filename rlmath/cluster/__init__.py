"""Ray: starting or joining it, and placing each rank and engine."""
