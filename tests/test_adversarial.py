"""FedADG, Stable-FedADG and RSC: closed forms, directions of every step, reductions to FedAvg."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from client import BACKBONE, examples_of, fresh, one_batch, programs
from flax import linen as nn
from tiny import tiny_federation

from fedjax_dg import make_round
from fedjax_dg.algorithms import (
    FEDADG_CODE,
    FEDADG_PAPER,
    STABLE_FEDADG_PAPER,
    FedADGHparams,
    FedAvgHparams,
    RSCHparams,
    StableFedADGHparams,
    fedadg,
    fedavg,
    rsc,
    stable_fedadg,
)
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.fedadg import (
    Discriminator,
    Generator,
    boxed,
    discriminator_loss,
    extractor_loss,
    generator_loss,
    smoothed_losses,
    unboxed,
)
from fedjax_dg.algorithms.rsc import challenge, challenged_share, mute_channels, mute_features, mute_places
from fedjax_dg.alignment import permute
from fedjax_dg.alignment.groups import carry
from fedjax_dg.backbones import Backbone, lenet5
from fedjax_dg.types import Examples, Received, Topology, Variables

FEATURES = 5
LR = 0.05
KEY = jax.random.key(2)
FORMS = pytest.mark.parametrize("form", ["ls", "paper"])


def apart(tree, other):
    """The largest difference of two trees."""
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other)))


def minus(tree, other):
    return jax.tree.map(jnp.subtract, tree, other)


# --- the losses of FedADG -------------------------------------------------------------------------------------------

ALL = jnp.ones(4, bool)
HALF = jnp.full(4, 0.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda: discriminator_loss(HALF, HALF, ALL, "ls"), 0.5),
        (lambda: discriminator_loss(HALF, HALF, ALL, "paper"), -0.5),
        (lambda: extractor_loss(HALF, ALL), 0.25),
        (lambda: generator_loss(HALF, ALL, "ls"), 0.25),
        (lambda: generator_loss(HALF, ALL, "paper"), -0.25),
    ],
    ids=["D, ls", "D, paper", "F", "G, ls", "G, paper"],
)
def test_the_losses_of_an_undecided_discriminator(value, expected):
    assert value() == pytest.approx(expected, abs=1e-7)


@FORMS
def test_the_losses_do_not_see_padding(form):
    mask, wild = jnp.arange(4) < 2, jnp.array([0.5, 0.5, 1e9, jnp.nan])
    assert discriminator_loss(wild, wild, mask, form) == discriminator_loss(HALF, HALF, ALL, form)
    assert extractor_loss(wild, mask) == 0.25
    assert generator_loss(wild, mask, form) == generator_loss(HALF, ALL, form)


@pytest.mark.parametrize(("form", "expected"), [("ls", 1.8), ("paper", 0.2)])
def test_the_slope_at_a_mistaken_judgement(form, expected):
    """D(z) = 0.9 of real features: the paper's form hardly minds."""
    one = jnp.ones(1, bool)
    slope = jax.grad(lambda d: discriminator_loss(d, jnp.full(1, 0.5), one, form))(jnp.full(1, 0.9))
    assert slope[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("form", "expected"), [("ls", (0.25, 0.75)), ("paper", (0.0, 1.0))])
def test_the_best_discriminator(form, expected):
    """Of two points, p = (3/4, 1/4), q = (1/4, 3/4): q / (p + q) by least squares, a decision q > p by the paper's form."""
    grid = jnp.linspace(0.0, 1.0, 21)
    real, generated = jnp.array([0, 0, 0, 1]), jnp.array([0, 1, 1, 1])
    losses = jax.vmap(lambda a: jax.vmap(lambda b: at(jnp.stack([a, b])))(grid))
    at = lambda d: discriminator_loss(d[real], d[generated], ALL, form)
    best = np.unravel_index(np.argmin(losses(grid)), (21, 21))
    np.testing.assert_allclose([grid[i] for i in best], expected, atol=1e-6)


def test_smoothed_cross_entropy():
    """p = (.7, .1, .1, .05, .05), class 0, epsilon = 0.2."""
    log_p = jnp.log(jnp.array([[0.7, 0.1, 0.1, 0.05, 0.05]]))
    assert smoothed_losses(log_p, jnp.zeros(1, jnp.int32), 0.2)[0] == pytest.approx(0.8151716918, abs=1e-6)
    assert smoothed_losses(log_p, jnp.ones(1, jnp.int32), 0.0)[0] == pytest.approx(-np.log(0.1), abs=1e-6)


def test_the_presets_weigh_as_the_authors_code_and_as_the_papers_print():
    assert (FEDADG_CODE.lambda_cls, FEDADG_CODE.lambda_adv) == (0.85, 0.15)
    assert (FEDADG_PAPER.lambda_cls, FEDADG_PAPER.lambda_adv) == (0.15, 0.85)
    assert (STABLE_FEDADG_PAPER.lambda_cls, STABLE_FEDADG_PAPER.lambda_adv) == (0.15, 0.85)
    assert FedADGHparams() == FEDADG_CODE and StableFedADGHparams().smoothing == 0.0


# --- one step of FedADG ---------------------------------------------------------------------------------------------

ADG = functools.partial(fedadg, warmup_epochs=1, rectify=False)
PAPER = functools.partial(ADG, adv_form="paper")
SHARED = functools.partial(ADG, share_discriminator=True)
RECTIFIED = functools.partial(ADG, rectify=True)
STABLE = functools.partial(stable_fedadg, warmup_epochs=1, rectify=False)


@functools.cache
def started(method=ADG):
    """Model and client before round 1."""
    return jax.jit(functools.partial(method().init, BACKBONE))(fresh(), jax.random.key(3))


def received_by(method):
    start = started(method)
    return Received(start.variables, (), (), start.client, jnp.int32(0))


def take_step(method, hparams, rows=None, passes=1, optimizer=optax.sgd):
    """One local step in the given pass: what it leaves, the metrics."""
    rows = one_batch() if rows is None else rows
    return programs(method, optimizer)[0](hparams, received_by(method), rows, KEY, jnp.int32(passes))


def train(method, hparams, optimizer=momentum, size=4):
    """Two passes: what local training leaves, the client's state, its message."""
    train_in_batches = programs(method, optimizer, size=size)[1]
    trained, *reported = train_in_batches(hparams, received_by(method), examples_of(), jax.random.key(1))
    return trained.local, *reported


def model_of(params):
    """Without what the adversary adds."""
    return {name: layer for name, layer in params.items() if name in fresh().params}


REAL = slice(0, 7)  # of the batch's rows


def codes():
    """The labels that G and D read."""
    return jax.nn.one_hot(one_batch().labels, 3)


def noise():
    """What a step with the key ``KEY`` draws."""
    return jax.random.uniform(jax.random.fold_in(KEY, 1), (8, 8))


@jax.jit
def judge_all(discriminator, z, code):
    return Discriminator(8).apply({"params": unboxed(discriminator)}, z, code)


def judge(discriminator, z, code=None):
    """D of the real rows."""
    return judge_all(discriminator, z, codes() if code is None else code)[REAL]


@functools.partial(jax.jit, static_argnames="rectify")
def generated_by(generator, drawn, code, rectify=False):
    return Generator(8, FEATURES, rectify).apply({"params": generator}, drawn, code)


def generated(variables, rectify=False):
    return generated_by(variables.params["generator"], noise(), codes(), rectify)


features = jax.jit(BACKBONE.features)


def features_of(variables):
    return features(Variables(model_of(variables.params), {}), one_batch().inputs)


def discriminator_of(client):
    return client[0].discriminator


def discriminator_step(method, client):
    """A client after a step of the adversary alone."""
    received = received_by(method)._replace(origin=client)
    return programs(method, optax.sgd)[0](FedADGHparams(0.0, 0.5), received, one_batch(), KEY, jnp.int32(1))[0].client


@functools.cache
def learnt():
    """A client whose discriminator was undecided and has seen the same features and generated ones again and again."""
    (own, memory) = started().client
    undecided = {**own.discriminator, "out": jax.tree.map(jnp.zeros_like, own.discriminator["out"])}
    client = (own._replace(discriminator=undecided), memory)
    for _ in range(60):
        client = discriminator_step(ADG, client)
    return client


def judged_by(client):
    """D(z) and D(z') at the start, on average."""
    variables = started().variables
    return [judge(discriminator_of(client), z).mean() for z in (features_of(variables), generated(variables))]


def test_a_discriminator_learns_to_tell_features_and_generated_apart():
    of_real, of_generated = judged_by(learnt())
    assert of_real < 0.1 and of_generated > 0.8


@FORMS
def test_a_discriminators_step_lowers_that_of_features_and_raises_that_of_generated(form):
    before, after = (judged_by(x) for x in (learnt(), discriminator_step({"ls": ADG, "paper": PAPER}[form], learnt())))
    assert after[0] < before[0] - 5e-4 and after[1] > before[1] + 5e-4


def test_an_extractors_step_makes_features_pass_for_generated():
    """Without classification; the discriminator stands still, and the head is not asked."""
    moved, _ = take_step(ADG, FedADGHparams(0.5, 0.0, lambda_adv=1.0, lambda_cls=0.0))
    discriminator = discriminator_of(started().client)
    chex.assert_trees_all_equal(discriminator_of(moved.client), discriminator)
    before, after = (judge(discriminator, features_of(v)) for v in (started().variables, moved.variables))
    assert (after > before + 1e-3).all()
    chex.assert_trees_all_equal(moved.variables.params["head"], fresh().params["head"])


@FORMS
def test_a_generators_step_moves_towards_the_features(form):
    """By the discriminator just updated: D(z') falls."""
    moved, _ = take_step({"ls": ADG, "paper": PAPER}[form], FedADGHparams(0.0, 0.5))
    discriminator, start = discriminator_of(moved.client), started().variables
    before, after = (judge(discriminator, generated(v)).mean() for v in (start, moved.variables))
    assert after < before - 1e-3
    assert apart(moved.variables.params["generator"], start.params["generator"]) > 1e-3


@FORMS
def test_a_step_is_three_problems_with_the_others_constant(form):
    """D; then F and C with the new D; then G with the new D and the same noise: plain descent of each loss by itself."""
    lr, adversary_lr, scale = 0.3, 0.7, 0.6
    hparams = FedADGHparams(lr, adversary_lr, lambda_adv=0.4, lambda_cls=0.9, smoothing=0.0, label_scale=scale)
    moved, metrics = take_step({"ls": ADG, "paper": PAPER}[form], hparams)
    start, code = started(), scale * codes()
    descend = lambda params, gradient, rate: jax.tree.map(lambda x, g: x - rate * g, params, gradient)

    @jax.jit
    def expected(variables, discriminator):
        z, other = features_of(variables), generated_by(variables.params["generator"], noise(), code)

        def of_d(d):
            real, fake = judge(d, z, code), judge(d, other, code)
            if form == "ls":
                return jnp.mean(real**2) + jnp.mean((1 - fake) ** 2)
            return -jnp.mean((1 - real) ** 2) - jnp.mean(fake**2)

        def of_model(params):
            z = BACKBONE.features(Variables(params, {}), one_batch().inputs)
            error = reference.cross_entropy(BACKBONE.head(Variables(params, {}), z)[REAL], one_batch().labels[REAL])
            return 0.9 * error + 0.4 * jnp.mean((1 - judge(new_d, z, code)) ** 2)

        def of_g(g):
            fake = judge(new_d, generated_by(g, noise(), code), code)
            return jnp.mean(fake**2) if form == "ls" else -jnp.mean((1 - fake) ** 2)

        loss_d, gradient = jax.value_and_grad(of_d)(discriminator)
        new_d = descend(discriminator, gradient, adversary_lr)
        model, g = model_of(variables.params), variables.params["generator"]
        loss, of_rest = jax.value_and_grad(of_model)(model)
        loss_g, of_generator = jax.value_and_grad(of_g)(g)
        params = {**descend(model, of_rest, lr), "generator": descend(g, of_generator, adversary_lr)}
        return new_d, params, {"adv_d": loss_d, "loss": loss, "adv_g": loss_g}

    new_d, params, losses = expected(start.variables, discriminator_of(start.client))
    chex.assert_trees_all_close(discriminator_of(moved.client), new_d, atol=1e-6)
    chex.assert_trees_all_close(moved.variables.params, params, atol=1e-6)
    for name, value in losses.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5)


def test_nothing_adversarial_happens_in_the_warm_up():
    """Only the cross-entropy is descended, with its whole gradient."""
    moved, metrics = take_step(ADG, FedADGHparams(LR, 0.5, smoothing=0.0), passes=0)
    start = started()
    chex.assert_trees_all_equal(moved.client, start.client)
    chex.assert_trees_all_equal(moved.variables.params["generator"], start.variables.params["generator"])
    gradient = reference.plain_gradient(BACKBONE)(fresh().params, one_batch().inputs[REAL], one_batch().labels[REAL])
    expected = reference.subtract(fresh().params, reference.scale(gradient, LR))
    chex.assert_trees_all_close(model_of(moved.variables.params), expected, atol=1e-6)
    assert [float(metrics[name]) for name in ("adv_d", "adv_f", "adv_g")] == [0.0, 0.0, 0.0]
    later, _ = take_step(ADG, FedADGHparams(LR, 0.5), passes=1)
    assert apart(later.client, start.client) > 1e-4
    assert apart(later.variables.params["generator"], start.variables.params["generator"]) > 1e-4


@pytest.mark.parametrize(("method", "hparams"), [(ADG, FedADGHparams(0.5)), (STABLE, StableFedADGHparams(0.5))])
def test_padding_is_never_read(method, hparams):
    wild = one_batch()._replace(inputs=one_batch().inputs.at[7].set(7.0), labels=one_batch().labels.at[7].set(2))
    (moved, metrics), (other, told) = (take_step(method, hparams, rows) for rows in (one_batch(), wild))
    chex.assert_trees_all_close(other.variables.params, moved.variables.params, atol=1e-7)
    chex.assert_trees_all_close(discriminator_of(other.client), discriminator_of(moved.client), atol=1e-7)
    chex.assert_trees_all_close(told, metrics, atol=1e-6)


def test_a_rectified_generator_is_not_negative():
    variables = started().variables
    signed = generated(variables)
    rectified = generated(variables, rectify=True)
    assert signed.min() < -1e-2
    np.testing.assert_array_equal(rectified, np.maximum(signed, 0.0))
    told = [take_step(method, FedADGHparams(0.0, 0.0))[1]["adv_g"] for method in (ADG, RECTIFIED)]
    expected = [(judge(discriminator_of(started().client), z) ** 2).mean() for z in (signed, rectified)]
    np.testing.assert_allclose(told, expected, rtol=1e-5)
    assert abs(told[0] - told[1]) > 1e-4


def test_widths_are_given_or_ratios_of_the_features():
    backbone = lenet5(num_classes=3)
    shapes = jax.eval_shape(lambda key: fedadg().init(backbone, backbone.init(key), key), KEY)
    generator, discriminator = shapes.variables.params["generator"], unboxed(shapes.client[0].discriminator)
    assert generator["hidden"]["kernel"].shape == (42 + 3, 84) and generator["out"]["kernel"].shape == (84, 84)
    assert discriminator["projection"]["kernel"].shape == (84, 21)
    assert discriminator["hidden"]["kernel"].shape == (21 + 3, 21)
    given = fedadg(noise_width=3, generator_width=4, discriminator_width=5)
    shapes = jax.eval_shape(lambda key: given.init(BACKBONE, BACKBONE.init(key), key), KEY)
    assert shapes.variables.params["generator"]["hidden"]["kernel"].shape == (3 + 3, 4)
    assert unboxed(shapes.client[0].discriminator)["projection"]["kernel"].shape == (FEATURES, 5)


# --- FedADG and FedAvg ----------------------------------------------------------------------------------------------


def test_without_adversary_and_smoothing_it_is_fedavg():
    hparams = FedADGHparams(LR, lambda_adv=0.0, lambda_cls=1.0, smoothing=0.0)
    trained = train(ADG, hparams)[0]
    received = Received(fresh(), (), (), ())
    plain = programs(fedavg, momentum)[1](FedAvgHparams(LR), received, examples_of(), jax.random.key(1))[0].local
    chex.assert_trees_all_close(model_of(trained.variables.params), plain.variables.params, atol=1e-6)
    adversarial = train(ADG, hparams._replace(lambda_adv=0.5))[0]
    assert apart(model_of(adversarial.variables.params), plain.variables.params) > 1e-3


def test_the_classification_weight_scales_the_gradient_after_the_warm_up():
    """One whole batch a pass: theta - lr g(theta), then theta - 0.85 lr g(theta)."""
    hparams = FedADGHparams(0.3, lambda_adv=0.0, lambda_cls=0.85, smoothing=0.0)
    trained = train(ADG, hparams, optax.sgd, size=8)[0]
    gradient, params = reference.plain_gradient(BACKBONE), fresh().params
    for weight in (1.0, 0.85):
        of_loss = gradient(params, one_batch().inputs[REAL], one_batch().labels[REAL])
        params = reference.subtract(params, reference.scale(of_loss, 0.3 * weight))
    chex.assert_trees_all_close(model_of(trained.variables.params), params, atol=1e-6)


# --- who holds what -------------------------------------------------------------------------------------------------

MODEL = {"conv", "dense", "head"}


def test_the_discriminator_never_leaves_the_client():
    start = started()
    assert start.variables.params.keys() == MODEL | {"generator"}
    trained, (own, memory), message = train(ADG, FedADGHparams(LR))
    assert trained.variables.params.keys() == MODEL | {"generator"}
    assert message == () and memory == ()
    assert own.discriminator.keys() == {"projection", "hidden", "out"}
    assert apart(own.discriminator, discriminator_of(start.client)) > 1e-4


def test_a_shared_discriminator_is_part_of_the_model():
    start = started(SHARED)
    assert start.variables.params.keys() == MODEL | {"generator", "discriminator"}
    assert start.client == ((), ())
    moved, _ = take_step(SHARED, FedADGHparams(LR))
    assert SHARED().report(BACKBONE, received_by(SHARED), moved, jnp.int32(1), one_batch(), KEY) == (((), ()), ())
    assert apart(moved.variables.params["discriminator"], start.variables.params["discriminator"]) > 1e-4


def test_a_shared_discriminator_learns_as_an_own_one():
    """From the same start, the same step."""
    start, shared = started(), started(SHARED)
    theirs = unboxed(discriminator_of(start.client))
    params = {**start.variables.params, "discriminator": theirs}
    received = received_by(SHARED)._replace(variables=shared.variables._replace(params=params))
    hparams = FedADGHparams(LR, 0.3)
    moved, metrics = programs(SHARED, optax.sgd)[0](hparams, received, one_batch(), KEY, jnp.int32(1))
    own, told = take_step(ADG, hparams)
    chex.assert_trees_all_close(
        moved.variables.params.pop("discriminator"), unboxed(discriminator_of(own.client)), atol=1e-6
    )
    chex.assert_trees_all_close(moved.variables.params, own.variables.params, atol=1e-6)
    chex.assert_trees_all_close(metrics, told, atol=1e-6)


@functools.cache
def two_rounds():
    """Jitted (hparams, state) -> the next state, and the start, of two clients."""
    federation = tiny_federation([[4, 3]], batch_size=4, local_epochs=2)
    start = make_round(BACKBONE, ADG(), federation.topology).init(jax.random.key(0))

    @jax.jit
    def step(hparams, state):
        round_fn = make_round(BACKBONE, ADG(hparams), federation.topology)
        return round_fn.step(state, federation.data, jax.random.key(1))[0]

    return start, step


def of_client(state, client):
    return jax.tree.map(lambda x: x[0, client], state.clients[0])


def test_clients_start_with_discriminators_of_their_own():
    start, _ = two_rounds()
    first, second = (of_client(start, i).discriminator for i in range(2))
    assert apart(first["projection"], second["projection"]) > 0.1


def test_discriminators_persist_and_are_not_averaged():
    """Untrained ones are the same after two rounds, to the bit; trained ones go on where they were, with their momentum."""
    start, step = two_rounds()
    still = FedADGHparams(LR, adversary_lr=0.0)
    after = step(still, step(still, start))
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x, s.clients[0].discriminator) for s in (after, start)))
    hparams = FedADGHparams(LR, 0.1)
    first = step(hparams, start)
    second = step(hparams, first)
    forgetful = step(hparams, first._replace(clients=start.clients))
    for i in range(2):
        states = [of_client(s, i) for s in (start, first, second, forgetful)]
        assert apart(states[0].discriminator, states[1].discriminator) > 1e-3
        assert apart(states[2].discriminator, states[3].discriminator) > 1e-3
        assert max(np.abs(x).max() for x in jax.tree.leaves(states[1].optimizer)) > 1e-4
    assert (
        apart(of_client(second, 0).discriminator["projection"], of_client(second, 1).discriminator["projection"]) > 0.1
    )


@pytest.mark.parametrize("method", [fedadg, stable_fedadg])
def test_passes_must_reach_beyond_the_warm_up(method):
    with pytest.raises(ValueError, match="local_epochs=1.*needs 4.*raise local_epochs"):
        make_round(BACKBONE, method(warmup_epochs=3), Topology(1, 1, local_epochs=1))
    assert (method().local_epochs, method().least_epochs) == (8, 4)
    assert (method(warmup_epochs=1).local_epochs, method(warmup_epochs=1).least_epochs) == (6, 2)
    make_round(BACKBONE, method(warmup_epochs=0), Topology(1, 1, local_epochs=1))


@pytest.mark.parametrize("method", [fedadg, stable_fedadg])
def test_what_cannot_be_is_refused(method):
    with pytest.raises(ValueError, match="paper"):
        method(adv_form="papers")
    with pytest.raises(ValueError, match="warmup_epochs=-1"):
        method(warmup_epochs=-1)
    with pytest.raises(ValueError, match="0 or more"):
        method(noise_width=-2)


# --- the features in another order ----------------------------------------------------------------------------------


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


features_of_lenet = jax.jit(lenet5(num_classes=3).features)


@functools.cache
def reordered(share):
    """A LeNet-5's (model, client), all random, the order of its features, and both in that order."""
    method = fedadg(share_discriminator=share, rectify=False)
    backbone = method.adapt(lenet5(num_classes=3))
    shapes = jax.eval_shape(lambda key: method.init(backbone, backbone.init(key), key), KEY)
    random = lambda x: jnp.asarray(0.1 * np.random.default_rng(x.size).normal(size=x.shape), jnp.float32)
    variables, client = jax.tree.map(random, (shapes.variables, shapes.client))
    (group,) = (g for g in backbone.groups if any(x.leaf == "params/head/kernel" for x in g.consumers))
    order = jnp.asarray(np.random.default_rng(2).permutation(group.size))
    moved = carry(client, variables, backbone.groups, {group.name: order})
    return backbone, (variables, client), order, (permute(variables, group, order), moved)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_reordered_features_leave_network_and_adversary_the_same(share):
    backbone, (variables, client), order, (permuted, moved) = reordered(share)
    inputs, noise, code = normal(3, 32, 32, 3), normal(3, 42, seed=1), jnp.eye(3)
    without = lambda v: Variables(
        {name: v.params[name] for name in v.params if name not in ("generator", "discriminator")}, {}
    )
    z, there = (features_of_lenet(without(v), inputs) for v in (variables, permuted))
    np.testing.assert_allclose(there, z[:, order], atol=1e-6)
    np.testing.assert_allclose(backbone.head(without(permuted), there), backbone.head(without(variables), z), atol=1e-5)
    of = lambda v: Generator(84, 84, False).apply({"params": v.params["generator"]}, noise, code)
    np.testing.assert_allclose(of(permuted), of(variables)[:, order], atol=1e-6)
    before, after = (
        unboxed(v.params["discriminator"] if share else discriminator_of(c))
        for v, c in ((variables, client), (permuted, moved))
    )
    judged = lambda d, z: Discriminator(21).apply({"params": d}, z, code)
    np.testing.assert_allclose(judged(after, there), judged(before, z), atol=1e-6)
    # so that the test can fail
    assert np.abs(judged(before, there) - judged(before, z)).max() > 1e-4
    assert np.ptp(np.asarray(z), axis=1).min() > 1e-3


def test_the_momentum_of_a_discriminator_follows_too():
    _, (_, client), order, (_, moved) = reordered(False)
    before, after = (unboxed(c[0].optimizer[0].trace["discriminator"]) for c in (client, moved))
    np.testing.assert_array_equal(after["projection"]["kernel"], before["projection"]["kernel"][order])
    chex.assert_trees_all_equal(after["hidden"], before["hidden"])


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_kept_momentum_follows_in_parts(share):
    """The optimizers' states are shaped like parts of the parameters: with those parts as momentum, both move alike."""
    backbone, (variables, client), order, (permuted, _) = reordered(share)
    method = fedadg(share_discriminator=share, rectify=False)
    optimizers, _ = method.begin(backbone, Received(variables, (), (), client), client)
    (group,) = (g for g in backbone.groups if any(x.leaf == "params/head/kernel" for x in g.consumers))

    def filled(params):
        parts = ({k: v for k, v in params.items() if k not in ("generator", "discriminator")},)
        parts += tuple({name: params[name]} for name in ("generator", "discriminator") if name in params)
        return tuple((state[0]._replace(trace=part), *state[1:]) for state, part in zip(optimizers, parts) if state)

    found = carry(filled(variables.params), variables, backbone.groups, {group.name: order})
    chex.assert_trees_all_equal(found, filled(permuted.params))


def test_boxes_change_nothing():
    discriminator = {"projection": {"kernel": jnp.ones((2, 3))}, "hidden": {"bias": jnp.zeros(3)}}
    chex.assert_trees_all_equal(unboxed(boxed(discriminator)), discriminator)


# --- Stable-FedADG --------------------------------------------------------------------------------------------------

PLAIN_WARM_UP = functools.partial(STABLE, reweight_in_warmup=False)
WEIGHTED = StableFedADGHparams(LR, 0.1, smoothing=0.05, lambda_p=0.1)
UNWEIGHTED = WEIGHTED._replace(weight_lr=0.0)
AS_FEDADG = FedADGHparams(*WEIGHTED[:6])


def test_even_weights_are_fedadg():
    stable, plain = train(STABLE, UNWEIGHTED), train(ADG, AS_FEDADG)
    chex.assert_trees_all_close(stable[0].variables, plain[0].variables, atol=1e-6)
    chex.assert_trees_all_close(stable[1], plain[1], atol=1e-6)
    assert stable[2] == ()


def test_weights_are_felt():
    assert apart(train(STABLE, WEIGHTED)[0].variables, train(ADG, AS_FEDADG)[0].variables) > 1e-3


@pytest.mark.parametrize(("passes", "weighted"), [(0, False), (1, True)], ids=["warm-up", "after it"])
def test_the_warm_up_may_be_unweighted(passes, weighted):
    plain = take_step(ADG, AS_FEDADG, passes=passes)[0].variables
    chosen = take_step(PLAIN_WARM_UP, WEIGHTED, passes=passes)[0].variables
    by_default = take_step(STABLE, WEIGHTED, passes=passes)[0].variables
    assert apart(by_default, plain) > 1e-4
    chex.assert_trees_all_close(chosen, by_default if weighted else plain, atol=1e-6)


def test_the_adversary_is_not_weighted():
    """Its losses, and the discriminator and generator after a step, are those of FedADG."""
    weighted, told = take_step(STABLE, WEIGHTED)
    even, plainly = take_step(STABLE, UNWEIGHTED)
    assert told["weight_max"] > 1.1 and plainly["weight_max"] == pytest.approx(1.0, abs=1e-6)
    assert abs(told["cross_entropy"] - plainly["cross_entropy"]) > 1e-3
    for name in ("adv_d", "adv_f", "adv_g"):
        assert told[name] == pytest.approx(float(plainly[name]), rel=1e-6) and told[name] > 1e-2
    chex.assert_trees_all_close(weighted.client, even.client, atol=1e-7)
    generators = (x.variables.params["generator"] for x in (weighted, even))
    chex.assert_trees_all_close(*generators, atol=1e-7)


# --- RSC: which features --------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """z = scale * x, and a linear head: what a feature's scale feels is the gradient of that feature."""

    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (3,))
        self.head = nn.Dense(2)

    def features(self, x, train, mask=None):
        return self.scale * x

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


SCALED = Backbone(Scaled(), input_shape=(3,), num_features=3, num_classes=2)
W = np.array([[3.0, 1.0, -2.0], [0.0, 2.0, 1.0]])


def scaled_step(x, labels, hparams, method=rsc):
    """One step of plain descent at rate 1 from h(z) = W z: the change of the parameters, the metrics."""
    params = {"scale": jnp.ones(3), "head": {"kernel": jnp.asarray(W.T, jnp.float32), "bias": jnp.zeros(2)}}
    rows = Examples(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(labels, jnp.int32),
        jnp.ones(len(x), bool),
        jnp.zeros(len(x), jnp.int32),
    )
    received = Received(Variables(params, {}), (), (), (), jnp.int32(0))
    moved, metrics = programs(method, optax.sgd, SCALED)[0](hparams, received, rows, KEY, jnp.int32(0))
    return minus(moved.variables.params, params), metrics


def test_rsc_mutes_the_feature_that_speaks_most_for_the_class():
    """z = (1, 1, 1), y = 0: g = (3, 1, -2), so the first is muted and the loss rises; neither it nor its weights learn."""
    move, metrics = scaled_step(np.ones((1, 3)), [0], RSCHparams(1.0, drop=1 / 3, batch=1.0))
    assert metrics["unchallenged"] == pytest.approx(1.3132616875, rel=1e-6)
    assert metrics["loss"] == pytest.approx(4.0181499179, rel=1e-6)
    assert metrics["challenged"] == 1.0
    error = 1 - 1 / (1 + np.exp(4.0))  # of the logits (-1, 3)
    np.testing.assert_allclose(move["scale"], error * np.array([0.0, 1 - 2, -2 - 1]), rtol=1e-5)
    np.testing.assert_allclose(move["head"]["kernel"], error * np.outer([0, 1, 1], [1, -1]), rtol=1e-5)


def test_a_feature_muted_in_one_row_learns_from_the_others():
    """Two rows of different classes: W[0] is largest at feature 0, W[1] at feature 1."""
    x = np.array([[1.0, 0.5, 0.2], [0.3, 1.0, -0.4]])
    move, _ = scaled_step(x, [0, 1], RSCHparams(1.0, drop=1 / 3, batch=1.0))
    kept = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    logits = (x * kept) @ W.T
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(move["scale"], -(((p - np.eye(2)) @ W) * kept * x).mean(0), rtol=1e-5)


@pytest.mark.parametrize("num", [0, 1, 3, 8])
@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_exactly_so_many_features_are_muted(num, score):
    z, gradient = normal(6, 8), normal(6, 8, seed=1)
    gradient = gradient.at[0].set(0.0).at[1, ::2].set(1.0).at[2].set(-3.0)  # ties
    z = z.at[3:].set(jnp.maximum(z[3:], 0.0)).at[0].set(1.0)  # as after a ReLU
    kept = np.asarray(mute_features(z, gradient, num / 8, score))
    scores = np.asarray(gradient if score == "gradient" else z * gradient)
    assert set(np.unique(kept)) <= {0.0, 1.0}
    np.testing.assert_array_equal((kept == 0).sum(1), np.full(6, num))
    for row, muted in zip(scores, kept == 0):
        assert set(np.flatnonzero(muted)) == set(np.argsort(-row, kind="stable")[:num])


@pytest.mark.parametrize(("width", "num"), [(512, 171), (2048, 683), (4096, 1365), (4, 1), (5, 2)])
def test_a_third_of_the_features_is(width, num):
    assert (mute_features(normal(1, width), normal(1, width, seed=1), 1 / 3, "gradient") == 0).sum() == num


@pytest.mark.parametrize(("side", "num"), [(7, 17), (6, 12), (5, 9), (1, 1)])
def test_a_third_of_the_places_is(side, num):
    maps = normal(2, side, side, 3)
    kept = mute_places(maps, normal(2, side, side, 3, seed=1), 1 / 3)
    assert kept.shape == (2, side, side, 1)
    np.testing.assert_array_equal((kept == 0).sum((1, 2, 3)), [num, num])


@pytest.mark.parametrize(("channels", "num"), [(512, 160), (2048, 640), (16, 5)])
def test_a_share_of_the_channels_is(channels, num):
    shape = (2, 2, 2, channels)
    kept = mute_channels(normal(*shape), normal(*shape, seed=1), 1 / 3.2)
    assert kept.shape == (2, 1, 1, channels)
    np.testing.assert_array_equal((kept == 0).sum((1, 2, 3)), [num, num])


def test_ties_of_maps_go_to_the_first():
    zeros = jnp.zeros((1, 3, 3, 10))
    np.testing.assert_array_equal(mute_places(zeros, zeros, 1 / 3).ravel(), np.arange(9) >= 3)
    np.testing.assert_array_equal(mute_channels(zeros, zeros, 1 / 3.2).ravel(), np.arange(10) >= 4)


def naive_places(maps, gradient, num):
    """The places of largest sum_c z_c g_c, g averaged over places, are 0."""
    kept = np.ones((*maps.shape[:3], 1))
    for i in range(len(maps)):
        of_channels = gradient[i].mean((0, 1))
        scores = {(h, w): maps[i, h, w] @ of_channels for h in range(maps.shape[1]) for w in range(maps.shape[2])}
        for place in sorted(scores, key=scores.get, reverse=True)[:num]:
            kept[(i, *place)] = 0.0
    return kept


def naive_channels(maps, gradient, num):
    kept = np.ones((len(maps), 1, 1, maps.shape[3]))
    for i in range(len(maps)):
        kept[i, 0, 0, np.argsort(-gradient[i].mean((0, 1)))[:num]] = 0.0
    return kept


def test_places_and_channels_are_those_of_largest_score():
    maps, gradient = normal(4, 3, 4, 6), normal(4, 3, 4, 6, seed=1)
    np.testing.assert_array_equal(
        mute_places(maps, gradient, 0.4), naive_places(np.asarray(maps), np.asarray(gradient), 5)
    )
    np.testing.assert_array_equal(
        mute_channels(maps, gradient, 0.4), naive_channels(np.asarray(maps), np.asarray(gradient), 3)
    )


def test_the_activation_score_differs_between_examples_of_a_class():
    """Under a linear head the gradient is the class's weights, whatever the features."""
    z, labels = jnp.abs(normal(40, 6)), np.arange(40) % 2
    gradient = jnp.asarray(np.random.default_rng(4).uniform(size=(2, 6)), jnp.float32)[labels]
    of_gradient, of_activation = (np.asarray(mute_features(z, gradient, 1 / 3, s)) for s in ("gradient", "activation"))
    for label in range(2):
        assert len(np.unique(of_gradient[labels == label], axis=0)) == 1
        assert len(np.unique(of_activation[labels == label], axis=0)) > 1


ACTIVATION = functools.partial(rsc, score="activation")


def test_the_score_reaches_the_step():
    """x = (0.1, 1, 1): 3 is the largest gradient, 1 the largest product."""
    x, hparams = np.array([[0.1, 1.0, 1.0]]), RSCHparams(1.0, drop=1 / 3, batch=1.0)
    by_gradient, _ = scaled_step(x, [0], hparams)
    by_activation, _ = scaled_step(x, [0], hparams, ACTIVATION)
    np.testing.assert_array_equal(by_gradient["scale"] == 0, [True, False, False])
    np.testing.assert_array_equal(by_activation["scale"] == 0, [False, True, False])


# --- RSC: which rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 1 / 3, 0.5, 0.9, 1.0])
def test_those_that_lose_most_confidence_are_challenged(share):
    rng = np.random.default_rng(int(10 * share))
    logits, muted = rng.normal(size=(2, 13, 4)).astype(np.float32)
    labels, mask = rng.integers(0, 4, 13).astype(np.int32), np.arange(13) % 5 != 2  # 10 real rows
    muted[~mask] = -50.0 * np.eye(4)[labels[~mask]]  # padding would lose most
    chosen = np.asarray(challenge(*(jnp.asarray(x) for x in (logits, muted, labels, mask)), share))
    confidence = lambda x: np.array([np.exp(row[y]) / np.exp(row).sum() for row, y in zip(x, labels)])
    lost = np.where(mask, confidence(logits) - confidence(muted), -np.inf)
    assert chosen.sum() == round(share * 10)
    assert set(np.flatnonzero(chosen)) == set(np.argsort(-lost)[: round(share * 10)])


def test_no_rows_are_challenged_where_there_are_none():
    nothing = jnp.zeros((3, 2))
    assert not challenge(nothing, nothing, jnp.zeros(3, jnp.int32), jnp.zeros(3, bool), 1.0).any()


def test_of_equal_rows_the_first_are_challenged():
    rows = jnp.ones((5, 2))
    chosen = challenge(rows, rows, jnp.zeros(5, jnp.int32), jnp.array([False, True, True, True, True]), 0.5)
    np.testing.assert_array_equal(chosen, [False, True, True, False, False])


@pytest.mark.parametrize(
    ("number", "expected"), [(0, 0.3), (9, 0.3), (10, 0.5), (19, 0.5), (20, 0.7), (30, 0.9), (40, 1.0), (99, 1.0)]
)
def test_the_challenged_share_grows_by_round_up_to_one(number, expected):
    hparams = RSCHparams(batch=0.3, growth=0.2, growth_rounds=10.0)
    assert challenged_share(hparams, jnp.int32(number)) == pytest.approx(expected, abs=1e-6)
    assert challenged_share(RSCHparams(batch=0.3), jnp.int32(number)) == pytest.approx(0.3, abs=1e-6)


# --- RSC: steps -----------------------------------------------------------------------------------------------------

RSC = {mute: functools.partial(rsc, mute=mute) for mute in ("features", "spatial", "channel", "either")}


def rsc_step(mute, hparams, number=0, seed=2, rows=None):
    received = Received(fresh(), (), (), (), jnp.int32(number))
    rows = one_batch() if rows is None else rows
    moved, metrics = programs(RSC[mute], optax.sgd)[0](hparams, received, rows, jax.random.key(seed), jnp.int32(0))
    return minus(moved.variables.params, fresh().params), metrics


def trained_by(method, hparams):
    received = Received(fresh(), (), (), (), jnp.int32(0))
    return programs(method, momentum)[1](hparams, received, examples_of(), jax.random.key(1))[0].local.variables.params


NOBODY = {"batch": 0.0}
NOTHING = {"drop": 0.0, "drop_channels": 0.0, "batch": 1.0}


@pytest.mark.parametrize("off", [NOBODY, NOTHING], ids=["no rows", "no features"])
@pytest.mark.parametrize("mute", RSC)
def test_without_challenges_it_is_fedavg(mute, off):
    challenged, plain = trained_by(RSC[mute], RSCHparams(LR, **off)), trained_by(fedavg, FedAvgHparams(LR))
    if mute == "features":
        chex.assert_trees_all_equal(challenged, plain)
    else:
        chex.assert_trees_all_close(challenged, plain, atol=1e-6)
    assert apart(trained_by(RSC[mute], RSCHparams(LR, batch=1.0)), plain) > 1e-3


@pytest.mark.parametrize(("number", "share"), [(0, 0.3), (10, 0.5), (25, 0.7), (60, 1.0)])
def test_the_schedule_goes_by_server_round(number, share):
    _, metrics = rsc_step("features", RSCHparams(LR, batch=0.3, growth=0.2), number)
    assert metrics["challenged"] == pytest.approx(round(7 * share) / 7, rel=1e-6)


@pytest.mark.parametrize("mute", RSC)
def test_rsc_never_reads_padding(mute):
    wild = one_batch()._replace(inputs=one_batch().inputs.at[7].set(7.0), labels=one_batch().labels.at[7].set(2))
    hparams = RSCHparams(LR, batch=0.5)
    chex.assert_trees_all_close(rsc_step(mute, hparams), rsc_step(mute, hparams, rows=wild), atol=1e-6)


@pytest.mark.parametrize("mute", RSC)
def test_what_is_muted_gets_no_gradient(mute):
    """All of it, in every row: nothing in front learns, and the bias behind does."""
    move, _ = rsc_step(mute, RSCHparams(1.0, drop=1.0, drop_channels=1.0, batch=1.0))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(move["conv"]))
    assert not np.asarray(move["dense"]["kernel"]).any()
    if mute == "features":
        assert not np.asarray(move["dense"]["bias"]).any() and not np.asarray(move["head"]["kernel"]).any()
    assert np.abs(move["head"]["bias"]).max() > 1e-2


@pytest.mark.parametrize("mute", ["spatial", "channel"])
def test_a_step_on_muted_maps(mute):
    """The gradient of the cross-entropy of maps times constants, which are found row by row."""
    move, metrics = rsc_step(mute, RSCHparams(1.0, drop=0.5, drop_channels=0.5, batch=1.0))
    maps, _ = BACKBONE.maps(fresh(), one_batch().inputs, one_batch().mask, KEY)

    @jax.jit
    @jax.vmap
    def gradient_of(maps, label):
        return jax.grad(lambda x: BACKBONE.from_maps(fresh(), x[None], KEY).logits[0, label])(maps)

    gradient = gradient_of(maps, one_batch().labels)
    naive = naive_places if mute == "spatial" else naive_channels
    kept = jnp.asarray(naive(np.asarray(maps), np.asarray(gradient), 2), jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        maps, _ = BACKBONE.maps(Variables(params, {}), one_batch().inputs, one_batch().mask, KEY)
        logits = BACKBONE.from_maps(Variables(params, {}), maps * kept, KEY).logits
        return reference.cross_entropy(logits[REAL], one_batch().labels[REAL])

    value, expected = loss(fresh().params)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    chex.assert_trees_all_close(jax.tree.map(jnp.negative, move), expected, atol=1e-6)


def test_either_is_one_of_the_two_by_a_coin():
    hparams = RSCHparams(1.0, drop=0.5, drop_channels=0.5, batch=1.0)
    both = [rsc_step(mute, hparams)[0] for mute in ("spatial", "channel")]
    assert apart(*both) > 1e-3
    seen = set()
    for seed in range(10):
        move = rsc_step("either", hparams, seed=seed)[0]
        near = [apart(move, one) < 1e-6 for one in both]
        assert sum(near) == 1
        seen.add(near.index(True))
    assert seen == {0, 1}


@pytest.mark.parametrize("mute", ["spatial", "channel", "either"])
def test_networks_without_maps_are_told_what_to_choose(mute):
    with pytest.raises(ValueError, match=f"mute={mute}.*choose mute=features"):
        rsc(mute=mute).adapt(SCALED)
    assert rsc().adapt(SCALED) is SCALED
    assert rsc(mute=mute).adapt(BACKBONE) is BACKBONE


def test_rsc_names_what_can_be_muted_and_how_it_scores():
    with pytest.raises(ValueError, match="spatial"):
        rsc(mute="spatially")
    with pytest.raises(ValueError, match="activation"):
        rsc(score="activations")
