"""A reward that a random model learns within thirty steps."""


def digits(completions, **_):
    """Share of the characters that are ASCII digits; 0 for an empty response."""
    return [sum(c in "0123456789" for c in text) / max(len(text), 1) for text in completions]
