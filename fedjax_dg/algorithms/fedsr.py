"""FedSR (Nguyen, Torr, Lim, NeurIPS 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg.algorithms.common import cross_entropy, masked_mean, momentum
from fedjax_dg.alignment.groups import read_by
from fedjax_dg.errors import unknown
from fedjax_dg.types import Algorithm, Start, Variables

L2_FORMS = ("norm", "squared")
SMALLEST_STD = 1e-5
SMALLEST_RHO = -5.0  # keeps 1 / s^2 of the reference below about 2e4


class FedSRHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    l2: ArrayLike = 0.01  # alpha_L2R
    cmi: ArrayLike = 0.001  # alpha_CMI; a sum over M dimensions, so it must shrink as M grows


class Reference(NamedTuple):
    """r(z | y) = N(mean_y, softplus(rho_y)^2) of every class, and the scale of z in comparing the two."""

    mean: Float[Array, "K M"]
    rho: Float[Array, "K M"]
    log_kappa: Float[Array, ""]


class Gaussian(nn.Module):
    """A network whose features are [mu | raw], the parameters of q(z | x) = N(mu, softplus(raw)^2), each M wide.

    The layers of ``base`` keep their names, so its permutation groups still hold.
    """

    base: nn.Module
    width: int

    def setup(self):
        nn.share_scope(self, self.base)
        self.posterior = nn.Dense(2 * self.width)

    def features(self, x, train: bool, mask=None) -> Float[Array, "B L"]:
        return self.posterior(self.base.features(x, train, mask))

    def classify(self, z: Float[Array, "B m"]) -> Float[Array, "B K"]:
        """Logits of a sample z [B, M], or of the mean when the features themselves are given."""
        return self.base.classify(z[..., : self.width])

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def gaussian_of(features: Float[Array, "B L"]) -> tuple[Float[Array, "B M"], Float[Array, "B M"]]:
    """Mean and standard deviation of q(z | x)."""
    mean, raw = jnp.split(features, 2, axis=-1)
    return mean, jax.nn.softplus(raw) + SMALLEST_STD


def gaussian_kl(mean: Array, std: Array, other_mean: Array, other_std: Array) -> Array:
    """KL(N(mean, std^2) || N(other_mean, other_std^2)) per dimension."""
    return jnp.log(other_std / std) + (std**2 + (mean - other_mean) ** 2) / (2 * other_std**2) - 0.5


def fedsr(
    hparams: FedSRHparams = FedSRHparams(),
    optimizer: Callable = momentum,
    l2_form: str = "norm",
    samples: int = 20,
    share_reference: bool = False,
    learn_kappa: bool = False,
) -> Algorithm:
    """Simple representations: Gaussian features z, kept short and close to a class-wise reference distribution.

    loss = CE(C(z), y) + alpha_L2R R_L2 + alpha_CMI R_CMI with one sample z ~ q(z | x) per example,
    R_L2 = mean || z ||_2 (``l2_form="norm"``, the authors' code, for which their coefficient was tuned) or mean || z ||^2
    (``squared``, the paper), and R_CMI = mean over examples, summed over the M dimensions, of KL(q(z | x) || r(z | y)).
    Prediction averages the class probabilities of ``samples`` draws and returns their logarithm.

    The backbone gains a dense layer ``posterior`` D -> 2M with M = D, in place of the authors' widened last layer.
    Client state: the reference r (K x M means and rho), trained with the model by the same optimizer, never uploaded.
    ``share_reference`` makes it part of the model instead, under ``reference``: uploaded, and merged with it (as public
    ports do). Upload: the model. Gram statistics of the head are those of the means mu.

    ``learn_kappa`` trains the scale kappa of the authors' code, with r: KL(N(kappa mu, (kappa sigma)^2) || r). It is not in
    the paper, and fixed at 1 otherwise; as exp(log_kappa) it stays positive, which theirs need not.

    Deviations: standard deviations are bounded below by 1e-5 and rho by -5; the optimizer starts afresh each station round
    (``keep_optimizer`` keeps it, as their code). Source: Nguyen, Torr, Lim, NeurIPS 2022, https://arxiv.org/abs/2206.08332
    (code: github.com/atuannguyen/FedSR).
    """
    if l2_form not in L2_FORMS:
        raise unknown("l2_form", l2_form, L2_FORMS)
    descent = optimizer(hparams.client_lr)

    def adapt(backbone):
        module = Gaussian(backbone.module, backbone.num_features)
        return dataclasses.replace(backbone, module=module, groups=read_by(backbone.groups, "head", "posterior"))

    def init(backbone, variables, key):
        shape = (backbone.num_classes, backbone.num_features)
        reference = Reference(jnp.zeros(shape), jnp.ones(shape), jnp.zeros(()))
        if not share_reference:
            return Start(variables, client=reference)
        return Start(variables._replace(params={**variables.params, "reference": reference._asdict()}))

    def trained_of(params, client):
        if not share_reference:
            return params, client
        params = dict(params)
        return params, Reference(**params.pop("reference"))

    def begin(backbone, received, client):
        return descent.init(trained_of(received.variables.params, client)), ()

    def loss(trained, backbone, batch_stats, batch, key):
        params, reference = trained
        variables = Variables(params, batch_stats)
        forward = backbone.forward(variables, batch.inputs, batch.mask, key)
        mean, std = gaussian_of(forward.z)
        z = mean + std * jax.random.normal(jax.random.fold_in(key, 1), mean.shape)
        error = cross_entropy(backbone.head(variables, z), batch.labels, batch.mask)
        length = (z**2).sum(-1)
        # the square root has no gradient at 0, where padding rows may be
        l2 = masked_mean(length if l2_form == "squared" else jnp.sqrt(length + 1e-12), batch.mask)
        target_std = jax.nn.softplus(jnp.maximum(reference.rho, SMALLEST_RHO)) + SMALLEST_STD
        kappa = jnp.exp(reference.log_kappa if learn_kappa else jax.lax.stop_gradient(reference.log_kappa))
        kl = gaussian_kl(kappa * mean, kappa * std, reference.mean[batch.labels], target_std[batch.labels]).sum(-1)
        cmi = masked_mean(kl, batch.mask)
        metrics = {"cross_entropy": error, "l2": l2, "cmi": cmi}
        return error + hparams.l2 * l2 + hparams.cmi * cmi, (forward, metrics)

    def step(backbone, received, local, batch, key):
        trained = trained_of(local.variables.params, local.client)
        (value, (forward, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(
            trained, backbone, local.variables.batch_stats, batch, key
        )
        updates, state = descent.update(gradient, local.optimizer, trained)
        params, reference = jax.tree.map(jnp.add, trained, updates)
        if share_reference:
            params = {**params, "reference": reference._asdict()}
        local = local._replace(
            variables=Variables(params, forward.batch_stats),
            optimizer=state,
            client=() if share_reference else reference,
            seen=forward.dense_inputs,
        )
        return local, {"loss": value, **metrics}

    def predict(backbone, variables, inputs, key):
        mean, std = gaussian_of(backbone.features(variables, inputs))

        def one(key):
            return jax.nn.softmax(backbone.head(variables, mean + std * jax.random.normal(key, mean.shape)))

        return jnp.log(jnp.maximum(jax.vmap(one)(jax.random.split(key, samples)).mean(0), 1e-12))

    return Algorithm(step=step, adapt=adapt, init=init, begin=begin, predict=predict)
