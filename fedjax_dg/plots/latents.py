"""Latents that were made from a head beside real features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_dg.plots.common import COLORS, load_matplotlib, save
from fedjax_dg.plots.features import embed


def plot_latents(
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]], labels: tuple[np.ndarray, np.ndarray], folder: str | Path
) -> list[Path]:
    """Draw features of real examples beside latents made from the head, by t-SNE, a panel for each way they were made:
    ``latents.png`` and ``.svg`` in ``folder``.

    ``panels``: title -> (real [N, n], made [L, n]), each panel with an embedding of its own; ``labels``: class of every row
    of both, told by colour. Raises ``ValueError`` where matplotlib or scikit-learn is missing.
    """
    _, Figure = load_matplotlib()
    figure = Figure(figsize=(4.2 * len(panels), 4.6), layout="constrained")
    for axes, (title, (real, made)) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        places = embed(np.concatenate([real, made]))
        for part, label, marker, name in (
            (places[: len(real)], labels[0], "o", "real"),
            (places[len(real) :], labels[1], "x", "made"),
        ):
            colors = [COLORS[int(y) % len(COLORS)] for y in label]
            face = {"facecolors": "none", "edgecolors": colors} if marker == "o" else {"color": colors}
            axes.scatter(part[:, 0], part[:, 1], s=14, marker=marker, linewidths=0.8, label=name, **face)
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(fontsize=7, labelcolor="black")
    return save(figure, Path(folder), "latents")
