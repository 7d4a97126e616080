"""Counts of kept, changed and dropped rows of data files."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.data.golds import GoldKinds


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows; ``rows == kept + filtered + overlong + skipped + beyond_limit``."""

    rows: int
    kept: int  # Rows that became problems (or worked examples).
    filtered: int = 0  # Rows whose prompt has more tokens than data.max_prompt_tokens.
    overlong: int = 0  # Worked examples longer than the model's positions.
    skipped: int = 0  # Rows that could not be read (data.malformed_rows=skip).
    beyond_limit: int = 0  # Rows beyond the maximum number of problems.
    duplicates: int = 0  # Kept rows whose prompt an earlier kept row has.
    contradictions: int = 0  # Duplicates whose accepted answers differ from the earlier row's.
    longest_prompt_tokens: int = 0  # Longest prompt of all readable rows, filtered ones included.
    skipped_rows: tuple[str, ...] = ()  # Places and reasons of the first ten skipped rows.
    restored: int = 0  # Kept rows in which LaTeX commands were restored, see rlmath.data.control.
    prompt: str = ""  # The first kept prompt as the model gets it, shortened.
    # Signs that prompts are unlike those that the model was trained on.
    warnings: tuple[str, ...] = ()
    longest_tokens: int = 0  # Longest worked example, prompt and response together; 0 for problems.
    # Kinds of the kept rows' accepted answers; None for worked examples.
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
        if self.restored:
            parts.append(
                f"{self.restored:,} with control characters where LaTeX commands were meant, "
                "restored"
            )
        if self.golds is not None:
            parts.append(f"answers: {self.golds.describe()}")
        if self.golds is not None and self.golds.num_bad:
            parts.append(
                f"{self.golds.num_bad:,} with an answer that no response can match "
                f"(first: {self.golds.bad[0]})"
            )
        return "; ".join(parts)
