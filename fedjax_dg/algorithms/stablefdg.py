"""StableFDG (Park et al., NeurIPS 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg import sharding, styles
from fedjax_dg.algorithms.common import cross_entropy, gradient_method, momentum
from fedjax_dg.alignment.groups import Axis, Group
from fedjax_dg.backbones.backbone import Forward, first_readers
from fedjax_dg.errors import unknown
from fedjax_dg.styles import Summary, at_stages, style_of
from fedjax_dg.types import Algorithm, Disclosure, Examples, Start, Variables

ATTENTION_WIDTH = 30  # the paper's d_k


class StableFDGHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    share_prob: ArrayLike = 0.5  # chance that a batch takes in a peer's styles
    explore_prob: ArrayLike = 0.5  # chance, at every stage, that styles are explored there
    explore: ArrayLike = 3.0  # the paper's alpha: how far the copies' styles are moved away from the batch's mean
    mix_alpha: ArrayLike = 0.1  # of Beta(alpha, alpha), from which MixStyle's shares are drawn; 0: no mixing


class Offer(NamedTuple):
    """What a client tells the server before it trains."""

    draw: Float[Array, "*n"]  # its place in this round's cycle of clients; infinite without data
    styles: Summary


class Peer(NamedTuple):
    """Whose styles a client takes in."""

    styles: Summary
    another: Bool[Array, ""]  # or itself, where no other client holds data


class Highlighted(nn.Module):
    """An image network whose features are [z | zeta]: its own z, and its last map x pooled by attention, zeta = sum a x.

    a = softmax over places of <mean over places of (q + q') / 2, k>, with q and k the map's unit vectors of width d_k and q'
    those of ``partner``. Logits are W z + b + W' zeta: one dense layer on [z | zeta], in two leaves as their units differ.
    The layers of ``base`` keep their names, so its permutation groups still hold.
    """

    base: nn.Module
    width: int  # of z
    num_classes: int

    def setup(self):
        nn.share_scope(self, self.base)
        # without biases: at a place where all channels are off they would be all there is, and be blown up to length 1
        self.query, self.key = (nn.Dense(ATTENTION_WIDTH, use_bias=False) for _ in range(2))
        self.highlight = nn.Dense(self.num_classes, use_bias=False)

    def maps(self, x, train: bool, mask=None) -> Float[Array, "R H W C"]:
        return self.base.maps(x, train, mask)

    def partner(self, query: Float[Array, "R P d"]) -> Float[Array, "R P d"]:
        """The queries of another example of a row's class, in training; of its own here."""
        return query

    def reduce(self, maps: Float[Array, "R H W C"], train: bool) -> Float[Array, "R D"]:
        places = maps.reshape(len(maps), -1, maps.shape[-1])
        query, key = (unit(layer(places)) for layer in (self.query, self.key))
        query = (query + self.partner(query)).mean(1) / 2
        attention = nn.softmax(jnp.einsum("bd,bpd->bp", query, key))
        attended = jnp.einsum("bp,bpc->bc", attention, places)
        return jnp.concatenate([self.base.reduce(maps, train), attended], axis=-1)

    def features(self, x, train: bool, mask=None) -> Float[Array, "R D"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "R D"]) -> Float[Array, "R K"]:
        return self.base.classify(z[..., : self.width]) + self.highlight(z[..., self.width :])

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def unit(x: Array) -> Array:
    """Vectors of length 1; those much shorter than 1e-3 stay near 0, where the direction is rounding."""
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def read_last_map(groups: tuple[Group, ...], *layers: str) -> tuple[Group, ...]:
    """The groups of an image network whose last map these dense layers read too, place by place.

    Its units are those that a dense layer reads first.
    """
    last = next((group.name for group in groups if group.grams), None)

    def gain(group):
        axes, grams = ([Axis(f"params/{layer}/kernel", 0) for layer in layers], [(layer, 1) for layer in layers])
        return group._replace(consumers=(*group.consumers, *axes), grams=(*group.grams, *grams))

    return tuple(gain(group) if group.name == last else group for group in groups)


def map_widths(backbone) -> tuple[int, int]:
    """Channels at the end of the first stage, and of the last map. ``ValueError`` for a network without stages."""

    def run(variables, inputs):
        with at_stages() as passed:
            maps, _ = backbone.maps(variables, inputs, jnp.ones(1, bool), jax.random.key(0))
        return [*(stage for stage, _ in passed), maps]

    maps = []
    if hasattr(backbone.module, "maps"):
        inputs = jax.ShapeDtypeStruct((1, *backbone.input_shape), jnp.float32)
        maps = jax.eval_shape(run, jax.eval_shape(backbone.init, jax.random.key(0)), inputs)
    if len(maps) < 2:
        raise ValueError(
            "stablefdg acts on feature maps between the stages of an image network, and this network has none: choose an "
            "image network such as resnet18, or mark its stages with backbones.layers.Stage."
        )
    return maps[0].shape[-1], maps[-1].shape[-1]


def partner_of(offers: Offer, draw: Float[Array, ""]) -> Peer:
    """The client with the next larger draw; after the largest, the smallest."""
    after = jnp.where(offers.draw > draw, offers.draw, jnp.inf)
    place = jnp.where(jnp.isfinite(after).any(), jnp.argmin(after), jnp.argmin(offers.draw))
    return Peer(jax.tree.map(lambda x: x[place], offers.styles), offers.draw[place] != draw)


def styled_pass(
    backbone, variables: Variables, batch: Examples, peer: Peer | None, key: Array, hparams: StableFDGHparams, kept: str
) -> tuple[Forward, Int[Array, " R"], Bool[Array, " R"]]:
    """A training-mode pass over a batch and copies of its rows: R = 2 B rows, their labels, and which of them count."""
    size = len(batch.mask)
    copy_key, coin_key, shift_key, explore_key = jax.random.split(jax.random.fold_in(key, 1), 4)
    rows, taken = styles.oversample(batch.labels, batch.mask, backbone.num_classes, copy_key)
    labels = jnp.concatenate([batch.labels, batch.labels[rows]])
    copies = jnp.concatenate([jnp.zeros(size, bool), taken])

    def share(maps, mask):
        if peer is None:
            return maps
        happens = jax.random.bernoulli(coin_key, hparams.share_prob) & peer.another
        return jnp.where(happens, styles.shift(maps, mask, peer.styles, shift_key, kept), maps)

    def at_stage(place, maps, mask):
        if place == 0:
            maps = share(maps, mask)
            maps, mask = jnp.concatenate([maps, maps[rows]]), jnp.concatenate([mask, jnp.zeros(size, bool)])
        draw_key, mix_key = jax.random.split(jax.random.fold_in(explore_key, place))
        happens = jax.random.bernoulli(draw_key, hparams.explore_prob)
        fresh = copies & happens & ~mask  # they count from here on; before, they only repeat their rows
        style = style_of(maps)
        new = jnp.where(fresh[:, None], styles.extrapolate(style, mask, hparams.explore), style)
        mask = mask | fresh
        new = jax.lax.stop_gradient(styles.mix(new, mask, hparams.mix_alpha, mix_key))
        return jnp.where(happens, styles.restyle(maps, style, new), maps), mask

    with at_stages(at_stage) as passed:

        def pair(next_method, args, kwargs, context):
            if context.method_name == "partner":
                return args[0][styles.next_of_class(labels, passed[-1][1])]
            return next_method(*args, **kwargs)

        with nn.intercept_methods(pair):
            forward = backbone.forward(variables, batch.inputs, batch.mask, key)
    return forward, labels, passed[-1][1]


def first_rows(forward: Forward, size: int) -> Forward:
    """A pass with what the dense layers read of its first rows only; layers that read the same still do."""
    firsts = first_readers(forward.dense_inputs)
    own = {layer: forward.dense_inputs[layer][:size] for layer in set(firsts.values())}
    return forward._replace(dense_inputs={layer: own[first] for layer, first in firsts.items()})


def stablefdg(
    hparams: StableFDGHparams = StableFDGHparams(),
    optimizer: Callable = momentum,
    kept: str = styles.ROWS,
    highlight: bool = True,
) -> Algorithm:
    """Train on the styles of another client and on exaggerated ones, and look at what an example shares with its class.

    A style is the mean and the standard deviation, over places, of each of a map's C channels. On a batch of n examples:

    1. Sharing, at the end of the first stage, with chance ``share_prob``: n // 2 rows x get styles drawn from
       N(mean, std^2) of another client's styles, x <- (x - mu) / sigma * new sigma + new mu. ``kept``: those that k-means++
       chooses for their styles stay as they are (``rows``, the paper), or the first stay, in the styles of a k-means'
       centres (``centres``, the authors' code).
    2. Exploration, at every stage with chance ``explore_prob``. At the first where it happens the batch gains n copies of
       rows, the rarest classes first, in styles s + alpha (s - mean of the n), alpha = ``explore``. There and at later
       such stages all styles are mixed (MixStyle): lambda s_i + (1 - lambda) s_j. New styles are constants.
    3. ``highlight``: the head reads the last map pooled by attention too (``Highlighted``), whose queries are averaged
       with those of the next row of the same class; its own for the only one, and in evaluation.

    The loss is the cross-entropy of rows and copies. Both chances 0 and ``highlight=False`` is FedAvg. Shapes are fixed:
    behind the first stage there are always 2 B rows, of which those that are not used are padding.

    Partners: every client draws a number, and receives the summary of the one with the next larger number among the
    participants that hold data, so nobody has itself; one alone shares nothing. Client state: its number. Within a round,
    ``shared`` is all ``Offer``s [S P]: the simulation's, where a client would receive one. Between rounds it is empty.

    Upload: the model, and before it (one more pass over the data, in evaluation mode) 4 C + 1 floats: mean and standard
    deviation of the styles of its examples at the received model, and its number. One peer sees the former. Gram
    statistics gathered in training are of the batch's own rows, with their new styles.

    Raises ``ValueError`` for another ``kept``, and for a network without stages (``backbones.layers.Stage``).

    A channel that is almost constant over places is divided by about 1e-3 (a floor of 1e-6 under variances), which enlarges
    rounding as it does gradients.

    Deviations from the authors' code: summaries are of this round's model, and so shared in the first round too; in
    attention the only row of a class is its own partner, where theirs takes one of a class-balanced batch, wrongly indexed;
    q and k have no biases, and short ones stay short; a division by 49 is the mean here, so images may have any size; where
    z is not the mean of the last map (LeNet, AlexNet, VGG), it takes the mean's place; half of a short batch is shifted, and
    a short batch doubled; rows of a class are copied in turns; models are merged by the federation's weights, not uniformly;
    no schedule, no clipping. Source: Park, Han, Kim, Wang, Brinton, Moon, NeurIPS 2023, https://arxiv.org/abs/2311.00227
    (code: github.com/savertm/StableFDG_github).
    """
    if kept not in styles.KEPT:
        raise unknown("kept", kept, styles.KEPT)

    def adapt(backbone):
        _, channels = map_widths(backbone)
        if not highlight:
            return backbone
        return dataclasses.replace(
            backbone,
            module=Highlighted(backbone.module, backbone.num_features, backbone.num_classes),
            num_features=backbone.num_features + channels,
            groups=read_last_map(backbone.groups, "query", "key", "highlight"),
        )

    def init(backbone, variables, key):
        return Start(variables, client=jnp.zeros(()))

    def survey(backbone, received, client, examples, key):
        def styles_of(batch):
            with at_stages() as passed:
                backbone.features(received.variables, batch.inputs)
            return style_of(passed[0][0])

        draw = jax.random.uniform(key)
        summary, count = styles.summarise(styles_of, examples)
        return draw, Offer(jnp.where(count > 0, draw, jnp.inf), summary)

    def digest(shared, stations, messages, shares):
        everyone = sharding.whole(messages, sharding.AXES)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), everyone), stations

    def absorb(shared, stations, messages, shares):
        return (), stations

    def loss(backbone, params, received, local, batch, key):
        # nobody's styles where the round's beginning was left out, as in timing a client
        peer = partner_of(received.shared, local.client) if received.shared else None
        variables = Variables(params, local.variables.batch_stats)
        forward, labels, mask = styled_pass(backbone, variables, batch, peer, key, hparams, kept)
        error = cross_entropy(forward.logits, labels, mask)
        return error, (first_rows(forward, len(batch.mask)), {"copies": (mask.sum() - batch.mask.sum()) * 1.0})

    told = Disclosure(
        "mean and deviation of the styles of its images at the first stage", "server and one other client"
    )
    hooks = {"adapt": adapt, "init": init, "survey": survey, "digest": digest, "absorb": absorb, "discloses": (told,)}
    return gradient_method(loss, optimizer(hparams.client_lr), **hooks)
