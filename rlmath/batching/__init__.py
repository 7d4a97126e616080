"""Split a step's sequences into optimizer minibatches, ranks and micro-batches.

    step --minibatches()--> minibatch --assign()--> rank --> micro-batch

``shards()`` gives each rank's sequences. The split depends only on lengths, masks and ids.
"""

from rlmath.batching.minibatches import minibatches
from rlmath.batching.packing import assign, cost

__all__ = ["assign", "cost", "minibatches"]
