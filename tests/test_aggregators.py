"""Averaging, server optimizers by hand, and HFedATM by its reductions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import tree
from fedjax_dg.aggregators import WEIGHTINGS, Gram, fedadam, fedavgm, hfedatm, mean, regmean, server_optimizer
from fedjax_dg.alignment import permute
from fedjax_dg.backbones import lenet5
from fedjax_dg.local import merge_models
from fedjax_dg.types import Examples, Variables

GAMMA = jnp.array([2.0, 1.0, 3.0])


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def one_leaf(*values, batch_stats=None):
    """Models [n] of a single parameter."""
    return Variables({"w": jnp.asarray(values)}, {} if batch_stats is None else {"m": jnp.asarray(batch_stats)})


def merge_plainly(rule, start, models, weights, state=()):
    return rule.merge(None, state, start, models, jnp.asarray(weights), ())


def near(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# --- mean -----------------------------------------------------------------------------------------------------------


def test_mean_weighs_models():
    models = one_leaf(2.0, 10.0, batch_stats=[0.0, 4.0])
    merged, state, info = merge_plainly(mean(), tree.take(models, 0), models, [3.0, 1.0])
    assert merged == Variables({"w": 4.0}, {"m": 1.0})
    assert (state, info) == ((), {})


def test_mean_with_no_weight_keeps_the_start():
    start = one_leaf(5.0, batch_stats=7.0)
    models = one_leaf([2.0], [10.0], batch_stats=[0.0, 4.0])
    merged, _, _ = merge_plainly(mean(), start, models, [0.0, 0.0])
    assert_same(merged, start)


def test_mean_keeps_dtypes():
    leaves = {t: jnp.asarray([[3.0, 8.0], [3.0, 16.0]], t) for t in ("bfloat16", "float16", "float32")}
    models = Variables(leaves, {})
    merged, _, _ = merge_plainly(mean(), tree.take(models, 0), models, [1.0, 3.0])
    for name, leaf in merged.params.items():
        assert leaf.dtype == name
        assert leaf.tolist() == [3.0, 14.0]


def test_a_counter_that_all_models_share_stays():
    """Rounded, not cut off: in float32 the shares of ten models may add up to a little less than 1."""
    counts = jnp.arange(1, 40, dtype=jnp.int32)
    models = Variables({}, {"count": jnp.broadcast_to(counts, (10, 39))})
    merged, _, _ = merge_plainly(mean(), tree.take(models, 0), models, np.arange(1.0, 11.0))
    assert merged.batch_stats["count"].dtype == jnp.int32
    np.testing.assert_array_equal(merged.batch_stats["count"], counts)


@pytest.mark.parametrize(
    ("name", "expected"), [("samples", [10.0, 0.0, 3.0]), ("clients", [2.0, 0.0, 1.0]), ("uniform", [1.0, 0.0, 1.0])]
)
def test_weightings(name, expected):
    num_examples, num_clients = jnp.array([10, 0, 3]), jnp.array([2, 0, 1])
    for rule in (mean(name), hfedatm(weighting=name), fedavgm(weighting=name), fedadam(weighting=name)):
        weights = rule.weigh(num_examples, num_clients)
        assert weights.dtype == jnp.float32
        assert weights.tolist() == expected
    assert sorted(WEIGHTINGS) == ["clients", "samples", "uniform"]


def test_default_weightings():
    counts = jnp.array([10, 4]), jnp.array([2, 1])
    assert mean().weigh(*counts).tolist() == [10.0, 4.0]
    assert hfedatm().weigh(*counts).tolist() == [2.0, 1.0]


# --- server optimizers ----------------------------------------------------------------------------------------------


def test_sgd_of_one_at_the_server_changes_nothing():
    models = one_leaf([1.0, -3.0], [4.0, 2.0], batch_stats=[0.0, 4.0])
    start = one_leaf(0.3, -0.7, batch_stats=9.0)
    rule = server_optimizer(mean(), optax.sgd(1.0))
    merged, _, _ = merge_plainly(rule, start, models, [3.0, 1.0], rule.init(start, 2))
    expected, _, _ = merge_plainly(mean(), start, models, [3.0, 1.0])
    near(merged, expected, 1e-6)
    assert merged.batch_stats["m"] == 1.0


def two_steps(rule, first, second):
    """From w = 1, with models whose means are ``first`` and ``second``."""
    start, seen = Variables({"w": jnp.array(1.0)}, {}), []
    state = rule.init(start, 2)
    for goal in (first, second):
        start, state, _ = merge_plainly(rule, start, one_leaf(goal - 1.0, goal + 3.0), [3.0, 1.0], state)
        seen.append(float(start.params["w"]))
    return seen


def test_fedavgm_by_hand():
    # gradient 1 - 0.6 = 0.4; w = 1 - 0.5 * 0.4 = 0.8
    # gradient 0.8 - 1.0 = -0.2; momentum 0.9 * 0.4 - 0.2 = 0.16; w = 0.8 - 0.5 * 0.16 = 0.72
    near(two_steps(fedavgm(server_lr=0.5, server_momentum=0.9), 0.6, 1.0), [0.8, 0.72], 1e-6)


def test_fedadam_by_hand():
    # Bias-corrected moments; step 1: m = 0.4, v = 0.16: w = 1 - 0.1 * 0.4 / (0.4 + 0.1) = 0.92
    # step 2, gradient 0.92 - 1.0 = -0.08: m = (0.5 * 0.2 + 0.5 * -0.08) / (1 - 0.25) = 0.06 / 0.75 = 0.08,
    # v = (0.75 * 0.04 + 0.25 * 0.0064) / (1 - 0.5625) = 0.0316 / 0.4375: w = 0.92 - 0.1 * 0.08 / (sqrt(v) + 0.1)
    second = 0.92 - 0.1 * 0.08 / (np.sqrt(0.0316 / 0.4375) + 0.1)
    rule = fedadam(server_lr=0.1, server_b1=0.5, server_b2=0.75, server_eps=0.1)
    near(two_steps(rule, 0.6, 1.0), [0.92, second], 1e-6)


def test_a_server_optimizer_measures_what_its_rule_measures():
    inner = hfedatm()
    rule = server_optimizer(inner, optax.sgd(1.0))
    assert rule.measure is inner.measure
    assert rule.combine is inner.combine
    assert rule.weigh is inner.weigh


# --- hfedatm --------------------------------------------------------------------------------------------------------


BACKBONES = {"tiny": tiny_backbone, "lenet5": lambda: lenet5(6)}


@functools.cache
def backbone_of(net):
    return BACKBONES[net]()


@functools.cache
def model(net, seed):
    """Random in every leaf, biases included."""
    shapes = jax.eval_shape(backbone_of(net).init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    scale = {1: 1.0, 2: 0.3, 4: 0.3}
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * scale[x.ndim], jnp.float32), shapes)


def grams_of(net, seed):
    """The statistics of 30 random inputs of every dense layer."""
    rng, grams = np.random.default_rng(seed), {}
    for layer, leaves in model(net, 0).params.items():
        if leaves["kernel"].ndim == 2:
            x = rng.normal(size=(30, leaves["kernel"].shape[0])).astype(np.float32) + 0.3
            grams[layer] = Gram(jnp.asarray(x.T @ x), jnp.asarray(x.sum(0)), jnp.asarray(30.0))
    return grams


def shuffle(net, variables, grams, seed):
    """Both with the units of every group in another order, none of them where it was."""
    for group in backbone_of(net).groups:
        path = np.random.default_rng(seed).permutation(group.size)
        order = np.empty_like(path)
        order[path] = np.roll(path, -1)
        variables = permute(variables, group, jnp.asarray(order))
        for layer, positions in group.grams:
            index = np.concatenate([p * group.size + order for p in range(positions)])
            gram, total, rows = grams[layer]
            grams = {**grams, layer: Gram(gram[index][:, index], total[index], rows)}
    return variables, grams


@functools.cache
def merger(net="tiny", **options):
    """Compiled once per choice of static options; numbers are traced."""
    backbone = backbone_of(net)

    def merge(start, models, weights, grams, numbers):
        rule = hfedatm(**options, **numbers)
        merged, state, _, info = merge_models(backbone, rule, (), start, models, weights, grams)
        assert state == ()
        return merged, info

    return jax.jit(merge)


def merged(start, models, grams, weights=GAMMA, net="tiny", numbers=None, **options):
    numbers = {"alpha": 0.75, "ridge": 1e-6, "epsilon": 0.05} | (numbers or {})
    return merger(net, **options)(start, models, weights, grams, numbers)


def stations(net="tiny", spread=0.05):
    """A start and three stations near it, with their Grams: alignment has nothing to do."""
    start = model(net, 0)
    models = stack([jax.tree.map(lambda a, b: a + spread * b, start, model(net, s)) for s in (1, 2, 3)])
    return start, models, stack([grams_of(net, s) for s in (4, 5, 6)])


ORDERS = (0, 1, 3)  # seeds: three different orders, also of four units


def shuffled_stations(net="tiny"):
    """The same stations, each in an order of its own."""
    start, models, grams = stations(net)
    pairs = [shuffle(net, tree.take(models, s), tree.take(grams, s), ORDERS[s]) for s in range(3)]
    return start, stack([v for v, _ in pairs]), stack([g for _, g in pairs])


def weighted(models, weights=GAMMA):
    return tree.weighted_mean(models, weights)


def test_hfedatm_without_its_parts_is_the_mean_by_clients():
    start, models, _ = stations()
    rule = hfedatm(fot=False, regmean=False)
    result, info = merged(start, models, {}, fot=False, regmean=False)
    near(result, weighted(models), 1e-6)
    assert info == {}
    assert rule.measure(None, None, None, None, None, ()) == {}
    assert rule.combine({}, GAMMA) == {}
    plain = mean("clients")
    near(plain.merge(None, (), start, models, GAMMA, ())[0], result, 1e-6)


def test_hfedatm_with_regmean_alone_merges_dense_layers_by_it():
    start, models, grams = stations()
    for numbers in ({"alpha": 0.75, "ridge": 1e-6}, {"alpha": 0.2, "ridge": 0.5}):
        result, info = merged(start, models, grams, numbers=numbers, fot=False)
        near(result.params["conv"], weighted(models).params["conv"], 1e-6)
        assert sorted(info) == ["regmean"]
        expected = regmean(models, grams, GAMMA, **numbers).variables
        near(result, expected)
        for layer in ("dense", "head"):
            assert abs(expected.params[layer]["kernel"] - weighted(models).params[layer]["kernel"]).max() > 1e-3
            assert info["regmean"][layer]["residual"] < 1e-5
            assert info["regmean"][layer]["fallback"] == 0.0


def test_hfedatm_passes_its_bias_rule_on():
    start, models, grams = stations()
    result, _ = merged(start, models, grams, fot=False, bias="mean")
    for layer in ("dense", "head"):
        near(result.params[layer]["bias"], weighted(models).params[layer]["bias"], 1e-6)


def test_hfedatm_at_alpha_one_with_equal_grams_is_the_mean():
    start, models, grams = stations()
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), grams)
    result, _ = merged(start, models, equal, weights=jnp.full(3, 4.0), numbers={"alpha": 1.0}, fot=False)
    near(result, weighted(models, jnp.ones(3)))


def test_hfedatm_with_alignment_alone_is_the_mean_in_the_order_of_the_start():
    start, models, _ = stations()
    _, shuffled, _ = shuffled_stations()
    result, info = merged(start, shuffled, {}, regmean=False)
    near(result, weighted(models), 1e-6)
    assert sorted(info) == ["fot", "outputs_moved"]
    assert (info["outputs_moved"] < 1e-5).all()
    assert info["fot"]["conv"]["identity_fraction"].tolist() == [0.0, 0.0, 0.0]
    assert (info["fot"]["conv"]["cost_after"] < info["fot"]["conv"]["cost_before"]).all()


@pytest.mark.parametrize("net", [n if n == "tiny" else pytest.param(n, marks=pytest.mark.slow) for n in BACKBONES])
def test_hfedatm_undoes_the_order_of_every_station(net):
    """Grams included: merging stations in orders of their own is merging them as they were."""
    start, models, grams = stations(net)
    _, shuffled, moved = shuffled_stations(net)
    result, info = merged(start, shuffled, moved, net=net, align_dense=True)
    expected, _ = merged(start, models, grams, net=net, fot=False)
    near(result, expected)
    assert all(not x["identity_fraction"].any() for x in info["fot"].values())
    without, _ = merged(start, shuffled, moved, net=net, fot=False)
    assert max(abs(a - b).max() for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(expected))) > 0.1
    as_they_are, _ = merged(start, models, grams, net=net, align_dense=True)
    near(as_they_are, expected)


@pytest.mark.slow
def test_hfedatm_of_shuffled_copies_is_the_model():
    """LeNet-5, through the whole merge: the function of the mean is that of each copy."""
    backbone, start = backbone_of("lenet5"), model("lenet5", 0)
    copies = [shuffle("lenet5", start, grams_of("lenet5", s), s) for s in range(3)]
    models, grams = stack([v for v, _ in copies]), stack([g for _, g in copies])
    result, _ = merged(start, models, grams, net="lenet5", align_dense=True)
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 32, 3)), jnp.float32)
    logits = jax.jit(backbone.apply)
    expected, scale = logits(start, inputs), abs(logits(start, inputs)).max()
    assert abs(logits(result, inputs) - expected).max() < 1e-5 * scale
    assert abs(logits(weighted(models), inputs) - expected).max() > 1e-2 * scale


def test_hfedatm_of_identical_stations_is_that_model():
    _, _, grams = stations()
    far = model("tiny", 9)
    models = stack([far] * 3)
    for start in (far, model("tiny", 0)):
        result, info = merged(start, models, grams, fot=False)
        near(result, far)
    result, info = merged(far, models, grams)
    near(result, far)
    assert info["fot"]["conv"]["identity_fraction"].tolist() == [1.0, 1.0, 1.0]


def test_hfedatm_keeps_the_order_of_its_reference():
    """``first``: that of station 0, wherever the start is; ``previous_global``: that of the start."""
    _, shuffled, moved = shuffled_stations()
    original, models, grams = stations()
    at_start, _ = merged(original, models, grams, fot=False)
    elsewhere = model("tiny", 7)
    result, info = merged(elsewhere, shuffled, moved, reference="first")
    assert info["fot"]["conv"]["identity_fraction"][0] == 1.0
    expected, _ = shuffle("tiny", at_start, tree.take(grams, 0), ORDERS[0])
    near(result, expected)
    _, info = merged(elsewhere, shuffled, moved)
    assert info["fot"]["conv"]["identity_fraction"][0] < 1.0


def test_hfedatm_without_groups_aligns_nothing():
    start, models, grams = stations()
    bare = tiny_backbone()
    bare = type(bare)(bare.module, bare.input_shape, bare.num_features, bare.num_classes)
    result, _, _, info = jax.jit(lambda *x: merge_models(bare, hfedatm(), (), *x))(start, models, GAMMA, grams)
    near(result, merged(start, models, grams, fot=False)[0], 1e-6)
    assert info["fot"] == {}


def test_hfedatm_without_dense_layers_is_the_mean_of_aligned_models():
    start, _, _ = stations()
    _, shuffled, _ = shuffled_stations()
    near(merged(start, shuffled, {})[0], merged(start, shuffled, {}, regmean=False)[0], 1e-6)


def test_hfedatm_leaves_out_stations_of_weight_zero():
    start, models, grams = stations()
    result, _ = merged(start, models, grams, weights=jnp.array([2.0, 0.0, 3.0]), fot=False)
    two = jax.tree.map(lambda x: x[jnp.array([0, 2])], (models, grams))
    expected, _, _ = hfedatm(fot=False).merge(backbone_of("tiny"), (), start, two[0], jnp.array([2.0, 3.0]), two[1])
    near(result, expected)


@pytest.mark.parametrize("fot", [True, False])
def test_hfedatm_with_no_weight_keeps_the_start(fot):
    start, models, grams = stations()
    nothing = jax.tree.map(jnp.zeros_like, grams)
    result, info = merged(start, models, nothing, weights=jnp.zeros(3), **({} if fot else {"fot": False}))
    assert_same(result, start)
    assert info["regmean"]["dense"]["fallback"] == 1.0


@pytest.mark.parametrize(
    ("option", "given", "nearest"),
    [
        ("reference", "frist", "first"),
        ("bias", "correct", "corrected"),
        ("gram", "summ", "sum"),
        ("gram_at", "clients", "client"),
        ("matching", "independant", "independent"),
        ("cost", "square", "squared"),
        ("assignment", "hungary", "hungarian"),
        ("oversize", "blocks", "block"),
        ("bn_pool", "exactly", "exact"),
        ("weighting", "client", "clients"),
    ],
)
def test_hfedatm_names_the_nearest_option(option, given, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        hfedatm(**{option: given})
    if option == "weighting":
        for rule in (mean, fedavgm, fedadam):
            with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
                rule(weighting=given)


# --- what hfedatm uploads -------------------------------------------------------------------------------------------


def lenet5_message(places):
    backbone = backbone_of("lenet5")
    shape = functools.partial(jax.ShapeDtypeStruct, (places,))
    images = jax.ShapeDtypeStruct((places, 32, 32, 3), jnp.uint8)
    examples = Examples(images, shape(jnp.int32), shape(jnp.bool_), shape(jnp.int32))
    key = jax.random.key(0)
    rule = hfedatm(gram_at="client")
    return jax.eval_shape(lambda v, e: rule.measure(backbone, v, v, e, key, ()), model("lenet5", 0), examples)


def test_hfedatm_uploads_as_many_floats_as_it_says():
    message = lenet5_message(30)
    total = sum(leaf.size for leaf in jax.tree.leaves(message))
    assert total == sum(d**2 + d + 1 for d in (400, 120, 84))
    (stated,) = re.findall(r"LeNet-5:\s+([\d,]+) floats", hfedatm.__doc__)
    assert int(stated.replace(",", "")) == total
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(message))


def test_hfedatm_uploads_nothing_per_example():
    assert lenet5_message(30) == lenet5_message(31) == lenet5_message(700)


def test_hfedatm_measures_by_its_gram_rule():
    examples = jax.tree.map(lambda x: x[0, 0], tiny_federation([[7]]).clients)
    for gram, rows in (("sum", 7.0), ("mean", 1.0)):
        rule = hfedatm(gram=gram, gram_at="client")
        start = model("tiny", 0)
        message = rule.measure(backbone_of("tiny"), start, start, examples, None, ())
        assert sorted(message) == ["dense", "head"]
        assert all(statistics.rows == rows for statistics in message.values())
