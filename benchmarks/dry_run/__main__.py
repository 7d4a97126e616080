"""A process that counts: jobs as JSON lines on stdin, results as JSON lines on stdout."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import traceback
import warnings


def main() -> None:
    """Answer each line; an exception is an answer too."""
    # Whatever libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from benchmarks.dry_run.jobs import Job
    from benchmarks.dry_run.rank import count, prepare_process
    from rlmath.model.lora import from_described
    from rlmath.model.parallel import Layout

    prepare_process()
    for line in sys.stdin:
        given = json.loads(line)
        given["lengths"] = tuple(tuple(pair) for pair in given["lengths"])
        sizes = tuple(given["layout"].pop("pipeline_layers"))
        given["layout"] = Layout(**given["layout"], pipeline_layers=sizes)
        for key in ("phases", "recompute_modules"):
            given[key] = tuple(given[key])
        if given["lora"] is not None:
            given["lora"] = from_described(given["lora"])
        try:
            answer = dataclasses.asdict(count(Job(**given)))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
