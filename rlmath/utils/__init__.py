"""General helpers for processes, files and installed packages."""
