"""The hierarchical round as the papers write it: NumPy, and loops over stations, clients, station rounds and steps.

It shares three things with the library: the network, the batch order (``plan_batches``) and the rule by which keys are
derived. Control variates and corrections have the papers' own form, differences of models, which needs plain SGD; the
gradient penalty is written out for a linear head. Means are weighted by samples at both tiers; clients without data are
left out.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dg.local import plan_batches
from fedjax_dg.types import Variables


def add(*trees):
    return jax.tree.map(lambda *leaves: np.asarray(sum(leaves)), *trees)


def scale(tree, factor):
    return jax.tree.map(lambda x: np.asarray(x * factor), tree)


def subtract(tree, other):
    return add(tree, scale(other, -1.0))


def average(trees, weights):
    return scale(add(*(scale(tree, w) for tree, w in zip(trees, weights))), 1.0 / sum(weights))


# --- gradients ------------------------------------------------------------------------------------------------------


def cross_entropy(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()


@functools.cache
def plain_gradient(backbone):
    """(params, inputs, labels) -> gradient of the mean cross-entropy."""

    def loss(params, inputs, labels):
        return cross_entropy(backbone.apply(Variables(params, {}), inputs), labels)

    return jax.jit(jax.grad(loss))


@functools.cache
def aligned_gradient(backbone, gamma):
    """(params, target, inputs, labels) -> FedIIR's gradient; the head's own gradient is Z^T R / B and the mean of R."""

    def loss(params, target, inputs, labels):
        z = backbone.features(Variables(params, {}), inputs)
        logits = z @ params["head"]["kernel"] + params["head"]["bias"]
        residual = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1])
        kernel, bias = z.T @ residual / len(labels), residual.mean(0)
        penalty = ((kernel - target["kernel"]) ** 2).sum() + ((bias - target["bias"]) ** 2).sum()
        return cross_entropy(logits, labels) + gamma * penalty

    return jax.jit(jax.grad(loss))


# --- who holds what -------------------------------------------------------------------------------------------------


class Client(NamedTuple):
    inputs: np.ndarray  # padding and all, as the batch order needs it
    labels: np.ndarray
    mask: np.ndarray
    id: int

    @property
    def size(self):
        return int(self.mask.sum())

    @property
    def examples(self):
        return self.inputs[self.mask], self.labels[self.mask]


def clients_of(federation):
    """{station: {place: Client}} of the clients with data."""
    inputs, labels, mask, _ = (np.asarray(x) for x in federation.clients)
    ids = np.asarray(federation.ids)
    return {
        s: {c: Client(inputs[s, c], labels[s, c], mask[s, c], ids[s, c]) for c in np.flatnonzero(mask[s].any(-1))}
        for s in np.flatnonzero(mask.any((1, 2)))
    }


def flat(federation):
    """The same clients under the same ids, all in one station."""
    whole = lambda x: x.reshape(1, -1, *x.shape[2:])
    return dataclasses.replace(
        federation,
        clients=jax.tree.map(whole, federation.clients),
        ids=whole(federation.ids),
        topology=federation.topology._replace(stations=1, clients_per_station=federation.ids.size),
    )


planned = jax.jit(plan_batches, static_argnames="topology")  # called as it is, its scan would compile every time


def batches(client, topology, key):
    """The client's batches of one station round with the station round's key, in order."""
    train_key = jax.random.split(jax.random.fold_in(key, client.id), 4)[0]
    plan = planned(jnp.asarray(client.mask), topology, jax.random.split(train_key)[0])
    for index, valid in zip(np.asarray(plan.index), np.asarray(plan.valid)):
        if valid.any():
            yield client.inputs[index[valid]], client.labels[index[valid]]


def descend(params, gradient, of_batches, lr, momentum=0.0):
    """Local SGD: the model it ends with, and the number of steps."""
    velocity, steps = scale(params, 0.0), 0
    for inputs, labels in of_batches:
        velocity = add(scale(velocity, momentum), gradient(params, inputs, labels))
        params = subtract(params, scale(velocity, lr))
        steps += 1
    return params, steps


def one_round(federation, params, key, number, train):
    """Server round ``number``: ``train(received, station, place, batches) -> model`` for every client, means above."""
    stations, topology = clients_of(federation), federation.topology
    local_key = jax.random.split(jax.random.fold_in(key, number), 3)[2]
    models = []
    for s, clients in stations.items():
        model = params
        for e in range(topology.station_rounds):
            round_key = jax.random.fold_in(local_key, e)
            trained = [train(model, s, c, batches(client, topology, round_key)) for c, client in clients.items()]
            model = average(trained, [client.size for client in clients.values()])
        models.append(model)
    return average(models, [sum(client.size for client in clients.values()) for clients in stations.values()])


# --- methods: what they hold after ``rounds`` server rounds ---------------------------------------------------------


def fedavg(backbone, federation, params, key, rounds, lr, momentum=0.0):
    """The model."""
    gradient = plain_gradient(backbone)

    def train(received, s, c, of_batches):
        return descend(received, gradient, of_batches, lr, momentum)[0]

    for number in range(rounds):
        params = one_round(federation, params, key, number, train)
    return params


def fedprox(backbone, federation, params, key, rounds, lr, momentum, mu):
    """The model; local gradients gain mu (theta - theta_received)."""
    gradient = plain_gradient(backbone)

    def train(received, s, c, of_batches):
        def pulled(params, *batch):
            return add(gradient(params, *batch), scale(subtract(params, received), mu))

        return descend(received, pulled, of_batches, lr, momentum)[0]

    for number in range(rounds):
        params = one_round(federation, params, key, number, train)
    return params


def fediir(backbone, federation, params, key, rounds, lr, momentum, gamma, ema):
    """The model, and the running mean gradient G."""
    plain, aligned = plain_gradient(backbone), aligned_gradient(backbone, gamma)
    everyone = [client for clients in clients_of(federation).values() for client in clients.values()]
    running = scale(params["head"], 0.0)

    def train(received, s, c, of_batches):
        return descend(received, lambda p, *batch: aligned(p, running, *batch), of_batches, lr, momentum)[0]

    for number in range(rounds):
        fresh = average([plain(params, *client.examples)["head"] for client in everyone], [x.size for x in everyone])
        running = add(scale(running, ema), scale(fresh, 1 - ema))
        params = one_round(federation, params, key, number, train)
    return params, running


def scaffold(backbone, federation, params, key, rounds, lr):
    """The model, c, and c_i by (station, place).

    Option II: c_i <- c_i - c + (theta - y_i) / (K_i lr); c gains the p_i-weighted changes of a whole server round.
    """
    gradient, zero = plain_gradient(backbone), scale(params, 0.0)
    sizes = {(s, c): x.size for s, clients in clients_of(federation).items() for c, x in clients.items()}
    shared, controls = zero, dict.fromkeys(sizes, zero)

    def train(received, s, c, of_batches):
        correction = subtract(shared, controls[s, c])
        params, steps = descend(received, lambda p, *batch: add(gradient(p, *batch), correction), of_batches, lr)
        controls[s, c] = subtract(scale(subtract(received, params), 1.0 / (steps * lr)), correction)
        return params

    for number in range(rounds):
        before = dict(controls)
        params = one_round(federation, params, key, number, train)
        changes = [subtract(controls[who], before[who]) for who in sizes]
        shared = add(shared, average(changes, list(sizes.values())))
    return params, shared, controls


def mtgc(backbone, federation, params, key, rounds, lr):
    """The model, z_i by (station, place), y_j by station; for clients of equal sizes, so that all make H steps.

    z_i += (x_i - mean_j x) / (H lr) after a station round, from zero in every server round; y_j += (mean_j x - mean x) /
    (H E lr) after a server round.
    """
    gradient, zero = plain_gradient(backbone), scale(params, 0.0)
    stations, topology = clients_of(federation), federation.topology
    y = dict.fromkeys(stations, zero)
    for number in range(rounds):
        local_key = jax.random.split(jax.random.fold_in(key, number), 3)[2]
        z = {(s, c): zero for s, clients in stations.items() for c in clients}
        models = dict.fromkeys(stations, params)
        for e in range(topology.station_rounds):
            round_key = jax.random.fold_in(local_key, e)
            for s, clients in stations.items():
                trained = {}
                for c, client in clients.items():
                    corrected = lambda p, *batch, extra=add(z[s, c], y[s]): add(gradient(p, *batch), extra)
                    of_batches = batches(client, topology, round_key)
                    trained[c], steps = descend(models[s], corrected, of_batches, lr)
                models[s] = average(list(trained.values()), [1.0] * len(trained))
                for c, model in trained.items():
                    z[s, c] = add(z[s, c], scale(subtract(model, models[s]), 1.0 / (steps * lr)))
        params = average(list(models.values()), [1.0] * len(models))
        for s, model in models.items():
            y[s] = add(y[s], scale(subtract(model, params), 1.0 / (steps * topology.station_rounds * lr)))
    return params, z, y


def one_client(gradient, params, optimizer, steps, restart_every=None):
    """Centralised training by any optax optimizer with ``gradient(params)``; started afresh every so many steps."""
    for step in range(steps):
        if step == 0 or (restart_every and step % restart_every == 0):
            state = optimizer.init(params)
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params
