"""What most methods share: the masked loss, one gradient step, local optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from fedjax_dg import tree
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Algorithm, Examples, Local, PyTree, Received, Variables

AUGMENTING = 2**31 - 1  # in a step's key: not a number that methods use there

#: By the name that the command line takes: learning rate -> optax optimizer.
OPTIMIZERS: dict[str, Callable] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}
momentum = OPTIMIZERS["momentum"]


def cross_entropy(logits: Float[Array, "B K"], labels: Int[Array, " B"], mask: Bool[Array, " B"]) -> Float[Array, ""]:
    """Mean cross-entropy over the real rows; 0 when there are none."""
    return masked_mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), mask)


def masked_mean(values: Float[Array, " B"], mask: Bool[Array, " B"]) -> Float[Array, ""]:
    """Mean over the real rows; 0 when there are none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def losses_of(logits: Float[Array, "B K"], batch: Examples) -> Float[Array, " B"]:
    """Cross-entropy of every row; 0 at padding."""
    return jnp.where(batch.mask, optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels), 0.0)


def classify_rows(backbone, params: PyTree, local: Local, batch: Examples, key):
    """The plain classification loss, the ``Forward`` pass, and the loss of every row [B], 0 at padding."""
    forward = backbone.forward(Variables(params, local.variables.batch_stats), batch.inputs, batch.mask, key)
    losses = losses_of(forward.logits, batch)
    return masked_mean(losses, batch.mask), forward, losses


def classify(backbone, params: PyTree, local: Local, batch: Examples, key):
    """The plain classification loss and the ``Forward`` pass: what a ``gradient_step`` wants."""
    return classify_rows(backbone, params, local, batch, key)[:2]


def classification_loss(backbone, params, received, local, batch, key):
    """FedAvg's loss, in the form that ``gradient_step`` takes."""
    value, forward = classify(backbone, params, local, batch, key)
    return value, (forward, {})


def gradient_step(loss: Callable, optimizer: optax.GradientTransformation, correct: Callable | None = None) -> Callable:
    """An ``Algorithm.step``: descend ``loss`` with ``optimizer``.

    ``loss(backbone, params, received, local, batch, key) -> (value, (forward, metrics))``, with the ``Forward`` pass over
    the batch; or ``(value, (forward, metrics, changes))`` where the step also sets fields of ``Local``, by name.
    ``correct(gradient, received, local) -> gradient`` is applied before the optimizer; where it is given, ``local.tally``
    sums the raw gradients (for ``mean_gradient``).
    """

    def step(backbone, received, local, batch, key):
        params = local.variables.params
        objective = functools.partial(loss, backbone)
        (value, (forward, metrics, *changes)), gradient = jax.value_and_grad(objective, has_aux=True)(
            params, received, local, batch, key
        )
        tally = local.tally if correct is None else jax.tree.map(jnp.add, local.tally, gradient)
        direction = gradient if correct is None else correct(gradient, received, local)
        updates, state = optimizer.update(direction, local.optimizer, params)
        variables = Variables(optax.apply_updates(params, updates), forward.batch_stats)
        local = local._replace(variables=variables, optimizer=state, tally=tally, seen=forward.dense_inputs)
        return local._replace(**dict(*changes)), {"loss": value, **metrics}

    return step


def gradient_method(
    loss: Callable, optimizer: optax.GradientTransformation, correct: Callable | None = None, **hooks
) -> Algorithm:
    """A method that descends a loss with a fresh optimizer in every station round, and the hooks it adds.

    ``loss`` and ``correct`` as in ``gradient_step``.
    """

    def begin(backbone, received, client):
        params = received.variables.params
        return optimizer.init(params), () if correct is None else tree.zeros(params)

    return Algorithm(step=gradient_step(loss, optimizer, correct), begin=begin, **hooks)


def mean_gradient(local: Local, steps: Int[Array, ""]) -> PyTree:
    """The average raw gradient over a client's real steps; zeros without any."""
    return jax.tree.map(lambda g: g / jnp.maximum(steps, 1), local.tally)


def summed_gradient(loss: Callable, params: PyTree, examples: Examples) -> tuple[PyTree, Float[Array, ""]]:
    """Gradient of the loss summed over a client's examples, and their number: both add up over clients exactly.

    ``loss(params, batch)`` is a mean over the real rows of a batch.
    """

    def of_batch(batch):
        count = batch.mask.sum().astype(jnp.float32)
        return jax.tree.map(lambda g: g * count, jax.grad(loss)(params, batch)), count

    return sum_over_batches(of_batch, examples)


def check_domains(num_domains: int) -> Callable:
    """An ``Algorithm.prepare`` that changes nothing: ``ValueError`` when clients hold ids of ``num_domains`` or above."""

    def prepare(backbone, state, data, key, workshop):
        examples: Examples = data[0]
        largest = int(np.asarray(jnp.where(examples.mask, examples.domain, 0).max()))
        if largest >= num_domains:
            raise ValueError(
                f"num_domains={num_domains}, but clients hold examples of domain {largest}: give num_domains={largest + 1} "
                "or more."
            )
        return state

    return prepare


def augmenting(algorithm: Algorithm, augment: Callable) -> Algorithm:
    """The same method on augmented batches: ``augment(inputs, key)`` is what its steps see instead of their inputs.

    A new draw in every step, from its key. Whatever else looks at examples sees them as they are: surveys, reports,
    measurements after training, evaluation. What a rule gathers from the training passes (``Aggregator.watches``) is of
    augmented ones. A method that augments too does so afterwards.
    """

    def step(backbone, received, local, batch, key):
        inputs = augment(batch.inputs, jax.random.fold_in(key, AUGMENTING))
        return algorithm.step(backbone, received, local, batch._replace(inputs=inputs), key)

    return algorithm._replace(step=step)


def keep_optimizer(algorithm: Algorithm) -> Algorithm:
    """The same method with the local optimizer's state kept on the client between rounds instead of started afresh.

    Adds the optimizer's state to what a client stores; uploads nothing more.
    """

    def first(backbone, start):
        received = Received(start.variables, start.shared, start.station, start.client)
        return algorithm.begin(backbone, received, start.client)[0]

    return keep_part(
        algorithm, first, lambda local: local.optimizer, lambda local, kept: local._replace(optimizer=kept)
    )


def keep_batch_stats(algorithm: Algorithm) -> Algorithm:
    """The same method with every client training on its own running batch statistics (``bn_pool="local"``).

    They are uploaded with the model all the same, so the server's model has the mean of them to be judged with; a client
    just does not read that. Source of the idea: Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623 (FedBN, which
    keeps the norm's scale and bias local too).
    """
    return keep_leaves(algorithm, lambda variables: Variables({}, variables.batch_stats))


def keep_leaves(algorithm: Algorithm, own: Callable[[Variables], Variables]) -> Algorithm:
    """The same method with some leaves of the model kept on every client: those that are left by ``own``.

    A client trains with its own ones whatever came down. They are uploaded with the model all the same, so that the
    server's has means of them, and clients' move along when models are aligned.
    """

    def put(local, kept):
        variables = from_leaves(leaves_of(local.variables) | leaves_of(kept))
        return local._replace(variables=variables)

    return keep_part(algorithm, lambda backbone, start: own(start.variables), lambda local: own(local.variables), put)


def keep_part(algorithm: Algorithm, first: Callable, get: Callable, put: Callable) -> Algorithm:
    """A method whose clients keep a part of ``Local``: ``first(backbone, start)``, then what the last step left.

    The client's state is (that of ``algorithm``, the part kept).
    """

    def init(backbone, variables, key):
        start = algorithm.init(backbone, variables, key)
        return start._replace(client=(start.client, first(backbone, start)))

    def prepare(backbone, state, data, key, workshop):
        inner, kept = state.clients
        state = algorithm.prepare(backbone, state._replace(clients=inner), data, key, workshop)
        return state._replace(clients=(state.clients, kept))

    def inside(received):
        return received._replace(origin=received.origin[0])

    def begin(backbone, received, client):
        return algorithm.begin(backbone, inside(received), client[0])

    def step(backbone, received, local, batch, key):
        inner, kept = local.client
        moved, metrics = algorithm.step(backbone, inside(received), put(local._replace(client=inner), kept), batch, key)
        return moved._replace(client=(moved.client, get(moved))), metrics

    def report(backbone, received, local, steps, examples, key):
        inner, kept = local.client
        inner, message = algorithm.report(
            backbone, inside(received), local._replace(client=inner), steps, examples, key
        )
        return (inner, kept), message

    hooks = {}
    if (inner_survey := algorithm.survey) is not None:

        def survey(backbone, received, client, examples, key):
            inner, message = inner_survey(backbone, inside(received), client[0], examples, key)
            return (inner, client[1]), message

        hooks["survey"] = survey
    return algorithm._replace(init=init, prepare=prepare, begin=begin, step=step, report=report, **hooks)
