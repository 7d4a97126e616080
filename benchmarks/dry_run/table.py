"""``python -m benchmarks.dry_run.table``: plans and counts as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.dry_run.compare import Row, rows
from benchmarks.dry_run.jobs import RankCount
from benchmarks.dry_run.pool import Pool
from benchmarks.dry_run.presets import Case, layout_cases, preset_cases
from rlmath.commands.plan.memory import GIB

COLUMNS = ("state", "log-probs", "update", "weight sync", "checkpoint")


def as_markdown(counts: Iterable[RankCount]) -> str:
    """A line for each rank, plan / count in GiB; the layout as TP x PP x CP x DP, EP."""
    head = ["preset", "layout", "stage", "layers", *COLUMNS]
    lines = [head, ["---"] * len(head)]
    for count in counts:
        job, layout = count.job, count.job.layout
        sizes = (
            f"{layout.tensor_parallel} x {layout.pipeline_parallel} x {layout.context_parallel} x "
            f"{layout.data_parallel}, {layout.expert_parallel}"
        )
        found = {row.phase: row for row in rows(count)}
        cells = [_cell(found.get(name)) for name in COLUMNS]
        layers = str(job.config["num_hidden_layers"])
        lines.append([job.name, sizes, str(job.stage), layers, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.plan.num_bytes / GIB:.2f} / {row.counted_bytes / GIB:.2f}"


def main() -> None:
    """Count all presets and layouts, and print the table."""
    cases: list[Case] = [*preset_cases(), *layout_cases()]
    with Pool(2) as pool:
        print(as_markdown(pool.count([job for case in cases for job in case.jobs()])))


if __name__ == "__main__":
    main()
