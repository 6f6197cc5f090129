"""AFL, agnostic federated learning (Mohri et al., ICML 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg.algorithms.common import classify, gradient_method, losses_of, momentum
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Algorithm, Disclosure, Start


class AFLHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    lambda_lr: ArrayLike = 0.1  # the paper's gamma_lambda: step size of the clients' weights


class Emphasis(NamedTuple):
    """How much a client counts, relative to its share of the federation."""

    ratio: Float[Array, ""]  # r_k = lambda_k / p_k in the last round
    raised: Float[Array, ""]  # r_k + gamma_lambda R_k in this one, before the projection


def afl(hparams: AFLHparams = AFLHparams(), optimizer: Callable = momentum) -> Algorithm:
    """The worst mixture of the clients: min over theta, max over lambda of sum_k lambda_k R_k(theta), lambda a distribution.

    Before training in every server round each client takes its mean loss R_k at the received model, and lambda takes one
    step of projected gradient ascent. In terms of r_k = lambda_k / p_k (p_k: a client's share, so r = 1 is FedAvg):
    r_k <- max(r_k + gamma_lambda R_k - tau, 0), with the tau that keeps sum_k p_k r_k. Client k then descends r_k R_k.
    gamma_lambda = 0 is FedAvg. Where clients are sampled, the participants share the weight that they had.

    Client state: ``Emphasis``. Shared: tau. Upload: the model, and two floats before it (one more pass over the data).

    Deviations: the projection is in the norm weighted by p_k (the paper's, with gamma_lambda N, where the p_k are 1/N);
    several local steps a round, where the paper makes one. Source: Mohri, Sivek, Suresh, ICML 2019,
    https://arxiv.org/abs/1902.00146.
    """

    def init(backbone, variables, key):
        return Start(variables, client=Emphasis(jnp.ones(()), jnp.ones(())), shared=jnp.zeros(()))

    def survey(backbone, received, client, examples, key):
        def of_batch(batch):
            losses = losses_of(backbone.apply(received.variables, batch.inputs), batch)
            return losses.sum(), batch.mask.sum().astype(jnp.float32)

        total, count = sum_over_batches(of_batch, examples)
        raised = client.ratio + hparams.lambda_lr * total / jnp.maximum(count, 1.0)
        return client._replace(raised=raised), (client.ratio, raised)

    def digest(shared, stations, messages, shares):
        ratio, raised = messages
        return threshold(raised, shares, (shares * ratio).sum()), stations

    def ratio_of(received, client):
        return jnp.maximum(client.raised - received.shared, 0.0)

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        ratio = ratio_of(received, local.client)
        return ratio * value, (forward, {"cross_entropy": value, "ratio": ratio})

    def report(backbone, received, local, steps, examples, key):
        return local.client._replace(ratio=ratio_of(received, local.client)), ()

    told = Disclosure("mean loss at the received model", "server")
    hooks = {"init": init, "survey": survey, "digest": digest, "report": report, "discloses": (told,)}
    return gradient_method(loss, optimizer(hparams.client_lr), **hooks)


def threshold(values: Float[Array, "*n"], weights: Float[Array, "*n"], mass: Float[Array, ""]) -> Float[Array, ""]:
    """The tau with sum_k w_k max(v_k - tau, 0) = mass: of a projection onto the simplex, in the norm weighted by w.

    Michelot's iteration: solve as if all that is above tau stayed above, until nothing more falls below. Sums only, so that
    clients may lie on several devices (``optax.projections`` sorts).
    """

    def solve(above):
        above = above * weights
        return ((above * values).sum() - mass) / jnp.maximum(above.sum(), 1e-30)

    def more(carry):
        tau, before, step = carry
        return (tau > before) & (step < values.size)

    def again(carry):
        tau, _, step = carry
        return jnp.maximum(solve((values > tau).astype(jnp.float32)), tau), tau, step + 1

    start = solve(jnp.ones_like(values))
    return jax.lax.while_loop(more, again, (start, start - 1.0, 0))[0]
