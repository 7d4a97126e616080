import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number at the end, a little for any number."""
    numbers = re.findall(r"\d+", solution_str)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == ground_truth else 0.1
