"""Group DRO (Sagawa et al., ICLR 2020) over the domains of a client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg.algorithms.common import check_domains, classify_rows, gradient_method, momentum
from fedjax_dg.types import Algorithm, Start


class GroupDROHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    eta: ArrayLike = 0.01  # step size of the domains' weights (DomainBed's)


def groupdro(
    hparams: GroupDROHparams = GroupDROHparams(), optimizer: Callable = momentum, num_domains: int = 16
) -> Algorithm:
    """The worst domain counts most: loss = sum_d q_d R_d, with q_d <- q_d exp(eta R_d) before every step.

    R_d is the mean loss of domain d in the batch; domains that are not in it keep their q and count nothing, and the
    q of the others sum to 1 in the loss. Client state: the logarithms of q, equal at first, kept between rounds. With
    eta = 0 it is the mean over domains of their losses; with one domain a client, FedAvg. Upload: the model.

    ``num_domains``: how many ids there are (the command line takes the data set's); ``ValueError`` before round 1 when the
    federation has more. Source: Sagawa, Koh, Hashimoto, Liang, ICLR 2020, https://arxiv.org/abs/1911.08731.
    """

    def init(backbone, variables, key):
        return Start(variables, client=jnp.zeros(num_domains))

    def loss(backbone, params, received, local, batch, key):
        _, forward, losses = classify_rows(backbone, params, local, batch, key)
        here = (jax.nn.one_hot(batch.domain, num_domains) * batch.mask[:, None]).T  # [G, B]
        size = here.sum(1)
        risks = jnp.matmul(here, losses, precision="highest") / jnp.maximum(size, 1.0)
        log_q = jax.lax.stop_gradient(local.client + hparams.eta * risks)
        weights = shares_of(log_q, size > 0)
        told = {"largest_weight": weights.max()}
        return (weights * risks).sum(), (forward, told, {"client": log_q - log_q.max()})

    hooks = {"init": init, "prepare": check_domains(num_domains)}
    return gradient_method(loss, optimizer(hparams.client_lr), **hooks)


def shares_of(log_q: Float[Array, " G"], present: Array) -> Float[Array, " G"]:
    """q of the domains present, as shares; 0 elsewhere."""
    return jax.nn.softmax(jnp.where(present, log_q, -jnp.inf))
