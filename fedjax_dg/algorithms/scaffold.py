"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike

from fedjax_dg import tree
from fedjax_dg.algorithms.common import classification_loss, gradient_method, mean_gradient
from fedjax_dg.types import Algorithm, Disclosure, Start


class ScaffoldHparams(NamedTuple):
    client_lr: ArrayLike = 0.05


def scaffold(hparams: ScaffoldHparams = ScaffoldHparams(), optimizer: Callable = optax.sgd) -> Algorithm:
    """FedAvg whose local gradients are corrected by control variates: g - c_i + c.

    Client state: c_i, shaped like ``params``, zero at first. Shared: c. After local training c_i becomes the mean raw
    gradient over the client's real steps, and c gains the clients' changes times their shares in the whole federation, so
    c = sum_i p_i c_i over all clients always holds (p_i = 1/N under uniform weighting, as in the paper).

    Upload: the model and c_i's change, twice FedAvg; download: the model and c.

    Deviation: the paper's option II, c_i - c + (theta - y_i) / (K_i eta), equals this mean gradient under plain SGD with
    a constant rate; this form stays right with momentum, schedules and clipping, where that one is mis-scaled.
    Source: Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378.
    """

    def init(backbone, variables, key):
        zeros = tree.zeros(variables.params)
        return Start(variables, client=zeros, shared=zeros)

    def correct(gradient, received, local):
        return jax.tree.map(lambda g, own, all_: g - own + all_, gradient, local.client, received.shared)

    def report(backbone, received, local, steps, examples, key):
        control = mean_gradient(local, steps)
        return control, jax.tree.map(jnp.subtract, control, received.origin)

    def absorb(shared, stations, changes, shares):
        return jax.tree.map(jnp.add, shared, tree.weighted_sum(changes, shares)), stations

    descent = optimizer(hparams.client_lr)
    told = Disclosure("mean gradient over local training, as an increment of c_i", "server")
    hooks = {"init": init, "report": report, "absorb": absorb, "discloses": (told,)}
    return gradient_method(classification_loss, descent, correct, **hooks)
