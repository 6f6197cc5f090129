"""Shrinkage-aware RegMean: merge linear layers by least squares on their input statistics."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg.alignment.groups import take_units
from fedjax_dg.errors import unknown
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Metrics

BIASES = ("corrected", "mean")
GRAMS = ("sum", "mean")


class Gram(NamedTuple):
    """What a dense layer's inputs X [m, d] looked like: sums over rows, so those of several clients simply add up."""

    gram: Float[Array, "*e d d"]  # X^T X
    total: Float[Array, "*e d"]  # sum of rows
    rows: Float[Array, "*e"]  # m

    def permute(self, order: Array, positions: int) -> Gram:
        """The statistics of the same inputs with their units in another order (see ``alignment.take_units``)."""
        gram = take_units(take_units(self.gram, order, 0, positions), order, 1, positions)
        return Gram(gram, take_units(self.total, order, 0, positions), self.rows)


class Merged(NamedTuple):
    """A merged dense layer and how the solve went."""

    kernel: Float[Array, "d o"]
    bias: Float[Array, " o"]
    info: Metrics


def measure_grams(backbone, variables, examples, key, gram: str = "sum") -> dict[str, Gram]:
    """One evaluation-mode pass of a client's trained model over its own examples: a Gram per dense layer.

    ``gram="mean"`` divides by the number of rows, so that every client counts the same.
    """

    def of_batch(batch):
        def statistics(x):
            x = jnp.where(batch.mask[:, None], x, 0.0)
            return Gram(jnp.matmul(x.T, x, precision="highest"), x.sum(0), batch.mask.sum().astype(jnp.float32))

        return {name: statistics(x) for name, x in backbone.dense_inputs(variables, batch.inputs).items()}

    grams = sum_over_batches(of_batch, examples)
    if gram == "mean":
        return {name: jax.tree.map(lambda x, m=jnp.maximum(g.rows, 1.0): x / m, g) for name, g in grams.items()}
    return grams


def add_grams(grams: dict[str, Gram], weights: Float[Array, " n"]) -> dict[str, Gram]:
    """Sum over the leading axis [n], leaving out models of weight zero."""
    return jax.tree.map(lambda x: jnp.tensordot((weights > 0).astype(x.dtype), x, axes=1, precision="highest"), grams)


def shrink(gram: Float[Array, "... d d"], alpha: ArrayLike) -> Float[Array, "... d d"]:
    """alpha G + (1 - alpha) diag(G): the off-diagonal times alpha."""
    diagonal = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return gram * (alpha + (1.0 - alpha) * diagonal)


def regmean(
    kernels: Float[Array, "e d o"],
    biases: Float[Array, "e o"],
    grams: Gram,
    weights: Float[Array, " e"],
    alpha: ArrayLike = 0.75,
    ridge: ArrayLike = 1e-6,
    bias: str = "corrected",
) -> Merged:
    """Merge a dense layer of e models so that it answers on every model's inputs as that model's own layer does.

    W = argmin_W sum_e || X_e W - X_e W_e ||^2 with shrunken Grams G_e = alpha X_e^T X_e + (1 - alpha) diag(X_e^T X_e), and
    a pull of strength r = ridge * trace(S) / d, S = sum_e G_e, towards the weighted mean M of the kernels. Solved for the
    difference to that mean: (S + r I)(W - M) = sum_e G_e (W_e - M), by Cholesky after Jacobi scaling, at highest
    precision. So equal models, a single model and never-active inputs give the mean exactly, for every alpha and ridge.

    Bias: ``corrected`` is optimal for the merged W, b = sum_e m_e (b_e + (W_e - W)^T mu_e) / sum_e m_e, with row counts
    m_e and mean inputs mu_e; ``mean`` is the weighted mean.

    Shapes: ``kernels`` [e, d, o], ``biases`` [e, o], ``grams`` with leading axis e, ``weights`` [e] (of the mean only).
    Info: ``residual`` (relative, of the solve), ``fallback`` (1.0 when no input was ever active, so W = M) and ``raised``
    (1.0 when the system was not positive definite in float32, so its diagonal was raised a little).

    Deviations: the paper has neither ridge nor bias correction; the authors' release has a ridge towards zero, which
    shrinks weights and erases rows of inputs that are never active.
    Source: Jin et al., ICLR 2023, https://arxiv.org/abs/2212.09849; HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    if bias not in BIASES:
        raise unknown("bias rule", bias, BIASES)
    present = (weights > 0).astype(kernels.dtype)
    shares = weights / jnp.maximum(weights.sum(), jnp.finfo(kernels.dtype).tiny)
    mean_kernel = jnp.tensordot(shares, kernels, axes=1, precision="highest")
    shrunken = shrink(grams.gram, alpha) * present[:, None, None]
    system = shrunken.sum(0)
    trace = jnp.trace(system)
    fallback = trace <= 0
    system = system + jnp.where(fallback, 1.0, ridge * trace / system.shape[0]) * jnp.eye(system.shape[0])
    target = jnp.einsum("eij,ejo->io", shrunken, kernels - mean_kernel, precision="highest")
    difference, raised = _solve(system, target)
    kernel = mean_kernel + difference

    error = jnp.matmul(system, difference, precision="highest") - target
    size = jnp.linalg.norm(target)
    info = {
        "residual": jnp.linalg.norm(error) / jnp.where(size > 0, size, 1.0),
        "fallback": fallback.astype(jnp.float32),
        "raised": raised.astype(jnp.float32),
    }
    mean_bias = jnp.tensordot(shares, biases, axes=1, precision="highest")
    if bias == "mean":
        return Merged(kernel, mean_bias, info)
    rows = grams.rows * present
    shifts = jnp.einsum("ei,eio->eo", grams.total * present[:, None], kernels - kernel, precision="highest")
    corrected = (jnp.einsum("e,eo->o", rows, biases, precision="highest") + shifts.sum(0)) / jnp.maximum(
        rows.sum(), 1e-12
    )
    return Merged(kernel, jnp.where(fallback, mean_bias, corrected), info)


def _solve(system: Float[Array, "d d"], target: Float[Array, "d o"]) -> tuple[Float[Array, "d o"], Bool[Array, ""]]:
    """Cholesky of the matrix scaled to a unit diagonal: a shrunken Gram's condition is then at most (3 d + 1) at 0.75.

    With alpha = 1 and fewer rows than inputs it can be singular; where Cholesky fails, the diagonal is raised by d eps,
    and the second result says so.
    """
    diagonal = jnp.diagonal(system)
    # without a ridge a never-active input has a zero row, column and target: any positive scale gives it zero
    dead = diagonal <= 0
    scale = 1.0 / jnp.sqrt(jnp.where(dead, 1.0, diagonal))
    scaled = system * scale[:, None] * scale[None, :] + jnp.diag(dead.astype(system.dtype))
    least = len(system) * jnp.finfo(system.dtype).eps
    with jax.default_matmul_precision("highest"):
        factor = jnp.linalg.cholesky(scaled)
        definite = jnp.isfinite(factor).all()
        factor = jax.lax.cond(
            definite,
            lambda: factor,
            lambda: jnp.linalg.cholesky(scaled + least * jnp.eye(len(system), dtype=system.dtype)),
        )
        return scale[:, None] * jax.scipy.linalg.cho_solve((factor, True), scale[:, None] * target), ~definite
