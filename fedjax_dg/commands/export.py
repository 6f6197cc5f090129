"""``fedjax-dg export``."""

from __future__ import annotations

import tyro
from rich.console import Console

from fedjax_dg.models import export, load_model


def export_command(console: Console):
    """The command."""

    def export_model(run: tyro.conf.Positional[str], /, out: str, cell: str | None = None) -> int:
        """Write the selected model of a run as a file of weights that also says what network it is of.

        Args:
            run: Run folder.
            out: FILE.safetensors, or a folder for a checkpoint of orbax.
            cell: Its name, such as fedavg-mean-noto-seed0; by default the one with the best source-validation accuracy.
        """
        model = load_model(run, cell)
        path = export(model, out)
        scores = {name: model.cell.get(name) for name in ("source_accuracy", "accuracy")}
        words = ", ".join(f"{name.replace('_', ' ')} {100 * x:.1f} %" for name, x in scores.items() if x is not None)
        chosen = "" if cell is not None else ", the cell with the best source-validation accuracy"
        console.print(f"{model.name}{chosen}: round {model.cell['selected_round']}, {words}", highlight=False)
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
        return 0

    return export_model
