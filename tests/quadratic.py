"""Clients whose losses are quadratics, through a real network and the real cross-entropy: closed forms for whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedjax_dg import make_round
from fedjax_dg.backbones import Backbone
from fedjax_dg.types import Examples, Topology


class QuadraticNet(nn.Module):
    """Its cross-entropy for the inputs (a, b) and label 0 is 1 + sum_d a_d (theta_d - b_d)^2 / 2.

    Logits (0, t) have the cross-entropy log(1 + exp(t)), which is v for t = log(exp(v) - 1).
    """

    width: int

    def setup(self):
        self.theta = self.param("theta", nn.initializers.zeros, (self.width,))

    def features(self, x, train, mask=None):
        return x

    def classify(self, z):
        a, b = jnp.split(z, 2, axis=-1)
        value = 1.0 + 0.5 * (a * (self.theta - b) ** 2).sum(-1)
        return jnp.stack([jnp.zeros_like(value), jnp.log(jnp.expm1(value))], axis=-1)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def quadratic_backbone(width=1):
    return Backbone(QuadraticNet(width), input_shape=(2 * width,), num_features=2 * width, num_classes=2)


def quadratic_data(a, b):
    """A round's data: client i of station s holds one example, a [S, C, D] and b [S, C, D]."""
    inputs = jnp.concatenate([jnp.asarray(a, float), jnp.asarray(b, float)], axis=-1)[:, :, None]
    stations, clients = inputs.shape[:2]
    zeros = jnp.zeros((stations, clients, 1), jnp.int32)
    ids = jnp.arange(stations * clients, dtype=jnp.int32).reshape(stations, clients)
    return Examples(inputs, zeros, zeros == 0, zeros), ids


def quadratic_rounds(algorithm, a, b, theta, rounds, *, steps, station_rounds=1, **rules):
    """The states after each of ``rounds`` rounds from ``theta`` [D], in float64: [rounds, ...] NumPy leaves."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    stations, clients, width = a.shape
    with jax.enable_x64(True):
        topology = Topology(stations, clients, station_rounds, local_steps=steps, batch_size=1)
        round_fn = make_round(quadratic_backbone(width), algorithm, topology, **rules)
        state = round_fn.init(jax.random.key(0))
        start = jnp.broadcast_to(jnp.asarray(theta, float), (width,))
        state = state._replace(variables=state.variables._replace(params={"theta": start}))
        data, key = quadratic_data(a, b), jax.random.key(1)

        def one(state, _):
            state = round_fn.step(state, data, key)[0]
            return state, state

        return jax.device_get(jax.jit(lambda state: jax.lax.scan(one, state, length=rounds)[1])(state))


def optimum(a, b):
    """Where the mean of all clients' losses is least."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return (a * b).sum((0, 1)) / a.sum((0, 1))
