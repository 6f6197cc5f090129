"""Penalties on the losses, logits and features of one batch, whose rows may come from several domains.

How many domains there are is nowhere a size: rows know which other rows share their domain (``Rows``), so a mean per domain
is a product with a [B, B] matrix, and what is summed over pairs of domains follows from sums over pairs of rows. A batch
of one domain has no pairs: those penalties are 0 there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.types import Examples

#: DomainBed's widths of the Gaussian kernels, exp(-gamma || a - b ||^2), which are summed.
GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


class Rows(NamedTuple):
    """Which rows of a batch are of one domain. Padding belongs to none."""

    same: Float[Array, "B B"]  # 1 where both rows are real and share a domain
    size: Float[Array, " B"]  # real rows of a row's domain, at least 1
    share: Float[Array, " B"]  # 1 / size, and 0 at padding: sums to the number of domains
    num_domains: Float[Array, ""]


def rows_of(batch: Examples) -> Rows:
    """The domains of a batch."""
    return group_rows(batch.domain, batch.mask)


def group_rows(domain: Int[Array, " B"], mask: Bool[Array, " B"]) -> Rows:
    """The domains of rows, by any ids."""
    same = ((domain[:, None] == domain) & mask[:, None] & mask).astype(jnp.float32)
    size = jnp.maximum(same.sum(1), 1.0)
    share = mask / size
    return Rows(same, size, share, share.sum())


def domain_means(values: Float[Array, "B *d"], rows: Rows) -> Float[Array, "B *d"]:
    """At every row the mean over its domain; 0 at padding."""
    return jnp.einsum("ij,j...->i...", rows.same / rows.size[:, None], values, precision="highest")


def mean_over_domains(values: Float[Array, " B"], rows: Rows) -> Float[Array, ""]:
    """Mean over domains of what every row says of its domain; 0 without rows."""
    return (rows.share * values).sum() / jnp.maximum(rows.num_domains, 1.0)


def vrex(losses: Float[Array, " B"], rows: Rows) -> Float[Array, ""]:
    """Variance over domains of their mean losses."""
    risks = domain_means(losses, rows)
    return mean_over_domains((risks - mean_over_domains(risks, rows)) ** 2, rows)


def irm(logits: Float[Array, "B K"], labels: Int[Array, " B"], rows: Rows, unbiased: bool = True) -> Float[Array, ""]:
    """Mean over domains of (d/dw CE(w logits, y) at w = 1)^2: how far the best scale of the logits is from 1.

    That derivative is the mean of g_i = <softmax(s_i) - onehot(y_i), s_i>. The square of a mean over n rows counts its
    noise too; ``unbiased`` leaves out the terms g_i^2: (sum_i sum_{j != i} g_i g_j) / (n (n - 1)), which may be negative
    and is 0 for a domain with one row.
    """
    error = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[-1])
    slopes = (error * logits).sum(-1)
    mean = domain_means(slopes, rows)
    if not unbiased:
        return mean_over_domains(mean**2, rows)
    n = rows.size
    pairs = (n * mean) ** 2 - n * domain_means(slopes**2, rows)
    return mean_over_domains(pairs / jnp.maximum(n * (n - 1), 1.0), rows)


def gap(kernel: Float[Array, "B B"], weights: Float[Array, " B"], rows: Rows) -> Float[Array, ""]:
    """Sum over pairs of domains of || m_a - m_b ||^2, for m_a = sum of w_i phi_i over domain a and kernel = <phi_i, phi_j>.

    With G domains it is G sum_a || m_a ||^2 - || sum_a m_a ||^2.
    """
    weighted = kernel * weights[:, None] * weights
    return rows.num_domains * (rows.same * weighted).sum() - weighted.sum()


def mean_over_pairs(total: Float[Array, ""], rows: Rows) -> Float[Array, ""]:
    """A sum over pairs of domains divided by their number, G (G - 1) / 2."""
    return total / jnp.maximum(rows.num_domains * (rows.num_domains - 1) / 2, 1.0)


def squared_distances(z: Float[Array, "B D"]) -> Float[Array, "B B"]:
    """|| z_i - z_j ||^2."""
    products = jnp.einsum("id,jd->ij", z, z, precision="highest")
    lengths = jnp.diagonal(products)
    return jnp.maximum(lengths[:, None] + lengths - 2 * products, 0.0)


def mmd(z: Float[Array, "B D"], rows: Rows, gammas: tuple[float, ...] = GAMMAS) -> Float[Array, ""]:
    """Mean over pairs of domains of the squared maximum mean discrepancy of their features, Gaussian kernels summed."""
    distances = squared_distances(z)
    kernel = jnp.asarray(sum(jnp.exp(-gamma * distances) for gamma in gammas))
    return mean_over_pairs(gap(kernel, rows.share, rows), rows)


def coral(z: Float[Array, "B D"], rows: Rows) -> Float[Array, ""]:
    """Mean over pairs of domains of || mu_a - mu_b ||^2 / D + || C_a - C_b ||_F^2 / D^2, C with n - 1 in its denominator.

    No D x D covariance is formed: for rows c centred in their domains, <C_a, C_b> is the sum of <c_i, c_j>^2 over i in a
    and j in b, divided by (n_a - 1)(n_b - 1). A domain with one row has C = 0.
    """
    width = z.shape[-1]
    centred = z - domain_means(z, rows)
    inner = lambda x: jnp.einsum("id,jd->ij", x, x, precision="highest")
    weights = (rows.share > 0) / jnp.maximum(rows.size - 1, 1.0)
    covariances = gap(inner(centred) ** 2, weights, rows)
    means = gap(inner(z), rows.share, rows)
    return mean_over_pairs(means / width + covariances / width**2, rows)


def ranks(scores: Float[Array, "*b n"]) -> Int[Array, "*b n"]:
    """Rank of every entry along the last axis, 0 for the largest; of equal ones the first is larger."""
    order = jnp.argsort(scores, axis=-1, descending=True, stable=True)
    return jnp.argsort(order, axis=-1, stable=True)


def annealed(weight: ArrayLike, anneal_rounds: ArrayLike, number: ArrayLike) -> Array:
    """A penalty's weight: at most 1 in the first ``anneal_rounds`` server rounds, then ``weight``."""
    weight = jnp.asarray(weight, jnp.float32)
    return jnp.where(jnp.asarray(number) < jnp.asarray(anneal_rounds), jnp.minimum(weight, 1.0), weight)
