"""Commands of the console that are more than one file."""
