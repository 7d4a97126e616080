"""A process that asks for a loss, importable where Ray starts it."""


class Process:
    """In place of a rank or an engine."""

    def loss(self, objective):
        from rlmath.algorithms.losses import LOSSES
        from rlmath.plugins.loading import imported_plugins

        return LOSSES.get(objective.loss).__name__, objective.loss_options.scale, imported_plugins()
