"""FedIIR (Guo et al., ICML 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike

from fedjax_dg import tree
from fedjax_dg.algorithms.common import cross_entropy, gradient_method, momentum, summed_gradient
from fedjax_dg.types import Algorithm, Disclosure, Start, Variables


class FedIIRHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    gamma: ArrayLike = 1e-3  # the paper's gamma, weight of the gradient penalty (1e-3 is the authors' value for PACS)
    ema: ArrayLike = 0.95  # beta of the running mean gradient


def fediir(hparams: FedIIRHparams = FedIIRHparams(), optimizer: Callable = momentum) -> Algorithm:
    """Align every client's classifier gradient with the federation's: loss + gamma || grad_omega loss - G ||^2.

    omega is the head. G is a running mean over rounds, G <- beta G + (1 - beta) g, of g = the classifier's mean gradient
    over all participants' examples at the received model, taken in an extra pass at the start of every server round.
    The gradient inside the penalty is differentiated too: it acts on the features as well.

    Shared: G, zero at first, with no bias correction (as the authors' code). Upload: the model, and before it |omega| + 1
    floats (a sum of gradients and a number of examples); download: the model and G. One more synchronous phase a round.

    Deviation: g weighs every example the same; the authors' code averages over batches, so a short last batch counts as
    a full one there. Source: Guo et al., ICML 2023, https://proceedings.mlr.press/v202/guo23b.html.
    """

    def init(backbone, variables, key):
        return Start(variables, shared=tree.zeros(variables.params["head"]))

    def head_loss(backbone, variables, head, z, batch):
        variables = Variables({**variables.params, "head": head}, variables.batch_stats)
        return cross_entropy(backbone.head(variables, z), batch.labels, batch.mask)

    def survey(backbone, received, client, examples, key):
        variables = received.variables

        def mean_loss(head, batch):
            return head_loss(backbone, variables, head, backbone.features(variables, batch.inputs), batch)

        return client, summed_gradient(mean_loss, variables.params["head"], examples)

    def digest(shared, stations, messages, shares):
        gradients, count = jax.tree.map(lambda x: x.sum((0, 1)), messages)
        fresh = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), gradients)
        return jax.tree.map(lambda old, new: hparams.ema * old + (1 - hparams.ema) * new, shared, fresh), stations

    def loss(backbone, params, received, local, batch, key):
        variables = Variables(params, local.variables.batch_stats)
        forward = backbone.forward(variables, batch.inputs, batch.mask, key)
        value, gradient = jax.value_and_grad(lambda head: head_loss(backbone, variables, head, forward.z, batch))(
            params["head"]
        )
        penalty = optax.tree.norm(optax.tree.sub(gradient, received.shared), squared=True)
        return value + hparams.gamma * penalty, (forward, {"penalty": penalty})

    told = Disclosure("gradient of the head's loss, summed over all examples, and their number", "server")
    hooks = {"init": init, "survey": survey, "digest": digest, "discloses": (told,)}
    return gradient_method(loss, optimizer(hparams.client_lr), **hooks)
