"""How context ranks share the tokens of a row."""

import pytest
import torch

from rlmath.actor.context import context_classes, context_share, own_positions


def test_a_rank_has_a_piece_of_the_beginning_and_one_of_the_end():
    # 8 tokens in 4 pieces: rank 0 has the first and the last.
    assert own_positions([8], 2, 0).tolist() == [0, 1, 6, 7]
    assert own_positions([8], 2, 1).tolist() == [2, 3, 4, 5]
    # Each sequence of a row is cut on its own.
    assert own_positions([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]


@pytest.mark.parametrize("contexts", [2, 3, 4])
def test_values_come_together_in_the_order_of_the_text(contexts):
    sizes = [2 * contexts * n for n in (3, 1, 5)]
    rows = torch.tensor([0, 1, 5, sizes[0] - 1, sizes[0] + 1, sum(sizes) - 2])
    rank_rows, sent, largest = [], [], 0
    for rank in range(contexts):
        share, chosen, places = context_share(sizes, contexts, rank, rows)
        own = own_positions(sizes, contexts, rank)
        # In its own row the rank finds the positions that are its share.
        assert torch.equal(own[places], rows[chosen])
        assert share.first == rank * share.largest
        largest = share.largest
        rank_rows.append(rows[chosen])
        sent.append(torch.nn.functional.pad(rows[chosen], (0, largest - len(chosen)), value=-1))
    assert torch.cat(rank_rows).sort().values.tolist() == rows.tolist()
    assert largest == max(map(len, rank_rows))
    assert torch.equal(torch.cat(sent)[share.order], rows)


@pytest.mark.parametrize("contexts", [2, 4])
def test_a_query_sees_the_tokens_before_it_and_no_others(contexts):
    sizes = [2 * contexts, 6 * contexts, 2 * contexts]
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    position = torch.cat([torch.arange(size) for size in sizes])
    everything = torch.cat([own_positions(sizes, contexts, rank) for rank in range(contexts)])
    for rank in range(contexts):
        own = own_positions(sizes, contexts, rank)
        seen = 0
        for one in context_classes(sizes, contexts, rank):
            queries, keys = own[one.queries], everything[one.keys]
            # Whole sequences in the order of the text.
            assert (position[keys] == torch.arange(keys.size(1))).all()
            assert (sequence[queries][:, :1] == sequence[keys][:, :1]).all()
            for query, mask in zip(queries.T, one.mask, strict=True):
                assert (position[query] == int(mask.sum()) - 1).all()
                assert mask[: int(mask.sum())].all()
            seen += queries.numel()
        assert seen == len(own)


def test_ranks_have_equal_parts_of_causal_attention():
    (whole,) = {
        int(sum(one.mask.sum() * len(one.queries) for one in context_classes([16, 32], 4, rank)))
        for rank in range(4)
    }
    assert 4 * whole == sum(n * (n + 1) // 2 for n in (16, 32))


def test_nothing_to_share():
    share, chosen, places = context_share([4], 2, 0, torch.zeros(0, dtype=torch.int64))
    assert share.largest == 0 and not len(chosen) and not len(places)
