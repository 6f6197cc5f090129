"""``fedjax-dg report``."""

from __future__ import annotations

import tyro
from rich.console import Console

from fedjax_dg.report import report


def report_command(console: Console):
    """The command."""

    def write_report(run: tyro.conf.Positional[str], /, out: str, kinds: tuple[str, ...] = ()) -> int:
        """Write a run as one page of HTML: tables, figures, failures, and how to run it again.

        Args:
            run: Run folder.
            out: FILE.html.
            kinds: Figures: accuracy, domains, sweep, partition, alignment, grams, features; by default all that apply.
        """
        for absent in report(run, out, kinds or None):
            console.print(f"Without {absent.kind}: {absent.why_not}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"Wrote {out}", highlight=False, soft_wrap=True)
        return 0

    return write_report
