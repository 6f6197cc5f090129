"""What the text networks share: configurations, stored tokens, the encoder, a classifier on its first token."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.backbones.backbone import Backbone, Inputs, Reads, first_readers, scale_pixels, tapped
from fedjax_dg.backbones.layers import check_dropout
from fedjax_dg.errors import unknown

FAMILIES = ("roberta", "bert", "deberta")
POSITION_TERMS = ("c2p", "p2c")
MASKED = -1e30  # logit of what may not be looked at: finite, so that a row of nothing else has no NaN


# --- configurations -------------------------------------------------------------------------------------------------


class EncoderConfig(NamedTuple):
    """The sizes of an encoder, under the names that ``config.json`` has for them."""

    model_type: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int = 0
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float = 0.1  # before the last dense layer
    pooler_dropout: float = 0.0  # DeBERTa: before the first of the classifier's two
    initializer_range: float = 0.02  # deviation of fresh weights
    position_biased_input: bool = True  # absolute positions are added to the embeddings
    max_relative_positions: int = 0  # DeBERTa: further apart is as far as this
    pos_att_type: tuple[str, ...] = ()  # DeBERTa: which of POSITION_TERMS its attention has

    @property
    def longest(self) -> int | None:
        """The most tokens of an input; None if any number."""
        if not self.position_biased_input:
            return None
        taken = self.pad_token_id + 1 if self.model_type == "roberta" else 0
        return self.max_position_embeddings - taken


REQUIRED = EncoderConfig._fields[1:9]
#: Of what ``config.json`` may say and the networks here cannot do: its name -> the only value that they have.
ONLY = {
    "hidden_act": "gelu",
    "pooler_hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "talking_head": False,
    "relative_attention": True,
}


def read_config(source: str | os.PathLike[str] | Mapping[str, Any], family: str = "roberta") -> EncoderConfig:
    """The configuration in a folder's ``config.json``, in that file, or in a dict of its entries.

    ``family``: what an entry ``model_type`` is taken to say where there is none. DeBERTa's ``pos_att_type`` may be a list or
    ``c2p|p2c``; its ``max_relative_positions`` of -1 is ``max_position_embeddings``.
    Raises ``ValueError`` for a file that is missing or no JSON, for another ``model_type``, and for entries that are missing
    or say what no network here has.
    """
    if isinstance(source, Mapping):
        given, where = dict(source), "The configuration"
    else:
        given, where = _read_json(Path(source))
    kind = given.get("model_type", family)
    if kind in ("deberta-v2", "deberta-v3"):
        raise ValueError(
            f"{where} is of model_type {kind}, which is DeBERTa v2 or v3: other attention, embeddings and tokens than v1, "
            "the only one here: give a folder of v1, such as microsoft/deberta-base."
        )
    if kind not in FAMILIES:
        raise unknown("model_type", str(kind), FAMILIES)
    if missing := [name for name in REQUIRED if name not in given]:
        raise ValueError(f"{where} lacks {', '.join(missing)}: give the config.json of a published encoder, whole.")
    for name, value in ONLY.items():
        if given.get(name, value) != value:
            raise ValueError(f"{where} has {name}={given[name]!r}, but the encoders here only have {value!r}.")
    if given.get("embedding_size", given["hidden_size"]) != given["hidden_size"]:
        raise ValueError(
            f"{where} has embedding_size={given['embedding_size']}, but here it is always hidden_size="
            f"{given['hidden_size']}."
        )
    config = EncoderConfig(kind, **{name: given[name] for name in REQUIRED})
    dropout = given.get("hidden_dropout_prob", config.hidden_dropout_prob)
    own = {
        "pad_token_id": 1 if kind == "roberta" else 0,
        "classifier_dropout": given.get("cls_dropout") if kind == "deberta" else given.get("classifier_dropout"),
    }
    own["classifier_dropout"] = dropout if own["classifier_dropout"] is None else own["classifier_dropout"]
    for name in ("pad_token_id", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"):
        if given.get(name) is not None:
            own[name] = given[name]
    if kind == "deberta":
        span, terms = given.get("max_relative_positions", -1), given.get("pos_att_type") or ()
        own["pooler_dropout"] = given.get("pooler_dropout", 0.0)
        own["position_biased_input"] = given.get("position_biased_input", True)
        own["max_relative_positions"] = span if span > 0 else config.max_position_embeddings
        own["pos_att_type"] = tuple(terms.split("|") if isinstance(terms, str) else terms)
    return check_config(config._replace(**own))


def _read_json(path: Path) -> tuple[dict, str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"The encoder's configuration {file} cannot be read ({error.strerror}): give a folder with config.json, or that "
            "file."
        ) from None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"The encoder's configuration {file} is no JSON object: give the config.json of an encoder.")
    return given, f"Configuration {file}"


def check_config(config: EncoderConfig) -> EncoderConfig:
    """The same; ``ValueError`` for sizes that no encoder has."""
    if config.model_type not in FAMILIES:
        raise unknown("model_type", config.model_type, FAMILIES)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a positive whole number: give 1 or more.")
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} does not divide among num_attention_heads={config.num_attention_heads}: give "
            "a multiple."
        )
    for term in config.pos_att_type:
        if term not in POSITION_TERMS:
            raise unknown("pos_att_type", term, POSITION_TERMS)
    for name in (name for name in EncoderConfig._fields if "dropout" in name):
        check_dropout(getattr(config, name))
    return config


# --- tokens ---------------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """A backbone's ``transform``: stored tokens to (token ids [B, L], which of them are there [B, L])."""

    pad_token_id: int

    def __call__(self, inputs: Inputs) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
        """Of an array of ids with -1 where there is no token; or of (input_ids, attention_mask) as tokenizers give them."""
        if isinstance(inputs, tuple):
            ids, there = (jnp.asarray(x) for x in inputs)
        else:
            ids = jnp.asarray(inputs)
            there = ids >= 0
        ids = ids.astype(jnp.int32)
        return jnp.where(ids < 0, self.pad_token_id, ids), there.astype(bool)


def store_tokens(input_ids: ArrayLike, attention_mask: ArrayLike) -> Int[np.ndarray, "B L"]:
    """What a data set stores of a tokenizer's answer: int32 ids, -1 where the mask is 0."""
    return np.where(np.asarray(attention_mask) != 0, np.asarray(input_ids), -1).astype(np.int32)


# --- layers ---------------------------------------------------------------------------------------------------------


class Projection(nn.Module):
    """x W + b, named and initialised as ``nn.Dense``; not seen by RegMean, since it reads parameters and no examples."""

    features: int
    bias: bool
    deviation: float

    @nn.compact
    def __call__(self, x: Float[Array, "R d"]) -> Float[Array, "R o"]:
        shape = (x.shape[-1], self.features)
        y = x @ self.param("kernel", nn.initializers.normal(self.deviation), shape)
        return y + self.param("bias", nn.initializers.zeros_init(), (self.features,)) if self.bias else y


class Embeddings(nn.Module):
    """A token's vector plus, where the configuration has them, those of its position and of type 0; a norm, dropout."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"], there: Bool[Array, "B L"], train: bool) -> Float[Array, "B L d"]:
        c = self.config
        if c.longest is not None and ids.shape[1] > c.longest:
            raise ValueError(
                f"Inputs of {ids.shape[1]} tokens are given, but this encoder has positions for {c.longest}: cut them off."
            )
        table = lambda rows, name: nn.Embed(
            rows, c.hidden_size, embedding_init=nn.initializers.normal(c.initializer_range), name=name
        )
        x = table(c.vocab_size, "word")(ids)
        if c.type_vocab_size:
            x = x + table(c.type_vocab_size, "token_type")(jnp.zeros_like(ids))
        if c.position_biased_input:
            x = x + table(c.max_position_embeddings, "position")(positions_of(ids, c))
        x = norm(c, "norm")(x)
        if c.model_type == "deberta":
            x = jnp.where(there[..., None], x, 0.0)
        return nn.Dropout(c.hidden_dropout_prob)(x, deterministic=not train)


def positions_of(ids: Int[Array, "B L"], config: EncoderConfig) -> Int[Array, "*B L"]:
    """0, 1, ...; RoBERTa's count from the row after its pad token's, which all pad tokens have, and skip these."""
    if config.model_type != "roberta":
        return jnp.arange(ids.shape[1])
    real = (ids != config.pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=1) * real + config.pad_token_id


def dense(config: EncoderConfig, features: int, name: str, bias: bool = True) -> nn.Dense:
    fresh = nn.initializers.normal(config.initializer_range)
    return nn.Dense(features, use_bias=bias, kernel_init=fresh, dot_general=of_rows, name=name)


def of_rows(
    x: Float[Array, "*r d"], kernel: Float[Array, "d o"], dimensions: Any, **options: Any
) -> Float[Array, "*r o"]:
    """``nn.Dense``'s product, of all rows as one matrix: with more axes of rows, XLA copies gradients for the kernel's."""
    y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
    return y.reshape(*x.shape[:-1], -1)


def norm(config: EncoderConfig, name: str) -> nn.LayerNorm:
    # the fast variance, a difference of squares, loses digits
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, name=name)


def gelu(x: Array) -> Array:
    """x Phi(x), by the error function."""
    return 0.5 * x * (1.0 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))  # nn.gelu takes erfc, which is slower on CPU


def attend(
    logits: Float[Array, "B H L L"], allowed: Bool[Array, "B 1 M L"], values: Float[Array, "B L H e"], drop: Callable
) -> Float[Array, "B L H e"]:
    """drop(softmax of the logits of what each token may look at, or of all where that is nothing) values, in float32.

    Divided by the softmax's sum at last, where there is less to divide, and to keep for the gradient.
    """
    logits = logits.astype(jnp.float32) + jnp.where(allowed, 0.0, MASKED)  # a sum's gradient needs no mask
    shares = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = jnp.moveaxis(shares.sum(-1), 1, 2)[..., None]  # [B, L, H, 1], 1 or more
    return (jnp.einsum("bhij,bjhd->bihd", drop(shares.astype(values.dtype)), values) / total).astype(values.dtype)


class Layer(nn.Module):
    """h = norm(x + attention(x)); norm(h + MLP(h)), the MLP with GELU. The family decides the attention."""

    config: EncoderConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B L d"], there: Bool[Array, "B L"], relative: Float[Array, "R d"] | None, train: bool
    ) -> Float[Array, "B L d"]:
        c = self.config
        drop = nn.Dropout(c.hidden_dropout_prob)
        if relative is None:
            logits, values = self.scores(x)
            allowed = there[:, None, None, :]
        else:
            logits, values = self.disentangled_scores(x, relative, train)
            allowed = there[:, None, :, None] & there[:, None, None, :]
        drop_shares = functools.partial(nn.Dropout(c.attention_probs_dropout_prob), deterministic=not train)
        attended = attend(logits, allowed, values, drop_shares).reshape(x.shape)
        attended = drop(dense(c, c.hidden_size, "attention_output")(attended), deterministic=not train)
        h = norm(c, "attention_norm")(x + attended)
        y = dense(c, c.hidden_size, "output")(gelu(dense(c, c.intermediate_size, "intermediate")(h)))
        return norm(c, "output_norm")(h + drop(y, deterministic=not train))

    def scores(self, x: Float[Array, "B L d"]) -> tuple[Float[Array, "B H L L"], Float[Array, "B L H e"]]:
        """q k / sqrt(e), e the width of a head, and the values."""
        c = self.config
        query, key, value = (
            dense(c, c.hidden_size, name)(x).reshape(*x.shape[:2], c.num_attention_heads, -1)
            for name in ("query", "key", "value")
        )
        return jnp.einsum("bihd,bjhd->bhij", query / math.sqrt(query.shape[-1]), key), value

    def disentangled_scores(
        self, x: Float[Array, "B L d"], relative: Float[Array, "R d"], train: bool
    ) -> tuple[Float[Array, "B H L L"], Float[Array, "B L H e"]]:
        """DeBERTa's [q_i k_j + q_i K(i - j) + k_j Q(i - j)] / sqrt(e (1 + number of position terms)), and the values.

        K and Q are projections of the ``relative`` table, whose row r is a distance of r - max_relative_positions.
        ``in_proj`` holds a query, a key and a value block for each head in turn; keys have no bias.
        """
        c = self.config
        length, heads = x.shape[1], c.num_attention_heads
        scale = 1.0 / math.sqrt(c.hidden_size // heads * (1 + len(c.pos_att_type)))
        mixed = dense(c, 3 * c.hidden_size, "in_proj", bias=False)(x)
        query, key, value = jnp.moveaxis(mixed.reshape(*x.shape[:2], heads, 3, -1), 3, 0)
        bias = lambda name: self.param(name, nn.initializers.zeros_init(), (c.hidden_size,)).reshape(heads, -1)
        query, value = scale * (query + bias("q_bias")), value + bias("v_bias")
        logits = jnp.einsum("bihd,bjhd->bhij", query, key)
        if not c.pos_att_type:
            return logits, value

        # of the table only the rows of distances 1 - L .. L - 1 that occur
        rows = np.clip(np.arange(1 - length, length) + c.max_relative_positions, 0, len(relative) - 1)
        near = nn.Dropout(c.hidden_dropout_prob)(relative[rows], deterministic=not train)
        project = lambda name, bias: Projection(c.hidden_size, bias, c.initializer_range, name=name)(near).reshape(
            2 * length - 1, heads, -1
        )
        if "c2p" in c.pos_att_type:
            to_position = jnp.einsum("bihd,rhd->bhir", query, project("pos_proj", False)[::-1])
            logits = logits + by_distance(to_position)  # i - j falls with j
        if "p2c" in c.pos_att_type:
            from_position = jnp.einsum("bjhd,rhd->bhjr", key, scale * project("pos_q_proj", True))
            logits = logits + by_distance(from_position).swapaxes(2, 3)  # and rises with i
        return logits, value


def by_distance(x: Float[Array, "B H L R"]) -> Float[Array, "B H L L"]:
    """y[a, b] = x[a, L - 1 - a + b], R = 2 L - 1: what belongs to each pair, by slices, whose gradient is no scatter."""
    length = x.shape[2]
    flat = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*x.shape[:2], 2 * length * length)
    rows = flat[..., length - 1 : 2 * length * length - 1].reshape(*x.shape[:2], length, 2 * length - 1)
    return rows[..., :length]


class Encoder(nn.Module):
    """Embeddings and layers; ``remat`` computes what is inside a layer anew in the backward pass instead of keeping it."""

    config: EncoderConfig
    remat: bool

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"], there: Bool[Array, "B L"], train: bool) -> Float[Array, "B L d"]:
        c = self.config
        x = Embeddings(c, name="embeddings")(ids, there, train)
        relative = None
        if c.model_type == "deberta":
            fresh = nn.initializers.normal(c.initializer_range)
            rows = 2 * c.max_relative_positions
            relative = nn.Embed(rows, c.hidden_size, embedding_init=fresh, name="rel_embeddings").embedding
        for i in range(c.num_hidden_layers):
            layer = Layer(c, name=f"layer_{i}")
            x = recomputed(layer, x, there, relative, train) if self.remat else layer(x, there, relative, train)
        return x


def recomputed(layer: nn.Module, x: Array, there: Array, relative: Array | None, train: bool) -> Array:
    """``layer(...)`` as one checkpointed step; what its dense layers read is handed out of it, for ``tapped``."""
    firsts: dict[str, str] = {}

    def run(layer, x, there, relative):
        with tapped() as seen:
            y = layer(x, there, relative, train)
        firsts.update(first_readers(seen))
        return y, {name: seen[name] for name in dict.fromkeys(firsts.values())}

    y, seen = nn.remat(run)(layer, x, there, relative)
    Reads()({name: seen[first] for name, first in firsts.items()})
    return y


class TextClassifier(nn.Module):
    """An encoder, a dense layer on its first token (``dense``) and a linear head, as the families' authors have them.

    z, what the head reads, is: RoBERTa drop(tanh(dense(drop(h)))), BERT drop(tanh(dense(h))), its pooler, and DeBERTa
    drop(gelu(dense(drop'(h)))), with drop' of ``pooler_dropout``. Inputs may also be the first tokens h [B, d] themselves.
    """

    config: EncoderConfig
    num_classes: int
    freeze_encoder: bool
    remat: bool

    def setup(self):
        c = self.config
        fresh = nn.initializers.normal(c.initializer_range)
        self.encoder = Encoder(c, self.remat)
        self.dense = nn.Dense(c.hidden_size, kernel_init=fresh)
        self.drop, self.drop_first = nn.Dropout(c.classifier_dropout), nn.Dropout(c.pooler_dropout)
        self.head = nn.Dense(self.num_classes, kernel_init=fresh)

    def hidden_states(self, x, train: bool = False) -> Float[Array, "B L d"]:
        ids, there = x
        hidden = self.encoder(ids, there, train and not self.freeze_encoder)
        return jax.lax.stop_gradient(hidden) if self.freeze_encoder else hidden

    def pool(self, first: Float[Array, "B d"], train: bool) -> Float[Array, "B D"]:
        family = self.config.model_type
        if family == "roberta":
            first = self.drop(first, deterministic=not train)
        if family == "deberta":
            first = self.drop_first(first, deterministic=not train)
        activation = gelu if family == "deberta" else jnp.tanh
        return self.drop(activation(self.dense(first)), deterministic=not train)

    def features(self, x, train: bool, mask=None) -> Float[Array, "B D"]:
        return self.pool(self.hidden_states(x, train)[:, 0] if isinstance(x, tuple) else x, train)

    def classify(self, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        return self.head(z)

    def top(self, first: Float[Array, "B D"]) -> Float[Array, "B K"]:
        """All that a published encoder may come without."""
        return self.classify(self.pool(first, train=False))

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


# --- backbones ------------------------------------------------------------------------------------------------------


def text_backbone(
    net: str,
    families: Sequence[str],
    config: EncoderConfig | str | os.PathLike[str] | Mapping[str, Any],
    num_classes: int,
    max_length: int,
    dropout: float | None,
    freeze_encoder: bool,
    remat: bool,
) -> Backbone:
    """What the factories of the ``families`` build; ``net`` is their name, for errors."""
    found = check_config(config) if isinstance(config, EncoderConfig) else read_config(config, families[0])
    if found.model_type not in families:
        raise ValueError(
            f"{net} builds encoders of model_type {' or '.join(families)}, but the configuration says {found.model_type}: "
            f"use {'deberta' if found.model_type == 'deberta' else 'roberta'}."
        )
    if dropout is not None:
        check_dropout(dropout)
        found = found._replace(**{name: dropout for name in EncoderConfig._fields if "dropout" in name})
    if max_length < 1 or (found.longest is not None and max_length > found.longest):
        most = "1 or more" if found.longest is None else f"1 to {found.longest}"
        raise ValueError(f"max_length={max_length} is no length that this encoder takes: give {most}.")
    return Backbone(
        module=TextClassifier(found, num_classes, freeze_encoder, remat),
        input_shape=(max_length,),
        num_features=found.hidden_size,
        num_classes=num_classes,
        transform=Tokens(found.pad_token_id),
        weight_names=weight_names(found),
        ignored_weights=ignored_weights(found),
        drawn=("dense", "head"),
        frozen=("encoder",) if freeze_encoder else (),
        regmean_scope="head",
        vocab_size=found.vocab_size,
    )


def on_encoded(backbone: Backbone) -> Backbone:
    """The classifier of a text network alone, for inputs [B, d] that its encoder has made of texts (``encoding.encode``).

    With ``freeze_encoder`` this is the same training as on texts, at a small part of its cost; only the classifier's
    parameters are there, so only they travel.
    """
    shape = (backbone.num_features,)
    return dataclasses.replace(backbone, input_shape=shape, transform=scale_pixels, frozen=(), vocab_size=None)


#: Where the hub's files have the two layers on top of the encoder.
TOPS = {
    "roberta": {"dense": ("classifier.dense",), "head": ("classifier.out_proj",)},
    "bert": {"dense": ("bert.pooler.dense", "pooler.dense"), "head": ("classifier",)},
    "deberta": {"dense": ("pooler.dense",), "head": ("classifier",)},
}
#: Heads of the tasks that encoders are published with, none of which is ours, and buffers; prefixes of names.
IGNORED = {
    "roberta": ("lm_head.", "pooler.", "embeddings.position_ids"),
    "bert": ("cls.", "embeddings.position_ids"),
    "deberta": ("cls.", "lm_head.", "lm_predictions.", "mask_predictions.", "embeddings.position_ids"),
}


def weight_names(config: EncoderConfig) -> dict[str, tuple[str, ...]]:
    """The hub's names of every layer: of a model with a task, whose encoder has the family's name before it, or without."""
    layer_parts = {
        "attention_output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "intermediate": "intermediate.dense",
        "output": "output.dense",
        "output_norm": "output.LayerNorm",
    }
    attention = ("query", "key", "value")
    if config.model_type == "deberta":
        attention = ("in_proj", "pos_proj", "pos_q_proj")
        layer_parts[""] = "attention.self"  # q_bias and v_bias
    layer_parts |= {name: f"attention.self.{name}" for name in attention}
    names = {
        "encoder/embeddings/word": "embeddings.word_embeddings",
        "encoder/embeddings/token_type": "embeddings.token_type_embeddings",
        "encoder/embeddings/position": "embeddings.position_embeddings",
        "encoder/embeddings/norm": "embeddings.LayerNorm",
        "encoder/rel_embeddings": "encoder.rel_embeddings",
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in layer_parts.items():
            names[f"encoder/layer_{i}/{ours}".rstrip("/")] = f"encoder.layer.{i}.{theirs}"
    both = {ours: (f"{config.model_type}.{theirs}", theirs) for ours, theirs in names.items()}
    return both | TOPS[config.model_type]


def ignored_weights(config: EncoderConfig) -> tuple[str, ...]:
    """Prefixes of names that a file may hold and this network does not: an explicit list, so that nothing else is lost."""
    parts = IGNORED[config.model_type]
    if not config.position_biased_input:
        parts += ("embeddings.position_embeddings.",)
    return (*parts, *(f"{config.model_type}.{part}" for part in parts))
