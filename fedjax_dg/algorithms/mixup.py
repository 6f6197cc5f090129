"""Mixup (Zhang et al., ICLR 2018), across the domains of a client (Yan et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Int

from fedjax_dg.algorithms.common import gradient_method, masked_mean, momentum
from fedjax_dg.errors import unknown
from fedjax_dg.types import Algorithm, Variables

LEVELS = ("inputs", "features")


class MixupHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    mix_alpha: ArrayLike = 0.2  # of Beta(alpha, alpha), from which shares are drawn; 0: no mixing


def partners(
    mask: Bool[Array, " B"], domain: Int[Array, " B"], key: Array, across_domains: bool = True
) -> Int[Array, " B"]:
    """For every real row another real row, drawn uniformly, of another domain where there is one. A lone row has itself."""
    draws = jax.random.uniform(key, (len(mask), len(mask)))
    others = mask & ~jnp.eye(len(mask), dtype=bool)
    if across_domains:
        draws = draws + (domain[:, None] != domain)
    scores = jnp.where(others, draws, -1.0)
    return jnp.where(others.any(1), jnp.argmax(scores, axis=1), jnp.arange(len(mask)))


def mixup(
    hparams: MixupHparams = MixupHparams(),
    optimizer: Callable = momentum,
    level: str = "inputs",
    across_domains: bool = True,
) -> Algorithm:
    """Train on mixtures s x_i + (1 - s) x_j of two examples, with the loss s CE(., y_i) + (1 - s) CE(., y_j).

    One share s ~ Beta(alpha, alpha) a batch; j is drawn for every i, from another domain where the batch has one
    (``across_domains``, DomainBed's inter-domain mixup). ``level``: mix the network's ``inputs``, or its ``features`` (for
    inputs that cannot be mixed, such as tokens). alpha = 0 is FedAvg. Upload: the model. Gram statistics gathered in
    training are of mixed examples. Raises ``ValueError`` for another level, and for inputs that cannot be mixed.

    Deviation: DomainBed mixes pairs of whole minibatches of two domains. Source: Zhang, Cisse, Dauphin, Lopez-Paz, ICLR
    2018, https://arxiv.org/abs/1710.09412; Yan et al., 2020, https://arxiv.org/abs/2001.00677.
    """
    if level not in LEVELS:
        raise unknown("level", level, LEVELS)

    def loss(backbone, params, received, local, batch, key):
        variables = Variables(params, local.variables.batch_stats)
        partner_key, share_key = jax.random.split(jax.random.fold_in(key, 1))
        other = partners(batch.mask, batch.domain, partner_key, across_domains)
        alpha = jnp.asarray(hparams.mix_alpha, jnp.float32)
        drawn = jax.random.beta(share_key, jnp.maximum(alpha, 1e-3), jnp.maximum(alpha, 1e-3))
        share = jnp.where(alpha > 0, drawn, 1.0)
        mix = lambda x: share * x + (1 - share) * x[other]
        inputs = backbone.transform(batch.inputs)
        kind = jax.tree.leaves(inputs)[0].dtype  # of text, of the token ids
        if level == "inputs" and not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"mixup cannot mix inputs of type {kind}: choose level=features.")
        forward = backbone.forward(variables, mix(inputs) if level == "inputs" else inputs, batch.mask, key)
        logits = forward.logits if level == "inputs" else backbone.head(variables, mix(forward.z))
        error = optax.softmax_cross_entropy_with_integer_labels
        losses = share * error(logits, batch.labels) + (1 - share) * error(logits, batch.labels[other])
        return masked_mean(losses, batch.mask), (forward, {"share": share})

    return gradient_method(loss, optimizer(hparams.client_lr))
