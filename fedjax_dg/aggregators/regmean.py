"""Shrinkage-aware RegMean: merge linear layers by least squares on their input statistics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import sharding, tree
from fedjax_dg.aggregators.grams import Gram, LowRankGram
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.errors import unknown
from fedjax_dg.types import Metrics, PyTree, Variables

BIASES = ("corrected", "augmented", "mean")
POWER_STEPS = 12


class Merged(NamedTuple):
    """A merged model and how each dense layer's solve went."""

    variables: Any
    info: dict[str, Metrics]


class System(NamedTuple):
    """S D = T, k systems of width c: D is the difference to the mean kernel."""

    matrix: Float[Array, "k c c"]
    target: Float[Array, "k c o"]


class Solution(NamedTuple):
    """What ``solve`` found, and how reliable it is, per system."""

    difference: Float[Array, "k c o"]
    residual: Float[Array, " k"]  # relative
    condition: Float[
        Array, " k"
    ]  # estimated from below: of the matrix scaled to a unit diagonal; low rank: of I + U U^T
    raised: Float[Array, " k"]  # 1 where it was not positive definite in float32, so its diagonal was raised


def regmean(
    models: Variables | Sequence[Any],
    grams: dict[str, Any] | Sequence[dict[str, Any]],
    weights: Float[Array, " e"] | None = None,
    alpha: ArrayLike = 0.75,
    ridge: ArrayLike = 1e-6,
    bias: str = "corrected",
) -> Merged:
    """Merge models so that each dense layer answers on every model's inputs as that model's own layer does.

    Per layer of ``grams``: W = argmin_W sum_e || X_e W - X_e W_e ||^2 with shrunken Grams
    G_e = alpha X_e^T X_e + (1 - alpha) diag(X_e^T X_e), and a pull of strength r = ridge * trace(S) / d, S = sum_e G_e,
    towards the weighted mean M of the kernels. Solved for the difference to that mean:
    (S + r I)(W - M) = sum_e G_e (W_e - M), by Cholesky after Jacobi scaling, at highest precision; layers of one shape
    in one batch, a low-rank Gram by Woodbury's identity. So equal models, a single model and never-active inputs give
    the mean exactly, for every alpha and ridge. All other leaves take the weighted mean.

    Bias: ``corrected`` is optimal for the merged W, b = sum_e m_e (b_e + (W_e - W)^T mu_e) / sum_e m_e, with row counts
    m_e and mean inputs mu_e; ``augmented`` solves for W and b together, with the Gram of [x, 1] (whole Grams only; alpha
    shrinks its last row too); ``mean`` is the weighted mean.

    ``models``: a list of Variables or bare params, or Variables with a leading axis [e]; the result is of the same kind.
    ``grams``: a list of ``grams_of(...)``, or that with a leading axis. ``weights`` [e] (of the means; None: equal): a model
    of weight 0 is left out altogether.
    Info per layer: ``residual`` (relative, of the solve), ``condition`` (estimate, of the scaled matrix), ``fallback`` (1.0
    when no input was ever active, so W = M), ``raised`` (share of systems not positive definite in float32, whose
    diagonal was raised a little). Raises ``ValueError`` for an unknown bias rule, layers that the models lack, lists of
    different lengths.

    Deviations: the paper has neither ridge nor bias correction; the authors' release has a ridge towards zero, which
    shrinks weights and erases rows of inputs that are never active.
    Source: Jin et al., ICLR 2023, https://arxiv.org/abs/2212.09849; HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    bare = not (isinstance(models, Variables) or isinstance(models[0], Variables))
    if not (isinstance(models, Variables) or isinstance(grams, dict)) and len(models) != len(grams):
        raise ValueError(f"{len(models)} models but {len(grams)} Grams are given: give one for each model.")
    if isinstance(models, Variables):
        stacked = models
    else:
        stacked = _stack([Variables(model, {}) if bare else model for model in models])
    statistics = grams if isinstance(grams, dict) else _stack(grams)
    weights = jnp.ones(jax.tree.leaves(stacked)[0].shape[0]) if weights is None else weights
    merged, info = _merge(stacked, statistics, weights, alpha, ridge, bias=bias)
    return Merged(merged.params if bare else merged, info)


@functools.partial(jax.jit, static_argnames="bias")
def _merge(models, grams, weights, alpha, ridge, *, bias) -> tuple[Variables, dict[str, Metrics]]:
    """Compiled once for models of one architecture."""
    return merge_layers(tree.weighted_mean(models, weights), models, grams, weights, alpha, ridge, bias)


def merge_layers(
    merged: Variables,
    models: Variables,
    grams: dict[str, Any],
    weights: Float[Array, " e"],
    alpha: ArrayLike,
    ridge: ArrayLike,
    bias: str,
) -> tuple[Variables, dict[str, Metrics]]:
    """``merged`` with the dense layers of ``grams`` replaced by their ``regmean`` over ``models`` [e]."""
    if bias not in BIASES:
        raise unknown("bias rule", bias, BIASES)
    stacked, layers = leaves_of(models), {}
    for layer, statistics in grams.items():
        kernel = f"params/{layer}/kernel"
        if kernel not in stacked:
            raise unknown("dense layer in grams", layer, [k[7:-7] for k in stacked if k.endswith("/kernel")])
        layers[layer] = (stacked[kernel], stacked.get(f"params/{layer}/bias"), statistics)
    kernels, biases, info = merge_dense(layers, weights, alpha, ridge, bias)
    leaves = leaves_of(merged) | {f"params/{layer}/kernel": x for layer, x in kernels.items()}
    return from_leaves(leaves | {f"params/{layer}/bias": x for layer, x in biases.items()}), info


def merge_dense(
    layers: dict[str, tuple[Float[Array, "e d o"], Float[Array, "e o"] | None, Any]],
    weights: Float[Array, " e"],
    alpha: ArrayLike,
    ridge: ArrayLike,
    bias: str,
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Metrics]]:
    """``regmean`` of layers ``{name: (kernels, biases or None, statistics)}``: kernels [d, o], biases [o], info."""
    shares = weights / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
    present = (weights > 0).astype(weights.dtype)
    parts, means, systems, solutions = {}, {}, {}, {}
    for name, (kernels, biases, statistics) in layers.items():
        if bias == "augmented" and biases is not None:
            kernels, statistics = augment(name, kernels, biases, statistics)
        parts[name] = kernels, jax.tree.map(lambda x: x * present.reshape(-1, *[1] * (x.ndim - 1)), statistics)
        means[name] = jnp.tensordot(shares, kernels, axes=1, precision="highest")
        if isinstance(statistics, LowRankGram):
            solutions[name] = solve_low_rank(kernels, parts[name][1], means[name], alpha, ridge)
        else:
            systems[name] = normal_equations(kernels, parts[name][1], means[name], alpha, ridge)
    solutions |= solve_together(systems)

    out_kernels, out_biases, info = {}, {}, {}
    for name, (_, biases, _) in layers.items():
        kernels, statistics = parts[name]
        solution = solutions[name]
        kernel = means[name] + unfold(solution.difference, kernels.shape[1])
        power = statistics.diagonal if isinstance(statistics, LowRankGram) else _diagonals(statistics.gram)
        fallback = power.sum() <= 0
        info[name] = {
            "residual": solution.residual.max(),
            "condition": solution.condition.max(),
            "fallback": fallback.astype(jnp.float32),
            "raised": solution.raised.mean(),
        }
        if biases is None:
            pass
        elif bias == "augmented":
            kernel, out_biases[name] = kernel[:-1], kernel[-1]
        else:
            out_biases[name] = jnp.tensordot(shares, biases, axes=1, precision="highest")
            if bias == "corrected":
                moved = jnp.einsum("e,eo->o", statistics.rows, biases, precision="highest")
                moved += shifts(kernels, kernel, statistics.total)
                best = moved / jnp.maximum(statistics.rows.sum(), 1e-12)
                out_biases[name] = jnp.where(fallback, out_biases[name], best)
        out_kernels[name] = kernel
    return out_kernels, out_biases, info


def shifts(
    kernels: Float[Array, "e d o"], merged: Float[Array, "d o"], totals: Float[Array, "e d"]
) -> Float[Array, " o"]:
    """sum_e (W_e - W)^T t_e: never the differences of all models at once, which would be as large as the models."""

    shift = lambda merged, model: (model[1][:, None] * (model[0] - merged)).sum(0)
    return sharding.total(shift, merged, (kernels, totals))


def shrink(gram: Float[Array, "... d d"], alpha: ArrayLike) -> Float[Array, "... d d"]:
    """alpha G + (1 - alpha) diag(G): the off-diagonal times alpha."""
    diagonal = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return gram * (alpha + (1.0 - alpha) * diagonal)


def augment(name: str, kernels: Array, biases: Array, statistics: Any) -> tuple[Array, Gram]:
    """The layers [W; b] and the Grams of their inputs [x, 1]."""
    if isinstance(statistics, LowRankGram) or statistics.gram.ndim != 3:
        raise ValueError(
            f"bias=augmented needs the whole Gram of {name}, but it is kept in parts: raise max_gram, or choose "
            "bias=corrected."
        )
    gram, total, rows = statistics
    column = jnp.concatenate([total, rows[:, None]], axis=1)[..., None]
    whole = jnp.concatenate([jnp.concatenate([gram, total[:, None]], axis=1), column], axis=2)
    return jnp.concatenate([kernels, biases[:, None]], axis=1), Gram(whole, column[..., 0], rows)


def normal_equations(
    kernels: Float[Array, "e d o"], statistics: Gram, mean: Float[Array, "d o"], alpha: ArrayLike, ridge: ArrayLike
) -> System:
    """The systems of a layer, one a block of its Gram."""
    blocks = statistics.gram if statistics.gram.ndim == 4 else statistics.gram[:, None]

    def of_model(common, model):
        (mean, alpha), (kernel, gram) = common, model
        difference, shrunken = fold(kernel - mean, *blocks.shape[1:3]), shrink(gram, alpha)
        return System(shrunken, jnp.matmul(shrunken, difference, precision="highest"))

    matrix, target = sharding.total(of_model, (mean, alpha), (kernels, blocks))
    power = _diagonals(matrix).mean()
    pull = jnp.where(power > 0, ridge * power, 1.0)
    return System(matrix + pull * jnp.eye(matrix.shape[-1], dtype=matrix.dtype), target)


def fold(x: Float[Array, "d o"], blocks: int, width: int) -> Float[Array, "k c p"]:
    """Rows of a kernel as k blocks of ``width``; where one block serves all positions, these become further outputs."""
    if blocks > 1:
        return x.reshape(blocks, width, -1)
    return x.reshape(-1, width, x.shape[1]).swapaxes(0, 1).reshape(1, width, -1)


def unfold(x: Float[Array, "k c p"], rows: int) -> Float[Array, "d o"]:
    """The inverse of ``fold``, d = ``rows``."""
    blocks, width, _ = x.shape
    return x.reshape(blocks, width, rows // (blocks * width), -1).swapaxes(1, 2).reshape(rows, -1)


def solve_together(systems: dict[str, System]) -> dict[str, Solution]:
    """``solve``, with systems of one shape in one batch."""
    by_shape: dict[tuple, list[str]] = {}
    for name, system in systems.items():
        by_shape.setdefault(system.target.shape[1:], []).append(name)
    solutions = {}
    for names in by_shape.values():
        solution = solve(System(*(jnp.concatenate(x) for x in zip(*(systems[n] for n in names)))))
        start = 0
        for name in names:
            stop = start + len(systems[name].matrix)
            solutions[name] = jax.tree.map(lambda x, i=start, j=stop: x[i:j], solution)
            start = stop
    return solutions


@jax.custom_batching.sequential_vmap
def solve(system: System) -> Solution:
    """Cholesky of the matrices scaled to a unit diagonal: a shrunken Gram's condition is then at most 3 c + 1 at 0.75.

    With alpha = 1 and fewer rows than inputs one can be singular; where Cholesky fails, the diagonal is raised by c eps,
    and ``raised`` says so. Under ``vmap`` (a sweep) the settings are solved one after another, as LAPACK wants it.
    """
    matrix, target = system
    width = matrix.shape[-1]
    diagonal = _diagonals(matrix)
    # without a ridge a never-active input has a zero row, column and target: any positive scale gives it zero
    dead = diagonal <= 0
    scale = 1.0 / jnp.sqrt(jnp.where(dead, 1.0, diagonal))
    one = jnp.eye(width, dtype=matrix.dtype)
    scaled = matrix * scale[:, :, None] * scale[:, None, :] + dead[:, :, None] * one
    with jax.default_matmul_precision("highest"):
        factor = jnp.linalg.cholesky(scaled)
        definite = jnp.isfinite(factor).all((1, 2))
        least = jnp.where(definite, 0.0, width * jnp.finfo(matrix.dtype).eps)[:, None, None]
        factor = jax.lax.cond(definite.all(), lambda: factor, lambda: jnp.linalg.cholesky(scaled + least * one))
        # one after another: on CPU, XLA calls LAPACK's triangular solve for single matrices only (30 times faster)
        solved = jax.lax.map(
            lambda x: jax.scipy.linalg.cho_solve((x[0], True), x[1]), (factor, scale[..., None] * target)
        )
        difference = scale[..., None] * solved
        error = jnp.linalg.norm(jnp.matmul(matrix, difference) - target, axis=(1, 2))
        # no eigenvalue is above a pivot's square: an estimate from below, for no more than a few products
        condition = largest(scaled) / jnp.minimum((_diagonals(factor) ** 2).min(1), 1.0)
    size = jnp.linalg.norm(target, axis=(1, 2))
    residual = error / jnp.where(size > 0, size, 1.0)
    return Solution(difference, residual, condition, 1.0 - definite.astype(jnp.float32))


def largest(matrices: Float[Array, "k c c"]) -> Float[Array, " k"]:
    """Largest eigenvalue of positive definite matrices by power iteration, from below."""
    width = matrices.shape[-1]
    start = jnp.broadcast_to(
        jax.random.normal(jax.random.key(0), (width, 1), matrices.dtype), (len(matrices), width, 1)
    )

    def step(_, x):
        x = matrices @ x
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)

    return jnp.linalg.norm(matrices @ jax.lax.fori_loop(0, POWER_STEPS, step, start / width**0.5), axis=(1, 2))


def solve_low_rank(
    kernels: Float[Array, "e d o"],
    statistics: LowRankGram,
    mean: Float[Array, "d o"],
    alpha: ArrayLike,
    ridge: ArrayLike,
) -> Solution:
    """The same for Grams F_e^T F_e + a diagonal, by Woodbury's identity on S = D^(1/2) (I + U U^T) D^(1/2).

    With the target D^(1/2) (U c + v): D^(1/2) difference = v + U (I + U^T U)^-1 (c - U^T v). So what lies in the range of
    U is solved there; as a difference to the target its digits would cancel where D is small, at alpha = 1.
    """
    factor, diagonal = statistics.factor, statistics.diagonal
    rest = jnp.maximum(diagonal - alpha * (factor**2).sum(1), 0.0)  # what alpha F^T F leaves of the diagonal
    differences = kernels - mean
    power = diagonal.sum(0).mean()
    own = rest.sum(0) + jnp.where(power > 0, ridge * power, 1.0)
    root = jnp.sqrt(jnp.where(own > 0, own, 1.0))[:, None]
    leading = jnp.sqrt(alpha) * factor
    with jax.default_matmul_precision("highest"):
        u = leading.reshape(-1, leading.shape[-1]).T / root  # [d, e r]
        inside = (leading @ differences).reshape(-1, differences.shape[-1])
        beside = (rest[..., None] * differences).sum(0) / root
        target = root * (u @ inside + beside)
        if u.shape[1] >= u.shape[0]:  # no lower a rank than the matrix itself, which is then the better one to solve
            matrix = root * (jnp.eye(u.shape[0], dtype=u.dtype) + u @ u.T) * root.T
            return solve(System(matrix[None], target[None]))
        inner = jnp.eye(u.shape[1], dtype=u.dtype) + u.T @ u
        found = beside + u @ jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(inner), inside - u.T @ beside)
        error = jnp.linalg.norm(root * (found + u @ (u.T @ found)) - target)
        condition = largest(inner[None])  # no eigenvalue of I + U U^T is below 1
    size = jnp.linalg.norm(target)
    residual = error / jnp.where(size > 0, size, 1.0)
    return Solution((found / root)[None], residual[None], condition, jnp.zeros(1))


def _diagonals(matrices: Float[Array, "*k c c"]) -> Float[Array, "*k c"]:
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(leaf) for leaf in x]), *trees)
