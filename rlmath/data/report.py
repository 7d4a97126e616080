"""What became of the rows of the data files."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.data.golds import GoldKinds


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows; ``rows == kept + filtered + overlong + skipped + beyond_limit``.

    Attributes:
        kept: Rows that became problems (or worked examples).
        filtered: Left out because the prompt has more tokens than ``data.max_prompt_tokens``.
        overlong: Worked examples left out because the model has fewer positions.
        skipped: Left out because they could not be read (``data.malformed_rows=skip``).
        beyond_limit: Left out beyond the maximum number of problems.
        duplicates: Kept rows whose prompt an earlier kept row has.
        contradictions: Those of the duplicates whose accepted answers differ from the earlier's.
        longest_prompt_tokens: Over all readable rows, the filtered ones included.
        skipped_rows: Why rows were skipped, with their place; the first ten.
        mended: Kept rows in which LaTeX commands were restored, see :mod:`rlmath.data.control`.
        prompt: The first kept one as the model gets it, shortened.
        warnings: Signs that prompts are not what the model was made for.
        longest_tokens: Of worked examples, prompt and response together; 0 for problems.
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
        """One line for the log; the parts that are zero are left out.

        Args:
            max_prompt_tokens: The limit that ``filtered`` counts against.
        """
        parts = [
            f"{self.kept} of {self.rows} rows kept",
            f"longest prompt {self.longest_prompt_tokens} tokens",
        ]
        if self.longest_tokens:
            parts.append(f"longest example {self.longest_tokens} tokens with its response")
        if self.filtered:
            parts.append(f"{self.filtered} dropped with more than {max_prompt_tokens} tokens")
        if self.overlong:
            parts.append(f"{self.overlong} dropped as longer than the model's positions")
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
        if self.mended:
            parts.append(
                f"{self.mended} with control characters where LaTeX commands were meant, restored"
            )
        if self.golds is not None:
            parts.append(f"answers: {self.golds.describe()}")
        if self.golds is not None and self.golds.num_bad:
            parts.append(
                f"{self.golds.num_bad} with an answer that no response can match "
                f"(first: {self.golds.bad[0]})"
            )
        return "; ".join(parts)
