"""Digests of sequences: what changes them, and that a batch has those of its sequences."""

import numpy as np
import torch

from rlmath.weights.sequence_fingerprints import token_digest, token_digests


def digest(prompt, response):
    return token_digest(np.array(prompt, np.int32), np.array(response, np.int32))


def test_tokens_their_order_and_the_prompts_end_change_it():
    whole = digest([1, 2, 3], [4, 5])
    others = [
        *(digest([1, 2], [3, 4, 5]), digest([1, 2, 3, 4], [5]), digest([1, 2, 3], [5, 4])),
        *(digest([1, 2, 3], [4, 6]), digest([1, 2, 3], [4]), digest([1, 2, 3], [4, 5, 0])),
    ]
    assert len({whole, *others}) == 7
    assert whole == digest([1, 2, 3], [4, 5]) and -(2**63) <= whole < 2**63


def test_a_batch_has_those_of_its_sequences():
    tokens = torch.tensor([1, 2, 3, 4, 5, 9, 8, 7])
    found = token_digests(tokens, torch.tensor([3, 1, 0]), torch.tensor([5, 2, 1]))
    assert found.tolist() == [digest([1, 2, 3], [4, 5]), digest([9], [8]), digest([], [7])]
    # Slices of a larger array are not contiguous where they are strided.
    strided = np.arange(10, dtype=np.int32)[::2]
    assert token_digest(strided, strided) == digest([0, 2, 4, 6, 8], [0, 2, 4, 6, 8])
    none = torch.zeros(0, dtype=torch.int64)
    assert token_digests(none, none, none).tolist() == []
