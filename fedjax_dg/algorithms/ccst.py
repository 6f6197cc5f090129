"""CCST, cross-client style transfer (Chen et al., WACV 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import sharding, weights
from fedjax_dg.algorithms.common import classification_loss, gradient_method, momentum
from fedjax_dg.backbones.convolution import NHWC
from fedjax_dg.errors import unknown
from fedjax_dg.local import map_clients, take_batch
from fedjax_dg.types import Algorithm, Before, Disclosure, PyTree

STYLES = ("overall", "single")
EPSILON = 1e-5
AT_ONCE = 8  # images that a device encodes and decodes at once; only memory depends on it

#: AdaIN's networks by the places of their convolutions in PyTorch's file, with the pools and enlargements between them.
ENCODER = (2, 5, "pool", 9, 12, "pool", 16, 19, 22, 25, "pool", 29)  # after a 1 x 1 convolution, 0
DECODER = (1, "up", 5, 8, 11, 14, "up", 18, 21, "up", 25, 28)
SMALLEST = 9  # pixels a side: the encoder leaves the two places that reflection needs


class CCSTHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    style_alpha: ArrayLike = 1.0  # alpha, share of the restyled features in what is decoded


class Codec(NamedTuple):
    """Frozen networks from an image, in [0, 1], to a feature map and back. Both are pure functions of ``params``."""

    encode: Callable[[PyTree, Array], Array]  # (params, image [H, W, C]) -> map [h, w, D]
    decode: Callable[[PyTree, Array], Array]  # (params, map) -> image, at least H x W
    params: PyTree = ()


class Style(NamedTuple):
    """Mean and standard deviation of every channel of feature maps."""

    mean: Float[Array, "*n D"]
    std: Float[Array, "*n D"]


def ccst(
    hparams: CCSTHparams = CCSTHparams(),
    optimizer: Callable = momentum,
    encoder: str = "",
    decoder: str = "",
    codec: Codec | None = None,
    style: str = "overall",
    mixing_level: int = 3,
    shared_images: int = 64,
    style_size: int = 0,
) -> Algorithm:
    """FedAvg on images repainted in the styles of other clients.

    Before training every image is replaced by K = ``mixing_level`` versions, of K different clients drawn for it among all
    with data, its own included: the image itself for its own client, and for another
    x' = Dec(alpha AdaIN(f, s) + (1 - alpha) f), f = E(x), AdaIN(f, s) = sigma_s (f - mu(f)) / sigma(f) + mu_s, with mean mu
    and deviation sigma, sqrt(variance + 1e-5), of each of D channels over the places of a map. A client's style s is
    ``overall``, of all places of all its images; or ``single``, of one image drawn among the ``shared_images`` (or as many
    as there are) that it shares the styles of. uint8 images stay uint8. Data and a pass grow K times; where fewer than K
    clients hold data, that many versions are made. The paper's domain is a client here: where many clients hold one domain,
    most of an image's styles are of few domains.

    E and Dec are frozen and not part of the library: ``encoder`` and ``decoder`` are files of the public AdaIN weights,
    vgg_normalised.pth (read up to relu4_1, D = 512) and decoder.pth, as .pth, .safetensors or .npz; or ``codec`` has other
    networks. ``style_size``: side in pixels that images are resized to in between (the authors: 512); 0 = as they are.

    Before round 1 each client uploads 2 D floats, the 4 KB of its style (in ``single``, for every shared image), and EVERY
    CLIENT RECEIVES THEM ALL, and both networks (28 MB). Upload in a round: the model. The paper weighs clients equally:
    ``--server-weighting uniform --station-weighting uniform``. Its K = 3 is all its domains.

    Raises ``ValueError`` for another style; when the round is made, without networks or for images they do not take; for a
    file that does not hold them; for a ``mixing_level`` above the number of clients.

    Deviations: deviations of content and style are both biased, so that a style of its own changes nothing (the authors'
    content has n - 1); validation examples are set aside before, where the authors' 10 % may be versions of what is trained
    on. Source: Chen, Jiang, Dou, Chen, WACV 2023, https://arxiv.org/abs/2210.00912 (code: github.com/JeremyCJM/CCST);
    Huang, Belongie, ICCV 2017, https://arxiv.org/abs/1703.06868 (AdaIN).
    """
    if style not in STYLES:
        raise unknown("style", style, STYLES)
    networks = codec or (load_codec(encoder, decoder) if encoder and decoder else Codec(no_network, no_network))

    def adapt(backbone):
        if len(backbone.input_shape) != 3:
            raise ValueError(
                f"ccst works on images [H, W, C], but the backbone takes inputs of shape {backbone.input_shape}: choose an "
                "image backbone, or another algorithm."
            )
        image = jax.ShapeDtypeStruct(backbone.input_shape, jnp.float32)
        made = jax.eval_shape(lambda params, x: decoded(params, encoded(params, x), x), networks.params, image)
        if made.shape != image.shape:
            raise ValueError(
                f"The decoder makes images {list(made.shape)} of images {list(image.shape)}: give the networks of a pair."
            )
        return backbone

    def encoded(params, inputs):
        image = inputs.astype(jnp.float32) / 255 if inputs.dtype == jnp.uint8 else inputs
        if style_size:
            image = jax.image.resize(image, (style_size, style_size, image.shape[-1]), "bilinear")
        return networks.encode(params, image)

    def decoded(params, features, inputs):
        height, width, channels = inputs.shape
        image = networks.decode(params, features)
        if style_size:
            image = jax.image.resize(image[:style_size, :style_size], (height, width, channels), "bilinear")
        image = image[:height, :width]  # a pool rounds up
        return jnp.round(255 * jnp.clip(image, 0, 1)).astype(jnp.uint8) if inputs.dtype == jnp.uint8 else image

    def share(common, station, client):
        """A client's styles [J, D], J = 1 for ``overall``, and which of them are there."""
        (params, key), (examples, i) = common, client
        places = examples.mask.shape[0]
        picked = jnp.arange(places)
        if style == "single":
            draws = jax.random.uniform(jax.random.fold_in(key, i), (places,))
            picked = jnp.argsort(jnp.where(examples.mask, draws, jnp.inf))[: min(shared_images, places)]
        batch = take_batch(examples, picked, examples.mask[picked])
        mean, variance = jax.lax.map(lambda x: moments(encoded(params, x)), batch.inputs, batch_size=AT_ONCE)
        mask = batch.mask
        if style == "overall":
            mean, variance = jax.tree.map(lambda x: x[None], pooled(mean, variance, mask.astype(jnp.float32)))
            mask = mask.any(keepdims=True)
        return Style(mean, jnp.sqrt(variance + EPSILON)), mask

    def repaint(common, station, client):
        """A client's examples, K versions of each in a row."""
        (params, key, styles, known, everyone), (examples, me) = common, client
        batch = take_batch(examples, jnp.arange(examples.mask.shape[0]), examples.mask)
        of_client, of_style = (jax.random.fold_in(jax.random.fold_in(key, me), n) for n in (0, 1))

        def versions(given):
            image, number = given
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(of_client, number), i))(everyone)
            draws = jnp.where(known.any(1), jax.vmap(jax.random.uniform)(keys), -1.0)
            content = encoded(params, image)

            def version(donor):
                odds = jnp.where(known[donor], 0.0, -jnp.inf)
                drawn = jax.random.fold_in(jax.random.fold_in(of_style, number), everyone[donor])
                here = jax.tree.map(lambda x: x[donor, jax.random.categorical(drawn, odds)], styles)
                mixed = hparams.style_alpha * adain(content, here) + (1 - hparams.style_alpha) * content
                own = everyone[donor] == me
                return jnp.where(own, image, decoded(params, mixed, image)), known[donor].any()

            return jax.vmap(version)(jax.lax.top_k(draws, mixing_level)[1])

        numbers = jnp.arange(len(batch.mask))
        inputs, made = jax.lax.map(versions, (batch.inputs, numbers), batch_size=AT_ONCE)  # [N, K, ...]
        labels, mask, domain = (jnp.repeat(x, mixing_level, axis=0) for x in batch[1:])
        return batch._replace(
            inputs=inputs.reshape(-1, *inputs.shape[2:]), labels=labels, mask=mask & made.ravel(), domain=domain
        )

    def furnish(backbone, examples, ids, key):
        if mixing_level > ids.size:
            raise ValueError(
                f"mixing_level={mixing_level}, but there are {ids.size} clients: give mixing_level={ids.size} or less."
            )
        share_key, paint_key = jax.random.split(key)
        params = jax.tree.map(jnp.asarray, networks.params)
        shared = map_clients(share, (params, share_key), (), (examples, ids))
        everything = sharding.whole((*shared, ids), sharding.AXES)
        everyone = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), everything)  # [S, C, ...] as rows
        return map_clients(repaint, (params, paint_key, *everyone), (), (examples, ids))

    def before(backbone):
        image = jax.ShapeDtypeStruct(backbone.input_shape, jnp.float32)
        width = jax.eval_shape(lambda params, x: encoded(params, x), networks.params, image).shape[-1]
        each = Style(*(jax.eval_shape(lambda: jnp.zeros(width)) for _ in range(2)))
        return Before(
            up={"style": each}, down={"style of another client": each, "encoder and decoder": networks.params}
        )

    what = "all its images together" if style == "overall" else "each shared image"
    return gradient_method(
        classification_loss,
        optimizer(hparams.client_lr),
        adapt=adapt,
        furnish=furnish,
        resident=True,
        before=before,
        discloses=(Disclosure(f"mean and deviation of VGG features of {what}", "all clients", "once"),),
    )


# --- styles ---------------------------------------------------------------------------------------------------------


def moments(features: Float[Array, "h w D"]) -> tuple[Float[Array, " D"], Float[Array, " D"]]:
    """Mean and variance of every channel."""
    return features.mean((0, 1)), features.var((0, 1))


def pooled(
    means: Float[Array, "n D"], variances: Float[Array, "n D"], counts: Float[Array, " n"]
) -> tuple[Float[Array, " D"], Float[Array, " D"]]:
    """Mean and variance of a union of n parts with so many values each; zeros when there are none.

    Of deviations from the mean, as E f^2 - mu^2 loses all its digits over millions of pixels.
    """
    share = (counts / jnp.maximum(counts.sum(), 1.0))[:, None]
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean) ** 2)).sum(0)


def adain(features: Float[Array, "h w D"], style: Style) -> Float[Array, "h w D"]:
    """Features with the mean and deviation of a style."""
    mean, variance = moments(features)
    return (features - mean) / jnp.sqrt(variance + EPSILON) * style.std + style.mean


# --- AdaIN's networks -----------------------------------------------------------------------------------------------


def no_network(params, given):
    """In place of a network whose file was not given."""
    raise ValueError(
        "ccst needs AdaIN's two networks, which are not part of the library: give the public files vgg_normalised.pth and "
        "decoder.pth with --set encoder=PATH --set decoder=PATH."
    )


def load_codec(encoder: str, decoder: str) -> Codec:
    """The public networks from their files; ``ValueError`` when those cannot be read or hold something else."""
    first, last = read_layers(encoder, (0, *ENCODER), 3), read_layers(decoder, DECODER, None)
    params: dict[str, Any] = {"encoder": first, "decoder": last}
    made, read = (params[net][layer][0].shape[i] for net, layer, i in (("encoder", 29, 3), ("decoder", 1, 2)))
    if made != read:
        raise ValueError(
            f"{encoder} makes {made} channels, but {decoder} reads {read}: give an encoder and its decoder."
        )
    return Codec(encode, decode, params)


def read_layers(path: str, layers: Sequence, channels: int | None) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Kernels [h, w, in, out] and biases by place; the first reads so many ``channels``."""
    state, found = weights.read(path), {}
    for layer in (layer for layer in layers if isinstance(layer, int)):
        size = 1 if layer == 0 else 3
        kernel, bias = (state.get(f"{layer}.{leaf}", np.zeros(0)) for leaf in ("weight", "bias"))
        fits = kernel.ndim == 4 and kernel.shape[1:] == (channels or kernel.shape[1], size, size)
        if not fits or bias.shape != kernel.shape[:1]:
            raise ValueError(
                f"Weights file {path} is not the network of AdaIN that was expected: {layer}.weight and {layer}.bias have "
                f"shapes {list(kernel.shape)} and {list(bias.shape)}; give vgg_normalised.pth as encoder, decoder.pth as "
                "decoder."
            )
        found[layer], channels = (kernel.transpose(2, 3, 1, 0), bias), len(kernel)
    return found


def encode(params: PyTree, image: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
    """VGG-19 up to relu4_1: an eighth of the places, rounded up."""
    if image.shape[-1] != 3 or min(image.shape[:2]) < SMALLEST:
        raise ValueError(
            f"AdaIN's encoder takes RGB images of at least {SMALLEST} x {SMALLEST} pixels, not {list(image.shape)}: give "
            "style_size, or another codec."
        )
    kernel, bias = params["encoder"][0]
    x = jnp.tensordot(image, kernel[0, 0], axes=1, precision="highest") + bias
    for layer in ENCODER:
        x = halved(x) if layer == "pool" else jax.nn.relu(convolved(x, *params["encoder"][layer]))
    return x


def decode(params: PyTree, features: Float[Array, "h w D"]) -> Float[Array, "H W 3"]:
    """The encoder in reverse, eight times the places."""
    x = features
    for layer in DECODER:
        x = doubled(x) if layer == "up" else convolved(x, *params["decoder"][layer])
        x = x if layer in ("up", DECODER[-1]) else jax.nn.relu(x)
    return x


def convolved(x: Float[Array, "H W I"], kernel: Array, bias: Array) -> Float[Array, "H W O"]:
    """A 3 x 3 convolution of an image reflected at its borders.

    XLA's: with one frozen kernel for all it lacks the troubles that ``backbones.convolution`` is for.
    """
    x = jnp.pad(x, ((1, 1), (1, 1), (0, 0)), mode="reflect")
    return jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "VALID", dimension_numbers=NHWC)[0] + bias


def halved(x: Float[Array, "H W D"]) -> Float[Array, "h w D"]:
    """2 x 2 maximum; of what there is at the end of an odd side."""
    height, width, channels = x.shape
    x = jnp.pad(x, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return x.reshape(math.ceil(height / 2), 2, math.ceil(width / 2), 2, channels).max((1, 3))


def doubled(x: Float[Array, "h w D"]) -> Float[Array, "H W D"]:
    """Every place four times."""
    return x.repeat(2, axis=0).repeat(2, axis=1)
