"""The interface of an engine, and vLLM, the only implementation."""
