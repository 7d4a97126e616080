"""vLLM engines on Ray, the queue that they draw from, and the random streams of requests."""
