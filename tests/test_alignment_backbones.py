"""Alignment on every backbone: known permutations are undone to the bit, residual streams, group norms, options, errors."""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_dg import tree
from fedjax_dg.aggregators import GramForm
from fedjax_dg.aggregators.grams import form_of, statistics
from fedjax_dg.aggregators.hfedatm import outputs_moved
from fedjax_dg.alignment import Alignment, Group, Matching, align, align_all, filter_cost, fot, match, permute
from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.backbones import Backbone, alexnet, lenet5, resnet, resnet18, resnet18_cifar, resnet50, vgg11, vgg11_bn
from fedjax_dg.backbones.backbone import max_pool
from fedjax_dg.backbones.layers import Layer, groups_of
from fedjax_dg.types import Variables

NETS = {
    "lenet5": lambda: lenet5(5),
    "alexnet": lambda: alexnet(5, image_size=64, dropout=0.0),
    "vgg11": lambda: vgg11(5, image_size=32, dropout=0.0),
    "vgg11_bn": lambda: vgg11_bn(5, image_size=32, dropout=0.0),
    "vgg11, group norm": lambda: vgg11(5, image_size=32, dropout=0.0, norm="group"),
    "resnet18": lambda: resnet18(5, image_size=32),
    "resnet18, group norm": lambda: resnet18(5, image_size=32, norm="group"),
    "resnet18_cifar": lambda: resnet18_cifar(5, image_size=8),
    "resnet50": lambda: resnet50(5, image_size=32),
}
EVERYDAY = ("lenet5", "resnet18", "resnet18, group norm")  # each is a program of its own to compile
# What aligns two models depends neither on widths nor on how many stages there are: thin and short nets every day, the
# real ones with -m slow.
plan_blocks = resnet.plan_blocks
THIN = {
    "alexnet": {"FILTERS": (6, 10, 8, 5, 7), "WIDTH": 12},
    "vgg": {"FILTERS": (8, 12, 8, 16, 12, 8, 16, 12), "WIDTH": 12},
    "resnet": {"STEM_FILTERS": 8, "plan_blocks": lambda depths, bottleneck: plan_blocks(depths[:2], bottleneck)},
    "layers": {"NORM_GROUPS": 4},
}
PARAMS = [
    pytest.param(
        (net, width), id=f"{net}-{width}", marks=() if net in EVERYDAY and width == "thin" else pytest.mark.slow
    )
    for net in NETS
    for width in ("thin", "full")
    if (net, width) != ("lenet5", "full")  # it is as thin as it is
]
FORMS = {"thin": 16, "full": 512}  # max_gram: the layer behind a flatten is oversize
PERMUTED = 2  # how many permuted copies; one model more has nothing to do with the reference
ROUNDING = 1e-5  # of a logit, in units of the largest


def random_model(backbone, seed=0) -> Variables:
    """Every leaf random, none zero, variances positive; scales below 1, or residual streams would grow with every block."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        x, name = rng.standard_normal(shape.shape, np.float32), path[-1].key
        if name == "kernel":
            x *= np.sqrt(2.0 / np.prod(shape.shape[:-1]), dtype=np.float32)
        return jnp.asarray({"var": 0.5 + abs(x), "scale": 0.4 + 0.5 * abs(x), "bias": 0.5 * x}.get(name, x))

    return jax.tree.map_with_path(leaf, jax.eval_shape(backbone.init, jax.random.key(0)))


def random_order(group: Group, rng):
    """Nothing stays in its place: a cycle of the norm groups, and a cycle within each of them."""

    def cycle(size):
        path, order = rng.permutation(size), np.empty(size, int)
        order[path] = np.roll(path, -1)
        return order

    if group.norm_groups == 1:
        return cycle(group.size)
    size = group.size // group.norm_groups
    return np.concatenate([g * size + cycle(size) for g in cycle(group.norm_groups)])


def random_orders(groups, seed):
    rng = np.random.default_rng(seed)
    return {group.name: random_order(group, rng) for group in groups}


def shuffled(variables, groups, orders):
    """The same function in every group's new order."""
    for group in groups:
        variables = permute(variables, group, orders[group.name])
    return variables


def copies_of(variables, groups, orders):
    """Models in several ``orders``, stacked."""
    return jax.jit(jax.vmap(lambda order: shuffled(variables, groups, order)))(stack(orders))


def random_grams(backbone, max_gram, seed=3):
    """Statistics of random inputs of every dense layer, in every form that it may take, by form."""
    rng, grams = np.random.default_rng(seed), {}
    widths = {
        k[7:-7]: x.shape[0] for k, x in leaves_of(shapes_of(backbone)).items() if k.endswith("/kernel") and x.ndim == 2
    }
    inputs = {layer: jnp.asarray(rng.normal(size=(9, width)), jnp.float32) for layer, width in widths.items()}
    for oversize in ("block", "channel", "lowrank", "diag"):
        form, grams[oversize] = GramForm(max_gram, oversize, rank=5), {}
        for layer, x in inputs.items():
            if oversize in ("block", "channel") and is_wide(backbone, layer, x.shape[1], max_gram):
                continue  # no smaller blocks
            taken, positions = form_of(layer, x.shape[1], backbone, form)
            grams[oversize][layer] = statistics(x, jnp.ones(9, bool), taken, positions, form.rank)
    return jax.tree.map(np.asarray, grams)


def is_wide(backbone, layer, width, max_gram):
    positions = max((n for group in backbone.groups for name, n in group.grams if name == layer), default=1)
    return width > max_gram and (positions == 1 or width // positions > max_gram)


def moved_grams(grams, groups, orders):
    """What random inputs in the new orders would have given: every form by its own axes, in NumPy."""
    grams = {oversize: dict(of_layers) for oversize, of_layers in grams.items()}
    for group in groups:
        order = orders[group.name]
        for layer, positions in group.grams:
            index = np.concatenate([p * group.size + order for p in range(positions)])
            for of_layers in grams.values():
                if layer in of_layers:
                    of_layers[layer] = moved(of_layers[layer], order, index)
    return grams


def moved(stats, order, index):
    total = stats.total[index]
    if hasattr(stats, "factor"):
        return stats._replace(factor=stats.factor[:, index], diagonal=stats.diagonal[index], total=total)
    if stats.gram.ndim == 2:
        return stats._replace(gram=stats.gram[index][:, index], total=total)
    if stats.gram.shape[-1] == 1:
        return stats._replace(gram=stats.gram[index], total=total)
    return stats._replace(gram=stats.gram[:, order][:, :, order], total=total)


def shapes_of(backbone):
    return jax.eval_shape(backbone.init, jax.random.key(0))


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# --- every backbone -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A net, its model, permuted copies and another model, all of them aligned to the first in one program."""

    backbone: Backbone
    groups: tuple[Group, ...]  # those that are matched
    reference: Variables
    grams: Any
    orders: list[dict[str, np.ndarray]]  # of the permuted copies
    models: Variables  # [PERMUTED + 1]
    aligned: Alignment
    evaluate: Any  # variables -> logits


@functools.lru_cache(maxsize=1)
def build(net, width) -> Case:
    backbone = NETS[net]()
    reference = random_model(backbone)
    # thin: dense layers too, by the solver that is the quickest to compile; full: as it is by default
    options = Matching(assignment="hungarian", align_dense=True) if width == "thin" else Matching()
    groups = fot.chosen(backbone.groups, reference, options)
    grams = random_grams(backbone, FORMS[width])
    orders = [random_orders(groups, seed) for seed in range(PERMUTED)]
    copies = copies_of(reference, groups, orders)
    models = jax.tree.map(lambda x, y: np.concatenate([x, y[None]]), copies, random_model(backbone, 1))
    all_grams = stack([*(moved_grams(grams, groups, order) for order in orders), grams])
    aligned = jax.jit(lambda m, r, g: align_all(m, r, groups, g, options))(models, reference, all_grams)
    images = jnp.asarray(np.random.default_rng(7).normal(size=(4, *backbone.input_shape)), jnp.float32)
    evaluate = jax.jit(lambda variables: backbone.apply(variables, images))
    return Case(backbone, groups, reference, grams, orders, models, aligned, evaluate)


@pytest.fixture
def thin(monkeypatch):
    for module, constants in THIN.items():
        for name, value in constants.items():
            monkeypatch.setattr(importlib.import_module(f"fedjax_dg.backbones.{module}"), name, value)


@pytest.fixture(scope="module", params=PARAMS)
def named(request):
    return request.param


@pytest.fixture
def case(named, request):
    """All tests of one net in a row, which holds one net's models at a time."""
    net, width = named
    if width == "thin":
        request.getfixturevalue("thin")
    return build(net, width)


def moved_by(case, one, other):
    """Largest difference of a logit, in units of the largest."""
    one, other = case.evaluate(one), case.evaluate(other)
    return float(abs(one - other).max() / abs(one).max())


def test_permuted_copies_are_put_back_to_the_bit(case):
    """Parameters, batch statistics and Grams of every form; the orders found undo those that were applied."""
    for i, orders in enumerate(case.orders):
        variables, grams, found, info = tree.take(tuple(case.aligned), i)
        assert_same(variables, case.reference)
        assert_same(grams, case.grams)
        for group in case.groups:
            np.testing.assert_array_equal(found[group.name], np.argsort(orders[group.name]))
            assert info[group.name]["identity_fraction"] == 0.0
            assert info[group.name]["cost_after"] < 1e-6 * group.size * len(group.producers)
            assert info[group.name]["cost_before"] > 0.1 * group.size * len(group.producers)


def test_grams_take_every_form(case):
    """Else the test above would not see an oversize form."""
    forms = {"block", "channel", "lowrank", "diag"}
    behind_flatten = [layer for group in case.groups for layer, n in group.grams if n > 1]
    assert set(case.grams) == forms
    for layer in behind_flatten:
        shapes = {oversize: jax.tree.map(jnp.shape, case.grams[oversize][layer]) for oversize in forms}
        assert len(set(shapes.values())) == len(forms)


def test_the_mean_of_permuted_copies_is_the_net_once_aligned(case):
    copies = lambda models: jax.tree.map(lambda x: x[:PERMUTED].mean(0), models)
    assert_same(copies(case.aligned.variables), case.reference)
    assert moved_by(case, case.reference, copies(case.models)) > 1e-2


def test_another_model_keeps_its_function_and_comes_nearer(case):
    given, aligned, found, info = (
        tree.take(x, PERMUTED) for x in (case.models, case.aligned.variables, case.aligned.orders, case.aligned.info)
    )
    assert moved_by(case, given, aligned) < ROUNDING
    for group in case.groups:
        assert sorted(found[group.name].tolist()) == list(range(group.size))
        assert info[group.name]["cost_after"] <= info[group.name]["cost_before"]
    assert sum(float(x["cost_before"] - x["cost_after"]) for x in info.values()) > 1.0


def test_only_what_a_group_norm_permits_is_found(case):
    for group in case.groups:
        order = np.asarray(case.aligned.orders[group.name][PERMUTED]).reshape(group.norm_groups, -1)
        came_from = order // (group.size // group.norm_groups)
        assert (came_from == came_from[:, :1]).all()
    if case.groups[0].norm_groups > 1:
        assert any(float(x["identity_fraction"][PERMUTED]) < 1.0 for x in case.aligned.info.values())


# --- residual streams -----------------------------------------------------------------------------------------------


def test_a_stream_is_found_from_the_sum_of_all_its_kernels(thin):
    """The stem alone, which is matched first, gives a wrong order; two later blocks of the stream outvote it."""
    backbone = resnet18(5, image_size=32)
    reference, groups = random_model(backbone), backbone.groups[:3]  # those that the stem's stream has to do with
    stream = groups[0]
    assert [axis.leaf.split("/")[1] for axis in stream.producers] == ["conv1", "layer1_0", "layer1_1"]
    orders = random_orders(groups, 0) | {"conv1": np.array([1, 2, 0, *range(3, stream.size)])}
    copy = tree.take(copies_of(reference, groups, [orders]), 0)
    stem = reference.params["conv1"]
    model = copy._replace(params={**copy.params, "conv1": stem})
    rows = jnp.moveaxis(stem["kernel"], 3, 0).reshape(stream.size, -1)
    assert match(filter_cost(rows, rows)).tolist() == list(range(stream.size))
    quick = Matching(assignment="hungarian")
    aligned = align(model, reference, groups, options=quick)
    for group in groups:
        np.testing.assert_array_equal(aligned.orders[group.name], np.argsort(orders[group.name]))
    back = aligned.variables
    assert_same(back._replace(params={**back.params, "conv1": stem}), reference)


def test_groups_are_visited_by_what_is_known_and_streams_again_by_all(thin):
    visits = fot.visits(resnet18(5, image_size=32).groups)
    groups = resnet18(5, image_size=32).groups
    assert [number for number, _ in visits] == [*range(len(groups))] * 2
    assert [len(axes) for _, axes in visits[:2]] == [1, 1]
    assert [axes for _, axes in visits[len(groups) :]] == [group.producers for group in groups]
    plain = lenet5(5).groups
    assert fot.visits(plain) == [(i, group.producers) for i, group in enumerate(plain)]


# --- options ---------------------------------------------------------------------------------------------------------


class TwoConvs(nn.Module):
    """Two convolutions of one width, a batch norm after the first, a flatten of 2 x 2 places, a linear head."""

    def setup(self):
        self.conv1, self.conv2 = nn.Conv(WIDTH, (3, 3)), nn.Conv(WIDTH, (3, 3))
        self.norm1, self.head = nn.BatchNorm(), nn.Dense(3)

    def features(self, x, train, mask=None):
        x = nn.relu(self.norm1(self.conv1(x), use_running_average=not train))
        return max_pool(nn.relu(self.conv2(x))).reshape(x.shape[0], -1)

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


WIDTH, COPIES = 8, 40
WIRING = [
    Layer("conv1", None, "conv1", WIDTH, norm="norm1"),
    Layer("conv2", "conv1", "conv2", WIDTH),
    Layer("head", "conv2", None, dense=True, positions=4),
]
TWO_CONVS = Backbone(TwoConvs(), (4, 4, 3), num_features=4 * WIDTH, num_classes=3, groups=groups_of(WIRING, "batch"))


@functools.cache
def copies():
    """A model, random orders of both convolutions in which some units stay where they are, and its copies in those."""
    rng, reference = np.random.default_rng(0), random_model(TWO_CONVS)
    orders = [{group.name: rng.permutation(WIDTH) for group in TWO_CONVS.groups} for _ in range(COPIES)]
    return reference, stack(orders), copies_of(reference, TWO_CONVS.groups, orders)


@functools.partial(jax.jit, static_argnames="options")
def align_copies(models, reference, epsilon, options):
    return align_all(models, reference, TWO_CONVS.groups, None, options._replace(epsilon=epsilon))


def aligned_copies(epsilon=0.05, **options) -> Alignment:
    reference, _, models = copies()
    return align_copies(models, reference, epsilon, Matching(0.0, **{"assignment": "hungarian", **options}))


def recovered(name, found):
    """How many copies got the inverse of their order."""
    return int((np.asarray(found.orders[name]) == np.argsort(copies()[1][name], axis=1)).all(1).sum())


@pytest.mark.parametrize("options", [{}, {"cost": "unsquared"}, {"assignment": "sinkhorn"}], ids=str)
def test_every_cost_and_assignment_recovers_known_orders(options):
    found, reference = aligned_copies(**options), copies()[0]
    assert [recovered(name, found) for name in ("conv1", "conv2")] == [COPIES, COPIES]
    assert_same(found.variables, jax.tree.map(lambda x: np.broadcast_to(x, (COPIES, *x.shape)), reference))


def test_the_unsquared_cost_is_the_distance():
    reference, _, models = copies()

    def unit_rows(model):
        rows = np.moveaxis(np.asarray(model.params["conv1"]["kernel"]), -1, -4)
        rows = rows.reshape(*rows.shape[:-3], -1)
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    squared = ((unit_rows(models) - unit_rows(reference)) ** 2).sum(-1)
    # rounding, and its square root
    for found, expected, atol in (
        (aligned_copies(), squared, 1e-5),
        (aligned_copies(cost="unsquared"), np.sqrt(squared), 1e-2),
    ):
        np.testing.assert_allclose(found.info["conv1"]["cost_before"], expected.sum(-1), rtol=1e-5, atol=atol)


def test_independent_matching_loses_layers_whose_inputs_moved():
    """It compares filters along inputs in different orders."""
    found = aligned_copies(matching="independent")
    assert recovered("conv1", found) == COPIES
    assert recovered("conv2", found) < COPIES / 2


def test_a_soft_plan_with_little_regularisation_is_nearly_the_permutation():
    found, (reference, orders, _) = aligned_copies(soft=True, epsilon=0.02), copies()
    for name, plans in found.orders.items():
        assert plans.shape == (COPIES, WIDTH, WIDTH)
        np.testing.assert_allclose(plans.sum(1), 1.0, atol=1e-2)
        np.testing.assert_allclose(plans.sum(2), 1.0, atol=1e-2)
        np.testing.assert_allclose(plans, np.eye(WIDTH)[np.argsort(orders[name], axis=1)], atol=2e-2)
        assert (found.info[name]["cost_after"] < 0.05 * WIDTH).all()
        stayed = (orders[name] == np.arange(WIDTH)).mean(1)
        np.testing.assert_allclose(found.info[name]["identity_fraction"], stayed, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, np.broadcast_to(y, x.shape), atol=0.1), found.variables, reference
    )


def test_a_soft_plan_mixes_filters():
    """With much regularisation every filter becomes the mean of all."""
    found, (_, _, models) = aligned_copies(soft=True, epsilon=1e3), copies()
    kernel = np.asarray(models.params["conv1"]["kernel"])
    mean = np.broadcast_to(kernel.mean(-1, keepdims=True), kernel.shape)
    np.testing.assert_allclose(found.variables.params["conv1"]["kernel"], mean, atol=1e-2)


def test_without_propagation_only_outputs_of_convolutions_move():
    """Each layer by itself: kernel and bias in another order, and so another function."""
    found, (_, orders, models) = aligned_copies(propagate=False, matching="independent"), copies()
    before, after = leaves_of(models), leaves_of(found.variables)
    for leaf, x in before.items():
        layer = leaf.split("/")[1]
        if layer.startswith("conv"):
            expected = np.stack([np.asarray(k)[..., order] for k, order in zip(x, found.orders[layer])])
            np.testing.assert_array_equal(after[leaf], expected)
        else:
            np.testing.assert_array_equal(after[leaf], x)
    assert sorted(found.orders) == ["conv1", "conv2"]
    np.testing.assert_array_equal(found.orders["conv1"], np.argsort(orders["conv1"], axis=1))
    moved = jax.jit(functools.partial(outputs_moved, TWO_CONVS))
    assert (moved(models, found.variables) > 1e-2).all()
    whole = moved(models, aligned_copies().variables)
    assert (whole < ROUNDING).all()
    assert (whole > 0).any()
    assert not moved(models, models).any()


# --- the shortcut ---------------------------------------------------------------------------------------------------


def costs(seed, size=6):
    """Costs of three models [e, size, size]: random ones, ties, equal rows, each row's least in its place, or nearly."""
    rng = np.random.default_rng(seed)
    random, ties = rng.uniform(size=(3, size, size)), rng.integers(0, 2, size=(3, size, size))
    placed = random + 0.5
    placed[:, range(size), range(size)] = 0.4
    mixed = np.stack([placed[0], random[1], placed[2]])
    tied = np.where(np.eye(size, dtype=bool), ties.min(2, keepdims=True), ties)
    nearly = placed - 0.9999 * fot.LEAST_GAIN * np.eye(size)
    almost = placed.copy()
    almost[:, 0, 1] = 0.4 - 1e-3
    stacks = [random, ties, placed, mixed, tied, nearly, almost, np.zeros_like(random)]
    return [jnp.asarray(x, jnp.float32) for x in stacks]


@pytest.mark.parametrize("assignment", ["sinkhorn", "hungarian"])
def test_leaving_out_the_search_changes_no_answer(assignment):
    options = Matching(assignment=assignment)
    one = jax.jit(lambda cost: fot.match_all(cost, options))
    every = jax.jit(jax.vmap(lambda cost: match(cost, options.epsilon, assignment)))
    for seed in range(4):
        for cost in costs(seed):
            np.testing.assert_array_equal(one(cost), every(cost))


def test_nothing_is_searched_where_every_filter_is_in_its_place(monkeypatch):
    monkeypatch.setattr(fot, "match", lambda cost, *options: jnp.arange(len(cost))[::-1])
    random, ties, placed, mixed, tied, nearly, almost, zero = costs(0)
    for cost in (placed, tied, nearly, zero):
        assert fot.match_all(cost, Matching()).tolist() == [list(range(6))] * 3
    for cost in (random, ties, mixed, almost):
        assert fot.match_all(cost, Matching()).tolist() == [list(range(6))[::-1]] * 3


# --- kernels of another size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "wanted"), [((3, 3), (5, 5)), ((5, 5), (3, 3)), ((1, 3), (3, 3))], ids=str)
def test_a_resized_flat_kernel_answers_a_constant_image_as_before(size, wanted):
    rng = np.random.default_rng(0)
    flat = jnp.asarray(np.broadcast_to(rng.normal(size=(2, 4)), (*size, 2, 4)), jnp.float32)
    bias = jnp.arange(4.0)
    target = Variables({"conv": {"kernel": jnp.zeros((*wanted, 2, 4)), "bias": bias}}, {})
    resized = fot.resize_kernels(Variables({"conv": {"kernel": flat, "bias": bias}}, {}), target).params["conv"]
    assert resized["kernel"].shape == (*wanted, 2, 4)
    np.testing.assert_allclose(resized["kernel"].sum((0, 1)), flat.sum((0, 1)), rtol=1e-5)
    np.testing.assert_array_equal(resized["bias"], bias)


def test_a_resized_kernel_is_bilinear():
    """Between the pixels of a row, at the edge the pixel itself; no blur when it shrinks."""
    kernel = jnp.asarray([1.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    target = Variables({"conv": {"kernel": jnp.zeros((1, 5, 1, 1))}}, {})
    wide = fot.resize_kernels(Variables({"conv": {"kernel": kernel}}, {}), target).params["conv"]["kernel"]
    np.testing.assert_allclose(wide.reshape(-1), 3 / 5 * np.array([1.0, 2.2, 4.0, 2.8, 2.0]), rtol=1e-5)
    back = fot.resize_kernels(Variables({"conv": {"kernel": wide}}, {}), Variables({"conv": {"kernel": kernel}}, {}))
    thirds = 5 / 3 * 3 / 5 * np.array([(2 * 1.0 + 2.2) / 3 - 0.0, 4.0, (2.8 + 2 * 2.0) / 3])
    np.testing.assert_allclose(back.params["conv"]["kernel"].reshape(-1), thirds, rtol=1e-5)


def test_models_with_kernels_of_another_size_are_aligned():
    """Bare parameters in, bare parameters out."""
    groups = tuple(group._replace(followers=group.followers[:1]) for group in TWO_CONVS.groups)
    params = {name: layer for name, layer in copies()[0].params.items() if name != "norm1"}
    small = Variables({**params, "conv1": {**params["conv1"], "kernel": params["conv1"]["kernel"][:1, :1]}}, {})
    reference = fot.resize_kernels(small, Variables(params, {}))
    orders = {"conv1": np.roll(np.arange(WIDTH), 1), "conv2": np.roll(np.arange(WIDTH), 3)}
    mixed = tree.take(copies_of(small, groups, [orders]), 0)
    quick = Matching(assignment="hungarian")
    aligned = align(mixed.params, reference.params, groups, options=quick)
    assert isinstance(aligned.variables, dict)
    assert_same(aligned.variables, reference.params)


# --- what is given --------------------------------------------------------------------------------------------------


def test_bare_parameters_of_a_net_with_batch_norm_are_aligned():
    reference, orders, models = copies()
    quick = Matching(assignment="hungarian")
    aligned = align(tree.take(models.params, 0), reference.params, TWO_CONVS.groups, options=quick)
    assert_same(aligned.variables, reference.params)
    assert aligned.grams == {}
    np.testing.assert_array_equal(aligned.orders["conv1"], np.argsort(orders["conv1"][0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matching": "sequentiel"}, "Unknown matching 'sequentiel'; did you mean 'sequential'"),
        ({"cost": "square"}, "Unknown cost 'square'; did you mean 'squared'"),
        ({"assignment": "sinkhorns"}, "Unknown assignment 'sinkhorns'; did you mean 'sinkhorn'"),
    ],
)
def test_an_unknown_option_is_named(options, message):
    reference = copies()[0]
    with pytest.raises(ValueError, match=message):
        align(reference, reference, TWO_CONVS.groups, options=Matching(**options))


WRONG = {
    "another width": (
        "conv1",
        {"kernel": (3, 3, 3, 6), "bias": (8,)},
        r"params/conv1/kernel has shape \(3, 3, 3, 6\) in",
    ),
    "no bias": ("conv1", {"kernel": (3, 3, 3, 8)}, "params/conv1/bias has shape None in the model and"),
    "one leaf too many": (
        "extra",
        {"kernel": (2, 2)},
        r"params/extra/kernel has shape \(2, 2\) in the model and None in",
    ),
    "a dense layer of another size": (
        "head",
        {"kernel": (30, 3), "bias": (3,)},
        r"kernel has shape \(30, 3\) in the model",
    ),
}


@pytest.mark.parametrize("case_name", WRONG)
def test_models_of_another_architecture_are_refused(case_name):
    reference = copies()[0]
    layer, shapes, message = WRONG[case_name]
    other = {name: jnp.ones(shape) for name, shape in shapes.items()}
    model = reference._replace(params={**reference.params, layer: other})
    with pytest.raises(ValueError, match=message + r".*: only models of one architecture and width can be aligned"):
        align(model, reference, TWO_CONVS.groups)
