"""Token values of data-parallel shares, put into the batch's order."""

import pytest
import torch

from rlmath.actor.dealing import assembled
from rlmath.actor.rank_calls import ActorError
from rlmath.actor.token_values import TokenValues

# Tokens of each of four sequences.
LENGTHS = torch.tensor([2, 1, 3, 2])


def share(*values):
    log_probs = torch.tensor(values, dtype=torch.float32)
    return TokenValues(torch.arange(len(values)), log_probs, 10 * log_probs)


def places(*numbers):
    return torch.tensor(numbers)


def test_every_token_is_in_its_place():
    found = assembled([share(6, 7, 2), share(3, 4, 5, 0, 1)], [places(3, 1), places(2, 0)], LENGTHS)
    assert found[0].tolist() == list(range(8))
    assert found[1].tolist() == [10.0 * n for n in range(8)]


@pytest.mark.parametrize(
    ("shares", "where"),
    [
        # Twice the same sequences, as many tokens as there should be.
        ([share(0, 1, 6, 7), share(0, 1, 6, 7)], [places(0, 3), places(0, 3)]),
        ([share(0, 1, 2), share(3, 4, 5)], [places(0, 1), places(2)]),
        ([share(0, 1, 2), share(3, 4, 5, 6)], [places(0, 1), places(2, 3)]),
    ],
    ids=["double", "a sequence is missing", "a token is missing"],
)
def test_a_token_that_is_missing_or_there_twice_is_an_error(shares, where):
    with pytest.raises(ActorError, match="token values came back for 8 response tokens"):
        assembled(shares, where, LENGTHS)
