"""gPerXAN: the mixed norm by hand, the network that has it, its weights, what stays on a client, and the global head."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from client import fresh, one_batch, programs
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import make_round, tree, weights
from fedjax_dg.aggregators import hfedatm
from fedjax_dg.algorithms import FedAvgHparams, GPerXANHparams, fedavg, gperxan, keep_batch_stats
from fedjax_dg.algorithms.gperxan import PERSONAL_SCORES, personal, with_xan
from fedjax_dg.alignment.groups import carry, from_leaves, leaves_of, permute
from fedjax_dg.backbones import alexnet, in_precision, lenet5, resnet18, resnet18_cifar, vgg11, vgg11_bn
from fedjax_dg.backbones.layers import XAN
from fedjax_dg.types import Received, Topology, Variables

LR = 0.05
PLAIN = tiny_backbone("batch")
MIXED = with_xan(PLAIN)
KEY = jax.random.key(0)
#: What a tiny client keeps.
OWN = {
    "params/norm/scale",
    "params/norm/bias",
    "params/norm/batch_score",
    "batch_stats/norm/mean",
    "batch_stats/norm/var",
}
ORDER = np.array([1, 2, 3, 0])  # a cycle: not its own inverse


def random_model(backbone=MIXED, seed=0) -> Variables:
    """No leaf at a value that would hide a mistake."""
    rng = np.random.default_rng(seed)
    draw = lambda path, x: jnp.asarray(
        abs(rng.normal(size=x.shape)) + 0.3 if "var" in path[-1].key else rng.normal(size=x.shape), jnp.float32
    )
    return jax.tree.map_with_path(draw, jax.eval_shape(backbone.init, KEY))


def changed(variables, **leaves) -> Variables:
    """With numbers in place of leaves of the norm."""
    new = {f"params/norm/{name}": jnp.float32(x) for name, x in leaves.items()}
    return from_leaves(leaves_of(variables) | new)


# --- the layer ------------------------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(1).normal(loc=0.7, scale=1.5, size=(5, 4, 3, 2)).astype(np.float32)
REAL = np.array([True, True, False, True, False])


def layer_variables(**scores):
    rng = np.random.default_rng(2)
    draw = lambda: jnp.asarray(rng.normal(size=2), jnp.float32)
    scores = {"batch_score": 1.0, "instance_score": 1.0} | scores
    params = {"scale": draw(), "bias": draw(), "instance": {"scale": draw(), "bias": draw()}, **tree_of(scores)}
    return {"params": params, "batch_stats": {"mean": draw(), "var": jnp.array([0.5, 2.0])}}


def tree_of(scores):
    return jax.tree.map(jnp.float32, scores)


def standard(x, axes=None, mean=None, var=None):
    mean = x.mean(axes, keepdims=True) if mean is None else mean
    var = x.var(axes, keepdims=True) if var is None else var
    return (x - mean) / np.sqrt(var + 1e-5)


def by_hand(variables, share, running=False):
    """Of the real rows."""
    params, stats = jax.tree.map(np.float64, (variables["params"], variables["batch_stats"]))
    x = IMAGES[REAL].astype(np.float64)
    batch = standard(x, **stats) if running else standard(x, (0, 1, 2))
    instance = standard(x, (1, 2)) * params["instance"]["scale"] + params["instance"]["bias"]
    return share * (batch * params["scale"] + params["bias"]) + (1 - share) * instance


def apply(variables, running=False, images=IMAGES):
    where = jnp.asarray(REAL)[:, None, None, None]
    return XAN().apply(variables, jnp.asarray(images), running, where, mutable=["batch_stats"])


@pytest.mark.parametrize("running", [False, True])
def test_equal_scores_give_the_mean_of_both_norms(running):
    out, _ = apply(layer_variables(), running)
    np.testing.assert_allclose(out[REAL], by_hand(layer_variables(), 0.5, running), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [30.0, 2.0, -1.0, -30.0])
def test_shares_are_the_softmax_of_the_scores(gap):
    variables = layer_variables(batch_score=3.0 + gap, instance_score=3.0)
    share = np.exp(gap) / (np.exp(gap) + 1)
    np.testing.assert_allclose(apply(variables)[0][REAL], by_hand(variables, share), rtol=1e-4, atol=1e-5)


def test_running_statistics_are_those_of_the_batch_norm():
    variables = layer_variables()
    _, after = apply(variables)
    x, before = IMAGES[REAL], variables["batch_stats"]
    for name, new in (("mean", x.mean((0, 1, 2))), ("var", x.var((0, 1, 2)))):
        np.testing.assert_allclose(after["batch_stats"][name], 0.9 * before[name] + 0.1 * new, rtol=1e-5)
    chex.assert_trees_all_equal(apply(variables, running=True)[1]["batch_stats"], before)


def test_padding_moves_no_other_row():
    garbage = np.where(REAL[:, None, None, None], IMAGES, 1e4).astype(np.float32)
    one, other = apply(layer_variables()), apply(layer_variables(), images=garbage)
    np.testing.assert_array_equal(one[0][REAL], other[0][REAL])
    chex.assert_trees_all_equal(one[1], other[1])


# --- the network ----------------------------------------------------------------------------------------------------


def shapes_of(backbone):
    return {leaf: x.shape for leaf, x in leaves_of(jax.eval_shape(backbone.init, KEY)).items()}


@pytest.mark.parametrize("make", [resnet18_cifar, vgg11_bn, lambda classes: PLAIN])
def test_every_batch_norm_gains_an_instance_norm_and_two_scores(make):
    plain = make(3)
    before, after = shapes_of(plain), shapes_of(with_xan(plain))
    norms = [leaf.removesuffix("/mean") for leaf in before if leaf.endswith("/mean")]
    assert norms
    expected = dict(before)
    for norm in (norm.replace("batch_stats/", "params/") for norm in norms):
        expected |= {f"{norm}/instance/{leaf}": before[f"{norm}/{leaf}"] for leaf in ("scale", "bias")}
        expected |= {f"{norm}/{score}": () for score in ("batch_score", "instance_score")}
    assert after == expected
    grouped = [axis.leaf for g in with_xan(plain).groups for axis in (*g.producers, *g.followers, *g.consumers)]
    instance = {leaf for leaf in expected if "/instance/" in leaf}
    assert set(grouped) >= instance and sorted(leaf for leaf in grouped if leaf in instance) == sorted(instance)
    assert not any(leaf.endswith("_score") for leaf in grouped)


def test_what_else_a_network_is_stays():
    plain = in_precision(resnet18_cifar(3, image_size=(24, 40), freeze_bn=True), "bfloat16")
    mixed = with_xan(plain)
    assert mixed.module.freeze_bn and mixed.dtype == jnp.bfloat16 and mixed.input_shape == (24, 40, 3)
    assert mixed.weight_names == plain.weight_names
    assert with_xan(mixed) is mixed


@pytest.mark.parametrize("make", [lenet5, alexnet, vgg11, functools.partial(resnet18, norm="group")])
def test_a_network_without_batch_norm_is_refused_before_training(make):
    with pytest.raises(ValueError, match=r"no batch norm: choose resnet18, resnet18_cifar, resnet50 or vgg11_bn"):
        make_round(make(3), gperxan(), Topology(1, 1))


def passes(variables, backbone=MIXED):
    images = jax.random.normal(KEY, (4, 6, 6, 2))
    forward = backbone.forward(variables, images, jnp.array([True, True, True, False]), KEY)
    return backbone.apply(variables, images), forward.logits[:3], forward.batch_stats


def test_permuting_units_keeps_the_function_and_leaving_a_leaf_behind_does_not():
    model, (group,), order = random_model(), MIXED.groups, jnp.asarray(ORDER)
    expected, moved = passes(model), passes(permute(model, group, order))
    chex.assert_trees_all_close(moved[:2], expected[:2], rtol=1e-4, atol=1e-5)
    stats = jax.tree.map(lambda x: x[order], expected[2])
    chex.assert_trees_all_close(moved[2], stats, rtol=1e-4, atol=1e-5)
    for axis in group.followers[-2:]:
        assert "/instance/" in axis.leaf
        alone = group._replace(producers=(axis,), followers=(), consumers=())
        assert abs(passes(permute(model, alone, order))[0] - expected[0]).max() > 1e-2


@pytest.mark.slow
def test_a_round_of_resnet18_has_the_types_of_its_state():
    """Shapes only: nothing is compiled."""
    federation = tiny_federation([[3, 2]], batch_size=2)
    inputs = jax.ShapeDtypeStruct((1, 2, 3, 32, 32, 3), jnp.uint8)
    data = (federation.clients._replace(inputs=inputs), federation.ids)
    round_fn = make_round(resnet18_cifar(3), gperxan(), federation.topology)
    state = jax.eval_shape(round_fn.init, KEY)
    after, info = jax.eval_shape(round_fn.step, state, data, KEY)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(state)]
    kept = leaves_of(state.clients[1])
    assert len(kept) == 20 * 5  # norms
    assert {x.shape[:2] for x in kept.values()} == {(1, 2)}


# --- weights --------------------------------------------------------------------------------------------------------

NAMES = {"conv": ("conv1",), "norm": ("bn1",), "dense": ("fc1",), "head": ("fc",)}
PUBLISHED = dataclasses.replace(PLAIN, weight_names=NAMES)


@pytest.fixture
def files(tmp_path):
    """One model of the plain network, as PyTorch's names have it and as ours: by kind, its file; and the model."""
    model = random_model(PUBLISHED, 3)
    params, stats = jax.tree.map(np.asarray, model)
    torch = {
        "conv1.weight": params["conv"]["kernel"].transpose(3, 2, 0, 1),
        "conv1.bias": params["conv"]["bias"],
        "bn1.weight": params["norm"]["scale"],
        "bn1.bias": params["norm"]["bias"],
        "bn1.running_mean": stats["norm"]["mean"],
        "bn1.running_var": stats["norm"]["var"],
        "fc1.weight": params["dense"]["kernel"].reshape(4, 4, 5).transpose(2, 1, 0).reshape(5, 16),
        "fc1.bias": params["dense"]["bias"],
        "fc.weight": params["head"]["kernel"].T,
        "fc.bias": params["head"]["bias"],
    }
    np.savez(tmp_path / "torch.npz", **torch)
    weights.save(model, tmp_path / "ours.npz")
    return {"torch": tmp_path / "torch.npz", "ours": tmp_path / "ours.npz"}, model


def check_start(found, plain):
    found, plain = leaves_of(found), leaves_of(plain)
    assert found.keys() == shapes_of(MIXED).keys()
    for leaf, x in found.items():
        expected = 1.0 if leaf.endswith("_score") else plain[leaf.replace("/instance/", "/")]
        np.testing.assert_array_equal(x, expected, err_msg=leaf)
        assert x.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_weights_of_batch_norm_go_to_both_norms(kind, files):
    paths, model = files
    check_start(weights.load(with_xan(PUBLISHED), paths[kind]), model)
    loaded = weights.load(PUBLISHED, paths[kind])
    check_start(make_round(PUBLISHED, gperxan(), Topology(1, 1)).init(KEY, loaded).variables, model)


def test_a_model_with_both_norms_keeps_its_own(tmp_path):
    model = random_model()
    weights.save(model, tmp_path / "model.npz")
    loaded = weights.load(MIXED, tmp_path / "model.npz")
    chex.assert_trees_all_equal(loaded, model)
    chex.assert_trees_all_equal(make_round(PLAIN, gperxan(), Topology(1, 1)).init(KEY, loaded).variables, model)


def test_batch_norms_leaves_are_still_required(files, tmp_path):
    with np.load(files[0]["torch"]) as arrays:
        np.savez(tmp_path / "less.npz", **{k: x for k, x in arrays.items() if k != "bn1.weight"})
    with pytest.raises(ValueError, match=r"missing: .*bn1.weight"):
        weights.load(with_xan(PUBLISHED), tmp_path / "less.npz")


# --- the loss -------------------------------------------------------------------------------------------------------


def received_by(variables, own=None, server=()):
    own = personal(variables if own is None else own, ("batch_score",))
    return Received(variables, (), (), ((), own), jnp.int32(0), server)


def take_step(lambda_g=0.5, received=None, method=gperxan):
    """A plain step of size 1: (how far the parameters moved, the client, metrics)."""
    received = received_by(fresh(MIXED)) if received is None else received
    step, _ = programs(method, optax.sgd, MIXED)
    after, metrics = step(GPerXANHparams(1.0, lambda_g), received, one_batch(), KEY)
    return after, metrics


def losses(params, stats, head, backbone=MIXED):
    """CE of the network's own head, and of another one, from its features."""
    batch = one_batch()
    z = backbone.forward(Variables(params, stats), batch.inputs, batch.mask, KEY).z

    def of(head):
        logits = z @ head["kernel"] + head["bias"]
        return -(jax.nn.log_softmax(logits)[jnp.arange(len(z)), batch.labels] * batch.mask).sum() / batch.mask.sum()

    return of(params["head"]), of(head)


@pytest.mark.parametrize("server", [False, True])
def test_in_the_first_batch_the_global_head_is_the_own_one(server):
    """loss = (1 + lambda) CE; the gradient of the network is as much larger, the head's is not."""
    start = fresh(MIXED)
    received = received_by(start, server=start if server else ())
    after, metrics = take_step(0.5, received)
    own, other = losses(start.params, start.batch_stats, start.params["head"])
    assert own == other and metrics["loss"] == pytest.approx(1.5 * float(own), rel=1e-5)
    gradient = jax.grad(lambda params: losses(params, start.batch_stats, start.params["head"])[0])(start.params)
    for name, layer in gradient.items():
        step = reference.scale(layer, 1.0 if name == "head" else 1.5)
        expected = reference.subtract(start.params[name], step)
        chex.assert_trees_all_close(after.variables.params[name], expected, rtol=1e-4, atol=1e-6)


def test_the_global_head_is_the_servers_and_stays():
    start, server = random_model(seed=1), random_model(seed=2)
    after, metrics = take_step(0.8, received_by(start, server=server))
    head = server.params["head"]
    own, other = losses(start.params, start.batch_stats, head)
    assert abs(own - other) > 0.1
    np.testing.assert_allclose([metrics["cross_entropy"], metrics["global_head"]], [own, other], rtol=1e-4)
    gradient = jax.grad(
        lambda params: sum(losses(params, start.batch_stats, head)) - 0.2 * losses(params, start.batch_stats, head)[1]
    )(start.params)
    expected = jax.tree.map(lambda p, g: p - g, start.params, gradient)
    chex.assert_trees_all_close(after.variables.params, expected, rtol=1e-3, atol=1e-5)


# --- what stays on a client -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", PERSONAL_SCORES)
def test_which_leaves_are_personal(scores):
    kept = gperxan(personal_scores=scores).init(MIXED, random_model(), KEY).client[1]
    added = {"bn": set(), "both": {"params/norm/instance_score"}, "none": set()}[scores]
    expected = (OWN | added) - ({"params/norm/batch_score"} if scores == "none" else set())
    assert leaves_of(kept).keys() == expected


def test_an_unknown_choice_of_scores_is_told():
    with pytest.raises(ValueError, match="Unknown personal_scores 'bm'; did you mean 'bn'"):
        gperxan(personal_scores="bm")


def test_a_client_trains_with_its_own_norms_whatever_comes_down():
    down, own = random_model(seed=1), random_model(seed=2)
    mine = from_leaves(leaves_of(down) | {k: leaves_of(own)[k] for k in OWN})
    one, other = take_step(received=received_by(down, own))[0], take_step(received=received_by(mine))[0]
    chex.assert_trees_all_equal(one, other)
    chex.assert_trees_all_equal(one.client[1], personal(one.variables, ("batch_score",)))
    assert leaves_of(one.client[1]).keys() == OWN


FEDERATION = tiny_federation([[3, 5], [4, 0]], batch_size=5)  # a client's pass is one full batch
SIZES = {(0, 0): 3, (0, 1): 5, (1, 0): 4}


def rounds(backbone, algorithm, start, number, federation=FEDERATION):
    """States after each of so many rounds."""
    round_fn = make_round(backbone, algorithm, federation.topology)

    def one(state, _):
        state = round_fn.step(state, federation.data, KEY)[0]
        return state, state

    def all(start):
        return jax.lax.scan(one, round_fn.init(KEY, start), length=number)[1]

    return jax.jit(all)(start)


def test_the_servers_norms_are_the_mean_of_the_clients():
    """Weighted by examples; so each client's norms were uploaded. No two are alike, and a client without data has none."""
    start = random_model()
    states = rounds(PLAIN, gperxan(GPerXANHparams(LR)), start, 3)
    kept, server = leaves_of(states.clients[1]), leaves_of(states.variables)
    assert kept.keys() == OWN
    for leaf in OWN:
        mean = sum(n * kept[leaf][:, s, c] for (s, c), n in SIZES.items()) / 12
        np.testing.assert_allclose(server[leaf], mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(kept[leaf][:, 1, 1], np.stack([leaves_of(start)[leaf]] * 3))
        assert abs(kept[leaf][:, 0, 0] - kept[leaf][:, 0, 1]).min(0).max() > 1e-5


def test_clients_that_sit_out_keep_their_norms():
    federation = tiny_federation([[3, 5, 2]], batch_size=5, participants=1)
    states = rounds(PLAIN, gperxan(GPerXANHparams(LR)), random_model(), 2, federation)
    before, after = (tree.take(leaves_of(states.clients[1]), (i, 0)) for i in range(2))
    same = [all((before[leaf][c] == after[leaf][c]).all() for leaf in OWN) for c in range(3)]
    assert sorted(same) == [False, True, True]


def test_with_the_batch_norm_alone_and_no_global_head_it_is_fedavg_with_local_norms():
    """By a loop over clients, each with its own norms, on the network with plain batch norm."""
    start, number = changed(random_model(), batch_score=31.0, instance_score=1.0), 3
    states = rounds(PLAIN, gperxan(GPerXANHparams(LR, 0.0), optax.sgd), start, number)

    @jax.jit
    def step(variables, examples):
        def loss(params):
            forward = PLAIN.forward(variables._replace(params=params), examples.inputs, examples.mask, KEY)
            rows = optax.softmax_cross_entropy_with_integer_labels(forward.logits, examples.labels)
            return (rows * examples.mask).sum() / examples.mask.sum(), forward.batch_stats

        gradient, stats = jax.grad(loss, has_aux=True)(variables.params)
        return Variables(jax.tree.map(lambda p, g: p - LR * g, variables.params, gradient), stats)

    names = shapes_of(PLAIN)
    local = OWN & names.keys()
    server = {k: x for k, x in leaves_of(start).items() if k in names}
    own = dict.fromkeys(SIZES, server)
    for i in range(number):
        for place in SIZES:
            model = from_leaves(server | {k: own[place][k] for k in local})
            own[place] = leaves_of(step(model, tree.take(FEDERATION.clients, place)))
        server = {k: sum(n / 12 * own[place][k] for place, n in SIZES.items()) for k in names}
        found = tree.take(states.variables, i)
        chex.assert_trees_all_close({k: leaves_of(found)[k] for k in names}, server, rtol=1e-4, atol=1e-5)


# --- alignment ------------------------------------------------------------------------------------------------------


def test_personal_leaves_move_with_the_model():
    model, other = random_model(), personal(random_model(seed=1), ("batch_score",))
    moved = carry(((), other), model, MIXED.groups, {"conv": jnp.asarray(ORDER)})[1]
    by_hand = {k: x[ORDER] if x.shape == (4,) else x for k, x in leaves_of(other).items()}
    chex.assert_trees_all_equal(moved, from_leaves(by_hand))
    stats = Variables({}, other.batch_stats)
    chex.assert_trees_all_equal(
        carry(stats, model, MIXED.groups, {"conv": jnp.asarray(ORDER)}), Variables({}, moved.batch_stats)
    )
    alien = Variables({"norm": {"scale": jnp.arange(5.0)}}, {})
    chex.assert_trees_all_equal(carry(alien, model, MIXED.groups, {"conv": jnp.asarray(ORDER)}), alien)


def relabelled(algorithm, backbone, order):
    """The same method, but at station 1 trained models come out with their units in this order, and with them what a
    client remembers: only names have changed."""

    def change(state, station, variables):
        return carry(state, variables, backbone.groups, {"conv": jnp.where(station == 1, order, jnp.arange(4))})

    def step(backbone, received, at, batch, key):
        moved, metrics = algorithm.step(backbone, received, at, batch, key)
        return moved._replace(variables=change(moved.variables, batch.domain.max(), moved.variables)), metrics

    def report(backbone, received, at, steps, examples, key):
        told = algorithm.report(backbone, received, at, steps, examples, key)
        return change(told, examples.domain.max(), at.variables)

    return algorithm._replace(step=step, report=report)


METHODS = {
    "gperxan": (MIXED, gperxan(GPerXANHparams(0.01))),
    "batch statistics": (PLAIN, keep_batch_stats(fedavg(FedAvgHparams(0.01)))),
}


@pytest.mark.parametrize("name", ["gperxan", pytest.param("batch statistics", marks=pytest.mark.slow)])
def test_an_aligned_round_does_not_know_in_which_order_a_station_has_its_units(name):
    backbone, algorithm = METHODS[name]
    federation = tiny_federation([[3, 5], [4, 6]], local_steps=1, batch_size=8)
    rule = hfedatm(regmean=False, assignment="hungarian")

    @jax.jit
    def states(order):
        round_fn = make_round(backbone, relabelled(algorithm, backbone, order), federation.topology, to_server=rule)
        state = round_fn.init(KEY, random_model(backbone))
        told = []
        for _ in range(2):
            state, info = round_fn.step(state, federation.data, KEY)
            told.append(info.server_merge["fot"]["conv"]["identity_fraction"])
        return state, told

    (plain, still), (other, moved) = states(jnp.arange(4)), states(jnp.asarray(ORDER))
    assert [x.tolist() for x in still] == [[1.0, 1.0]] * 2
    assert [x.tolist() for x in moved] == [[1.0, 0.0]] * 2
    chex.assert_trees_all_close(other, plain, rtol=1e-4, atol=1e-5)
    kept = plain.clients[1].batch_stats["norm"]["mean"]
    assert abs(kept - kept[..., ORDER]).max() > 1e-2  # left behind, they would differ
