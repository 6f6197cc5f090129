"""MTGC, multi-timescale gradient correction (Fang et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.algorithms.common import (
    classification_loss,
    cross_entropy,
    gradient_method,
    mean_gradient,
    summed_gradient,
)
from fedjax_dg.errors import unknown
from fedjax_dg.types import Algorithm, Disclosure, PyTree, Start

Z_INITS = ("zero", "grad", "persist")


class MTGCHparams(NamedTuple):
    client_lr: ArrayLike = 0.05


class StationControl(NamedTuple):
    """What a station remembers; ``gradient``, ``total`` and ``y`` are shaped like ``params``."""

    gradient: PyTree  # mean over its clients of their mean raw gradients, in the last station round
    active: Float[Array, ""]  # 1 when ``gradient`` may correct clients, 0 when z starts from zero
    total: PyTree  # sum of ``gradient`` over this server round's station rounds
    rounds: Float[Array, ""]  # how many of them
    y: PyTree  # station -> server correction


def mtgc(hparams: MTGCHparams = MTGCHparams(), optimizer: Callable = optax.sgd, z_init: str = "zero") -> Algorithm:
    """Local gradients corrected on both tiers: g + z_i + y_j, for client i of station j.

    With g_i a client's mean raw gradient over its last local steps, G_j the mean of g_i over its station and F_j the mean
    of G_j over the station rounds of a server round: z_i = G_j - g_i, and y_j = mean_j(F_j) - F_j after a server round.
    So the corrections sum to zero over the clients of a station, and over stations. Means are the station's and server's
    weights.

    ``z_init``, at the start of a server round: ``zero`` (the authors' code), ``persist`` (keep z) or ``grad`` (from full
    gradients at the received model; one more pass over the data, and one more synchronous phase).

    Client state: g_i. Station state: ``StationControl``. Upload: the model and g_i (with ``grad`` g_i twice).

    Deviation: the paper writes z_i += (x_i - mean x) / (H gamma) and y_j += (x_j - mean x) / (H E gamma) with models x.
    Under its plain SGD, constant rate, equal H steps and uniform means these are the gradients above; in gradient form they
    also hold for momentum, unequal steps, server optimizers and merges that are not means, and y needs no new server model.
    Source: Fang et al., NeurIPS 2024, https://arxiv.org/abs/2409.18448.
    """
    if z_init not in Z_INITS:
        raise unknown("z_init", z_init, Z_INITS)

    def init(backbone, variables, key):
        zeros = tree.zeros(variables.params)
        none = jnp.zeros(())
        return Start(variables, client=zeros, station=StationControl(zeros, none, zeros, none, zeros))

    def correct(gradient, received, local):
        station = received.station
        return jax.tree.map(
            lambda g, own, mean, y: g + station.active * (mean - own) + y,
            gradient,
            local.client,
            station.gradient,
            station.y,
        )

    def report(backbone, received, local, steps, examples, key):
        gradient = mean_gradient(local, steps)
        return gradient, gradient

    def gather(station, gradients, shares):
        mean = tree.weighted_mean(gradients, shares)
        return station._replace(
            gradient=mean,
            active=jnp.ones(()),
            total=jax.tree.map(jnp.add, station.total, mean),
            rounds=station.rounds + 1,
        )

    def absorb(shared, stations, gradients, shares):
        level = jax.tree.map(lambda t: jax.vmap(jnp.divide)(t, stations.rounds), stations.total)
        mean = tree.weighted_mean(level, shares.sum(1))
        return shared, stations._replace(
            y=jax.tree.map(lambda m, f: m - f, mean, level),
            total=tree.zeros(stations.total),
            rounds=jnp.zeros_like(stations.rounds),
            active=stations.active if z_init == "persist" else jnp.zeros_like(stations.active),
        )

    def survey(backbone, received, client, examples, key):
        def mean_loss(params, batch):
            logits = backbone.apply(received.variables._replace(params=params), batch.inputs)
            return cross_entropy(logits, batch.labels, batch.mask)

        total, count = summed_gradient(mean_loss, received.variables.params, examples)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), total)
        return gradient, gradient

    def digest(shared, stations, gradients, shares):
        mean = jax.vmap(tree.weighted_mean)(gradients, shares)
        return shared, stations._replace(gradient=mean, active=jnp.ones_like(stations.active))

    hooks: dict[str, Any] = {"survey": survey, "digest": digest} if z_init == "grad" else {}
    told = Disclosure("mean gradient over local training", "station; their mean: server")
    hooks |= {"init": init, "report": report, "gather": gather, "absorb": absorb, "discloses": (told,)}
    return gradient_method(classification_loss, optimizer(hparams.client_lr), correct, **hooks)
