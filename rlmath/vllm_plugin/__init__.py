"""The entry point of vLLM's plug-ins (``pyproject.toml``)."""
