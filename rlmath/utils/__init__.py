"""Small helpers about processes, files and installed packages; they know nothing of training."""
