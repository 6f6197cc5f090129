"""Sample weights under which features look independent (stable learning): what StableNet and Stable-FedADG share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg.alignment.groups import OfFeatures
from fedjax_dg.types import Metrics

STEPS = 20  # of the inner descent; the first half at the full rate, the rest at a tenth
MOMENTUM = 0.9
SLOWEST = 0.1  # a memory's row never forgets less than this per batch


class Memory(NamedTuple):
    """Features and weight logits of earlier batches, row by row."""

    z: Float[Array, "R M"]
    logits: Float[Array, " R"]
    count: Float[Array, " R"]  # how many batches went into a row


def empty_memory(rows: int, width: int) -> Memory:
    """A memory of ``rows`` rows that nothing has gone into."""
    return Memory(jnp.zeros((rows, width)), jnp.zeros(rows), jnp.zeros(rows))


def remember(memory: Memory, z: Float[Array, "B M"], logits: Float[Array, " B"], mask: Bool[Array, " B"]) -> Memory:
    """A batch's real rows mixed into the memory's first ones: a running mean of the first ten, then 0.9 old + 0.1 new."""
    n = min(len(mask), len(memory.count))
    z, logits, real = z[:n], logits[:n], mask[:n]
    rate = jnp.where(real, jnp.maximum(1.0 / (memory.count[:n] + 1.0), SLOWEST), 0.0)
    mixed = lambda old, new, r: old.at[:n].add(r * (jnp.where(r > 0, new, 0.0) - old[:n]))
    return Memory(mixed(memory.z, z, rate[:, None]), mixed(memory.logits, logits, rate), memory.count.at[:n].add(real))


def fourier_features(z: Float[Array, "B M"], key: Array, num: int) -> Float[Array, "B M n"]:
    """u(a) = sqrt(2) cos(omega a + phi) of every scalar feature, ``num`` functions each: omega ~ N(0, 1), phi ~ U(0, 2 pi).

    E u(a) u(b) = exp(-(a - b)^2 / 2), so the scale of a feature matters: ``standardise`` first.
    """
    omega_key, phi_key = jax.random.split(key)
    shape = (z.shape[-1], num)
    omega, phi = jax.random.normal(omega_key, shape), jax.random.uniform(phi_key, shape, maxval=2 * jnp.pi)
    return jnp.sqrt(2.0) * jnp.cos(omega * z[..., None] + phi)


def standardise(z: Float[Array, "B M"], mask: Bool[Array, " B"]) -> Float[Array, "B M"]:
    """Every feature with mean 0 and deviation 1 over the real rows; 0 at padding, and, to rounding, for constant ones."""
    count = jnp.maximum(mask.sum(), 1)
    real = jnp.where(mask[:, None], z, 0.0)
    centred = jnp.where(mask[:, None], z - real.sum(0) / count, 0.0)
    return centred / jnp.sqrt((centred**2).sum(0) / count + 1e-6)


def dependence(u: Float[Array, "B M n"], q: Float[Array, " B"]) -> Float[Array, ""]:
    """Mean over pairs of features m < h of || Cov_q(u_m, u_h) ||_F^2 / n^2.

    Cov_q(u, v) = sum_i q_i u_i v_i^T - (sum_i q_i u_i)(sum_i q_i v_i)^T, q summing to 1. Computed from the B x B Gram matrix
    K of the centred rows: the sum over all m, h is q^T (K o K) q, less the blocks m = h. No [M n, M n] covariance is formed.
    """
    return _dependence(u, q, _gram(u))


def _gram(u: Float[Array, "B M n"]) -> Float[Array, "B B"]:
    return jnp.einsum("imn,jmn->ij", u, u, precision="highest")


def _dependence(u, q, gram):
    _, width, num = u.shape
    moved = gram @ q
    centred = gram - moved[:, None] - moved + q @ moved
    own = u - jnp.einsum("i,imn->mn", q, u, precision="highest")
    blocks = jnp.einsum("i,ima,imb->mab", q, own, own, precision="highest")
    total = q @ (centred**2) @ q - (blocks**2).sum()
    return total / (max(width * (width - 1), 1) * num**2)


def solve(
    z: Float[Array, "B M"],
    mask: Bool[Array, " B"],
    key: Array,
    lambda_p: ArrayLike,
    lr: ArrayLike,
    num: int = 5,
    steps: int = STEPS,
    memory: Memory | None = None,
) -> tuple[Float[Array, " B"], Float[Array, " B"], Metrics]:
    """Weights q [B] of a batch's rows, summing to 1 over the real ones, under which its features are least dependent.

    q = softmax(a), and ``steps`` steps of descent with momentum 0.9 on the logits a [B], zero at first, minimise
    B (L / lambda_p + sum_i q_i^2), L = ``dependence`` of random Fourier features, drawn once. Without the second term all
    weight on one row would be best; a larger ``lambda_p`` means more even weights. With a ``memory`` L is of the batch's
    rows and the memory's together, whose logits stay as they are. Of two rows all features depend alike whatever their
    weights are, up to one row alone: they stay even.

    The authors minimise pairs L n^2 / 70 + sum q^2 at rate 1: here lambda_p = 70 / (pairs n^2) and lr = 1 / B, with
    pairs = M (M - 1) / 2. Theirs depends on M, and through softmax on B, so that weights often hardly move.

    Returns (q, a, metrics), metrics the largest and smallest B q_i and L before and after. Nothing is differentiated.
    """
    z = jax.lax.stop_gradient(z)
    size = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    rows, real, fixed = z, mask, jnp.zeros(0)
    if memory is not None:
        rows, real = jnp.concatenate([z, memory.z]), jnp.concatenate([mask, memory.count > 0])
        fixed = memory.logits
    u = jnp.where(real[:, None, None], fourier_features(standardise(rows, real), key, num), 0.0)
    gram = _gram(u)

    def shares(logits, mask):
        return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))

    def measure(logits):
        return _dependence(u, shares(jnp.concatenate([logits, fixed]), real), gram)

    def objective(logits):
        return size * (measure(logits) / lambda_p + (shares(logits, mask) ** 2).sum())

    def descend(carry, step):
        logits, speed = carry
        speed = MOMENTUM * speed + jax.grad(objective)(logits)
        rate = lr * jnp.where(step < steps // 2, 1.0, 0.1) * (real.sum() > 2)
        return (logits - rate * speed, speed), None

    start = jnp.zeros(len(mask))
    (logits, _), _ = jax.lax.scan(descend, (start, start), jnp.arange(steps))
    q = shares(logits, mask)
    metrics = {
        "weight_max": size * q.max(),
        "weight_min": size * jnp.where(mask, q, jnp.inf).min(initial=1.0),
        "dependence_before": measure(start),
        "dependence": measure(logits),
    }
    return q, logits, metrics


def even(memory, z, mask, key):
    """Every real row weighs the same."""
    return mask / mask.sum().clip(1), memory, {}


def weigher(lambda_p: ArrayLike, lr: ArrayLike, fourier: int, steps: int) -> Callable:
    """``weigh(memory, z, mask, key) -> (q, memory, metrics)``: ``solve``, then the batch is remembered.

    Raises ``ValueError`` for fewer than one random function a feature.
    """
    if fourier < 1:
        raise ValueError(f"fourier={fourier} is not positive: give 1 or more random functions of every feature.")

    def weigh(memory, z, mask, key):
        past = memory if isinstance(memory, Memory) else None
        q, logits, told = solve(z, mask, key, lambda_p, lr, fourier, steps, past)
        if past is not None:
            memory = remember(past, jax.lax.stop_gradient(z), logits, mask)
        return q, memory, told

    return weigh


class Keeping(NamedTuple):
    """Where a memory of features lives: on the client between rounds, or only while it trains."""

    first: Callable  # backbone -> the client's state before round 1
    recall: Callable  # (backbone, client) -> the tally that local training starts with
    keep: Callable  # (client, tally) -> the client's state afterwards


def memory_of(rows: int, persist: bool) -> Keeping:
    """A memory of ``rows`` rows (0: none), kept on the client if ``persist``. ``ValueError`` for what cannot be."""
    if rows < 0:
        raise ValueError(f"memory_rows={rows} is negative: give the batch size, or 0 for no memory.")
    if not rows and persist:
        raise ValueError("persist_memory=true, but there is no memory: give memory_rows, such as the batch size.")
    if not rows:
        return Keeping(lambda backbone: (), lambda backbone, client: (), lambda client, tally: client)
    empty = lambda backbone: empty_memory(rows, backbone.num_features)
    if not persist:
        return Keeping(lambda backbone: (), lambda backbone, client: empty(backbone), lambda client, tally: client)
    box = lambda memory: memory._replace(z=OfFeatures(memory.z, axis=1))  # features may change their order
    return Keeping(
        lambda backbone: box(empty(backbone)),
        lambda backbone, client: client._replace(z=client.z.value),
        lambda client, tally: box(tally),
    )
