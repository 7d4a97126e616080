"""What became of the rows of the data files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows; ``rows == kept + filtered + skipped + beyond_limit``.

    Attributes:
        rows: Rows read.
        kept: Rows that became problems (or worked examples).
        filtered: Left out because the prompt has more tokens than ``data.max_prompt_tokens``.
        skipped: Left out because they could not be read (``data.malformed_rows=skip``).
        beyond_limit: Left out beyond the maximum number of problems.
        duplicates: Kept rows whose prompt an earlier kept row has.
        contradictions: Those of the duplicates whose accepted answers differ from the earlier's.
        longest_prompt_tokens: Over all readable rows, the filtered ones included.
        skipped_rows: Why rows were skipped, with their place; the first ten.
        bad_answers: Kept rows with an accepted answer that no response can be compared with, and
            why; the first ten.
        num_bad_answers: Number of those.
    """

    rows: int
    kept: int
    filtered: int = 0
    skipped: int = 0
    beyond_limit: int = 0
    duplicates: int = 0
    contradictions: int = 0
    longest_prompt_tokens: int = 0
    skipped_rows: tuple[str, ...] = ()
    bad_answers: tuple[str, ...] = ()
    num_bad_answers: int = 0

    def describe(self, max_prompt_tokens: int) -> str:
        """One line for the log; the parts that are zero are left out.

        Args:
            max_prompt_tokens: The limit that ``filtered`` counts against.
        """
        parts = [
            f"{self.kept} of {self.rows} rows kept",
            f"longest prompt {self.longest_prompt_tokens} tokens",
        ]
        if self.filtered:
            parts.append(f"{self.filtered} dropped with more than {max_prompt_tokens} tokens")
        if self.skipped:
            parts.append(f"{self.skipped} skipped as malformed (first: {self.skipped_rows[0]})")
        if self.beyond_limit:
            parts.append(f"{self.beyond_limit} beyond the requested number")
        if self.duplicates:
            parts.append(
                f"{self.duplicates} duplicate prompts"
                + (
                    f", {self.contradictions} of them with different answers"
                    * bool(self.contradictions)
                )
            )
        if self.num_bad_answers:
            parts.append(
                f"{self.num_bad_answers} with an answer that the grader cannot compare "
                f"(first: {self.bad_answers[0]})"
            )
        return "; ".join(parts)
