"""RoBERTa, BERT and DeBERTa: outputs of transformers' own code, reductions to one another, and what each option promises."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn
from pytorch_files import whole, written
from scipy.special import erf

import fedjax_dg as fdg
from fedjax_dg import local
from fedjax_dg.aggregators.grams import measure_grams, statistics_of
from fedjax_dg.algorithms import fedavg, fedsr, mixup
from fedjax_dg.algorithms.common import cross_entropy
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones import (
    DEBERTA_BASE,
    DEBERTA_TINY,
    ROBERTA_BASE,
    ROBERTA_TINY,
    TEXT_BACKBONES,
    EncoderConfig,
    deberta,
    in_precision,
    lenet5,
    read_config,
    roberta,
    store_tokens,
)
from fedjax_dg.datasets import Domains
from fedjax_dg.estimate import client_bytes
from fedjax_dg.traffic import messages
from fedjax_dg.types import Examples, Received, Topology, Variables

GOLDEN = pathlib.Path(__file__).parent / "golden"
META = json.loads((GOLDEN / "transformers_state_dicts.json").read_text())
FACTORIES = {"roberta": roberta, "bert": roberta, "deberta": deberta}
LENGTH = 6

with np.load(GOLDEN / "transformers_outputs.npz") as arrays:
    OUTPUTS = dict(arrays)
    THERE = OUTPUTS["attention_mask"] != 0

spec = importlib.util.spec_from_file_location("formula_weights", GOLDEN / "formula_weights.py")
assert spec is not None and spec.loader is not None
formula = importlib.util.module_from_spec(spec)
spec.loader.exec_module(formula)

# one layer of width 8: what needs no more
SMALL = {
    "roberta": EncoderConfig("roberta", 20, 8, 1, 2, 12, 12, 1, 1e-5, pad_token_id=1),
    "bert": EncoderConfig("bert", 20, 8, 1, 2, 12, 10, 2, 1e-12),
    "deberta": DEBERTA_TINY._replace(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_relative_positions=10,
    ),
}
every_family = pytest.mark.parametrize("family", SMALL)


def small(family, num_classes=3, **options):
    config = SMALL[family]._replace(**{k: options.pop(k) for k in list(options) if k in EncoderConfig._fields})
    return FACTORIES[family](config, num_classes, max_length=LENGTH, **options)


@functools.cache
def drawn(family):
    """Variables of ``small(family)``, with no bias at 0 and no scale at 1."""
    rng = np.random.default_rng(0)
    shapes = leaves_of(jax.eval_shape(small(family).init, jax.random.key(0)))
    draw = lambda leaf, shape: leaf.endswith("/scale") + 0.3 * rng.normal(size=shape)
    return from_leaves({leaf: jnp.asarray(draw(leaf, x.shape), jnp.float32) for leaf, x in shapes.items()})


def tokens(rows=4, seed=0, shortest=2, length=LENGTH):
    """Stored ids of sentences of some lengths, the first of ``length``."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 20, (rows, length)).astype(np.int32)
    lengths = np.concatenate([[length], rng.integers(shortest, length + 1, rows - 1)])
    ids[np.arange(length) >= lengths[:, None]] = -1
    return jnp.asarray(ids)


@functools.cache
def compiled(backbone, method):
    return jax.jit(getattr(backbone, method))


def hidden(backbone, variables, stored):
    """Of stored tokens, or of ids and mask; compiled once for both."""
    return np.asarray(compiled(backbone, "hidden_states")(variables, *backbone.transform(stored)))


def logits(backbone, variables, stored):
    return np.asarray(compiled(backbone, "apply")(variables, stored))


def near(x, y, atol=1e-5):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol)


def near_trees(one, other, atol=1e-5):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(functools.partial(near, atol=atol), one, other)


def differ(x, y):
    return float(np.abs(np.asarray(x) - np.asarray(y)).max()) > 1e-3


# --- transformers' numbers ------------------------------------------------------------------------------------------


@functools.cache
def state_of(family):
    return {name: formula.parameter(name, tuple(shape)) for name, shape in META["state_dicts"][family].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a folder of the hub: the tiny configuration, and a state dict in one kind of file."""

    def put(family, state, kind="safetensors", **changed):
        path = tmp_path_factory.mktemp("hub")
        (path / "config.json").write_text(json.dumps({**META["configs"][family], "model_type": family, **changed}))
        if kind == "safetensors":
            safetensors.numpy.save_file(state, path / "model.safetensors")
        else:
            tensors = {name: whole(x, "Long" if x.dtype == np.int64 else "Float") for name, x in state.items()}
            (path / "pytorch_model.bin").write_bytes(written(kind, tensors))
        return path

    return put


def load(backbone, path, **options):
    with pytest.warns(UserWarning, match="has no head, so the head for .* classes, with dense before it, is freshly"):
        return fdg.weights.load(backbone, path, **options)


@pytest.fixture(scope="module")
def published(folder):
    """(backbone, variables) from a folder, by family; encoders without a head, as they are published."""

    @functools.cache
    def of(family):
        path = folder(family, state_of(family))
        backbone = FACTORIES[family](path, num_classes=3, max_length=17)
        return backbone, load(backbone, path)

    return of


GOLDENS = pytest.mark.parametrize("family", ["roberta", "deberta"])


@GOLDENS
def test_hidden_states_are_those_of_transformers(family, published):
    backbone, variables = published(family)
    hidden = jax.jit(backbone.hidden_states)(variables, OUTPUTS[f"{family}.input_ids"], OUTPUTS["attention_mask"])
    assert hidden.shape == (3, 17, 48)
    error = np.abs(np.asarray(hidden, np.float64) - OUTPUTS[f"{family}.last_hidden_state"])
    assert error[THERE].max() < 1e-5
    assert error.max() < 1e-5  # and what is never read


@GOLDENS
def test_names_and_shapes_are_those_of_transformers(family):
    backbone = FACTORIES[family]({**META["configs"][family], "model_type": family}, max_length=17)
    ours = {}
    for leaf, x in leaves_of(jax.eval_shape(backbone.init, jax.random.key(0))).items():
        _, *layer, last = leaf.split("/")
        if layer[0] == "encoder":
            last = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(last, last)
            prefixed, plain = backbone.weight_names["/".join(layer)]
            assert prefixed == f"{family}.{plain}"
            transposed = leaf.endswith("/kernel")
            ours[f"{plain}.{last}"] = list(x.shape[::-1] if transposed else x.shape)
    assert ours == META["state_dicts"][family]


def count(variables, *layers):
    return sum(x.size for leaf, x in leaves_of(variables).items() if leaf.split("/")[1] in layers)


def test_the_published_sizes_have_their_numbers_of_parameters():
    shapes = {name: jax.eval_shape(TEXT_BACKBONES[name](7).init, jax.random.key(0)) for name in TEXT_BACKBONES}
    assert count(shapes["roberta_base"], "encoder", "dense") == 124_645_632  # its pooler is as large as dense
    assert count(shapes["deberta_base"], "encoder") == 138_601_728
    assert shapes["roberta_base"].params["head"]["kernel"].shape == (768, 7)
    assert count(shapes["roberta_tiny"], "encoder") < count(shapes["deberta_tiny"], "encoder") < 100_000


# --- one family by another ------------------------------------------------------------------------------------------


def test_bert_is_roberta_with_positions_from_0_and_two_types():
    """The same numbers in RoBERTa's tables, behind the rows that its positions skip."""
    bert, leaves = small("bert", layer_norm_eps=1e-5), dict(leaves_of(drawn("bert")))
    there = jnp.asarray(tokens() >= 0)
    expected = hidden(bert, drawn("bert"), tokens())
    position, types = (f"params/encoder/embeddings/{name}/embedding" for name in ("position", "token_type"))
    leaves[position] = jnp.concatenate([jnp.full((2, 8), 9.0), leaves[position]])
    leaves[types] = leaves[types][:1]
    found = hidden(small("roberta"), from_leaves(leaves), tokens())
    near(np.asarray(found)[there], np.asarray(expected)[there])


def test_distances_beyond_debertas_table_are_its_ends():
    """A short table, and a long one that repeats the short one's ends."""
    leaves = dict(leaves_of(drawn("deberta")))
    rows = leaves["params/encoder/rel_embeddings/embedding"]
    near_only = from_leaves(leaves | {"params/encoder/rel_embeddings/embedding": rows[:6]})
    short = small("deberta", max_relative_positions=3)
    repeated = rows[np.clip(np.arange(20) - 10 + 3, 0, 5)]
    long = from_leaves(leaves | {"params/encoder/rel_embeddings/embedding": repeated})
    x = tokens(length=9)
    found = hidden(short, near_only, x)
    near(found, hidden(small("deberta"), long, x))
    assert differ(found, hidden(small("deberta"), drawn("deberta"), x))


@pytest.mark.parametrize(("term", "other"), [("c2p", "pos_q_proj"), ("p2c", "pos_proj")])
def test_a_position_term_left_out_is_one_of_zeros(term, other):
    """Up to the scale, the root of e (1 + terms): queries, and the distances' own, are larger by the root of 3 / 2."""
    root = np.sqrt(np.float32(1.5))
    leaves = dict(leaves_of(drawn("deberta")))
    in_proj = np.array(leaves["params/encoder/layer_0/in_proj/kernel"])
    by_head = in_proj.reshape(8, 2, 3, 4)
    by_head[:, :, 0] *= root
    changed = {
        "in_proj/kernel": in_proj,
        "q_bias": leaves["params/encoder/layer_0/q_bias"] * root,
        **{f"{other}/{leaf}": 0.0 for leaf in ("kernel", "bias")},
    }
    if term == "p2c":
        changed |= {
            f"pos_q_proj/{x}": leaves[f"params/encoder/layer_0/pos_q_proj/{x}"] * root for x in ("kernel", "bias")
        }
    both = {
        k: jnp.broadcast_to(changed.get(k[len("params/encoder/layer_0/") :], x), x.shape) for k, x in leaves.items()
    }
    one = {k: x for k, x in leaves.items() if f"/{other}/" not in k}
    backbone = small("deberta", pos_att_type=(term,))
    assert jax.tree.structure(jax.eval_shape(backbone.init, jax.random.key(0))) == jax.tree.structure(from_leaves(one))
    near(hidden(backbone, from_leaves(one), tokens()), hidden(small("deberta"), from_leaves(both), tokens()))


# --- tokens and padding ---------------------------------------------------------------------------------------------


@every_family
def test_stored_tokens_are_ids_and_mask(family):
    backbone, stored = small(family), tokens()
    there = np.asarray(stored) >= 0
    ids = np.where(there, stored, backbone.transform.pad_token_id)
    given = jnp.asarray(ids), jnp.asarray(there, jnp.int32)
    np.testing.assert_array_equal(store_tokens(*given), stored)
    assert store_tokens(*given).dtype == np.int32
    made = backbone.transform(stored)
    assert made[0].dtype == jnp.int32 and made[1].dtype == bool
    for same in (given, tuple(map(np.asarray, given)), (jnp.where(there, ids, -1), given[1]), made, stored + 0.0):
        jax.tree.map(np.testing.assert_array_equal, backbone.transform(same), made)
    for inputs in (stored, given):
        assert jax.eval_shape(backbone.apply, drawn(family), inputs).shape == (4, 3)
    assert backbone.input_shape == (LENGTH,)


@every_family
def test_padding_changes_no_real_token(family):
    """Not how long it is, nor what is under it."""
    backbone, stored = small(family), tokens()
    there = np.asarray(stored) >= 0
    expected = hidden(backbone, drawn(family), stored)[there]
    longer = jnp.pad(stored, ((0, 0), (0, 3)), constant_values=-1)
    near(hidden(backbone, drawn(family), longer)[:, :LENGTH][there], expected)
    noisy = np.where(there, stored, np.random.default_rng(1).integers(2, 20, stored.shape))
    near(hidden(backbone, drawn(family), (noisy, there))[there], expected)
    assert differ(hidden(backbone, drawn(family), (noisy, np.ones(there.shape)))[there], expected)


@functools.cache
def gradients(backbone):
    """(params, stored, mask, key) -> ((loss, Forward), gradient), compiled."""

    def loss(params, stored, mask, key):
        forward = backbone.forward(Variables(params, {}), stored, mask, key)
        return cross_entropy(forward.logits, jnp.array([0, 1, 2, 0]), mask), forward

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def gradient_of(backbone, variables, key=0, stored=None, mask=None):
    stored, mask = tokens() if stored is None else stored, jnp.ones(4, bool) if mask is None else mask
    return gradients(backbone)(variables.params, stored, mask, jax.random.key(key))


@every_family
def test_nothing_but_padding_stays_finite(family):
    stored = tokens().at[1].set(-1)
    for mask in (jnp.arange(4) != 1, jnp.ones(4, bool)):
        (value, _), gradient = gradient_of(small(family), drawn(family), stored=stored, mask=mask)
        assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("family", "first"), [("roberta", 2), ("bert", 0)])
def test_positions_count_real_tokens_from_their_first_row(family, first):
    """Which rows of the tables a text's tokens reach."""
    backbone = small(family)

    @jax.jit
    @jax.grad
    def reached(params, stored):
        there = stored[..., None] >= 0
        return jnp.where(there, backbone.hidden_states(Variables(params, {}), stored) ** 2, 0.0).sum()

    def rows(name):
        return np.flatnonzero(np.abs(gradient[name]["embedding"]).max(1) > 1e-6).tolist()

    for length in (LENGTH, 3):
        text = np.r_[np.arange(5, 5 + length), np.full(LENGTH - length, -1)]
        gradient = reached(drawn(family).params, jnp.asarray(text[None]))["encoder"]["embeddings"]
        assert rows("position") == list(range(first, first + length))
        assert rows("word") == list(range(5, 5 + length))
        assert rows("token_type") == [0]
    if family == "roberta":  # goes by the id: a pad token in a text has row 1, those behind count on
        gradient = reached(drawn(family).params, jnp.array([[5, 1, 7, 8, -1, -1]]))["encoder"]["embeddings"]
        assert rows("position") == [1, 2, 3, 4]


@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_more_tokens_than_positions_are_refused(family):
    look = lambda n: jax.eval_shape(small(family).hidden_states, drawn(family), jnp.full((1, n), 3))
    assert look(10).shape == (1, 10, 8)
    with pytest.raises(ValueError, match="Inputs of 11 tokens are given, .* has positions for 10"):
        look(11)


def test_deberta_takes_any_length():
    assert jax.eval_shape(small("deberta").hidden_states, drawn("deberta"), jnp.full((1, 50), 3)).shape == (1, 50, 8)


# --- the head -------------------------------------------------------------------------------------------------------


@every_family
def test_the_classifier_reads_the_first_token(family):
    backbone, variables, stored = small(family), drawn(family), tokens()
    first = np.float64(hidden(backbone, variables, stored))[:, 0]
    dense, head = (jax.tree.map(np.float64, variables.params[name]) for name in ("dense", "head"))
    z = first @ dense["kernel"] + dense["bias"]
    z = z * (1 + erf(z / np.sqrt(2))) / 2 if family == "deberta" else np.tanh(z)
    near(logits(backbone, variables, stored), z @ head["kernel"] + head["bias"])
    near(backbone.head(variables, jnp.asarray(z, jnp.float32)), z @ head["kernel"] + head["bias"])
    near(compiled(backbone, "dense_inputs")(variables, stored)["head"], z)
    assert backbone.num_features == 8


RATES = {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "classifier_dropout": 0.3,
    "pooler_dropout": 0.4,
}


def dropped(backbone, look):
    """(rate, shape) of every dropout that acts in ``look(backbone)``."""
    found = []

    def tap(next_method, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and not kwargs["deterministic"]:
            found.append((context.module.rate, args[0].shape))
        return next_method(*args, **kwargs)

    with nn.intercept_methods(tap):
        jax.eval_shape(lambda: look(backbone))
    return found


@pytest.mark.parametrize("freeze", [False, True])
@every_family
def test_dropout_has_the_places_of_each_family_and_acts_in_training_only(family, freeze):
    variables, hidden, pooled = drawn(family), (4, LENGTH, 8), (4, 8)
    backbone = small(family, **RATES, freeze_encoder=freeze)
    encoder = [(0.1, hidden), (0.2, (4, 2, LENGTH, LENGTH)), (0.1, hidden), (0.1, hidden)]
    if family == "deberta":
        encoder.insert(1, (0.1, (2 * LENGTH - 1, 8)))  # the table of distances, once for both projections
    before = {"roberta": [(0.3, pooled)], "bert": [], "deberta": [(0.4, pooled)]}[family]
    train = lambda b: b.forward(variables, tokens(), jnp.ones(4, bool), jax.random.key(0)).z
    assert dropped(backbone, train) == [*(encoder if not freeze else []), *before, (0.3, pooled)]
    assert dropped(backbone, lambda b: b.apply(variables, tokens())) == []
    assert dropped(backbone, lambda b: b.hidden_states(variables, tokens())) == []


@every_family
def test_dropout_follows_the_key(family):
    one, same, other = (gradient_of(small(family), drawn(family), key)[0][1].z for key in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert differ(one, other)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_a_frozen_encoder_has_no_gradient(family):
    variables = drawn(family)
    backbone = small(family, hidden_dropout_prob=0.5, classifier_dropout=0.0, freeze_encoder=True)
    (_, forward), gradient = gradient_of(backbone, variables)
    assert forward.batch_stats == {}
    near(forward.logits, logits(small(family), variables, tokens()))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradient["encoder"]))
    optimizer = optax.adam(0.1)
    updates, _ = jax.jit(lambda g, params: optimizer.update(g, optimizer.init(params)))(gradient, variables.params)
    moved = optax.apply_updates(variables.params, updates)
    jax.tree.map(np.testing.assert_array_equal, moved["encoder"], variables.params["encoder"])
    assert all((np.asarray(x) != 0).any() for name in ("dense", "head") for x in jax.tree.leaves(gradient[name]))
    assert sorted(forward.dense_inputs) == ["dense", "head"] == sorted(backbone.dense_layers(variables))


@every_family
def test_every_parameter_of_a_free_encoder_has_a_gradient(family):
    _, gradient = gradient_of(small(family), drawn(family))
    zero = [leaf for leaf, x in leaves_of(Variables(gradient, {})).items() if not (np.abs(x) > 1e-7).any()]
    # a bias of keys adds the same to all logits of a query
    assert zero == ([] if family == "deberta" else ["params/encoder/layer_0/key/bias"])


def test_recomputing_layers_changes_no_number():
    """Same dropout, same gradients, same inputs of dense layers."""
    kept, recomputed, variables = small("deberta"), small("deberta", remat=True), drawn("deberta")
    for key in (0, 1):
        (value, forward), gradient = gradient_of(recomputed, variables, key)
        (expected, wanted), expected_gradient = gradient_of(kept, variables, key)
        near(value, expected)
        near_trees(gradient, expected_gradient)
        near_trees(forward.dense_inputs, wanted.dense_inputs)


def test_recomputing_layers_keeps_less_and_the_same_layers():
    kept, recomputed = (
        small("roberta", num_hidden_layers=2, max_position_embeddings=40, remat=x) for x in (False, True)
    )
    shapes = jax.eval_shape(kept.init, jax.random.key(0))
    assert jax.tree.structure(jax.eval_shape(recomputed.init, jax.random.key(0))) == jax.tree.structure(shapes)
    assert list(recomputed.dense_layers(shapes).items()) == list(kept.dense_layers(shapes).items())

    def residuals(backbone):
        kept_by = lambda p: jax.vjp(lambda p: backbone.features(Variables(p, {}), jnp.full((8, 32), 5)), p)[1]
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(kept_by, shapes.params)))

    assert residuals(recomputed) < residuals(kept) / 2


@every_family
def test_bfloat16_reaches_every_layer(family):
    backbone, variables = in_precision(small(family), "bfloat16"), drawn(family)
    found = jax.eval_shape(lambda v: backbone.forward(v, tokens(), jnp.ones(4, bool), jax.random.key(0)), variables)
    assert {x.dtype for x in found.dense_inputs.values()} == {jnp.dtype(jnp.bfloat16)}
    assert found.z.dtype == found.logits.dtype == jnp.float32
    if family == "deberta":
        exact, rounded = hidden(small(family), variables, tokens()), hidden(backbone, variables, tokens())
        assert rounded.dtype == np.float32 and 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


# --- what dense layers read -----------------------------------------------------------------------------------------


@every_family
def test_dense_layers_and_what_they_read(family):
    backbone, variables = small(family), drawn(family)
    readers = ["in_proj"] if family == "deberta" else ["query", "key", "value"]
    inner = [f"encoder/layer_0/{name}" for name in (*readers, "attention_output", "intermediate", "output")]
    seen = jax.eval_shape(lambda v: backbone.dense_inputs(v, tokens()), variables)
    assert list(backbone.dense_layers(variables)) == [*inner, "dense", "head"]
    widths = {name: 12 if name.endswith("/output") else 8 for name in seen}
    assert {name: x.shape for name, x in seen.items()} == {
        name: (4, LENGTH, widths[name]) if name in inner else (4, 8) for name in seen
    }
    assert backbone.dense_layers(variables) == {
        name: min(inner[: len(readers)]) if name in inner[: len(readers)] else name for name in seen
    }


@every_family
def test_grams_are_of_real_tokens_only(family):
    """Those of a padded batch are the sums over what is real in it."""
    backbone, variables, stored = small(family), drawn(family), tokens()
    mask = np.array([True, True, False, True])
    seen = jax.tree.map(np.float64, compiled(backbone, "dense_inputs")(variables, stored))
    nothing = jnp.zeros(4, jnp.int32)
    measure = jax.jit(lambda v, x: measure_grams(backbone, v, Examples(x, nothing, jnp.asarray(mask), nothing)))
    found = measure(variables, stored)
    assert found.keys() == set(backbone.dense_layers(variables).values())
    for layer, gram in found.items():
        real = (np.asarray(stored) >= 0) & mask[:, None]
        rows = seen[layer][real] if seen[layer].ndim == 3 else seen[layer][mask]
        near(gram.gram, rows.T @ rows, 1e-4)
        near(gram.total, rows.sum(0), 1e-4)
        assert gram.rows == len(rows)


def test_grams_of_training_are_those_of_a_pass_of_their_own():
    """Where training moves nothing: without dropout and at rate 0. Recomputed layers show what they read too."""
    backbone, variables = small("roberta", dropout=0.0, remat=True), drawn("roberta")
    examples = Examples(tokens(5), jnp.zeros(5, jnp.int32), jnp.arange(5) < 4, jnp.zeros(5, jnp.int32))
    rules = (fdg.aggregators.mean(), fdg.aggregators.hfedatm(regmean_scope="all_dense"))
    received = Received(variables, (), (), (), 0, variables)

    @jax.jit
    def both(examples):
        algorithm = fedavg(optimizer=lambda client_lr: optax.sgd(0.0))
        topology = Topology(1, 1, batch_size=2)
        seen = local.train(backbone, algorithm, topology, rules, received, (), examples, jax.random.key(0)).seen
        return statistics_of(backbone, seen.inputs, seen.mask), measure_grams(backbone, variables, examples)

    trained, measured = both(examples)
    near_trees(trained, measured, atol=1e-4)


# --- rounds ---------------------------------------------------------------------------------------------------------


def sentences():
    """Two domains, two classes told apart by which tokens occur; some sentences shorter."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 40).astype(np.int32)
    ids = rng.integers(3, 11, (40, LENGTH)) + 8 * labels[:, None]
    ids[rng.random(40) < 0.5, 4:] = -1
    domain = np.repeat(np.arange(2, dtype=np.int32), 20)
    return Domains("tokens", ids.astype(np.int32), labels, domain, None, None, ("one", "two"), ("a", "b"))


@pytest.fixture(scope="module")
def federation():
    return fdg.federate(sentences(), stations=2, clients_per_station=2, batch_size=4, validation_fraction=0.2)


def test_rounds_train(federation):
    """Stations average, the server merges by RegMean: every leaf moves, and an encoder learns which tokens matter."""
    backbone = small("deberta", num_classes=2, dropout=0.0, intermediate_size=8)  # few shapes to solve for
    algorithm = fedavg(optimizer=lambda client_lr: optax.adam(0.02))
    rules = {"to_station": fdg.aggregators.mean(), "to_server": fdg.aggregators.hfedatm(regmean_scope="all_dense")}
    round_fn = fdg.make_round(backbone, algorithm, federation.topology, **rules)
    state = round_fn.init(jax.random.key(0))
    start = leaves_of(jax.device_get(state.variables))
    state, history = fdg.run(round_fn, state, federation, rounds=5, key=jax.random.key(1), eval_every=5)
    assert all(differ(x, start[leaf]) for leaf, x in leaves_of(state.variables).items())
    assert min(history[-1]["accuracy/one"], history[-1]["accuracy/two"]) > 0.8, history


def test_methods_that_cannot_take_tokens_say_so(federation):
    backbone = small("roberta", num_classes=2)
    round_fn = fdg.make_round(backbone, mixup(), federation.topology)
    with pytest.raises(ValueError, match="mixup cannot mix inputs of type int32: choose level=features"):
        state = jax.eval_shape(round_fn.init, jax.random.key(0))
        jax.eval_shape(round_fn.step, state, federation.data, jax.random.key(0))
    with pytest.raises(ValueError, match="Inputs of type int32 have no mean to compare: choose of=features"):
        fdg.make_round(backbone, fedavg(), federation.topology, to_server=fdg.aggregators.AGGREGATORS["fedrc"]())
    for method in ("ccst", "elcfs", "mcgdm"):
        with pytest.raises(ValueError, match=rf"{method} .* takes inputs of shape \({LENGTH},\): choose"):
            fdg.make_round(backbone, fdg.algorithms.ALGORITHMS[method](), federation.topology)


def test_memory_and_traffic_of_text_are_foreseen():
    kept, recomputed = (small("roberta", num_hidden_layers=2, remat=remat) for remat in (False, True))
    topology = Topology(2, 2, batch_size=64)
    assert client_bytes(recomputed, fedavg(), topology) < client_bytes(kept, fedavg(), topology)
    start = jax.eval_shape(lambda key: fedavg().init(kept, kept.init(key), key), jax.random.key(0))
    sent = messages(kept, fedavg(), (fdg.aggregators.mean(), fdg.aggregators.hfedatm(regmean_scope="all_dense")), start)
    layers = set(kept.dense_layers(start.variables).values())
    assert sent.to_server.keys() == layers and len(layers) == 2 * 4 + 2


def test_fedsr_puts_its_posterior_where_the_head_was():
    backbone = fedsr().adapt(small("deberta"))
    shapes = jax.eval_shape(backbone.init, jax.random.key(0))
    assert {"encoder", "dense", "head", "posterior"} == shapes.params.keys()
    assert shapes.params["posterior"]["kernel"].shape == (8, 16)


# --- weights --------------------------------------------------------------------------------------------------------


def prefixed(family, state, **more):
    """As a model with a task is saved: the encoder's names behind the family's, and further ones."""
    return {f"{family}.{name}": x for name, x in state.items()} | more


def other_names(state):
    """As TensorFlow called the leaves of norms."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {functools.reduce(lambda n, pair: n.replace(*pair), old.items(), name): x for name, x in state.items()}


ZEROS = np.zeros((48, 48), np.float32)
EXTRAS = {
    "roberta": {
        "lm_head.dense.weight": ZEROS,
        "lm_head.bias": ZEROS[0],
        "roberta.pooler.dense.weight": ZEROS,
        "roberta.embeddings.position_ids": np.arange(40)[None],
    },
    "deberta": {
        "lm_predictions.lm_head.dense.weight": ZEROS,
        "cls.predictions.bias": ZEROS[0],
        "deberta.embeddings.position_embeddings.weight": ZEROS[:32],
    },
}


@GOLDENS
@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_every_form_of_a_published_encoder_gives_the_same_variables(family, kind, folder, published):
    backbone, expected = published(family)
    state = prefixed(family, other_names(state_of(family)), **EXTRAS[family])
    path = folder(family, state, kind)
    assert FACTORIES[family](path, 3, max_length=17) == backbone
    variables = load(backbone, path)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert jax.tree.structure(variables) == jax.tree.structure(jax.eval_shape(backbone.init, jax.random.key(0)))


def test_a_fresh_classifier_is_drawn_as_the_network_draws_it(folder, published):
    backbone, _ = published("roberta")
    path = folder("roberta", state_of("roberta"))
    one, same, other = (load(backbone, path, key=jax.random.key(i)).params for i in (5, 5, 6))
    drawn = jax.jit(lambda key: {name: backbone.init(key).params[name] for name in ("dense", "head")})(
        jax.random.key(5)
    )
    for name in ("dense", "head"):
        jax.tree.map(np.testing.assert_array_equal, one[name], same[name])
        jax.tree.map(near, one[name], drawn[name])
        assert differ(one[name]["kernel"], other[name]["kernel"])
        assert np.std(drawn[name]["kernel"]) < 0.03  # the published deviation is 0.02


TOPS = {
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "bert": ("bert.pooler.dense", "classifier"),
    "deberta": ("pooler.dense", "classifier"),
}


@every_family
def test_a_classifier_in_the_file_is_taken(family, folder):
    source = "roberta" if family == "bert" else family
    state, tops = dict(state_of(source)), TOPS[family]
    if family == "bert":
        state["embeddings.token_type_embeddings.weight"] = formula.wave("types", (2, 48))
        state = prefixed("bert", state, **{"cls.predictions.bias": ZEROS[0]})
    for name, rows in zip(tops, (48, 3)):
        state |= {f"{name}.weight": formula.wave(name, (rows, 48)), f"{name}.bias": formula.wave(name + "b", (rows,))}
    path = folder(source, state, model_type=family, type_vocab_size=2 * (family == "bert") + (family == "roberta"))
    backbone = FACTORIES[family](path, 3, max_length=17)
    params = fdg.weights.load(backbone, path).params  # without a warning
    for name, ours in zip(tops, ("dense", "head")):
        np.testing.assert_array_equal(params[ours]["kernel"], state[f"{name}.weight"].T)
        np.testing.assert_array_equal(params[ours]["bias"], state[f"{name}.bias"])
    with pytest.warns(UserWarning, match="tells 3 classes apart, so the head for 5 classes is freshly drawn"):
        five = fdg.weights.load(FACTORIES[family](path, 5, max_length=17), path).params
    np.testing.assert_array_equal(five["dense"]["kernel"], params["dense"]["kernel"])
    headless = {k: x for k, x in state.items() if not k.startswith(f"{tops[0]}.")}
    with pytest.raises(ValueError, match=rf"missing: {tops[0]}.bias, {tops[0]}.weight\)"):
        fdg.weights.load(backbone, folder(source, headless))


@GOLDENS
def test_what_does_not_fit_is_named(family, folder, published):
    backbone, _ = published(family)
    query = "encoder.layer.1.intermediate.dense.weight"
    cases = {
        r"left over: qa_outputs.weight\)": {"qa_outputs.weight": ZEROS},
        r"left over: embeddings.position_ids_too\)|left over: encoder.layer.3.output.dense.bias\)": {
            "encoder.layer.3.output.dense.bias": ZEROS[0]
        },
        r"other shape: params/encoder/layer_1/intermediate/kernel \[48, 48\] instead of \[48, 96\]": {query: ZEROS},
    }
    for words, change in cases.items():
        with pytest.raises(ValueError, match=words):
            fdg.weights.load(backbone, folder(family, state_of(family) | change))
    less = {k: x for k, x in state_of(family).items() if k != query}
    with pytest.raises(ValueError, match=rf"missing: {family}.{query}\)"):
        fdg.weights.load(backbone, folder(family, less))


def test_a_folder_without_weights_is_told(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(
        ValueError, match="a folder without model.safetensors and pytorch_model.bin, of which it needs one"
    ):
        fdg.weights.load(small("roberta"), tmp_path)


def test_own_files_hold_encoders_too(tmp_path):
    fdg.weights.save(drawn("deberta"), tmp_path / "model.npz")
    jax.tree.map(
        np.testing.assert_array_equal, fdg.weights.load(small("deberta"), tmp_path / "model.npz"), drawn("deberta")
    )


# --- configurations -------------------------------------------------------------------------------------------------


def hub(config, **changed):
    """What the hub's file says of a configuration."""
    return {k: list(x) if isinstance(x, tuple) else x for k, x in config._asdict().items()} | changed


def test_configurations_are_read_as_the_hub_writes_them(tmp_path):
    assert read_config(hub(ROBERTA_BASE)) == ROBERTA_BASE
    written = hub(DEBERTA_BASE, pos_att_type="c2p|p2c", max_relative_positions=-1)
    assert read_config(written) == DEBERTA_BASE
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": ["x"], "torch_dtype": "float32"}))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == DEBERTA_BASE
    assert read_config({k: x for k, x in hub(DEBERTA_BASE).items() if k != "model_type"}, "deberta") == DEBERTA_BASE
    bare = {
        k: x
        for k, x in hub(ROBERTA_BASE).items()
        if "dropout" not in k and k not in ("pad_token_id", "initializer_range")
    }
    assert read_config(bare) == ROBERTA_BASE
    assert read_config(bare | {"hidden_dropout_prob": 0.3, "classifier_dropout": None}).classifier_dropout == 0.3
    assert read_config(bare | {"classifier_dropout": 0.4}).classifier_dropout == 0.4
    found = read_config(hub(DEBERTA_BASE, cls_dropout=0.2, pooler_dropout=0.1))
    assert (found.classifier_dropout, found.pooler_dropout) == (0.2, 0.1)
    assert (ROBERTA_BASE.longest, ROBERTA_TINY.longest, DEBERTA_BASE.longest, SMALL["bert"].longest) == (
        512,
        128,
        None,
        10,
    )


BAD = {
    "v3": (
        lambda: deberta(hub(DEBERTA_BASE, model_type="deberta-v2")),
        "of model_type deberta-v2, which is DeBERTa v2 or v3: .* give a folder of v1",
    ),
    "kind": (
        lambda: roberta(hub(ROBERTA_BASE, model_type="robrta")),
        "Unknown model_type 'robrta'; did you mean 'roberta'",
    ),
    "record kind": (lambda: roberta(ROBERTA_BASE._replace(model_type="gpt2")), "Unknown model_type 'gpt2'"),
    "family": (
        lambda: roberta(DEBERTA_TINY),
        "roberta builds encoders of model_type roberta or bert, but the configuration says deberta: use deberta",
    ),
    "other family": (lambda: deberta(ROBERTA_TINY), "of model_type deberta, but .* says roberta: use roberta"),
    "missing": (
        lambda: roberta({"model_type": "bert", "vocab_size": 3}),
        "lacks hidden_size, num_hidden_layers, .*eps: give",
    ),
    "activation": (lambda: roberta(hub(ROBERTA_BASE, hidden_act="relu")), "hidden_act='relu', but .* only have 'gelu'"),
    "relative keys": (
        lambda: roberta(hub(ROBERTA_BASE, position_embedding_type="relative_key")),
        "position_embedding_type='relative_key'",
    ),
    "no distances": (lambda: deberta(hub(DEBERTA_BASE, relative_attention=False)), "relative_attention=False"),
    "terms": (lambda: deberta(hub(DEBERTA_BASE, pos_att_type="c2p|p2p")), "Unknown pos_att_type 'p2p'.*c2p, p2c"),
    "projected": (lambda: deberta(hub(DEBERTA_BASE, embedding_size=128)), "embedding_size=128, but here .*=768"),
    "heads": (
        lambda: roberta(ROBERTA_TINY._replace(num_attention_heads=5)),
        "hidden_size=32 does not divide among .*=5",
    ),
    "layers": (lambda: roberta(ROBERTA_TINY._replace(num_hidden_layers=0)), "num_hidden_layers=0 is not a positive"),
    "length": (lambda: roberta(ROBERTA_TINY, max_length=129), "max_length=129 is no length .*: give 1 to 128"),
    "no length": (lambda: deberta(DEBERTA_TINY, max_length=0), "max_length=0 is no length .*: give 1 or more"),
    "dropout": (lambda: roberta(ROBERTA_TINY, dropout=1.0), "dropout=1.0 is no probability"),
    "file's dropout": (lambda: roberta(hub(ROBERTA_BASE, hidden_dropout_prob=2.0)), "dropout=2.0 is no probability"),
    "no file": (
        lambda: roberta("/nowhere/at/all"),
        "/nowhere/at/all cannot be read .No such file.*: give a folder with",
    ),
    "image net": (
        lambda: lenet5(3).hidden_states(Variables({}, {}), jnp.zeros((1, 4))),
        "hidden_states is for text, but this backbone is not: use features",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configurations_are_told_in_a_sentence(case):
    make, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("content", ["[1]", "{", "\x00"])
def test_a_file_that_is_no_configuration_is_told(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config.json is no JSON object: give the config.json of an encoder"):
        roberta(tmp_path)
