"""Counts of what loading did with the rows of data files."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.data.golds import GoldKinds


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows; ``rows == kept + filtered + overlong + skipped + beyond_limit``.

    Attributes:
        kept: Rows that became problems (or worked examples).
        filtered: Rows whose prompt has more tokens than ``data.max_prompt_tokens``.
        overlong: Worked examples longer than the model's positions.
        skipped: Rows that could not be read (``data.malformed_rows=skip``).
        beyond_limit: Rows beyond the maximum number of problems.
        duplicates: Kept rows whose prompt an earlier kept row has.
        contradictions: Duplicates whose accepted answers differ from the earlier row's.
        longest_prompt_tokens: Longest prompt of all readable rows, filtered ones included.
        skipped_rows: Places and reasons of the first ten skipped rows.
        mended: Kept rows in which LaTeX commands were restored, see :mod:`rlmath.data.control`.
        prompt: The first kept prompt as the model gets it, shortened.
        warnings: Signs that prompts are unlike those that the model was trained on.
        longest_tokens: Longest worked example, prompt and response together; 0 for problems.
        golds: Kinds of the kept rows' accepted answers; ``None`` for worked examples.
    """

    rows: int
    kept: int
    filtered: int = 0
    overlong: int = 0
    skipped: int = 0
    beyond_limit: int = 0
    duplicates: int = 0
    contradictions: int = 0
    longest_prompt_tokens: int = 0
    skipped_rows: tuple[str, ...] = ()
    mended: int = 0
    prompt: str = ""
    warnings: tuple[str, ...] = ()
    longest_tokens: int = 0
    golds: GoldKinds | None = None

    def prompt_lines(self) -> list[str]:
        """The rendered prompt, and a line for each warning."""
        return [f"prompt   {self.prompt}", *(f"warning  {text}" for text in self.warnings)]

    def describe(self, max_prompt_tokens: int) -> str:
        """One line for the log, without the counts that are zero."""
        parts = [
            f"{self.kept:,} of {self.rows:,} rows kept",
            f"longest prompt {self.longest_prompt_tokens:,} tokens",
        ]
        if self.longest_tokens:
            parts.append(f"longest example {self.longest_tokens:,} tokens with its response")
        if self.filtered:
            parts.append(f"{self.filtered:,} dropped with more than {max_prompt_tokens:,} tokens")
        if self.overlong:
            parts.append(f"{self.overlong:,} dropped as longer than the model's positions")
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped as malformed (first: {self.skipped_rows[0]})")
        if self.beyond_limit:
            parts.append(f"{self.beyond_limit:,} beyond the requested number")
        if self.duplicates:
            parts.append(
                f"{self.duplicates:,} duplicate prompts"
                + (
                    f", {self.contradictions:,} of them with different answers"
                    * bool(self.contradictions)
                )
            )
        if self.mended:
            parts.append(
                f"{self.mended:,} with control characters where LaTeX commands were meant, restored"
            )
        if self.golds is not None:
            parts.append(f"answers: {self.golds.describe()}")
        if self.golds is not None and self.golds.num_bad:
            parts.append(
                f"{self.golds.num_bad:,} with an answer that no response can match "
                f"(first: {self.golds.bad[0]})"
            )
        return "; ".join(parts)
