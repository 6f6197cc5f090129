"""``fedjax-dg table``."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro
from rich.console import Console

from fedjax_dg.tables import render


def table_command(console: Console):
    def table(
        runs: Annotated[tuple[str, ...], tyro.conf.Positional],
        selection: str | None = None,
        settings: Literal["best", "all"] = "best",
        format: Literal["text", "md", "latex", "csv"] = "text",
        spread: Literal["ci95", "se"] = "ci95",
        baseline: str | None = None,
    ) -> int:
        """Print the table of one or more run folders: accuracies, paired differences, and why numbers are missing.

        Args:
            runs: Run folders.
            selection: source-validation, last, oracle, leave-one-domain-out; by default what the run was made with.
            settings: Of a sweep, the setting that the selection rule prefers for each seed and domain, or every setting.
            format: As text, Markdown, LaTeX (booktabs) or CSV.
            spread: 95 % interval or standard error over seeds.
            baseline: Row that the differences are to, such as mean or "fedavg mean"; by default an algorithm's first rule.
        """
        text = render(runs, selection, settings, format, spread, baseline)
        console.print(text, highlight=False, markup=False, end="", soft_wrap=True)
        return 0

    return table
