"""Ray: start or join it, and say where each rank and engine goes."""
