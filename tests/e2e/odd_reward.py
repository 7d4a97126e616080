"""A reward that a random model gets right now and then, for runs of a few steps."""


def odd(completions, completion_ids, **_):
    """1 for the quarter of responses whose token ids add up to 6 or 7, modulo 8."""
    return [float(sum(ids) % 8 > 5) for ids in completion_ids]
