"""ELCFS, episodic learning in continuous frequency space (Liu et al., CVPR 2021)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg import sharding
from fedjax_dg.algorithms.common import classify, momentum
from fedjax_dg.errors import unknown
from fedjax_dg.local import map_clients, take_batch
from fedjax_dg.types import Algorithm, Before, Disclosure, Examples, Start, Variables

MIXINGS = ("uniform", "full")
ONE_IN = 8  # a client shares one in so many of its images
ROUNDING = 1e-6  # an amplitude of less than this times H W is float32's rounding, and its phase means nothing


class ELCFSHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    meta_lr: ArrayLike = 1e-3  # beta, step size from w to w'
    clip: ArrayLike = 100.0  # c, largest entry of the gradient of that step


class Bank(NamedTuple):
    """Low-frequency amplitudes of some images of every client, and what did not fit."""

    amplitudes: Float[Array, "n h w C"]
    owner: Int[Array, " n"]  # the id of the client whose image it was
    valid: Bool[Array, " n"]
    dropped: Int[Array, ""]  # images that clients would have shared, had the bank been larger


def elcfs(
    hparams: ELCFSHparams = ELCFSHparams(),
    optimizer: Callable = momentum,
    window: float = 0.0,
    mixing: str = "uniform",
    bank: int = 512,
    own: bool = False,
) -> Algorithm:
    """Train so that a step on an image also helps on the same image with another client's amplitudes.

    Every image x of a batch gets x_t = Re F^-1(A_t e^{iP}), where F(x) = A e^{iP} is its Fourier transform over the pixels
    of a channel. A_t = (1 - t) A + t A_j in the lowest frequencies, |f| <= b in both directions with b = floor(L min(H, W))
    at most half the image, and A elsewhere; A_j is drawn from the bank for each image; t ~ U(0, 1) (``mixing="uniform"``,
    the paper), or t = 1 (``full``, the authors' code). ``window`` is L. Where L < 1 / min(H, W), as in all released
    settings up to 222 pixels, b = 0: only the channels' means, x_t = x + t (mean x_j - mean x).
    With w' = w - beta clip(grad l(w; x), -c, c), a step descends l(w; x) + l(w'; x_t), to first order: the gradient of the
    second loss is taken at w' and moves w. Batch statistics are those of the first pass. Computes two passes a step.

    The exchange sees pixels before the backbone scales them: uint8 images as [0, 1], clipped and rounded back to uint8;
    others as they are. A frequency of no amplitude (below ``ROUNDING``) has no phase and stays.

    Before round 1 each client uploads the amplitudes of ceil(n / 8) of its n images, drawn once: (2b + 1)^2 floats a
    channel and image. They go into the ``bank`` of so many places: everyone's first image, then everyone's second, ...;
    ``Bank.dropped`` counts what did not fit. EVERY CLIENT RECEIVES IT, with the ids of its owners: with a wide window,
    amplitudes tell much of an image. A client draws from those of other clients, from all with ``own``, or where there are
    no others; from an empty bank, x_t = x. Shared: ``Bank``. Client state: its id. Upload in a round: the model.

    Raises ``ValueError`` for another mixing, and for inputs that are not images [H, W, C].

    Deviations: the paper's clients upload all H W frequencies, of which only the window's are ever read; its contour loss
    is for segmentation; 1/8 rounds up. In CCST's code, a port to
    classification, the second loss never reaches w.
    Source: Liu, Chen, Qin, Dou, Heng, CVPR 2021, https://arxiv.org/abs/2103.06030 (code: github.com/liuquande/FedDG-ELCFS).
    """
    if mixing not in MIXINGS:
        raise unknown("mixing", mixing, MIXINGS)
    descent = optimizer(hparams.client_lr)

    def adapt(backbone):
        if len(backbone.input_shape) != 3:
            raise ValueError(
                f"elcfs works on images [H, W, C], but the backbone takes inputs of shape {backbone.input_shape}: choose "
                "an image backbone, or another algorithm."
            )
        return backbone

    def init(backbone, variables, key):
        rows, columns = low_frequencies(backbone.input_shape, window)
        empty = Bank(
            jnp.zeros((bank, len(rows), len(columns), backbone.input_shape[-1])),
            owner=jnp.full(bank, -1, jnp.int32),
            valid=jnp.zeros(bank, bool),
            dropped=jnp.zeros((), jnp.int32),
        )
        return Start(variables, client=jnp.int32(-1), shared=empty)

    def prepare(backbone, state, data, key, workshop):
        frequencies = low_frequencies(backbone.input_shape, window)
        collected = jax.jit(
            functools.partial(collect, size=bank, frequencies=frequencies),
            out_shardings=jax.tree.map(lambda x: x.sharding, state.shared),
        )
        examples, ids = data
        return state._replace(shared=collected(examples, ids, key), clients=jnp.array(ids, jnp.int32))

    def begin(backbone, received, client):
        return descent.init(received.variables.params), ()

    def step(backbone, received, local, batch, key):
        params, stats = local.variables
        exchange_key, ahead_key = jax.random.split(jax.random.fold_in(key, 1))
        inputs = shifted(batch.inputs, received.shared, local.client, exchange_key)

        def loss(params, batch, key):
            return classify(backbone, params, local, batch, key)

        of = jax.value_and_grad(loss, has_aux=True)
        (value, forward), gradient = of(params, batch, key)
        largest = jnp.asarray(hparams.clip)
        ahead = jax.tree.map(lambda w, g: w - hparams.meta_lr * jnp.clip(g, -largest, largest), params, gradient)
        (outer, _), outer_gradient = of(ahead, batch._replace(inputs=inputs), ahead_key)
        updates, state = descent.update(optax.tree.add(gradient, outer_gradient), local.optimizer, params)
        variables = Variables(optax.apply_updates(params, updates), forward.batch_stats)
        metrics = {"loss": value + outer, "cross_entropy": value, "outer": outer}
        return local._replace(variables=variables, optimizer=state, seen=forward.dense_inputs), metrics

    def shifted(inputs, bank, client, key):
        pick_key, share_key = jax.random.split(key)
        picked, found = draw(bank, client, own, inputs.shape[0], pick_key)
        share = jax.random.uniform(share_key, inputs.shape[:1]) if mixing == "uniform" else jnp.ones(inputs.shape[0])
        frequencies = low_frequencies(inputs.shape[1:], window)
        pixels = exchange(scaled(inputs), bank.amplitudes[picked], jnp.where(found, share, 0.0), frequencies)
        if inputs.dtype != jnp.uint8:
            return pixels
        return jnp.round(255 * jnp.clip(pixels, 0, 1)).astype(jnp.uint8)

    def before(backbone):
        rows, columns = low_frequencies(backbone.input_shape, window)
        spectrum = (len(rows), len(columns), backbone.input_shape[-1])
        kept = jax.eval_shape(lambda: jnp.zeros((bank, *spectrum)))
        return Before(
            up={"amplitudes of an image": jax.eval_shape(lambda: jnp.zeros(spectrum))}, down={"amplitude bank": kept}
        )

    what = f"amplitudes of one in {ONE_IN} images at the lowest frequencies, with the owner's id"
    told = Disclosure(what, "all clients", "once")
    hooks = {"adapt": adapt, "init": init, "prepare": prepare, "resident": True, "begin": begin}
    return Algorithm(step=step, before=before, discloses=(told,), **hooks)


# --- amplitudes -----------------------------------------------------------------------------------------------------


def low_frequencies(shape: tuple[int, ...], window: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of an image's transform with frequencies of at most b = floor(L min(H, W)), or half the image."""
    shorter = min(shape[:2])
    b = min(math.floor(window * shorter + 1e-9), shorter // 2)
    height, width = (np.unique(np.arange(-b, b + 1) % size) for size in shape[:2])
    return height, width


def scaled(inputs: Array) -> Float[Array, "*B H W C"]:
    """uint8 pixels in [0, 1]; others as they are."""
    return inputs.astype(jnp.float32) / 255 if inputs.dtype == jnp.uint8 else inputs


def amplitudes_of(
    images: Float[Array, "B H W C"], frequencies: tuple[np.ndarray, np.ndarray]
) -> Float[Array, "B h w C"]:
    """|F(x)| at these rows and columns."""
    return jnp.abs(jnp.fft.fft2(images, axes=(1, 2))[:, frequencies[0][:, None], frequencies[1]])


def exchange(
    images: Float[Array, "B H W C"],
    amplitudes: Float[Array, "B h w C"],
    share: Float[Array, " B"],
    frequencies: tuple[np.ndarray, np.ndarray],
) -> Float[Array, "B H W C"]:
    """Images with (1 - t) of their own and t of the given amplitudes at these rows and columns; phases stay."""
    window = (slice(None), frequencies[0][:, None], frequencies[1])
    spectrum = jnp.fft.fft2(images, axes=(1, 2))
    low, t = spectrum[window], share[:, None, None, None]
    before = jnp.abs(low)
    after = (1 - t) * before + t * amplitudes
    phased = before > ROUNDING * images.shape[1] * images.shape[2]
    low = low * jnp.where(phased, after / jnp.where(phased, before, 1.0), 1.0)
    return jnp.fft.ifft2(spectrum.at[window].set(low), axes=(1, 2)).real


def draw(
    bank: Bank, client: Int[Array, ""], own: bool, number: int, key: Array
) -> tuple[Int[Array, " B"], Bool[Array, ""]]:
    """So many places of the bank for a client, uniformly; and whether there is anything at all to draw."""
    others = bank.valid & (bank.owner != client)
    allowed = bank.valid if own else jnp.where(others.any(), others, bank.valid)
    return jax.random.categorical(key, jnp.where(allowed, 0.0, -jnp.inf), shape=(number,)), allowed.any()


def collect(
    examples: Examples, ids: Int[Array, "S C"], key: Array, size: int, frequencies: tuple[np.ndarray, np.ndarray]
) -> Bank:
    """The bank of ``size`` places: one in ``ONE_IN`` images of every client, in the order of (its turn, its owner's id)."""
    most = min(-(-examples.mask.shape[-1] // ONE_IN), size)

    def one(key, station, client):
        examples, i = client
        draws = jax.random.uniform(jax.random.fold_in(key, i), examples.mask.shape)
        picked = jnp.argsort(jnp.where(examples.mask, draws, jnp.inf))[:most]
        offered = -(-examples.mask.sum() // ONE_IN)
        here = jnp.arange(most) < offered
        images = scaled(take_batch(examples, picked, here).inputs)
        return amplitudes_of(images, frequencies), jnp.broadcast_to(i, most), here, offered

    found = map_clients(one, key, (), (examples, ids))
    *found, offered = sharding.whole(found, sharding.AXES)
    amplitudes, owner, valid = (x.reshape(-1, *x.shape[3:]) for x in found)  # [S, C, most, ...] as rows
    turn = jnp.tile(jnp.arange(most), ids.size)
    order = jnp.lexsort((owner, turn, ~valid))[:size]
    kept = Bank(amplitudes[order], owner[order].astype(jnp.int32), valid[order], offered.sum() - valid[order].sum())
    pad = lambda x: jnp.pad(x, [(0, size - len(order)), *[(0, 0)] * (x.ndim - 1)])
    return kept._replace(amplitudes=pad(kept.amplitudes), owner=pad(kept.owner), valid=pad(kept.valid))
