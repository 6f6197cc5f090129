"""RegMean against numpy's least squares on the concatenated inputs, its closed forms, and how Grams are measured."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import local, tree
from fedjax_dg.aggregators import Gram, measure_grams, regmean, shrink
from fedjax_dg.aggregators.grams import add_grams, per_row
from fedjax_dg.aggregators.regmean import merge_dense

MODELS, WIDTH, OUT = 3, 6, 2
ROWS = (20, 15, 30)


class Layer(NamedTuple):
    kernel: Any
    bias: Any
    info: Any


@functools.partial(jax.jit, static_argnames="bias")
def merge(kernels, biases, grams, weights, alpha=0.75, ridge=1e-6, bias="corrected"):
    """One dense layer."""
    kernel, offset, info = merge_dense({"layer": (kernels, biases, grams)}, weights, alpha, ridge, bias)
    return Layer(kernel["layer"], offset["layer"], info["layer"])


def layers(seed=0, models=MODELS, width=WIDTH):
    """Kernels [e, d, o] and biases [e, o], float64."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(models, width, OUT)), rng.normal(size=(models, OUT))


def inputs(seed=1, rows=ROWS, width=WIDTH, centre=0.5):
    """What each model's layer reads, [m, d] each: of unequal sizes, correlated, off centre."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(width) + 0.3 * rng.normal(size=(width, width))
    return [rng.normal(size=(m, width)) @ mixing + centre for m in rows]


def gram(xs):
    return Gram(
        jnp.stack([jnp.asarray(x.T @ x) for x in xs]),
        jnp.stack([jnp.asarray(x.sum(0)) for x in xs]),
        jnp.asarray([float(len(x)) for x in xs]),
    )


def merged(kernels, biases, grams, weights=(1.0, 1.0, 1.0), alpha=1.0, ridge=0.0, bias="corrected"):
    kernels, biases = jnp.asarray(kernels), jnp.asarray(biases)
    return merge(kernels, biases, grams, jnp.asarray(weights, kernels.dtype), alpha, ridge, bias)


def first_two(grams):
    return jax.tree.map(lambda x: x[:2], grams)


def least_squares(xs, targets):
    return np.linalg.lstsq(np.concatenate(xs), np.concatenate(targets))[0]


def near(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# --- shrink ---------------------------------------------------------------------------------------------------------


def test_shrink_scales_what_is_off_the_diagonal():
    g = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    for alpha in (0.0, 0.3, 1.0):
        shrunken = np.asarray(shrink(jnp.asarray(g), alpha))
        diagonal = np.eye(4, dtype=bool)
        np.testing.assert_array_equal(shrunken[:, diagonal], g[:, diagonal])
        near(shrunken[:, ~diagonal], alpha * g[:, ~diagonal], 1e-6)


def test_shrink_bounds_the_eigenvalues_of_the_scaled_gram(x64):
    (x,) = inputs(rows=(3,))  # fewer rows than inputs: the Gram itself is singular
    g = x.T @ x
    for alpha in (0.0, 0.75, 0.9):
        shrunken = np.asarray(shrink(jnp.asarray(g), alpha))
        scale = 1.0 / np.sqrt(np.diag(shrunken))
        eigenvalues = np.linalg.eigvalsh(shrunken * scale[:, None] * scale)
        assert eigenvalues.min() >= 1 - alpha - 1e-12
        assert eigenvalues.max() <= alpha * WIDTH + 1 - alpha + 1e-12
        assert np.linalg.eigvalsh(shrunken).min() > -1e-12


# --- the kernel -----------------------------------------------------------------------------------------------------


def test_kernel_is_least_squares_on_all_inputs(x64):
    (kernels, biases), xs = layers(), inputs()
    expected = least_squares(xs, [x @ w for x, w in zip(xs, kernels)])
    result = merged(kernels, biases, gram(xs))
    assert result.kernel.dtype == jnp.float64
    near(result.kernel, expected)
    assert result.info["residual"] < 1e-12


def test_kernel_is_least_squares_in_float32():
    (kernels, biases), xs = layers(), inputs()
    expected = least_squares(xs, [x @ w for x, w in zip(xs, kernels)])
    result = merged(kernels.astype(np.float32), biases.astype(np.float32), gram([x.astype(np.float32) for x in xs]))
    assert result.kernel.dtype == jnp.float32
    near(result.kernel, expected, 1e-5)
    assert 0.0 < result.info["residual"] < 1e-5
    assert result.info["fallback"] == 0.0


def test_residual_is_small_at_the_width_of_a_real_layer():
    """LeNet-5's second layer: fewer rows than inputs, one input dead; a diagonal raised by d eps = 1.4e-5 would show."""
    kernels, biases = layers(width=120)
    xs = [np.maximum(x, 0.0).astype(np.float32) * (np.arange(120) != 7) for x in inputs(width=120)]
    result = merged(kernels.astype(np.float32), biases.astype(np.float32), gram(xs), alpha=0.75)
    assert 0.0 < result.info["residual"] < 5e-6


def test_shrinkage_and_ridge_solve_their_normal_equations(x64):
    """(S + r I) W = sum_e G_e W_e + r M with shrunken Grams and the weighted mean M, at strengths where each matters."""
    (kernels, biases), xs = layers(), inputs()
    weights = np.array([5.0, 1.0, 2.0])
    grams = [x.T @ x for x in xs]
    for alpha, ridge in ((0.75, 1e-6), (0.3, 0.2), (1.0, 10.0)):
        shrunken = [alpha * g + (1 - alpha) * np.diag(np.diag(g)) for g in grams]
        system = sum(shrunken)
        pull = ridge * np.trace(system) / WIDTH
        mean = np.tensordot(weights / weights.sum(), kernels, axes=1)
        target = sum(g @ w for g, w in zip(shrunken, kernels)) + pull * mean
        expected = np.linalg.solve(system + pull * np.eye(WIDTH), target)
        near(merged(kernels, biases, gram(xs), weights, alpha, ridge).kernel, expected)


@pytest.mark.parametrize("rows", [30, 3])
def test_a_single_model_comes_back_exactly(rows):
    """For every alpha and ridge, also where the Gram is singular."""
    kernels, biases = layers(models=1)
    xs = inputs(rows=(rows,))
    grams = jax.tree.map(lambda x: x.astype(jnp.float32), gram(xs))
    for alpha in (0.0, 0.75, 1.0):
        for ridge in (0.0, 1e-6, 1.0):
            result = merged(kernels.astype(np.float32), biases.astype(np.float32), grams, (7.0,), alpha, ridge)
            np.testing.assert_array_equal(result.kernel, kernels[0].astype(np.float32))
            near(result.bias, biases[0], 1e-6)


def test_equal_models_come_back(x64):
    kernels, biases = (np.broadcast_to(x[:1], x.shape) for x in layers())
    for alpha in (0.0, 0.75, 1.0):
        result = merged(kernels, biases, gram(inputs()), (1.0, 2.0, 0.5), alpha, 1e-6)
        near(result.kernel, kernels[0])
        near(result.bias, biases[0])


def test_proportional_grams_give_the_mean_weighted_by_them(x64):
    kernels, biases = layers()
    xs = inputs(rows=(20,)) * 3
    factors = np.array([1.0, 4.0, 0.5])
    scaled = gram(xs)._replace(gram=gram(xs).gram * factors[:, None, None])
    for alpha in (0.0, 0.75, 1.0):
        near(merged(kernels, biases, scaled, alpha=alpha).kernel, np.tensordot(factors / factors.sum(), kernels, 1))
        near(merged(kernels, biases, gram(xs), alpha=alpha, ridge=1e-3).kernel, kernels.mean(0))


def test_alpha_zero_weighs_each_input_by_its_own_power(x64):
    (kernels, biases), xs = layers(), inputs()
    powers = np.stack([(x**2).sum(0) for x in xs])
    expected = (powers[..., None] * kernels).sum(0) / powers.sum(0)[:, None]
    near(merged(kernels, biases, gram(xs), alpha=0.0).kernel, expected)


def test_scale_of_all_grams_does_not_matter(x64):
    (kernels, biases), grams = layers(), gram(inputs())
    one = merged(kernels, biases, grams, alpha=0.75, ridge=1e-2)
    for factor in (1e-6, 1e6):
        scaled = merged(kernels, biases, jax.tree.map(lambda x, c=factor: c * x, grams), alpha=0.75, ridge=1e-2)
        near(scaled.kernel, one.kernel)
        near(scaled.bias, one.bias)


def test_the_order_of_inputs_does_not_matter(x64):
    (kernels, biases), grams = layers(), gram(inputs())
    order = jnp.array([1, 2, 0, 5, 3, 4])  # two 3-cycles
    moved = jax.vmap(lambda g: g.permute(order, 1))(grams)
    one = merged(kernels, biases, grams, alpha=0.75, ridge=1e-6)
    other = merged(kernels[:, order], biases, moved, alpha=0.75, ridge=1e-6)
    near(other.kernel, one.kernel[order])
    near(other.bias, one.bias)
    forgotten = merged(kernels[:, order], biases, grams, alpha=0.75, ridge=1e-6)
    assert abs(forgotten.kernel - one.kernel[order]).max() > 1e-2


def test_merging_in_two_levels_with_summed_grams_is_merging_at_once(x64):
    (kernels, biases), grams = layers(), gram(inputs())
    at_once = merged(kernels, biases, grams, alpha=0.75)
    first = merged(kernels[:2], biases[:2], first_two(grams), (1.0, 1.0), alpha=0.75)
    summed = jax.tree.map(lambda x: jnp.stack([x[0] + x[1], x[2]]), grams)
    top = merged(
        jnp.stack([first.kernel, kernels[2]]), jnp.stack([first.bias, biases[2]]), summed, (1.0, 1.0), alpha=0.75
    )
    near(top.kernel, at_once.kernel)
    near(top.bias, at_once.bias)


# --- the bias -------------------------------------------------------------------------------------------------------


def test_corrected_bias_is_the_best_for_the_merged_kernel(x64):
    """The mean over all rows of what each model answers, less what the merged kernel already says."""
    (kernels, biases), xs = layers(), inputs()
    for alpha in (0.0, 0.75, 1.0):
        result = merged(kernels, biases, gram(xs), (9.0, 1.0, 1.0), alpha, 1e-3)
        left = [x @ w + b - x @ np.asarray(result.kernel) for x, w, b in zip(xs, kernels, biases)]
        near(result.bias, np.concatenate(left).mean(0))


def test_centred_inputs_give_the_joint_optimum_and_the_mean_bias_by_rows(x64):
    """With zero-mean inputs kernel and bias decouple: least squares on [X, 1] gives the same two."""
    kernels, biases = layers()
    xs = [x - x.mean(0) for x in inputs()]
    result = merged(kernels, biases, gram(xs))
    ones = [np.concatenate([x, np.ones((len(x), 1))], axis=1) for x in xs]
    joint = least_squares(ones, [x @ w + b for x, w, b in zip(xs, kernels, biases)])
    near(result.kernel, joint[:-1])
    near(result.bias, joint[-1])
    near(result.bias, np.average(biases, axis=0, weights=ROWS))


def test_mean_bias_is_the_weighted_mean(x64):
    kernels, biases = layers()
    result = merged(kernels, biases, gram(inputs()), (1.0, 2.0, 5.0), alpha=0.75, ridge=1e-6, bias="mean")
    near(result.bias, np.average(biases, axis=0, weights=(1.0, 2.0, 5.0)))
    corrected = merged(kernels, biases, gram(inputs()), (1.0, 2.0, 5.0), alpha=0.75, ridge=1e-6)
    np.testing.assert_array_equal(result.kernel, corrected.kernel)


def test_an_unknown_bias_rule_names_the_nearest():
    kernels, biases = (jnp.asarray(x, jnp.float32) for x in layers())
    with pytest.raises(ValueError, match="did you mean 'corrected'"):
        regmean(
            [{"x": {"kernel": k, "bias": b}} for k, b in zip(kernels, biases)], {"x": gram(inputs())}, bias="correct"
        )


# --- degenerate inputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.0, 1e-6])
def test_the_row_of_a_dead_input_is_the_mean(x64, ridge):
    (kernels, biases), xs = layers(), inputs()
    for x in xs:
        x[:, 2] = 0.0
    weights = (1.0, 2.0, 5.0)
    result = merged(kernels, biases, gram(xs), weights, 0.75, ridge)
    near(result.kernel[2], np.average(kernels, axis=0, weights=weights)[2])
    alive = np.array([0, 1, 3, 4, 5])
    others = merged(kernels[:, alive], biases, gram([x[:, alive] for x in xs]), weights, 0.75, ridge * 5 / 6)
    near(result.kernel[alive], others.kernel)
    near(result.bias, others.bias)


@pytest.mark.parametrize("rows", [20.0, 0.0])
def test_zero_grams_fall_back_to_the_mean(rows):
    kernels, biases = (x.astype(np.float32) for x in layers())
    weights = (1.0, 2.0, 5.0)
    nothing = Gram(jnp.zeros((3, WIDTH, WIDTH)), jnp.zeros((3, WIDTH)), jnp.full(3, rows))
    for alpha, ridge in ((0.75, 1e-6), (1.0, 0.0)):
        result = merged(kernels, biases, nothing, weights, alpha, ridge)
        assert result.info["fallback"] == 1.0
        assert result.info["residual"] == 0.0
        near(result.kernel, np.average(kernels, axis=0, weights=weights), 1e-6)
        near(result.bias, np.average(biases, axis=0, weights=weights), 1e-6)


def test_a_model_without_examples_changes_nothing(x64):
    """Weight 0 and no rows: neither its layer nor what its Gram holds is looked at."""
    (kernels, biases), grams = layers(), gram(inputs())
    pair = merged(kernels[:2], biases[:2], first_two(grams), (1.0, 3.0), 0.75, 1e-2)
    for stale in (grams, jax.tree.map(lambda x: x.at[2].set(0.0), grams)):
        result = merged(kernels, biases, stale, (1.0, 3.0, 0.0), 0.75, 1e-2)
        near(result.kernel, pair.kernel)
        near(result.bias, pair.bias)


def test_no_model_at_all_stays_finite():
    kernels, biases = (x.astype(np.float32) for x in layers())
    nothing = Gram(jnp.zeros((3, WIDTH, WIDTH)), jnp.zeros((3, WIDTH)), jnp.zeros(3))
    result = merged(kernels, biases, nothing, (0.0, 0.0, 0.0), 0.75, 1e-6)
    assert tree.all_finite(result)
    assert result.info["fallback"] == 1.0
    assert result.info["raised"] == 0.0


def test_fewer_rows_than_inputs_without_shrinkage_stays_finite_and_fits():
    """At alpha = 1 float32's Cholesky fails on such Grams; the answer must still fit every model on its inputs."""
    width, rows = 40, (8, 8, 8)
    kernels, biases = layers(width=width)
    xs = [x.astype(np.float32) for x in inputs(rows=rows, width=width)]
    for ridge in (0.0, 1e-8):
        result = merged(kernels.astype(np.float32), biases.astype(np.float32), gram(xs), alpha=1.0, ridge=ridge)
        assert tree.all_finite(result)
        assert result.info["raised"] == 1.0
        for x, w in zip(xs, kernels):  # 24 rows, 40 unknowns: an exact fit exists
            error = np.linalg.norm(x @ np.asarray(result.kernel) - x @ w) / np.linalg.norm(x @ w)
            assert error < 1e-3  # the diagonal is raised by d eps = 5e-6, the smallest eigenvalue is near 1e-2


def test_stacks_of_merges_equal_single_ones():
    kernels, biases = (jnp.stack([jnp.asarray(layers(s)[i], jnp.float32) for s in (0, 5)]) for i in (0, 1))
    grams = [jax.tree.map(lambda x: x.astype(jnp.float32), gram(inputs(s))) for s in (1, 6)]
    weights = jnp.array([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grams)
    together = jax.jit(jax.vmap(merge))(kernels, biases, stacked, weights)
    for i in range(2):
        alone = merged(kernels[i], biases[i], grams[i], weights[i], 0.75, 1e-6)
        near(together.kernel[i], alone.kernel, 1e-5)
        near(together.bias[i], alone.bias, 1e-5)


def test_settings_side_by_side_equal_single_ones():
    """A sweep over alpha and ridge, of layers of two widths."""
    kernels, biases = (x.astype(np.float32) for x in layers())
    grams = jax.tree.map(lambda x: x.astype(jnp.float32), gram(inputs()))
    alphas, ridges = jnp.array([0.1, 0.75, 1.0]), jnp.array([1e-6, 1e-2, 1.0])
    sweep = jax.jit(jax.vmap(lambda alpha, ridge: merged(kernels, biases, grams, (1.0, 2.0, 1.0), alpha, ridge)))
    together = sweep(alphas, ridges)
    for i in range(3):
        alone = merged(kernels, biases, grams, (1.0, 2.0, 1.0), alphas[i], ridges[i])
        chex.assert_trees_all_close(tree.take(together, i), alone, rtol=1e-5, atol=1e-6)


# --- measuring ------------------------------------------------------------------------------------------------------


@functools.cache
def client(padding=0, fill=0.0):
    """One client of 10 examples among ``10 + padding`` places, a model with random biases, and its own layer inputs."""
    federation = tiny_federation([[10]], padding=padding, fill=fill)
    examples = jax.tree.map(lambda x: x[0, 0], federation.clients)
    backbone = tiny_backbone()
    rng = np.random.default_rng(4)
    variables = jax.jit(backbone.init)(jax.random.key(1))
    variables = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), variables)
    return backbone, variables, examples


def measure(padding=0, fill=0.0, gram="sum"):
    backbone, variables, examples = client(padding, fill)
    finish = per_row if gram == "mean" else lambda grams: grams
    return jax.jit(lambda v, e: finish(measure_grams(backbone, v, e)))(variables, examples)


def expected_grams():
    backbone, variables, examples = client()
    seen = backbone.dense_inputs(variables, examples.inputs)
    return {name: (x.T @ x, x.sum(0), np.float32(len(x))) for name, x in seen.items()}


def near_grams(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, wanted in expected.items():
        for a, b in zip(actual[name], wanted):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)  # sums of ten values of order 10


def test_grams_are_those_of_the_layers_inputs():
    expected = expected_grams()
    assert sorted(expected) == ["dense", "head"]
    assert expected["dense"][0].shape == (16, 16)
    assert expected["head"][0].shape == (5, 5)
    near_grams(measure(), expected)


def test_dense_inputs_are_what_the_layers_read():
    backbone, variables, examples = client()
    seen = backbone.dense_inputs(variables, examples.inputs)
    dense, head = variables.params["dense"], variables.params["head"]
    z = jnp.tanh(seen["dense"] @ dense["kernel"] + dense["bias"])
    near(seen["head"], z, 1e-5)
    near(seen["head"] @ head["kernel"] + head["bias"], backbone.apply(variables, examples.inputs), 1e-5)


@pytest.mark.parametrize(("size", "padding"), [(256, 4), (7, 4), (5, 4), (1, 4), (7, 0), (3, 0)])
def test_grams_ignore_padding_however_the_pass_is_cut(monkeypatch, size, padding):
    monkeypatch.setattr(local, "PASS_SIZE", size)
    near_grams(measure(padding, fill=np.nan), expected_grams())


def test_mean_grams_are_per_row(monkeypatch):
    expected = {name: (g / 10, total / 10, 1.0) for name, (g, total, _) in expected_grams().items()}
    near_grams(measure(padding=4, fill=np.nan, gram="mean"), expected)
    monkeypatch.setattr(local, "PASS_SIZE", 5)
    near_grams(measure(padding=4, fill=np.nan, gram="mean"), expected)


@pytest.mark.parametrize("rule", ["sum", "mean"])
def test_a_client_without_examples_measures_zeros(rule):
    backbone, variables, examples = client()
    empty = examples._replace(mask=jnp.zeros(10, bool))
    grams = measure_grams(backbone, variables, empty)
    assert all(not x.any() for x in jax.tree.leaves(per_row(grams) if rule == "mean" else grams))


def test_a_station_adds_the_grams_of_its_active_clients():
    grams = {"dense": jax.tree.map(lambda x: x.astype(jnp.float32), gram(inputs()))}
    summed = add_grams(grams, jnp.array([20.0, 0.0, 0.5]))["dense"]
    for actual, parts in zip(summed, grams["dense"]):
        near(actual, parts[0] + parts[2], 1e-5)
