"""Where a model puts examples of every domain, seen from above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from threadpoolctl import threadpool_limits

from fedjax_dg.models import Model
from fedjax_dg.plots.common import COLORS, MARKERS, Run, load_matplotlib

MOST_EXAMPLES, MOST_CLASSES = 150, 7  # of a domain; of all
AT_ONCE = 64


def draw_features(runs: Sequence[Run]) -> Any:
    """What the head of the selected model of the run's best cell reads, by t-SNE: colour is class, marker is domain.

    Validation examples of the source domains (hollow) and examples of the held-out domain (filled), at most
    ``MOST_EXAMPLES`` of each and of the ``MOST_CLASSES`` commonest classes. Needs the data set, a checkpoint and
    scikit-learn.
    """
    _, Figure = load_matplotlib()
    from matplotlib.lines import Line2D

    (run,) = runs
    model, domains = run.model, run.data
    judged = run.deal_of_model().judged
    judged = judged[judged >= 0]
    classes = np.argsort(-np.bincount(domains.labels[judged], minlength=len(domains.class_names)), kind="stable")
    classes = [int(k) for k in np.sort(classes[:MOST_CLASSES])]
    judged = judged[np.isin(domains.labels[judged], classes)]
    held_out, rows = domains.domain_names.index(model.cell["held_out"]), []
    for domain in np.unique(domains.domain[judged]):
        here = judged[domains.domain[judged] == domain]
        rows.append(np.random.default_rng(0).permutation(here)[:MOST_EXAMPLES])
    rows = np.concatenate(rows)
    places = embed(head_inputs(model, domains.inputs, rows))
    figure = Figure(figsize=(8.2, 6.2), layout="constrained")
    axes, marks = figure.subplots(), []
    order = sorted(np.unique(domains.domain[rows]), key=lambda d: d == held_out)  # on top of the others
    for number, domain in enumerate(order):
        stressed = domain == held_out
        marker = "*" if stressed else MARKERS[number % len(MARKERS)]
        for place, label in enumerate(classes):
            here = (domains.domain[rows] == domain) & (domains.labels[rows] == label)
            color = COLORS[place % len(COLORS)]
            face = (
                {"facecolors": color, "edgecolors": "black"}
                if stressed
                else {"facecolors": "none", "edgecolors": color}
            )
            axes.scatter(
                places[here, 0],
                places[here, 1],
                s=85 if stressed else 24,
                marker=marker,
                linewidths=0.6 if stressed else 1.0,
                **face,
            )
        fill = "0.45" if stressed else "none"
        name = domains.domain_names[domain] + (" (held out)" if stressed else "")
        marks.append(
            (
                Line2D(
                    [],
                    [],
                    linestyle="",
                    marker=marker,
                    color="0.3",
                    markerfacecolor=fill,
                    markersize=10 if stressed else 6,
                ),
                name,
            )
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("t-SNE of what the head reads; distances between groups say little", fontsize=9)
    left_out = len(domains.class_names) - len(classes)
    axes.set_title(
        f"{model.name}, round {model.cell['selected_round']}"
        + (f"; without {left_out} rarer classes" if left_out > 0 else ""),
        fontsize=10,
    )
    colors = [
        (Line2D([], [], linestyle="", marker="s", color=COLORS[i % len(COLORS)], markersize=7), domains.class_names[k])
        for i, k in enumerate(classes)
    ]
    handles = [*colors, *marks]
    figure.legend(
        [h for h, _ in handles], [t for _, t in handles], loc="outside right upper", fontsize=8, frameon=False
    )
    return figure


def head_inputs(model: Model, inputs: Any, rows: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
    """What a model's head reads of the examples ``inputs[rows]``, ``AT_ONCE`` at a time."""
    read = jax.jit(lambda variables, inputs: model.backbone.dense_inputs(variables, inputs)["head"])
    places = np.arange(-(-len(rows) // AT_ONCE) * AT_ONCE)
    padded = rows[np.minimum(places, len(rows) - 1)]  # so that one program does
    parts = [
        np.asarray(read(model.variables, jnp.asarray(np.asarray(inputs[part]))))
        for part in np.split(padded, len(padded) // AT_ONCE)
    ]
    return np.concatenate(parts)[: len(rows)]


def embed(rows: Float[np.ndarray, "N d"]) -> Float[np.ndarray, "N 2"]:
    """t-SNE from the principal components, the same every time. ``ValueError`` where scikit-learn is missing."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise ValueError("This figure needs scikit-learn: run pip install 'fedjax-dg[plots]'.") from None
    # one thread: OpenMP's wait for each other busily, which takes ten times as long where others use the cores
    with threadpool_limits(1):
        return TSNE(init="pca", perplexity=min(30, (len(rows) - 1) / 3), random_state=0).fit_transform(rows)
