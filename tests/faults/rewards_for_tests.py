"""Rewards that a model with random weights can get, so that its runs have gradients."""

import zlib

from rlmath.grading import MathGrader

# Separate, so that every run has grading processes at work. Nothing comes from memory.
GRADER = MathGrader(num_workers=2, timeout_s=60.0, cache_size=0)


def letters(completions, **columns):
    """Share of ASCII letters; -1 where a grading process gets an integral wrong, of which every
    fourth response asks one."""
    return [_letters(text) if _is_graded(text) else -1.0 for text in completions]


def _letters(text):
    return sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1)


def _is_graded(text):
    number = zlib.crc32(text.encode(errors="surrogatepass"))
    if number % 4:
        return True
    power = number // 4 % 50
    # Only SymPy, in a worker process, can compare these.
    answer = f"\\boxed{{\\int_0^1 x^{{{power}}} dx}}"
    return GRADER.grade_one(answer, f"\\frac{{1}}{{{power + 1}}}").status == "correct"


def brevity(completions, **columns):
    """Shorter is better, whatever it says: what a policy collapses under."""
    return [-len(text.encode(errors="surrogatepass")) / 64 for text in completions]
