"""FedADG (Zhang et al., 2021), and what Stable-FedADG shares with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.algorithms.common import masked_mean, momentum
from fedjax_dg.alignment.groups import Axis, OfFeatures, made_with_features
from fedjax_dg.errors import unknown
from fedjax_dg.reweighting import Keeping, even, memory_of
from fedjax_dg.types import Algorithm, PyTree, Start, Variables

ADV_FORMS = ("ls", "paper")


class FedADGHparams(NamedTuple):
    client_lr: ArrayLike = 0.05  # lr0: of the extractor F and the classifier C
    adversary_lr: ArrayLike = 0.035  # lr1: of the generator G and the discriminator D (the authors' ratio, 0.7)
    lambda_adv: ArrayLike = 0.15  # weight of the adversarial loss of F
    lambda_cls: ArrayLike = 0.85  # weight of the classification loss after the warm-up
    smoothing: ArrayLike = 0.01  # epsilon of the labels: 1 - epsilon on the true class, epsilon / (K - 1) on each other
    label_scale: ArrayLike = 1.0  # of the one-hot label that G and D read (the authors' code: 0.6 or 0.7)


#: The weights of the authors' code, and those that the papers print.
FEDADG_CODE = FedADGHparams()
FEDADG_PAPER = FedADGHparams(lambda_adv=0.85, lambda_cls=0.15)


class Generator(nn.Module):
    """z' = G(noise, label code): the reference distribution of the features."""

    width: int
    num_features: int
    rectify: bool

    @nn.compact
    def __call__(self, noise: Float[Array, "B n"], code: Float[Array, "B K"]) -> Float[Array, "B M"]:
        x = nn.leaky_relu(nn.Dense(self.width, name="hidden")(jnp.concatenate([noise, code], axis=-1)))
        x = nn.Dense(self.num_features, name="out")(x)
        return nn.relu(x) if self.rectify else x


class Discriminator(nn.Module):
    """D(z | y): the probability that features come from the generator."""

    width: int

    @nn.compact
    def __call__(self, z: Float[Array, "B M"], code: Float[Array, "B K"]) -> Float[Array, " B"]:
        x = nn.Dense(self.width, use_bias=False, name="projection")(z)
        x = nn.leaky_relu(nn.Dense(self.width, name="hidden")(jnp.concatenate([x, code], axis=-1)))
        return nn.sigmoid(nn.Dense(1, name="out")(x))[..., 0]


class Adversary(NamedTuple):
    """What a client keeps to itself."""

    discriminator: PyTree
    optimizer: PyTree


def discriminator_loss(of_real: Array, of_generated: Array, mask: Bool[Array, " B"], form: str) -> Float[Array, ""]:
    """``ls``: E D(z)^2 + E (1 - D(z'))^2; ``paper``: - E (1 - D(z))^2 - E D(z')^2. Both push D(z) to 0 and D(z') to 1."""
    if form == "ls":
        return masked_mean(of_real**2 + (1 - of_generated) ** 2, mask)
    return -masked_mean((1 - of_real) ** 2 + of_generated**2, mask)


def extractor_loss(of_real: Array, mask: Bool[Array, " B"]) -> Float[Array, ""]:
    """E (1 - D(z))^2: features should pass for generated ones."""
    return masked_mean((1 - of_real) ** 2, mask)


def generator_loss(of_generated: Array, mask: Bool[Array, " B"], form: str) -> Float[Array, ""]:
    """``ls``: E D(z')^2; ``paper``: - E (1 - D(z'))^2. Both push D(z') to 0: the reference moves towards the features."""
    return masked_mean(of_generated**2, mask) if form == "ls" else -masked_mean((1 - of_generated) ** 2, mask)


def smoothed_losses(logits: Float[Array, "B K"], labels: Int[Array, " B"], smoothing: ArrayLike) -> Float[Array, " B"]:
    """Cross-entropy with 1 - epsilon on the true class and epsilon / (K - 1) on each other one."""
    true = jax.nn.one_hot(labels, logits.shape[-1])
    targets = (1 - smoothing) * true + smoothing / max(logits.shape[-1] - 1, 1) * (1 - true)
    return optax.softmax_cross_entropy(logits, targets)


def fedadg(
    hparams: FedADGHparams = FedADGHparams(),
    optimizer: Callable = momentum,
    warmup_epochs: int = 3,
    adv_form: str = "ls",
    share_discriminator: bool = False,
    rectify: bool = True,
    noise_width: int = 0,
    generator_width: int = 0,
    discriminator_width: int = 0,
) -> Algorithm:
    """Features aligned to a generated reference distribution, the same for all clients, by an adversary on each client.

    In every station round the first ``warmup_epochs`` (E0) passes descend the smoothed cross-entropy alone; in the others
    (E1 = local_epochs - E0) each step draws one noise xi ~ U[0, 1) and then, each with the others constant:

    1. D descends E D(z)^2 + E (1 - D(z'))^2, z = F(x), z' = G(xi, y);
    2. F and C descend lambda_cls CE + lambda_adv E (1 - D(z))^2, D just updated;
    3. G descends E D(z')^2.

    ``adv_form="paper"`` takes the printed forms of 1 and 3 (``discriminator_loss``, ``generator_loss``): the same
    directions, but D's loss is concave, so it hardly moves D where it errs most and drives it from 1/2 to a constant. The
    printed sum of all terms cannot be minimised jointly: over F it has the wrong sign, over G none. lambda_adv = 0,
    lambda_cls = 1 and no smoothing is FedAvg.

    ``FEDADG_CODE`` has the weights of the authors' code, 0.85 on classification and 0.15 on the adversary, and is the
    default; ``FEDADG_PAPER`` the other way round, as both papers print.

    Parameters: G under ``generator``; widths of 0 are the authors' ratios to the M features (noise M / 2, G M, D M / 4, at
    least 8). ``rectify``: G ends in a ReLU, for features that are not negative; false for signed ones.
    Client state: D and its optimizer, drawn per client, kept between rounds (``share_discriminator`` uploads D with the
    model instead). Upload: the model, which is F, C and G. Raises ``ValueError`` for an unknown ``adv_form`` and negative
    sizes, and in ``make_round`` for ``local_epochs`` that end with the warm-up.

    Deviations: C is the backbone's head, one layer (the authors' is two linear ones); D reads z of the training pass,
    with dropout on (theirs: off); no warm-up of the rate within a round (theirs makes it 10 to 100 times smaller than
    lr0), no weight decay; means over clients are the aggregator's. In the authors' code for VLCS, and in ports of it, G is
    detached and never trains; here it does. Source: Zhang, Lei, Shi, Huang, Chen, 2021, https://arxiv.org/abs/2111.10487.
    """
    return adversarial(
        hparams,
        optimizer,
        even,
        warmup_epochs=warmup_epochs,
        adv_form=adv_form,
        share_discriminator=share_discriminator,
        rectify=rectify,
        widths=(noise_width, generator_width, discriminator_width),
        local_epochs=warmup_epochs + 5,
    )


def adversarial(
    hparams: FedADGHparams,
    optimizer: Callable,
    weigh: Callable,
    *,
    warmup_epochs: int,
    adv_form: str,
    share_discriminator: bool,
    rectify: bool,
    widths: tuple[int, int, int],
    local_epochs: int,
    weigh_warmup: bool = True,
    memory: Keeping = memory_of(0, persist=False),
) -> Algorithm:
    """FedADG with its classification loss sum_i q_i CE_i, (q, tally, metrics) = ``weigh(tally, z, mask, key)``.

    A client's state is (``Adversary``, what ``memory`` keeps).
    """
    if adv_form not in ADV_FORMS:
        raise unknown("adv_form", adv_form, ADV_FORMS)
    if warmup_epochs < 0 or min(widths) < 0:
        raise ValueError(f"warmup_epochs={warmup_epochs}, widths={widths}: give 0 or more.")
    descent, adversary_descent = optimizer(hparams.client_lr), optimizer(hparams.adversary_lr)

    def networks(backbone):
        ratios = (backbone.num_features // 2, backbone.num_features, backbone.num_features // 4)
        noise, generator, discriminator = (given or max(8, ratio) for given, ratio in zip(widths, ratios))
        return noise, Generator(generator, backbone.num_features, rectify), Discriminator(discriminator)

    def adapt(backbone):
        axes = [Axis("params/generator/out/kernel", 1), Axis("params/generator/out/bias", 0)]
        if share_discriminator:
            axes.append(Axis("params/discriminator/projection/kernel", 0))
        return dataclasses.replace(backbone, groups=made_with_features(backbone.groups, *axes))

    def init(backbone, variables, key):
        noise_width, generator, discriminator = networks(backbone)
        generator_key, discriminator_key = jax.random.split(key)
        code, z = jnp.zeros((1, backbone.num_classes)), jnp.zeros((1, backbone.num_features))
        params = dict(variables.params)
        params["generator"] = generator.init(generator_key, jnp.zeros((1, noise_width)), code)["params"]
        adversary = discriminator.init(discriminator_key, z, code)["params"]
        if share_discriminator:
            params["discriminator"] = adversary
            own = ()
        else:
            adversary = boxed(adversary)
            own = Adversary(adversary, adversary_descent.init({"discriminator": adversary}))
        return Start(variables._replace(params=params), client=(own, memory.first(backbone)))

    def split(params):
        rest = dict(params)
        return rest, rest.pop("generator"), rest.pop("discriminator", None)

    def begin(backbone, received, client):
        rest, generator, shared = split(received.variables.params)
        # named as in ``params``, so that alignment knows them when they are kept (``keep_optimizer``)
        of_shared = adversary_descent.init({"discriminator": shared}) if share_discriminator else ()
        optimizers = (descent.init(rest), adversary_descent.init({"generator": generator}), of_shared)
        return optimizers, memory.recall(backbone, client[1])

    def step(backbone, received, local, batch, key):
        noise_width, generator, discriminator = networks(backbone)
        params, reference, shared = split(local.variables.params)
        for_model, for_reference, for_shared = local.optimizer
        own, kept = local.client
        adversary = Adversary(shared, for_shared) if share_discriminator else own
        code = hparams.label_scale * jax.nn.one_hot(batch.labels, backbone.num_classes)
        noise = jax.random.uniform(jax.random.fold_in(key, 1), (len(batch.mask), noise_width))
        warm = local.passes < warmup_epochs

        def judge(adversary, z) -> Any:
            return discriminator.apply({"params": unboxed(adversary)}, z, code)

        def generate(reference) -> Any:
            return generator.apply({"params": reference}, noise, code)

        def descend(name, network, gradient, state):
            updates, state = adversary_descent.update({name: gradient}, state, {name: network})
            return jax.tree.map(jnp.add, network, updates[name]), state

        def train_discriminator(adversary, z, generated):
            def objective(d):
                return discriminator_loss(judge(d, z), judge(d, generated), batch.mask, adv_form)

            value, gradient = jax.value_and_grad(objective)(adversary.discriminator)
            return Adversary(*descend("discriminator", adversary.discriminator, gradient, adversary.optimizer)), value

        def objective(params):
            forward = backbone.forward(Variables(params, local.variables.batch_stats), batch.inputs, batch.mask, key)
            z = jax.lax.stop_gradient(forward.z)
            q, tally, told = weigh(local.tally, z, batch.mask, jax.random.fold_in(key, 2))
            if not weigh_warmup:
                q = jnp.where(warm, even((), z, batch.mask, key)[0], q)
            losses = smoothed_losses(forward.logits, batch.labels, hparams.smoothing)
            error = (q * jnp.where(batch.mask, losses, 0.0)).sum()
            moved, loss_d = jax.lax.cond(
                warm,
                lambda: (adversary, jnp.zeros(())),
                lambda: train_discriminator(adversary, z, jax.lax.stop_gradient(generate(reference))),
            )
            moved = jax.lax.stop_gradient(moved)
            loss_f = extractor_loss(judge(moved.discriminator, forward.z), batch.mask)
            value = jnp.where(warm, 1.0, hparams.lambda_cls) * error + jnp.where(warm, 0.0, hparams.lambda_adv) * loss_f
            told = {"cross_entropy": error, "adv_d": loss_d, "adv_f": jnp.where(warm, 0.0, loss_f), **told}
            return value, (forward, moved, tally, told)

        (value, (forward, judged, tally, told)), gradient = jax.value_and_grad(objective, has_aux=True)(params)

        def train_generator():
            def objective(reference):
                return generator_loss(judge(judged.discriminator, generate(reference)), batch.mask, adv_form)

            loss_g, of_reference = jax.value_and_grad(objective)(reference)
            return *descend("generator", reference, of_reference, for_reference), loss_g

        new_reference, for_reference, loss_g = jax.lax.cond(
            warm, lambda: (reference, for_reference, jnp.zeros(())), train_generator
        )
        updates, for_model = descent.update(gradient, for_model, params)
        params = jax.tree.map(jnp.add, params, updates) | {"generator": new_reference}
        if share_discriminator:
            params["discriminator"], for_shared = judged
        else:
            own = judged
        local = local._replace(
            variables=Variables(params, forward.batch_stats),
            optimizer=(for_model, for_reference, for_shared),
            client=(own, kept),
            tally=tally,
            seen=forward.dense_inputs,
        )
        return local, {"loss": value, "adv_g": loss_g, **told}

    def report(backbone, received, local, steps, examples, key):
        own, kept = local.client
        return (own, memory.keep(kept, local.tally)), ()

    return Algorithm(
        step=step,
        adapt=adapt,
        init=init,
        begin=begin,
        report=report,
        local_epochs=local_epochs,
        least_epochs=warmup_epochs + 1,
    )


def boxed(discriminator: PyTree) -> PyTree:
    """Its projection reads the features, whose order may change when models are aligned."""
    return {**discriminator, "projection": {"kernel": OfFeatures(discriminator["projection"]["kernel"], axis=0)}}


def unboxed(discriminator: PyTree) -> PyTree:
    is_box = lambda x: isinstance(x, OfFeatures)
    return jax.tree.map(lambda x: x.value if is_box(x) else x, discriminator, is_leaf=is_box)
