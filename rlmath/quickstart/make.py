"""``python -m rlmath.quickstart.make FOLDER``: the tiny model and its problems."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlmath.model.tiny import make_tiny_model
from rlmath.quickstart.problems import SLIP_SHARE, make_problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Write ``FOLDER/model`` and ``FOLDER/data``; see the two functions that it calls."""
    parser = argparse.ArgumentParser(
        prog="python -m rlmath.quickstart.make",
        description="Make a tiny Qwen2 model (FOLDER/model) and arithmetic problems (FOLDER/data).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the problems")
    parser.add_argument("--num-train", type=int, default=4000, help="training problems")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out problems")
    parser.add_argument("--num-sft", type=int, default=20000, help="worked examples")
    parser.add_argument(
        "--slip-share",
        type=float,
        default=SLIP_SHARE,
        help="share of the worked examples with a wrong carry",
    )
    args = parser.parse_args(arguments)
    try:
        data = make_problems(
            args.folder / "data",
            args.seed,
            num_train=args.num_train,
            num_eval=args.num_eval,
            num_sft=args.num_sft,
            slip_share=args.slip_share,
        )
    except ValueError as error:
        parser.error(str(error))
    model = make_tiny_model(args.folder / "model", args.seed)
    print(f"model: {model}")
    print(
        f"data:  {data} ({args.num_train} training problems, {args.num_eval} held out, "
        f"{args.num_sft} worked examples)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
