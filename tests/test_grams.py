"""Gram forms: each is the part of the whole Gram that it names, adds up, permutes; RegMean in every form on whole models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny import tiny_backbone

from fedjax_dg import tree
from fedjax_dg.aggregators import Gram, GramForm, LowRankGram, grams_of, hfedatm, measure_grams, regmean
from fedjax_dg.aggregators.grams import add, add_grams, form_of, per_row, statistics
from fedjax_dg.aggregators.regmean import System, merge_dense, solve
from fedjax_dg.backbones import Backbone, lenet5
from fedjax_dg.types import Examples, Variables

POSITIONS, UNITS = 3, 4
WIDTH = POSITIONS * UNITS
ROWS, ENOUGH, FEW = 7, 24, 3  # rows of an input; ranks that lose nothing, and that do
FORMS = {
    "whole": ("whole", ENOUGH),
    "block": ("block", ENOUGH),
    "channel": ("channel", ENOUGH),
    "diag": ("diag", ENOUGH),
    "lowrank": ("lowrank", ENOUGH),
    "lowrank, cut": ("lowrank", FEW),
}
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def inputs(seed=0, rows=ROWS, width=WIDTH):
    """Off centre and correlated, as activations are."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, width)) @ (np.eye(width) + 0.3 * rng.normal(size=(width, width))) + 0.5).astype(
        np.float32
    )


def near(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@functools.partial(jax.jit, static_argnames="form")
def kept(x, form, mask=None):
    """The statistics of a batch in one of ``FORMS``."""
    name, rank = FORMS[form]
    return statistics(x, jnp.ones(len(x), bool) if mask is None else mask, name, POSITIONS, rank)


def dense(stats):
    """The matrix [d, d] that statistics stand for, and what else they hold."""
    if isinstance(stats, LowRankGram):
        part = np.asarray(stats.factor.T @ stats.factor)
        return part + np.diag(np.asarray(stats.diagonal) - np.diag(part)), stats.total, stats.rows
    if stats.gram.ndim == 2:
        return stats.gram, stats.total, stats.rows
    blocks, width = stats.gram.shape[:2]
    whole = np.zeros((WIDTH, WIDTH), np.float32)
    for i in range(0, WIDTH, width):
        whole[i : i + width, i : i + width] = stats.gram[(i // width) % blocks]
    return whole, stats.total, stats.rows


def same_position():
    position = np.arange(WIDTH) // UNITS
    return position[:, None] == position


# --- each form ------------------------------------------------------------------------------------------------------


@every_form
def test_a_form_is_its_part_of_the_whole_gram(form):
    x = inputs()
    whole, eye = x.T @ x, np.eye(WIDTH, dtype=np.float32)
    blocks = np.stack([whole[i : i + UNITS, i : i + UNITS] for i in range(0, WIDTH, UNITS)])
    values, vectors = np.linalg.eigh(whole)
    best = (vectors[:, -FEW:] * values[-FEW:]) @ vectors[:, -FEW:].T
    expected = {
        "whole": whole,
        "block": whole * same_position(),
        "channel": np.kron(np.eye(POSITIONS), blocks.mean(0)),
        "diag": whole * eye,
        "lowrank": whole,
        "lowrank, cut": best + (whole - best) * eye,
    }[form]
    gram, total, rows = dense(kept(x, form))
    near(gram, expected, 1e-4)  # of values up to 50
    near(total, x.sum(0))
    assert rows == ROWS


def test_sizes_are_those_of_the_forms():
    shapes = {form: jax.tree.leaves(jax.tree.map(jnp.shape, kept(inputs(), form)[0])) for form in FORMS}
    assert shapes == {
        "whole": [WIDTH, WIDTH],
        "block": [POSITIONS, UNITS, UNITS],
        "channel": [1, UNITS, UNITS],
        "diag": [WIDTH, 1, 1],
        "lowrank": [ENOUGH, WIDTH],
        "lowrank, cut": [FEW, WIDTH],
    }


@every_form
def test_the_diagonal_is_exact_in_every_form_that_tells_positions_apart(form):
    x = inputs()
    squares = (x**2).sum(0)
    if form == "channel":
        squares = np.tile(squares.reshape(POSITIONS, UNITS).mean(0), POSITIONS)
    near(np.diag(dense(kept(x, form))[0]), squares)


@every_form
def test_padding_rows_do_not_count_whatever_they_hold(form):
    x = inputs()
    padded = np.full((ROWS + 3, WIDTH), np.nan, np.float32)
    mask = np.ones(ROWS + 3, bool)
    mask[[1, 4, 9]] = False
    padded[mask] = x
    near(dense(kept(padded, form, mask)), dense(kept(x, form)), 1e-4)
    empty = kept(padded, form, np.zeros(ROWS + 3, bool))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty))


@every_form
def test_every_token_is_a_row(form):
    """Inputs [B, t, d]: an example is real with all its tokens or not at all."""
    x = inputs(rows=6)
    tokens = np.concatenate([x.reshape(3, 2, WIDTH), np.full((1, 2, WIDTH), np.nan, np.float32)])
    actual, expected = kept(tokens, form, np.array([True, True, True, False])), kept(x, form)
    near(dense(actual), dense(expected), 1e-4)
    assert actual.rows == 6


@pytest.mark.parametrize("form", [form for form in FORMS if form != "lowrank, cut"])
def test_adding_statistics_is_measuring_all_rows(form):
    one, two, three = inputs(0), inputs(1, rows=5), inputs(2, rows=4)
    parts = [kept(x, form) for x in (one, two, three)]
    near(dense(jax.jit(add)(parts[0], parts[1])), dense(kept(np.concatenate([one, two]), form)), 1e-4)
    summed = jax.jit(add_grams)({"layer": stack(parts)}, jnp.array([2.0, 0.0, 0.5]))["layer"]
    near(dense(summed), dense(kept(np.concatenate([one, three]), form)), 1e-4)


def test_adding_cut_statistics_keeps_what_leads_and_the_diagonal():
    one, two = kept(inputs(0), "lowrank, cut"), kept(inputs(1), "lowrank, cut")
    rows = np.concatenate([one.factor, two.factor])
    values, vectors = np.linalg.eigh(rows.T @ rows)
    best = (vectors[:, -FEW:] * values[-FEW:]) @ vectors[:, -FEW:].T
    for summed in (jax.jit(add)(one, two), jax.jit(add_grams)({"x": stack([one, two])}, jnp.ones(2))["x"]):
        assert summed.factor.shape == (FEW, WIDTH)
        near(summed.factor.T @ summed.factor, best, 1e-4)
        near(summed.diagonal, one.diagonal + two.diagonal)
        near((summed.total, summed.rows), (one.total + two.total, one.rows + two.rows))


@every_form
def test_statistics_per_row_are_means(form):
    x = inputs()
    gram, total, rows = dense(per_row({"x": kept(x, form)})["x"])
    whole, sums, count = dense(kept(x, form))
    near((gram, total), (whole / count, sums / count), 1e-4)
    assert rows == 1.0
    nothing = per_row({"x": jax.tree.map(jnp.zeros_like, kept(x, form))})["x"]
    assert all(not leaf.any() for leaf in jax.tree.leaves(nothing))


@every_form
def test_permuting_statistics_is_permuting_the_inputs(form):
    """A cycle, which is not its own inverse, in each position."""
    x, order = inputs(), np.array([1, 2, 3, 0])
    index = np.concatenate([p * UNITS + order for p in range(POSITIONS)])
    moved = kept(x, form).permute(jnp.asarray(order), POSITIONS)
    near(dense(moved), dense(kept(x[:, index], form)), 1e-4)
    assert abs(dense(moved)[1] - dense(kept(x, form))[1]).max() > 0.1


@pytest.mark.parametrize("form", ["whole", "diag", "lowrank"])
def test_the_units_of_a_dense_layer_permute_without_positions(form):
    x, order = inputs(), np.roll(np.arange(WIDTH), 5)
    near(dense(kept(x, form).permute(jnp.asarray(order), 1)), dense(kept(x[:, order], form)), 1e-4)


# --- which layer takes which form -----------------------------------------------------------------------------------


def test_only_wide_layers_are_oversize():
    backbone = lenet5(5)
    for oversize in ("block", "channel", "lowrank", "diag"):
        form = GramForm(120, oversize)
        assert form_of("dense1", 400, backbone, form) == (oversize, 25)
        assert form_of("dense2", 120, backbone, form) == ("whole", 1)
    assert form_of("dense2", 120, backbone, GramForm(119, "lowrank")) == ("lowrank", 1)
    assert GramForm() == (4096, "block", 64)


@pytest.mark.parametrize(
    ("layer", "width", "largest", "oversize"),
    [("dense2", 120, 119, "block"), ("head", 84, 80, "channel"), ("dense1", 400, 15, "block")],
)
def test_a_form_that_cannot_be_had_is_refused(layer, width, largest, oversize):
    message = (
        f"The Gram of {layer} has {width} inputs, more than max_gram={largest}, and no blocks that small: raise max_gram "
        f"to {width}, or choose oversize=lowrank or diag."
    )
    with pytest.raises(ValueError) as error:
        form_of(layer, width, lenet5(5), GramForm(largest, oversize))
    assert str(error.value) == message


class Attention(nn.Module):
    """Query, key and value read the same tokens, the head a mean over tokens."""

    def setup(self):
        self.q, self.k, self.v, self.head = nn.Dense(4), nn.Dense(4), nn.Dense(6), nn.Dense(3)

    def features(self, x, train, mask=None):
        weights = nn.softmax(self.q(x) @ self.k(x).swapaxes(1, 2))
        return (weights @ self.v(x)).mean(1)

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


ATTENTION = Backbone(Attention(), input_shape=(2, 5), num_features=6, num_classes=3)


def test_layers_that_read_the_same_share_one_gram():
    """Measured and sent once, used for all three."""
    models = [jax.jit(ATTENTION.init)(jax.random.key(i)) for i in range(2)]
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 2, 5)), jnp.float32)
    layers = ATTENTION.dense_layers(models[0])
    assert layers == {"q": "k", "k": "k", "v": "k", "head": "head"}
    rule, no = hfedatm(gram_at="client"), jnp.zeros(4, jnp.int32)

    @jax.jit
    def merged(models, tokens):
        measure = lambda model, x: rule.measure(ATTENTION, model, model, Examples(x, no, no == 0, no), None, ())
        messages = jax.vmap(measure)(models, tokens)
        return messages, rule.merge(ATTENTION, (), tree.take(models, 0), models, jnp.ones(2), messages)

    messages, (result, _, info) = merged(stack(models), tokens)
    rows = tokens.reshape(2, 8, 5)
    assert sorted(messages) == ["head", "k"]
    near(messages["k"], Gram(rows.swapaxes(1, 2) @ rows, rows.sum(1), jnp.full(2, 8.0)))
    near(result, regmean(models, {layer: messages[first] for layer, first in layers.items()}).variables)
    kernels = tree.weighted_mean(stack(models), jnp.ones(2)).params
    assert all(abs(result.params[x]["kernel"] - kernels[x]["kernel"]).max() > 1e-3 for x in layers)
    assert {layer: float(x["bytes"]) for layer, x in info["regmean"].items()} == {
        "q": 0.0,
        "k": 4.0 * (25 + 5 + 1),
        "v": 0.0,
        "head": 4.0 * (36 + 6 + 1),
    }
    shared = jax.eval_shape(lambda model, x: grams_of(ATTENTION, model, x), models[0], tokens[0])
    assert sorted(shared) == sorted(layers)


def test_statistics_of_a_model_are_those_of_all_its_passes(monkeypatch):
    """In every form, several batches and padding: the same as of one batch."""
    backbone = tiny_backbone()
    model = jax.jit(backbone.init)(jax.random.key(0))
    images = np.full((9, 6, 6, 2), np.nan, np.float32)
    mask = np.arange(9) < 7
    images[mask] = np.random.default_rng(0).normal(size=(7, 6, 6, 2))
    nothing = jnp.zeros(9, jnp.int32)
    examples = Examples(jnp.asarray(images), nothing, jnp.asarray(mask), nothing)
    for oversize in ("block", "lowrank"):
        form = GramForm(8, oversize, rank=12)
        monkeypatch.undo()
        expected = grams_of(backbone, model, jnp.asarray(images[mask]), form)
        monkeypatch.setattr("fedjax_dg.local.PASS_SIZE", 4)
        actual = jax.jit(lambda m, e, form=form: measure_grams(backbone, m, e, form))(model, examples)
        assert sorted(actual) == sorted(expected)
        for layer, stats in actual.items():
            assert type(stats) is type(expected[layer])
            if isinstance(stats, LowRankGram):
                near(stats.factor.T @ stats.factor, expected[layer].factor.T @ expected[layer].factor, 1e-4)
                near(stats[1:], expected[layer][1:], 1e-4)
            else:
                near(stats, expected[layer], 1e-4)


# --- RegMean in every form ------------------------------------------------------------------------------------------

MODELS, OUT = 3, 2


def layer_models(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(MODELS, WIDTH, OUT))), jnp.asarray(rng.normal(size=(MODELS, OUT)))


def forms_of(seeds=range(MODELS), rows=20, block_diagonal=False):
    """Statistics of three inputs in every form, float64; ``block_diagonal``: inputs of one position at a time."""
    xs = [inputs(seed, rows).astype(np.float64) for seed in seeds]
    if block_diagonal:
        xs = [(x[:, None] * np.kron(np.eye(POSITIONS), np.ones(UNITS))).reshape(-1, WIDTH) for x in xs]
    grams = [x.T @ x for x in xs]
    total, count = jnp.asarray([x.sum(0) for x in xs]), jnp.asarray([float(len(x)) for x in xs])
    blocks = np.stack([[g[i : i + UNITS, i : i + UNITS] for i in range(0, WIDTH, UNITS)] for g in grams])
    diagonal = jnp.asarray([np.diag(g) for g in grams])
    return xs, {
        "whole": Gram(jnp.asarray(grams), total, count),
        "block": Gram(jnp.asarray(blocks), total, count),
        "channel": Gram(jnp.asarray(blocks.mean(1, keepdims=True)), total, count),
        "diag": Gram(diagonal[..., None, None], total, count),
        "lowrank": LowRankGram(jnp.asarray(xs), diagonal, total, count),
    }


@functools.partial(jax.jit, static_argnames="bias")
def merge(layers, weights, alpha, ridge, bias):
    kernels, biases, info = merge_dense({"layer": layers}, weights, alpha, ridge, bias)
    return kernels["layer"], biases["layer"], info["layer"]


def merged(stats, alpha=0.75, ridge=1e-6, bias="corrected", weights=(1.0, 1.0, 1.0)):
    """The merged layer of ``layer_models``."""
    kernels, biases = jax.tree.map(lambda x: x.astype(stats.total.dtype), layer_models())
    return merge((kernels, biases, stats), jnp.asarray(weights, kernels.dtype), alpha, ridge, bias)


def test_blocks_are_the_whole_where_positions_do_not_meet(x64):
    _, stats = forms_of(block_diagonal=True)
    for alpha, ridge in ((0.0, 0.0), (0.75, 1e-6), (1.0, 1e-2)):
        near(merged(stats["block"], alpha, ridge)[:2], merged(stats["whole"], alpha, ridge)[:2], 1e-9)
    _, mixed = forms_of()
    assert abs(merged(mixed["block"])[0] - merged(mixed["whole"])[0]).max() > 1e-2


def test_the_diagonal_is_the_whole_without_its_rest(x64):
    _, stats = forms_of()
    for ridge in (0.0, 0.3):
        for alpha in (0.0, 0.75, 1.0):  # of the diagonal nothing shrinks
            near(merged(stats["diag"], alpha, ridge)[:2], merged(stats["whole"], 0.0, ridge)[:2], 1e-9)


def test_a_rank_that_loses_nothing_is_the_whole(x64):
    _, stats = forms_of(rows=5)  # 15 rows of 12 inputs in all
    for alpha, ridge in ((0.0, 0.0), (0.5, 0.0), (0.75, 1e-6), (1.0, 1e-6), (1.0, 1e-2)):
        whole, low = merged(stats["whole"], alpha, ridge), merged(stats["lowrank"], alpha, ridge)
        near(low[:2], whole[:2], 1e-7)
        assert low[2]["residual"] < 1e-9


@pytest.mark.parametrize("rows", [2, 3, 6])
def test_a_low_rank_fits_in_float32_without_shrinkage_too(rows):
    """Where Woodbury's identity could lose six digits: nothing but the ridge is beside the low rank.

    With 6 rows each there are more than inputs: no low rank at all.
    """
    xs, stats = forms_of(rows=rows)
    low = jax.tree.map(lambda x: x.astype(jnp.float32), stats["lowrank"])
    kernels = np.asarray(layer_models()[0])
    if rows == 6:
        expected = np.linalg.lstsq(np.concatenate(xs), np.concatenate([x @ k for x, k in zip(xs, kernels)]))[0]
        near(merged(low, 1.0, 1e-6)[0], expected, 1e-2)
    for ridge in (1e-6, 1e-4):
        kernel, _, info = merged(low, 1.0, ridge)
        assert info["residual"] < 1e-4
        if rows < 4:  # fewer rows than inputs: every model can be fitted
            for x, k in zip(xs, kernels):
                assert np.linalg.norm(x @ np.asarray(kernel) - x @ k) < 1e-2 * np.linalg.norm(x @ k)


def test_a_cut_rank_solves_its_own_normal_equations(x64):
    """F^T F for the leading part, the rest of the diagonal beside it."""
    _, stats = forms_of()
    cut = stats["lowrank"]._replace(factor=stats["lowrank"].factor[:, :FEW])
    kernels = np.asarray(layer_models()[0])
    weights = np.array([5.0, 1.0, 2.0])
    for alpha, ridge in ((0.75, 1e-6), (0.3, 0.2)):
        grams = [
            alpha * f.T @ f + np.diag(d - alpha * (f**2).sum(0))
            for f, d in zip(np.asarray(cut.factor), np.asarray(cut.diagonal))
        ]
        system, mean = sum(grams), np.tensordot(weights / weights.sum(), kernels, 1)
        pull = ridge * np.trace(system) / WIDTH
        target = sum(g @ k for g, k in zip(grams, kernels)) + pull * mean
        expected = np.linalg.solve(system + pull * np.eye(WIDTH), target)
        near(merged(cut, alpha, ridge, weights=weights)[0], expected, 1e-9)


def test_one_block_for_all_positions_is_a_convolution(x64):
    """The kernel as one matrix from a position's units to all positions' outputs, and every position's rows."""
    xs, stats = forms_of()
    kernels = np.asarray(layer_models()[0])
    folded = [k.reshape(POSITIONS, UNITS, OUT).transpose(1, 0, 2).reshape(UNITS, -1) for k in kernels]
    rows = [x.reshape(-1, UNITS) for x in xs]
    expected = np.linalg.lstsq(np.concatenate(rows), np.concatenate([x @ k for x, k in zip(rows, folded)]))[0]
    expected = expected.reshape(UNITS, POSITIONS, OUT).transpose(1, 0, 2).reshape(WIDTH, OUT)
    near(merged(stats["channel"], 1.0, 0.0)[0], expected, 1e-9)


@pytest.mark.parametrize("form", ["whole", "block", "channel", "diag", "lowrank"])
def test_the_corrected_bias_is_best_in_every_form(x64, form):
    xs, stats = forms_of()
    kernel, bias, _ = merged(stats[form], 0.75, 1e-3)
    kernels, biases = layer_models()
    left = [x @ np.asarray(k) + np.asarray(b) - x @ np.asarray(kernel) for x, k, b in zip(xs, kernels, biases)]
    near(bias, np.concatenate(left).mean(0), 1e-9)


def test_the_augmented_bias_is_least_squares_on_inputs_and_a_one(x64):
    xs, stats = forms_of()
    kernels, biases = layer_models()
    ones = [np.concatenate([x, np.ones((len(x), 1))], axis=1) for x in xs]
    targets = [x @ np.asarray(k) + np.asarray(b) for x, k, b in zip(xs, kernels, biases)]
    expected = np.linalg.lstsq(np.concatenate(ones), np.concatenate(targets))[0]
    kernel, bias, info = merged(stats["whole"], 1.0, 0.0, "augmented")
    near(kernel, expected[:-1], 1e-9)
    near(bias, expected[-1], 1e-9)
    assert info["residual"] < 1e-12
    assert abs(merged(stats["whole"], 1.0, 0.0)[0] - expected[:-1]).max() > 1e-3  # the kernel alone is another problem


def test_augmenting_shrinks_the_last_row_too(x64):
    """At alpha = 0 nothing connects kernel and bias: inputs by their power, the bias by rows."""
    _, stats = forms_of()
    kernel, bias, _ = merged(stats["whole"], 0.0, 0.0, "augmented")
    near(kernel, merged(stats["diag"], 0.0, 0.0)[0], 1e-9)
    near(bias, layer_models()[1].mean(0), 1e-9)


@pytest.mark.parametrize("form", ["block", "channel", "diag", "lowrank"])
def test_a_gram_in_parts_cannot_be_augmented(form):
    with pytest.raises(ValueError, match=r"^bias=augmented needs the whole Gram of layer, .* choose bias=corrected\."):
        merged(forms_of()[1][form], bias="augmented")


# --- whole models ---------------------------------------------------------------------------------------------------


@functools.cache
def tiny_models():
    backbone = tiny_backbone()
    models = [jax.jit(backbone.init)(jax.random.key(i)) for i in range(MODELS)]
    images = jnp.asarray(np.random.default_rng(0).normal(size=(MODELS, 12, 6, 6, 2)), jnp.float32)
    measure = jax.jit(lambda model, x: grams_of(backbone, model, x))
    return models, [measure(model, x) for model, x in zip(models, images)]


def test_lists_stacks_and_bare_parameters_agree():
    models, grams = tiny_models()
    weights = jnp.array([1.0, 2.0, 0.5])
    listed = regmean(models, grams, weights)
    stacked = regmean(stack(models), stack(grams), weights)
    bare = regmean([model.params for model in models], grams, weights)
    assert isinstance(listed.variables, Variables)
    jax.tree.map(np.testing.assert_array_equal, listed, stacked)
    jax.tree.map(np.testing.assert_array_equal, listed.variables.params, bare.variables)
    near(regmean(models, grams), regmean(models, grams, jnp.full(MODELS, 7.0)), 1e-4)
    assert sorted(listed.info) == ["dense", "head"]
    conv = tree.weighted_mean(stack(models), weights).params["conv"]
    near(listed.variables.params["conv"], conv)


def test_regmean_merges_every_layer_by_its_own_gram():
    models, grams = tiny_models()
    whole = regmean(models, grams, alpha=0.6, ridge=1e-3)
    for layer in ("dense", "head"):
        kernels, biases = (jnp.stack([m.params[layer][leaf] for m in models]) for leaf in ("kernel", "bias"))
        alone = kernels, biases, stack([g[layer] for g in grams])
        kernel, bias, info = merge(alone, jnp.ones(MODELS), 0.6, 1e-3, "corrected")
        near(whole.variables.params[layer], {"kernel": kernel, "bias": bias})
        assert sorted(info) == ["condition", "fallback", "raised", "residual"]
    only = regmean(models, [{"head": g["head"]} for g in grams])
    near(only.variables.params["dense"], tree.weighted_mean(stack(models), jnp.ones(MODELS)).params["dense"])
    near(only.variables.params["head"], regmean(models, grams).variables.params["head"])


def test_layers_of_one_shape_are_solved_as_if_alone(x64):
    rng = np.random.default_rng(0)

    def layer(width, out):
        x = rng.normal(size=(MODELS, 20, width)) + 0.5
        stats = Gram(jnp.asarray(x.swapaxes(1, 2) @ x), jnp.asarray(x.sum(1)), jnp.full(MODELS, 20.0))
        return jnp.asarray(rng.normal(size=(MODELS, width, out))), jnp.asarray(rng.normal(size=(MODELS, out))), stats

    layers = {"a": layer(6, 2), "b": layer(5, 2), "c": layer(6, 2)}
    together = jax.jit(lambda layers: merge_dense(layers, jnp.ones(MODELS), 0.75, 1e-6, "corrected"))(layers)
    for name, one in layers.items():
        near(tuple(x[name] for x in together), merge(one, jnp.ones(MODELS), 0.75, 1e-6, "corrected"), 1e-10)


# --- how a solve went -----------------------------------------------------------------------------------------------


@functools.cache
def solved(width, rows, alpha):
    """A shrunken Gram of rectified inputs, its exact scaled condition, its solution for a target in its range."""
    rng = np.random.default_rng(width + rows)
    x = np.maximum(rng.normal(size=(rows, width)) @ (np.eye(width) + 0.3 * rng.normal(size=(width, width))) + 0.5, 0.0)
    gram = x.T @ x
    gram = alpha * gram + (1 - alpha) * np.diag(np.diag(gram)) + 1e-6 * np.trace(gram) / width * np.eye(width)
    scale = 1.0 / np.sqrt(np.diag(gram))
    system = (gram, gram @ rng.normal(size=(width, 2)))
    solution = jax.jit(solve)(System(*(jnp.asarray(x, jnp.float32)[None] for x in system)))
    return np.linalg.cond(gram * scale[:, None] * scale), jax.tree.map(lambda x: np.asarray(x[0]), solution)


@pytest.mark.parametrize("width", [5, 60])
@pytest.mark.parametrize("alpha", [0.0, 0.75, 0.95])
def test_the_condition_is_estimated_from_below(width, alpha):
    """Within a factor of 10; exactly for a diagonal matrix. With shrinkage it stays below 3 c + 1."""
    for rows in (width // 2, 10 * width):
        exact, solution = solved(width, rows, alpha)
        assert exact / 10 < solution.condition <= exact * (1 + 1e-5)
        assert solution.residual < 1e-5
        assert solution.raised == 0.0
        if alpha == 0.0:
            np.testing.assert_allclose(solution.condition, 1.0, rtol=1e-5)
        if alpha == 0.75:
            assert exact < 3 * width + 1


def test_a_matrix_that_is_not_definite_is_raised_alone():
    """One of two systems of a layer: half of it."""
    good, bad = np.eye(4, dtype=np.float32), np.ones((4, 4), np.float32)
    bad[0, 0] = 1 - 1e-3  # one eigenvalue is below zero
    targets = np.ones((4, 2), np.float32)
    alone = jax.jit(solve)(System(jnp.asarray(good)[None], jnp.asarray(targets)[None]))
    both = jax.jit(solve)(System(jnp.stack([good, bad]), jnp.stack([targets, targets])))
    assert both.raised.tolist() == [0.0, 1.0]
    near(both.difference[0], alone.difference[0])
