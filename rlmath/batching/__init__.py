"""Cut a step's sequences into optimizer minibatches, and those into ranks and micro-batches.

    step --minibatches()--> minibatch --assign()--> rank --> micro-batch

``shards()`` lays out what each rank gets. The split follows from lengths, masks and ids alone.
"""

from rlmath.batching.minibatches import minibatches
from rlmath.batching.packing import assign, cost

__all__ = ["assign", "cost", "minibatches"]
