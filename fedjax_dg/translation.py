"""The representation translator: features of one domain into those of another, and its adversary (LSI, stage 3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float, Int

from fedjax_dg.inversion import Head, logits_of
from fedjax_dg.types import PyTree

NUM_CRITIC = 5  # discriminator steps to one of the translator
BATCH = 16


class Translator(nn.Module):
    """G_psi(z, d, d'): three dense layers on [z | one-hot d | one-hot d'], 2,109,952 parameters for n = 512 and M = 3."""

    width: int  # n
    hidden: int
    bounded: bool  # a tanh at the end, as in the authors' release

    @nn.compact
    def __call__(self, z: Float[Array, "B n"], source: Array, target: Array, train: bool) -> Float[Array, "B n"]:
        x = jnp.concatenate([z, source, target], -1)
        x = nn.LayerNorm(epsilon=1e-5, name="norm1")(nn.leaky_relu(nn.Dense(self.hidden, name="dense1")(x), 0.2))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.LayerNorm(epsilon=1e-5, name="norm2")(nn.leaky_relu(nn.Dense(self.hidden, name="dense2")(x), 0.2))
        x = nn.Dense(self.width, name="dense3")(x)
        return jnp.tanh(x) if self.bounded else x


class Discriminator(nn.Module):
    """D_src, a score for real features, and D_cls, their domain, on one trunk: 1,055,236 parameters likewise."""

    hidden: int
    num_domains: int  # M

    @nn.compact
    def __call__(self, z: Float[Array, "B n"], train: bool) -> tuple[Float[Array, " B"], Float[Array, "B M"]]:
        x = nn.LayerNorm(epsilon=1e-5, name="norm1")(nn.leaky_relu(nn.Dense(self.hidden, name="dense1")(z), 0.2))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.LayerNorm(epsilon=1e-5, name="norm2")(nn.leaky_relu(nn.Dense(self.hidden // 2, name="dense2")(x), 0.2))
        return nn.Dense(1, name="source")(x)[:, 0], nn.Dense(self.num_domains, name="domain")(x)


class Networks(NamedTuple):
    """G and D, as modules."""

    translator: Translator
    discriminator: Discriminator

    @property
    def num_domains(self) -> int:
        return self.discriminator.num_domains

    def translate(self, params: PyTree, z: Array, source: Array, target: Array, key=None) -> Array:
        """G(z, d, d') for domain numbers [B] below M; in evaluation mode without a key."""
        hot = lambda d: jax.nn.one_hot(d, self.num_domains)
        rngs = None if key is None else {"dropout": key}
        # ignored: apply's type also has the pair that it returns with mutable collections
        return self.translator.apply({"params": params}, z, hot(source), hot(target), key is not None, rngs=rngs)  # type: ignore

    def judge(self, params: PyTree, z: Array, key=None) -> tuple[Array, Array]:
        """D_src [B] and the logits of D_cls [B, M]; in evaluation mode without a key."""
        rngs = None if key is None else {"dropout": key}
        # ignored: as above
        return self.discriminator.apply({"params": params}, z, key is not None, rngs=rngs)  # type: ignore

    def init(self, key) -> Players:
        """Both, before the first step."""
        keys = jax.random.split(key)
        z, hot = jnp.zeros((1, self.translator.width)), jnp.zeros((1, self.num_domains))
        translator = self.translator.init(keys[0], z, hot, hot, False)["params"]
        discriminator = self.discriminator.init(keys[1], z, False)["params"]
        moments = (adam(1.0).init(translator), adam(1.0).init(discriminator))
        return Players(translator, discriminator, *moments)


class Players(NamedTuple):
    """Parameters and Adam's moments of both."""

    translator: PyTree
    discriminator: PyTree
    translator_moments: Any
    discriminator_moments: Any


class Latents(NamedTuple):
    """Rows that G and D are trained on."""

    z: Float[Array, "L n"]
    labels: Int[Array, " L"]
    domain: Int[Array, " L"]  # 0 .. M - 1


class TranslationWeights(NamedTuple):
    """The weights of the losses."""

    cls: ArrayLike = 1.0  # lambda_cls
    rec: ArrayLike = 10.0  # lambda_rec
    gp: ArrayLike = 10.0  # lambda_gp
    y: ArrayLike = 0.1  # lambda_y: of every source domain's head


def adam(learning_rate: ArrayLike) -> optax.GradientTransformation:
    """The optimizer of either."""
    return optax.adam(jnp.asarray(learning_rate), b1=0.5, b2=0.999)


def mean_error(logits: Float[Array, "B K"], labels: Int[Array, " B"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradient_penalty(score, real: Float[Array, "B n"], fake: Float[Array, "B n"], share: Float[Array, "B 1"]) -> Array:
    """mean (|| grad D_src(u) ||_2 - 1)^2 at u = share real + (1 - share) fake, row by row."""
    slopes = jax.grad(lambda u: score(u).sum())(share * real + (1 - share) * fake)
    return ((jnp.sqrt((slopes**2).sum(-1) + 1e-12) - 1) ** 2).mean()


def discriminator_loss(
    params: PyTree, translator: PyTree, nets: Networks, batch: Latents, target: Array, weights: TranslationWeights, key
) -> Float[Array, ""]:
    """-E D_src(z) + E D_src(G) + lambda_cls CE(D_cls(z), d) + lambda_gp GP, without gradient through G."""
    keys = jax.random.split(key, 5)
    fake = jax.lax.stop_gradient(nets.translate(translator, batch.z, batch.domain, target, keys[0]))
    real_score, domain = nets.judge(params, batch.z, keys[1])
    fake_score, _ = nets.judge(params, fake, keys[2])
    share = jax.random.uniform(keys[3], (len(fake), 1))
    penalty = gradient_penalty(lambda u: nets.judge(params, u, keys[4])[0], batch.z, fake, share)
    losses = (fake_score.mean(), -real_score.mean(), weights.cls * mean_error(domain, batch.domain))
    return jnp.asarray(sum(losses, weights.gp * penalty))


def translator_loss(
    params: PyTree,
    discriminator: PyTree,
    nets: Networks,
    heads: Head,
    say: Float[Array, " J"],
    batch: Latents,
    target: Array,
    weights: TranslationWeights,
    key,
) -> Float[Array, ""]:
    """-E D_src(G) + lambda_cls CE(D_cls(G), d') + lambda_rec E mean_j | z_j - G(G(z, d, d'), d', d)_j | + lambda_y M
    sum_j s_j CE(h_j(G), y), ``say`` s summing to 1: with one head a domain, the sum over the source heads."""
    keys = jax.random.split(key, 3)
    fake = nets.translate(params, batch.z, batch.domain, target, keys[0])
    score, domain = nets.judge(discriminator, fake, keys[1])
    back = nets.translate(params, fake, target, batch.domain, keys[2])
    errors = jax.vmap(lambda head: mean_error(logits_of(head, fake), batch.labels))(heads)
    kept = nets.num_domains * (say * errors).sum()
    losses = (-score.mean(), weights.cls * mean_error(domain, target), weights.rec * jnp.abs(batch.z - back).mean())
    return jnp.asarray(sum(losses, weights.y * kept))


def play(
    players: Players,
    nets: Networks,
    heads: Head,
    say: Float[Array, " J"],
    latents: Latents,
    weights: TranslationWeights,
    learning_rate: ArrayLike,
    first: Int[Array, ""] | int,
    steps: Int[Array, ""] | int,
    key,
) -> Players:
    """``steps`` discriminator steps from number ``first`` on, every fifth followed by one of the translator.

    A step's batch is drawn from the rows, its targets d' are its own domains in another order.
    """
    optimizer = adam(learning_rate)

    def step(number, players):
        keys = jax.random.split(jax.random.fold_in(key, number), 4)
        index = jax.random.randint(keys[0], (BATCH,), 0, len(latents.z))
        batch = jax.tree.map(lambda x: x[index], latents)
        target = jax.random.permutation(keys[1], batch.domain)
        gradient = jax.grad(discriminator_loss)(
            players.discriminator, players.translator, nets, batch, target, weights, keys[2]
        )
        updates, moments = optimizer.update(gradient, players.discriminator_moments)
        discriminator = optax.apply_updates(players.discriminator, updates)
        players = players._replace(discriminator=discriminator, discriminator_moments=moments)

        def move(players):
            gradient = jax.grad(translator_loss)(
                players.translator, players.discriminator, nets, heads, say, batch, target, weights, keys[3]
            )
            updates, moments = optimizer.update(gradient, players.translator_moments)
            translator = optax.apply_updates(players.translator, updates)
            return players._replace(translator=translator, translator_moments=moments)

        return jax.lax.cond((number + 1) % NUM_CRITIC == 0, move, lambda players: players, players)

    return jax.lax.fori_loop(first, first + steps, step, players)


def quality(
    players: Players, nets: Networks, heads: Head, say: Float[Array, " J"], latents: Latents, key
) -> dict[str, Float[Array, ""]]:
    """Of translations to random domains: their domain by D_cls, their class by the heads, and the error of the way back."""
    rows_key, target_key = jax.random.split(key)
    index = jax.random.randint(rows_key, (1024,), 0, len(latents.z))
    rows = jax.tree.map(lambda x: x[index], latents)
    target = jax.random.randint(target_key, index.shape, 0, nets.num_domains)
    fake = nets.translate(players.translator, rows.z, rows.domain, target)
    back = nets.translate(players.translator, fake, target, rows.domain)
    found = jax.vmap(lambda head: logits_of(head, fake).argmax(-1) == rows.labels)(heads)
    return {
        "domain_accuracy": (nets.judge(players.discriminator, fake)[1].argmax(-1) == target).mean(),
        "class_accuracy": (say * found.mean(1)).sum(),
        "cycle_error": jnp.abs(rows.z - back).mean(),
    }
