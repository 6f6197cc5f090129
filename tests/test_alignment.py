"""Permutation groups and filter alignment: functions are kept, known permutations are undone, matchings are optimal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from scipy.optimize import linear_sum_assignment
from tiny import tiny_backbone

from fedjax_dg import tree
from fedjax_dg.aggregators import Gram
from fedjax_dg.alignment import Axis, Group, Matching, align, assign, filter_cost, match, permute, take_units
from fedjax_dg.backbones import Backbone, lenet5
from fedjax_dg.backbones.backbone import max_pool
from fedjax_dg.types import Variables


class NormNet(nn.Module):
    """Batch norm after both convolutions, a feature map of 2 x 3 before the flatten, widths 3 and 5."""

    def setup(self):
        self.conv1, self.conv2 = nn.Conv(3, (3, 3)), nn.Conv(5, (3, 3), padding="VALID")
        self.norm1, self.norm2 = nn.BatchNorm(), nn.BatchNorm()
        self.dense, self.head = nn.Dense(4), nn.Dense(3)

    def features(self, x, train, mask=None):
        x = nn.relu(self.norm1(self.conv1(x), use_running_average=not train))
        x = nn.relu(max_pool(self.norm2(self.conv2(x), use_running_average=not train)))
        return nn.tanh(self.dense(x.reshape(x.shape[0], -1)))

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def norm_backbone():
    def group(conv, norm, size, consumer, grams=()):
        leaves = (f"params/{conv}/bias", f"params/{norm}/scale", f"params/{norm}/bias")
        leaves += (f"batch_stats/{norm}/mean", f"batch_stats/{norm}/var")
        followers = tuple(Axis(leaf, 0) for leaf in leaves)
        return Group(conv, size, (Axis(f"params/{conv}/kernel", 3),), followers, (consumer,), grams)

    groups = (
        group("conv1", "norm1", 3, Axis("params/conv2/kernel", 2)),
        group("conv2", "norm2", 5, Axis("params/dense/kernel", 0, 6), grams=(("dense", 6),)),
    )
    return Backbone(NormNet(), input_shape=(6, 8, 2), num_features=4, num_classes=3, groups=groups)


ROUNDING = 5e-7  # of 2 - 2 cos, in float32
# dense layers too, where a network's groups name them
EVERY_LAYER = Matching(align_dense=True)

NETS = {"lenet5": lambda: lenet5(6), "tiny": tiny_backbone, "norm": norm_backbone}


@functools.cache
def backbone_of(net):
    return NETS[net]()


@functools.cache
def model(net, seed=0):
    """Every leaf random (a zero bias could be left behind unseen), variances positive."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(backbone_of(net).init, jax.random.key(0))
    flat = traverse_util.flatten_dict(shapes._asdict(), sep="/")
    flat = {k: rng.normal(size=v.shape) / max(1.0, np.sqrt(np.prod(v.shape[:-1]))) for k, v in flat.items()}
    flat = {k: jnp.asarray(np.abs(v) + 0.5 if k.endswith("var") else v, jnp.float32) for k, v in flat.items()}
    return Variables(**{"batch_stats": {}, **traverse_util.unflatten_dict(flat, sep="/")})


@functools.cache
def outputs_of(net):
    """Jitted variables -> evaluation logits, training logits and the batch statistics left behind."""
    backbone = backbone_of(net)
    inputs = jnp.asarray(np.random.default_rng(7).normal(size=(8, *backbone.input_shape)), jnp.float32)

    def outputs(variables):
        trained = backbone.forward(variables, inputs, jnp.ones(8, bool), jax.random.key(0))
        return backbone.apply(variables, inputs), trained.logits, trained.batch_stats

    return jax.jit(outputs)


def distance(net, one, other):
    """Largest difference of two models' evaluation or training logits, in units of the largest logit."""
    (a, b, _), (c, d, _) = outputs_of(net)(one), outputs_of(net)(other)
    return float(max(abs(a - c).max() / abs(a).max(), abs(b - d).max() / abs(b).max()))


def cycle(size, seed=0):
    """A permutation that is one long cycle: nothing stays, and it is not its own inverse."""
    path = np.random.default_rng(seed).permutation(size)
    order = np.empty(size, int)
    order[path] = np.roll(path, -1)
    return jnp.asarray(order)


def shuffle(net, variables, seed):
    for group in backbone_of(net).groups:
        variables = permute(variables, group, cycle(group.size, seed))
    return variables


def edit_filters(net, variables, edit):
    """``edit(kernel [..., filters])`` applied to the kernel of every group."""
    flat = traverse_util.flatten_dict(variables._asdict(), sep="/")
    for group in backbone_of(net).groups:
        for axis in group.producers:
            flat[axis.leaf] = edit(flat[axis.leaf])
    return Variables(**{"batch_stats": {}, **traverse_util.unflatten_dict(flat, sep="/")})


def grams_of(net, seed=None):
    """Random statistics of the gram layers' inputs; with a seed, of inputs in the order that ``shuffle`` leaves them."""
    grams = {}
    for group in backbone_of(net).groups:
        for layer, positions in group.grams:
            x = np.random.default_rng(3).normal(size=(9, positions * group.size)).astype(np.float32)
            gram, total = x.T @ x, x.sum(0)
            if seed is not None:
                order = np.asarray(cycle(group.size, seed))
                index = np.concatenate([p * group.size + order for p in range(positions)])
                gram, total = gram[index][:, index], total[index]
            grams[layer] = Gram(jnp.asarray(gram), jnp.asarray(total), jnp.asarray(9.0))
    return grams


@functools.cache
def alignments(net):
    """Pairs (model, reference) of interest and their alignments, all from one compiled program."""
    reference = model(net)
    first = backbone_of(net).groups[0]
    rotated = jnp.arange(first.size).at[jnp.arange(3)].set(jnp.array([1, 2, 0]))
    dead = edit_filters(net, reference, lambda k: k.at[..., [0, 2]].set(0.0))
    lame = edit_filters(net, reference, lambda k: k.at[..., 0].set(0.0))
    twins = edit_filters(net, reference, lambda k: k.at[..., 2].set(k[..., 0]))
    zero = edit_filters(net, reference, jnp.zeros_like)
    pairs = {
        "identical": (reference, reference, None),
        **{f"shuffled{s}": (shuffle(net, reference, s), reference, s) for s in range(3)},
        "three-cycle": (permute(reference, first, rotated), reference, None),
        "independent": (model(net, 1), reference, None),
        "dead": (dead, dead, None),
        "dead elsewhere": (shuffle(net, lame, 1), lame, 1),
        "twins": (twins, twins, None),
        "zero": (zero, zero, None),
        "zero reference": (reference, zero, None),
        "zero model": (zero, reference, None),
    }
    groups = backbone_of(net).groups
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *column) for column in zip(*((m, r) for m, r, _ in pairs.values()))
    ]
    seeds = [seed for _, _, seed in pairs.values()]
    grams = jax.tree.map(lambda *x: jnp.stack(x), *(grams_of(net, seed) for seed in seeds))
    solved = jax.jit(jax.vmap(lambda m, r, g: align(m, r, groups, g, EVERY_LAYER)))(*stacked, grams)
    return {name: (*pairs[name][:2], tree.take(solved, i)) for i, name in enumerate(pairs)}


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


every_net = pytest.mark.parametrize("net", NETS)


# --- permutation groups ---------------------------------------------------------------------------------------------


def test_take_units_moves_channels_within_each_position():
    x = jnp.arange(12).reshape(2, 6)  # two positions of three channels
    expected = [[1, 2, 0, 4, 5, 3], [7, 8, 6, 10, 11, 9]]
    assert take_units(x, jnp.array([1, 2, 0]), axis=1, positions=2).tolist() == expected
    assert take_units(x.T, jnp.array([1, 2, 0]), axis=0, positions=2).T.tolist() == expected


@every_net
def test_permuting_a_group_keeps_the_function(net):
    for group in backbone_of(net).groups:
        permuted = permute(model(net), group, cycle(group.size))
        assert distance(net, model(net), permuted) < 1e-5
    assert distance(net, model(net), shuffle(net, model(net), 0)) < 1e-5


def test_permuting_moves_the_batch_statistics_of_training():
    group = backbone_of("norm").groups[0]
    _, _, before = outputs_of("norm")(model("norm"))
    _, _, after = outputs_of("norm")(permute(model("norm"), group, cycle(3)))
    for leaf in ("mean", "var"):
        np.testing.assert_allclose(after["norm1"][leaf], before["norm1"][leaf][cycle(3)], rtol=1e-5, atol=1e-6)


@every_net
def test_leaving_one_leaf_behind_changes_the_function(net):
    for group in backbone_of(net).groups:
        for role in ("producers", "followers", "consumers"):
            axes = getattr(group, role)
            for left in axes:
                part = group._replace(**{role: tuple(axis for axis in axes if axis != left)})
                assert distance(net, model(net), permute(model(net), part, cycle(group.size))) > 1e-2, left.leaf


def test_flatten_rows_in_channel_first_order_change_the_function():
    group = backbone_of("lenet5").groups[1]
    permuted = permute(model("lenet5"), group._replace(consumers=()), cycle(16))
    kernel = permuted.params["dense1"]["kernel"].reshape(16, 25, -1)[cycle(16)].reshape(400, -1)
    permuted.params["dense1"]["kernel"] = kernel
    assert distance("lenet5", model("lenet5"), permuted) > 1e-2


def test_a_leaf_that_the_model_lacks_is_an_error():
    group = backbone_of("tiny").groups[0]._replace(followers=(Axis("params/cnov/bias", 0),))
    with pytest.raises(KeyError, match="cnov"):
        permute(model("tiny"), group, cycle(4))


# --- align ----------------------------------------------------------------------------------------------------------


@every_net
def test_a_shuffled_copy_is_put_back_exactly(net):
    for seed in range(3):
        shuffled, reference, aligned = alignments(net)[f"shuffled{seed}"]
        assert distance(net, reference, shuffled) < 1e-5
        assert_same(aligned.variables, reference)
        assert_same(aligned.grams, grams_of(net))
        for group in backbone_of(net).groups:
            info = aligned.info[group.name]
            assert info["identity_fraction"] == 0.0
            assert info["cost_before"] > 1.0
            assert info["cost_after"] < ROUNDING * group.size


@every_net
def test_a_three_cycle_is_undone_and_counted(net):
    _, reference, aligned = alignments(net)["three-cycle"]
    assert_same(aligned.variables, reference)
    first, *others = backbone_of(net).groups
    np.testing.assert_allclose(aligned.info[first.name]["identity_fraction"], 1 - 3 / first.size, rtol=1e-6)
    assert all(aligned.info[group.name]["identity_fraction"] == 1.0 for group in others)


@every_net
def test_the_mean_of_shuffled_copies_is_the_model_once_aligned(net):
    triples = [alignments(net)[f"shuffled{seed}"] for seed in range(3)]
    reference = model(net)
    mean = jax.tree.map(lambda *x: sum(x) / 3, *(aligned.variables for _, _, aligned in triples))
    plain = jax.tree.map(lambda *x: sum(x) / 3, *(shuffled for shuffled, _, _ in triples))
    assert distance(net, reference, mean) < 1e-5
    assert distance(net, reference, plain) > 1e-2


@every_net
@pytest.mark.parametrize("case", ["identical", "dead", "twins", "zero"])
def test_the_reference_itself_stays_as_it_is(net, case):
    given, _, aligned = alignments(net)[case]
    assert_same(aligned.variables, given)
    assert_same(aligned.grams, grams_of(net))
    for group in backbone_of(net).groups:
        info = aligned.info[group.name]
        assert info["identity_fraction"] == 1.0
        assert 0.0 <= info["cost_after"] <= ROUNDING * group.size
        assert 0.0 <= info["cost_before"] <= ROUNDING * group.size


@every_net
def test_a_dead_filter_finds_its_place_too(net):
    _, reference, aligned = alignments(net)["dead elsewhere"]
    assert_same(aligned.variables, reference)
    assert_same(aligned.grams, grams_of(net))


@every_net
@pytest.mark.parametrize("case", ["independent", "dead elsewhere", "zero reference", "zero model"])
def test_aligning_keeps_the_function_and_never_costs(net, case):
    given, reference, aligned = alignments(net)[case]
    assert tree.all_finite(aligned)
    assert distance(net, given, aligned.variables) < 1e-5
    for group in backbone_of(net).groups:
        assert aligned.info[group.name]["cost_after"] <= aligned.info[group.name]["cost_before"]


@every_net
def test_an_independent_model_comes_nearer_to_the_reference(net):
    given, reference, aligned = alignments(net)["independent"]

    def gap(variables, leaf):
        flat = traverse_util.flatten_dict(variables._asdict(), sep="/")
        goal = traverse_util.flatten_dict(reference._asdict(), sep="/")
        rows = (np.moveaxis(np.asarray(x[leaf]), 3, 0).reshape(x[leaf].shape[3], -1) for x in (flat, goal))
        a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rows)
        return ((a - b) ** 2).sum()

    first = backbone_of(net).groups[0]
    before, after = (gap(x, first.producers[0].leaf) for x in (given, aligned.variables))
    np.testing.assert_allclose(aligned.info[first.name]["cost_before"], before, rtol=1e-5)
    np.testing.assert_allclose(aligned.info[first.name]["cost_after"], after, rtol=1e-5)
    assert after < before


def test_aligning_one_model_equals_aligning_a_stack():
    groups = backbone_of("tiny").groups
    one = jax.jit(lambda m, r: align(m, r, groups))
    for case in ("shuffled0", "independent", "twins"):
        given, reference, aligned = alignments("tiny")[case]
        alone = one(given, reference)
        assert alone.grams == {}
        assert_same(alone.variables, aligned.variables)


def test_align_is_one_device_program():
    def programme(function, *inputs):
        return str(jax.make_jaxpr(function)(*inputs))

    host = jax.ShapeDtypeStruct((), jnp.float32)
    assert "callback" in programme(lambda x: jax.pure_callback(np.sin, host, x), 1.0)  # this is how one would show
    models = model("lenet5"), model("lenet5", 1)
    text = programme(lambda m, r: align(m, r, backbone_of("lenet5").groups, grams_of("lenet5")), *models)
    assert "while" in text
    assert "callback" not in text


# --- costs and matchings --------------------------------------------------------------------------------------------


def filters(size, width=12, seed=0):
    return np.random.default_rng(seed).normal(size=(size, width)).astype(np.float32)


jitted_assign, jitted_match = jax.jit(assign), jax.jit(match)


def test_filter_cost_is_the_squared_distance_of_unit_filters():
    a, b = filters(5), filters(5, seed=1) * 7.0
    b[3] = 0.0
    units = a / np.linalg.norm(a, axis=1, keepdims=True), b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-9)
    expected = ((units[0][:, None] - units[1][None]) ** 2).sum(-1)
    np.testing.assert_allclose(filter_cost(jnp.asarray(a), jnp.asarray(b)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_assign_is_an_optimal_bijection(size):
    rng = np.random.default_rng(size)
    costs = rng.normal(size=(6, size, size)).astype(np.float32)
    costs[4:] = rng.integers(0, 3, size=(2, size, size))  # ties
    for cost, order in zip(costs, jax.jit(jax.vmap(assign))(costs)):
        assert sorted(order.tolist()) == list(range(size))
        best = cost[linear_sum_assignment(cost)].sum()
        np.testing.assert_allclose(cost[np.arange(size), order].sum(), best, rtol=1e-5, atol=1e-6)


def test_assign_returns_columns_by_row():
    """A planted permutation that is not its own inverse: the inverse would be a different answer."""
    order = np.asarray(cycle(5))
    cost = np.ones((5, 5), np.float32)
    cost[np.arange(5), order] = 0.0
    assert jitted_assign(cost).tolist() == order.tolist()
    assert assign(jnp.asarray(cost)).tolist() == order.tolist()  # outside jit
    assert order.tolist() != np.argsort(order).tolist()


def test_squared_distance_and_cosine_give_the_same_assignment():
    for seed in range(10):
        a, b = filters(5, seed=seed), filters(5, seed=seed + 100)
        cosine = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (b / np.linalg.norm(b, axis=1, keepdims=True)).T
        squared = filter_cost(jnp.asarray(a), jnp.asarray(b))
        np.testing.assert_array_equal(jitted_assign(squared), jitted_assign(jnp.asarray(-cosine)))


@pytest.mark.parametrize("size", [5, 16])
def test_match_is_the_assignment_when_a_true_matching_exists(size):
    for seed in range(4):
        reference, order = filters(size, seed=seed), np.asarray(cycle(size, seed))
        noisy = reference + 0.1 * filters(size, seed=seed + 50)
        shuffled = noisy[np.argsort(order)]  # so that row a meets its twin at order[a]
        cost = filter_cost(jnp.asarray(reference), jnp.asarray(shuffled))
        np.testing.assert_array_equal(jitted_match(cost, 0.05), order)
        np.testing.assert_array_equal(jitted_assign(cost), order)


def transport_plan(cost, epsilon, iterations=3000):
    """Sinkhorn by the book, in float64, on the scale of one unit of mass a row."""
    kernel = np.exp(-np.asarray(cost, np.float64) / epsilon)
    columns = np.ones(len(kernel))
    for _ in range(iterations):
        rows = 1.0 / (kernel @ columns)
        columns = 1.0 / (kernel.T @ rows)
    return rows[:, None] * kernel * columns


def test_match_rounds_the_plan_to_a_bijection_where_row_maxima_are_none():
    """Independent filters: the regularised plan's best permutation, whatever the cost's scale; not the cost's own."""
    cost = filter_cost(jnp.asarray(filters(16, seed=14)), jnp.asarray(filters(16, seed=15)))
    plan = transport_plan(cost, 0.5 * float(cost.std()))
    np.testing.assert_allclose(plan.sum(0), 1.0, rtol=1e-6)
    assert len(set(plan.argmax(1).tolist())) < 16
    order = linear_sum_assignment(-plan)[1]
    assert order.tolist() != linear_sum_assignment(cost)[1].tolist()
    for scale in (1.0, 0.01):
        np.testing.assert_array_equal(jitted_match(scale * cost, 0.5), order)


@pytest.mark.parametrize("epsilon", [0.05, 1e6])
def test_match_never_costs_more_than_the_identity(epsilon):
    """The rounding of a plan blurred by far too large an epsilon would, for some of these."""
    for seed in range(20):
        reference = filters(16, seed=seed)
        reference[[2, 4]] = reference[0]
        cost = filter_cost(jnp.asarray(reference), jnp.asarray(reference + 0.8 * filters(16, seed=seed + 70)))
        order = np.asarray(jitted_match(cost, epsilon))
        assert sorted(order.tolist()) == list(range(16))
        exact = np.asarray(cost, np.float64)
        assert exact[np.arange(16), order].sum() <= np.trace(exact) + 1e-5


def test_match_keeps_the_identity_unless_a_matching_is_clearly_cheaper():
    identity, swapped = [0, 1, 2, 3, 4], [1, 0, 2, 3, 4]
    for gain, order in ((0.0, identity), (2e-6, identity), (2e-3, swapped)):
        cost = jnp.ones((5, 5)).at[0, 1].add(-gain / 2).at[1, 0].add(-gain / 2)
        assert jitted_match(cost, 0.05).tolist() == order


def test_match_keeps_the_identity_among_equal_costs():
    for value in (0.0, 1.0, 2.0):
        assert jitted_match(jnp.full((5, 5), value), 0.05).tolist() == [0, 1, 2, 3, 4]
