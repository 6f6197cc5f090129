"""Backbone: a Flax Linen network and what federated domain generalization must know about it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg.alignment.groups import Group
from fedjax_dg.backbones.convolution import larger, pool, quarters_of
from fedjax_dg.errors import unknown
from fedjax_dg.types import Key, Variables

#: Stored inputs [B, ...], or what ``transform`` made of them: of tokens (input_ids, attention_mask), each [B, L].
Inputs = Array | tuple[ArrayLike, ArrayLike]


class Forward(NamedTuple):
    """A training-mode pass: features z, logits, the batch statistics it leaves behind, what each ``nn.Dense`` read."""

    z: Float[Array, "B D"]
    logits: Float[Array, "B K"]
    batch_stats: dict
    dense_inputs: dict[str, Float[Array, "B *t d"]]  # by layer; costs nothing where no one asks for it


def scale_pixels(inputs: Array) -> Array:
    """uint8 pixels to float32 in [-1, 1]; anything else (normalised images, token ids) passes unchanged."""
    inputs = jnp.asarray(inputs)  # of NumPy, layers outside jit could not lay out anew
    return inputs.astype(jnp.float32) / 127.5 - 1.0 if inputs.dtype == jnp.uint8 else inputs


@dataclass(frozen=True)
class Backbone:
    """A network split into features and head (penalties act on z), with the symmetries that merging needs.

    ``module`` is a Linen module with methods ``features(x, train, mask) -> z [B, D]`` (``mask`` [B] marks real rows, for
    layers that look across a batch) and ``classify(z) -> logits [B, K]``, whose parameters are ``params["head"]``; where the
    head looks across a batch too, ``classify_training(z, mask)`` for ``forward``.
    Image networks also have the two halves of ``features``: ``maps(x, train, mask) -> [B, H, W, C]``, their last feature
    map, and ``reduce(maps, train) -> z``; where their stages end (``layers.Stage``) a method may add rows to the batch.
    ``groups`` are its permutation symmetries (see ``alignment``).
    Text networks have ``hidden_states(x, train) -> [B, L, D]``.
    ``transform`` turns stored inputs into network inputs, so uint8 images may be passed everywhere, and token ids with -1
    where there is no token; it leaves network inputs as they are.
    ``dtype`` is what layers compute in (``in_precision``); parameters, statistics, features and logits stay float32.
    ``weight_names`` says under which names published checkpoints hold a layer: path below ``params`` -> PyTorch names.
    ``ignored_weights`` are prefixes of further names in such files, for layers that this network does not have; ``drawn``
    are the layers they may lack, which are then drawn anew (the head among them; ``top(z)`` of the module makes them all).
    ``starts`` says what a leaf starts as where given weights lack it: a copy of another leaf, by name, or a number.
    ``frozen`` are the first names of parameters that no loss reaches: merging measures nothing of them.
    ``regmean_scope``: which dense layers RegMean merges if it is not told: ``all_dense``, or those of the ``head``.
    ``vocab_size``: of text, ids of tokens are below it.
    """

    module: Any
    input_shape: tuple[int, ...]
    num_features: int
    num_classes: int
    groups: tuple[Group, ...] = ()
    transform: Callable[[Any], Any] = scale_pixels
    weight_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    starts: Mapping[str, str | float] = field(default_factory=dict, compare=False)
    ignored_weights: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ("head",)
    frozen: tuple[str, ...] = ()
    regmean_scope: str = "all_dense"
    vocab_size: int | None = None
    dtype: Any = jnp.float32

    def init(self, key: Key, inputs: Inputs | None = None) -> Variables:
        """Fresh Variables. ``inputs`` [B, *shape] is only looked at for its shape; by default ``input_shape`` is used."""
        example = jnp.zeros((1, *self.input_shape)) if inputs is None else inputs
        variables = self.module.init(key, self.transform(example), train=False)
        return Variables(variables["params"], variables.get("batch_stats", {}))

    def complete(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Given weights by leaf (``alignment.groups.leaves_of``), and what ``starts`` says of those that they lack."""
        made = dict(leaves)
        for leaf, start in self.starts.items():
            if leaf in leaves:
                continue
            if not isinstance(start, str):
                made[leaf] = np.float32(start)
            elif start in leaves:
                made[leaf] = leaves[start]
        return made

    def apply(self, variables: Variables, inputs: Inputs) -> Float[Array, "B K"]:
        """Logits in evaluation mode."""
        return self._run(variables, self.transform(inputs), train=False)

    def features(self, variables: Variables, inputs: Inputs) -> Float[Array, "B D"]:
        """Features z in evaluation mode."""
        return self._run(variables, self.transform(inputs), train=False, method="features")

    def hidden_states(
        self, variables: Variables, input_ids: ArrayLike, attention_mask: ArrayLike | None = None
    ) -> Float[Array, "B L D"]:
        """A text network's last layer in evaluation mode; without ``attention_mask`` the ids are stored ones, -1 = none."""
        if not hasattr(self.module, "hidden_states"):
            raise ValueError(
                "hidden_states is for text, but this backbone is not: use features, or one such as roberta."
            )
        x = self.transform(jnp.asarray(input_ids) if attention_mask is None else (input_ids, attention_mask))
        return self._run(variables, x, method="hidden_states")

    def head(self, variables: Variables, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        """Logits of given features."""
        return self._run(variables, z, method="classify")

    def forward(self, variables: Variables, inputs: Inputs, mask: Bool[Array, " B"], key: Key) -> Forward:
        """A training-mode pass; ``mask`` marks the real rows."""

        def both(module, x):
            z = module.features(x, train=True, mask=mask)
            return z, module.classify_training(z, mask) if hasattr(module, "classify_training") else module.classify(z)

        options = {"method": both, "mutable": ["batch_stats"], "rngs": {"dropout": key}}
        with tapped(self.frozen) as seen:
            (z, logits), changed = self._run(variables, self.transform(inputs), **options)
        return Forward(z, logits, dict(changed).get("batch_stats", variables.batch_stats), seen)

    def maps(self, variables: Variables, inputs: Array, mask: Bool[Array, " B"], key: Key) -> tuple[Array, dict]:
        """The first half of ``forward``: the last feature map [B, H, W, C], and the batch statistics it leaves behind."""
        options = {"method": "maps", "mask": mask, "mutable": ["batch_stats"], "rngs": {"dropout": key}}
        maps, changed = self._run(variables, self.transform(inputs), train=True, **options)
        return maps, dict(changed).get("batch_stats", variables.batch_stats)

    def from_maps(self, variables: Variables, maps: Float[Array, "B H W C"], key: Key) -> Forward:
        """The second half of ``forward``, from a feature map; batch statistics as in ``variables``."""

        def both(module, maps):
            z = module.reduce(maps, train=True)
            return z, module.classify(z)

        with tapped(self.frozen) as seen:
            z, logits = self._run(variables, maps, method=both, rngs={"dropout": key})
        return Forward(z, logits, variables.batch_stats, seen)

    def _run(self, variables: Variables, x: Inputs, **options):
        """The module in its precision: parameters and input cast to it on the way in, what comes out to float32."""
        cast = lambda tree, dtype: jax.tree.map(
            lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
        )
        if self.dtype == jnp.float32:
            return self.module.apply(variables._asdict(), x, **options)
        params = cast(variables.params, self.dtype)
        out = self.module.apply(
            {"params": params, "batch_stats": variables.batch_stats}, cast(x, self.dtype), **options
        )
        return cast(out, jnp.float32)

    def dense_inputs(self, variables: Variables, inputs: Inputs) -> dict[str, Float[Array, "B *t d"]]:
        """What each ``nn.Dense`` that is not ``frozen`` reads in an evaluation-mode pass, by layer name, rows = examples."""
        with tapped(self.frozen) as seen:
            self.apply(variables, inputs)
        return seen

    def real_rows(self, inputs: Inputs, mask: Bool[Array, " B"]) -> Bool[Array, "B *t"]:
        """Which rows of what the dense layers read are real, if ``mask`` says which examples are: of text, the tokens."""
        x = self.transform(inputs)
        return mask[:, None] & x[1] if isinstance(x, tuple) else mask

    def dense_layers(self, variables: Variables) -> dict[str, str]:
        """Every ``nn.Dense``, in order, and the first by name that reads the same input: that one's Gram serves both."""
        found = {}
        example = jax.ShapeDtypeStruct((1, *self.input_shape), jnp.float32)
        jax.eval_shape(lambda v, x: found.update(first_readers(self.dense_inputs(v, x))), variables, example)
        return found


PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def in_precision(backbone: Backbone, precision: str) -> Backbone:
    """The same network computing in ``float32`` or ``bfloat16``, with its parameters and their updates in float32.

    What RegMean reads of a layer is then rounded to bfloat16, but summed and solved in float32. ``ValueError`` for another
    name.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    return dataclasses.replace(backbone, dtype=PRECISIONS[precision])


class Reads(nn.Module):
    """Tells ``tapped`` what layers read in a program of their own (``nn.remat``), which values leave only as its results."""

    def __call__(self, seen: dict[str, Array]) -> dict[str, Array]:
        return seen


@contextlib.contextmanager
def tapped(without: tuple[str, ...] = ()) -> Iterator[dict[str, Array]]:
    """Context: what every ``nn.Dense`` reads while it lasts, by layer name; but for those below the names ``without``."""
    seen = {}

    def tap(next_method, args, kwargs, context):
        if context.method_name == "__call__":
            found = {}
            if isinstance(context.module, nn.Dense):
                found["/".join(context.module.path)] = args[0]
            elif isinstance(context.module, Reads):
                found = args[0]
            seen.update({layer: x for layer, x in found.items() if layer.split("/")[0] not in without})
        return next_method(*args, **kwargs)

    with nn.intercept_methods(tap):
        yield seen


def first_readers(seen: dict[str, Array]) -> dict[str, str]:
    """Layer -> the first layer that read the very same array; first by name, since trees of JAX sort their dicts."""
    firsts: dict[int, str] = {}
    for layer in sorted(seen):
        firsts.setdefault(id(seen[layer]), layer)
    return {layer: firsts[id(x)] for layer, x in seen.items()}


def max_pool(x: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
    """2 x 2 maximum, stride 2, as three elementwise maxima (``nn.max_pool``'s gradient is a slow scatter on CPU)."""
    return pool(quarters_of(x), lambda pooled: pooled, larger)


ACTIVATIONS: dict[str, Callable] = {"relu": jax.nn.relu, "tanh": jnp.tanh}
