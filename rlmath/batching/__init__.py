"""Cut a step's sequences into optimizer minibatches, and those into ranks and micro-batches.

    step --minibatches()--> minibatch --assign()--> rank --> micro-batch

Pure Python on lengths and ids: no tensors, no ranks, so that every rank can work out the same cut
for itself.
"""

from rlmath.batching.minibatches import minibatches
from rlmath.batching.packing import assign, cost

__all__ = ["assign", "cost", "minibatches"]
