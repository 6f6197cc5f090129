"""One client by itself: local steps and local training of any method, compiled once for all its hyper-parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import local
from fedjax_dg.aggregators import mean
from fedjax_dg.types import Local, Topology

BACKBONE = tiny_backbone()


@functools.cache
def fresh(backbone=BACKBONE):
    return jax.jit(backbone.init)(jax.random.key(0))


@functools.cache
def examples_of(domains=1):
    """A client's 7 examples, in 8 places whose last is NaN, of so many domains."""
    clients = tiny_federation([[7]], padding=1, fill=np.nan, domains=domains).clients
    return jax.tree.map(lambda x: x[0, 0], clients)


def batch_of(examples):
    """All of a client's examples as one batch, padding zeroed."""
    return local.take_batch(examples, jnp.arange(examples.mask.shape[0]), examples.mask)


@functools.cache
def one_batch(domains=1):
    """``examples_of(domains)`` as a batch."""
    return batch_of(examples_of(domains))


@functools.cache
def programs(method, optimizer, backbone=BACKBONE, size=4):
    """Compiled (one local step on a batch, local training in two passes with batches of ``size``).

    They return (Local, metrics), and (Trained, client state, message).
    """

    @jax.jit
    def step(hparams, received, batch, key, passes=0):
        algorithm = method(hparams, optimizer)
        optimizer_state, tally = algorithm.begin(backbone, received, received.origin)
        start = Local(received.variables, optimizer_state, received.origin, tally, passes=jnp.int32(passes))
        return algorithm.step(backbone, received, start, batch, key)

    @jax.jit
    def train(hparams, received, examples, key):
        algorithm, topology = method(hparams, optimizer), Topology(1, 1, local_epochs=2, batch_size=size)
        rules = (mean(), mean())
        trained = local.train(backbone, algorithm, topology, rules, received, received.origin, examples, key)
        return trained, *algorithm.report(backbone, received, trained.local, trained.steps, examples, key)

    return step, train
