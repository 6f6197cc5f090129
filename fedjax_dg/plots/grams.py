"""Spectra of what dense layers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from fedjax_dg.aggregators import grams_of
from fedjax_dg.plots.common import COLORS, DASHES, Run, load_matplotlib

MOST_ROWS, MOST_STATIONS, MOST_LAYERS = 1024, 10, 12
#: Of the largest eigenvalue; what is smaller is rounding of a float32 product.
SMALLEST = 1e-8


def draw_grams(runs: Sequence[Run]) -> Any:
    """Eigenvalues of the Gram X^T X / m of every dense layer's inputs X [m, d], a line per station, with its effective rank.

    For the selected model of the run's best cell, on at most ``MOST_ROWS`` training examples of each station, evenly spaced.
    Effective rank: exp of the entropy of the eigenvalues as shares of their sum (Roy and Vetterli, EUSIPCO 2007). Needs the
    data set and a checkpoint.
    """
    _, Figure = load_matplotlib()
    (run,) = runs
    model = run.model
    spectra = spectra_of(run)
    layers = list(next(iter(spectra.values())))
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(4.6 * columns, 0.8 + 3.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, layer in zip(panels, layers):
        for number, (station, of_station) in enumerate(spectra.items()):
            values = of_station[layer]
            axes.plot(
                np.arange(1, len(values) + 1),
                np.maximum(values, SMALLEST * values[0]),
                color=COLORS[number % len(COLORS)],
                linestyle=DASHES[number % len(DASHES)],
                linewidth=1.5,
                label=f"{station}: {effective_rank(values):.1f}",
            )
        axes.set_yscale("log")
        axes.set_title(f"{layer} (d = {len(next(iter(spectra.values()))[layer])})", fontsize=10)
        axes.set_xlabel("eigenvalue, the largest first", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, title="station: effective rank", title_fontsize=7)
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel(r"eigenvalue of $X^T X / m$", fontsize=9)
    figure.suptitle(f"{model.name}: Gram spectra of dense layers on the stations' training examples", fontsize=10)
    return figure


def spectra_of(run: Run) -> dict[int, dict[str, Float[np.ndarray, " d"]]]:
    """By station and layer, of at most the last ``MOST_LAYERS``, the eigenvalues, descending; of a station without examples
    nothing."""
    model = run.model
    held = run.deal_of_model().held  # [S, C, N]
    measure = jax.jit(lambda variables, inputs: grams_of(model.backbone, variables, inputs))
    found = {}
    for station, rows in enumerate(held[:MOST_STATIONS]):
        rows = np.sort(rows[rows >= 0])
        if not len(rows):
            continue
        chosen = rows[np.linspace(0, len(rows) - 1, min(MOST_ROWS, len(rows))).round().astype(int)]
        grams = jax.device_get(measure(model.variables, np.asarray(run.data.inputs[chosen])))
        found[station] = {
            layer: _eigenvalues(stats.gram) / max(float(stats.rows), 1.0) for layer, stats in grams.items()
        }
    return found


def _eigenvalues(gram: np.ndarray) -> Float[np.ndarray, " d"]:
    """Of a whole Gram [d, d], or of all blocks [k, c, c] of its diagonal."""
    with threadpool_limits(1, user_api="blas"):  # as in ``features.embed``
        return np.sort(np.linalg.eigvalsh(gram.astype(np.float64)).ravel())[::-1]


def effective_rank(values: Float[np.ndarray, " d"]) -> float:
    """exp(-sum p log p) with p the values as shares of their sum: 1 for one direction, d for d equal ones."""
    shares = np.maximum(values, 0.0)
    shares = shares[shares > 0] / shares.sum() if shares.sum() > 0 else np.ones(1)
    return float(np.exp(-(shares * np.log(shares)).sum()))
