"""MCGDM, multi-source collaborative gradient discrepancy minimization (Wei, Han, AAAI 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg import sharding, tree
from fedjax_dg.algorithms.common import cross_entropy, gradient_method, momentum
from fedjax_dg.augment import rand_augment
from fedjax_dg.types import Algorithm, Disclosure, Examples, PyTree, Start, Variables

EPS = 1e-8  # the least product of two lengths that a cosine divides by, PyTorch's


class MCGDMHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    a_intra: ArrayLike = 0.7  # weight of the matching of both views' gradients (the authors' for PACS)
    a_inter: ArrayLike = 0.7  # and of those of other clients' heads; ours, as neither their code nor its run lines tell
    magnitude: ArrayLike = 0.3  # of the strong view, in [0, 1]


class Head(NamedTuple):
    """What a client's head was when its part of a round ended."""

    params: PyTree  # {"head": ...}, a part of the model's, so that alignment moves it along
    trained: Bool[Array, ""]  # whether there has been such a round


class HeadGradient(NamedTuple):
    """Of the mean cross-entropy, with respect to a linear head."""

    kernel: Float[Array, "D K"]
    bias: Float[Array, " K"]


def mcgdm(hparams: MCGDMHparams = MCGDMHparams(), optimizer: Callable = momentum, num_ops: int = 2) -> Algorithm:
    """The head's gradient should be the same for both views of an image, and for the heads of all clients.

    x is the batch, x~ its strong view: ``num_ops`` operations of ``augment.rand_augment`` on every image. With the losses
    l_1 = CE(x~), l_2 = CE(x) and their gradients g_1, g_2 with respect to the head,
    loss = (l_1 + l_2) / 2 + a_intra cosd(g_1, g_2) + a_inter mean_k cosd(dCE(h_k(b(x)), y)/dh_k, g_1).
    h_k are the heads as clients had trained them when the last round ended, before they were averaged, this client's own
    among them; there are none in the first round, and that term is then 0. cosd is the mean of two numbers, 1 - cos for the
    bias, and for the kernel the mean over classes of 1 - cos. A linear head's gradient is b(x)^T (softmax - one-hot) / B,
    so the derivative of the loss, which passes through all of these, needs no nested one. a_intra = a_inter = 0 is FedAvg
    with two views.

    Client state: its trained head. Upload: the model, and at the start of the next round that head once more (K D + K
    floats and a flag, which a server could keep instead); every client is sent all heads, so clients see each other's.
    Where clients are sampled, the heads are those of this round's participants, from when each last took part. Computes two
    passes over the network a step, and holds the gradients of all M heads, M K D floats.

    Batch statistics: of both views, the strong one first. Gram statistics gathered in training: of x. Raises ``ValueError``
    before training for a network that does not take images, or whose head is not linear.

    Deviations: clients count as the rules of the run say (the authors': all alike, ``uniform``); one optimizer for all
    parameters; no MixStyle inside the network, which their code inserts; x is not augmented, where theirs is weakly.
    Source: Wei, Han, AAAI 2024, https://arxiv.org/abs/2401.10272.
    """

    def adapt(backbone):
        if len(backbone.input_shape) != 3:
            raise ValueError(
                f"mcgdm augments images, but this network takes inputs of shape {backbone.input_shape}: choose one for "
                "images [H, W, channels]."
            )
        return backbone

    def init(backbone, variables, key):
        head = variables.params["head"]
        if sorted(head) != ["bias", "kernel"] or head["kernel"].ndim != 2:
            raise ValueError(
                f"mcgdm needs a linear head, but this network's has {', '.join(sorted(head))}: make it one nn.Dense with "
                "a bias."
            )
        return Start(variables, client=Head({"head": tree.zeros(head)}, jnp.array(False)))

    def survey(backbone, received, client, examples, key):
        return client, client

    def digest(shared, stations, messages, shares):
        return sharding.whole(messages, sharding.AXES), stations

    def absorb(shared, stations, messages, shares):
        return (), stations  # the heads come anew with the next survey

    def loss(backbone, params, received, local, batch, key):
        view_key, strong_key, weak_key = jax.random.split(key, 3)
        variables = Variables(params, local.variables.batch_stats)
        view = rand_augment(batch.inputs, view_key, hparams.magnitude, num_ops)
        strong = backbone.forward(variables, view, batch.mask, strong_key)
        variables = variables._replace(batch_stats=strong.batch_stats)
        weak = backbone.forward(variables, batch.inputs, batch.mask, weak_key)
        gradient = head_gradient(strong.z, strong.logits, batch)

        def distance(head):
            logits = backbone.head(Variables({**params, **head.params}, variables.batch_stats), weak.z)
            return jnp.where(head.trained, cosd(head_gradient(weak.z, logits, batch), gradient), 0.0)

        heads = received.shared
        task = sum(cross_entropy(view.logits, batch.labels, batch.mask) for view in (strong, weak)) / 2
        intra, inter = cosd(gradient, head_gradient(weak.z, weak.logits, batch)), jnp.zeros(())
        if heads:  # an estimate of a round's time makes no survey
            inter = jax.vmap(jax.vmap(distance))(heads).sum() / jnp.maximum(heads.trained.sum(), 1)
        metrics = {"cross_entropy": task, "intra": intra, "inter": inter}
        return task + hparams.a_intra * intra + hparams.a_inter * inter, (weak, metrics)

    def report(backbone, received, local, steps, examples, key):
        return Head({"head": local.variables.params["head"]}, jnp.array(True)), ()

    hooks = {"adapt": adapt, "init": init, "survey": survey, "digest": digest, "absorb": absorb, "report": report}
    told = Disclosure("head as it was trained, before any averaging", "all clients")
    return gradient_method(loss, optimizer(hparams.client_lr), discloses=(told,), **hooks)


def head_gradient(z: Float[Array, "B D"], logits: Float[Array, "B K"], batch: Examples) -> HeadGradient:
    """The gradient of the mean cross-entropy over the real rows with respect to the linear head that made ``logits``."""
    residual = jax.nn.softmax(logits) - jax.nn.one_hot(batch.labels, logits.shape[-1])
    residual = jnp.where(batch.mask[:, None], residual, 0.0) / jnp.maximum(batch.mask.sum(), 1)
    return HeadGradient(jnp.matmul(z.T, residual, precision="highest"), residual.sum(0))


def cosd(one: HeadGradient, other: HeadGradient) -> Float[Array, ""]:
    """How far two gradients of a head are from pointing alike: 0 if they do, 2 if they are opposite, 1 if either is 0."""
    return 1.0 - (cosine(one.kernel, other.kernel).mean() + cosine(one.bias, other.bias)) / 2


def cosine(one: Float[Array, "D *K"], other: Float[Array, "D *K"]) -> Float[Array, "*K"]:
    """Along the first axis; the product of the lengths counts as ``EPS`` where it is less, so 0 has a gradient too."""
    lengths = (one**2).sum(0) * (other**2).sum(0)
    return (one * other).sum(0) / jnp.sqrt(jnp.maximum(lengths, EPS**2))
