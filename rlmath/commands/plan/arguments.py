"""What the command lines of both plans share."""

from __future__ import annotations

import argparse

from rlmath.errors import UserError


def no_model_argument(model: str | None) -> None:
    """Refuse a model that is given without ``model.path=``.

    Raises:
        UserError: There is one.
    """
    if model is not None:
        raise UserError(f"{model}: the model is a setting; give model.path={model}")


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: has to be more than 0")
    return value


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: has to be more than 0 and at most 1")
    return value
