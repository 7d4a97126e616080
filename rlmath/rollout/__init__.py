"""vLLM engines on Ray, the request queue, and the random streams of requests."""
