"""LSI: latent space inversion, the translator, the invariance loss, importance-weighted averaging."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from client import examples_of, fresh, one_batch, programs
from flax import linen as nn
from tiny import CLASSES, tiny_backbone, tiny_federation

from fedjax_dg import inversion, make_round, translation
from fedjax_dg.aggregators import importance, mean
from fedjax_dg.aggregators.importance import in_units
from fedjax_dg.aggregators.weighted import merge_by, shares
from fedjax_dg.algorithms import LSIHparams, fedavg, lsi, with_bottleneck
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.backbones import Backbone, alexnet, lenet5, resnet18, resnet50
from fedjax_dg.run import run_blocks, run_stage
from fedjax_dg.types import Examples, Local, Received, Variables

KEY = jax.random.key(0)
SMALL = {"num_sources": 3, "hidden": 8, "head_epochs": 1, "bank": 2, "inversion_steps": 3, "translator_steps": 10}
BACKBONE = with_bottleneck(tiny_backbone(), 4)


def plain_head(kernel, bias=None):
    """A head whose batch norm changes nothing."""
    kernel = jnp.asarray(kernel, jnp.float32)
    size, classes = kernel.shape
    bias = jnp.zeros(classes) if bias is None else jnp.asarray(bias, jnp.float32)
    return inversion.Head(kernel, bias, jnp.zeros(size), jnp.full(size, 1 - inversion.NORM_EPSILON))


def several(*heads):
    return jax.tree.map(lambda *x: jnp.stack(x), *heads)


# --- stage 2 --------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_batch_norm_and_a_dense_layer():
    rng = np.random.default_rng(0)
    kernel, bias, m, z = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 3), (3,), (5,), (7, 5)))
    v = jnp.asarray(rng.uniform(0.2, 3, 5), jnp.float32)
    norm = nn.BatchNorm(use_running_average=True, epsilon=1e-5, use_scale=False, use_bias=False)
    expected = norm.apply({"batch_stats": {"mean": m, "var": v}}, z) @ kernel + bias
    np.testing.assert_allclose(
        inversion.logits_of(inversion.Head(kernel, bias, m, v), z), expected, rtol=1e-5, atol=1e-6
    )


def test_gradient_of_the_classification_loss_has_the_closed_form():
    """(1/B) (v + eps)^(-1/2) W (softmax - onehot), row by row."""
    rng = np.random.default_rng(1)
    head = inversion.Head(*(jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in ((5, 3), (3,), (5,), (5,))))
    z, labels = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32), jnp.array([0, 2, 1, 1])
    weights = inversion.InversionWeights(bn=0.0, norm=0.0)
    found = jax.grad(inversion.inversion_loss)(z, labels, head, weights)
    wrong = jax.nn.softmax(inversion.logits_of(head, z)) - jax.nn.one_hot(labels, 3)
    expected = wrong @ head.kernel.T / jnp.sqrt(head.var + 1e-5) / 4
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def bank_of(z, labels, moments=None):
    z = jnp.asarray(z, jnp.float32)[None, None]
    return inversion.Bank(z, jnp.asarray(labels)[None, None], jnp.zeros((1, 1), jnp.int32), inversion.adam(1.0).init(z))


def settled(bank, head, weights):
    """Latents where the losses are least: Adam with smaller and smaller steps."""
    go = jax.jit(lambda bank, rate: inversion.invert(bank, head, weights, rate, 2000))
    for rate in (1e-2, 1e-3, 1e-4, 1e-5):
        bank = go(bank, rate)
    return bank.z


def test_norm_losses_alone_have_the_closed_form_minimum():
    """Batch mean m lambda_bn / (lambda_bn + lambda_norm), batch variance v - lambda_norm / (2 lambda_bn)."""
    m, v = np.array([0.4, -0.8, 1.2], np.float32), np.array([0.6, 0.3, 1.2], np.float32)
    head = several(inversion.Head(jnp.zeros((3, 2)), jnp.zeros(2), m, v))
    bank = bank_of(np.random.default_rng(0).normal(size=(16, 3)), np.zeros(16, np.int32))
    weights = inversion.InversionWeights(clsz=0.0)
    z = settled(bank, head, weights)[0, 0]
    np.testing.assert_allclose(z.mean(0), m / 1.1, atol=1e-3)
    np.testing.assert_allclose(z.var(0), v - 0.05, atol=1e-3)


def test_binary_head_with_a_penalty_on_the_norm_has_the_closed_form_minimum():
    """z* = t w / || w || with lambda t = || w || sigmoid(-2 || w || t)."""
    w = np.array([1.0, 2.0, 2.0])
    head = several(plain_head(np.stack([w, -w], 1)))
    weights = inversion.InversionWeights(bn=0.0, norm=0.05)
    bank = bank_of(np.random.default_rng(2).normal(size=(1, 3)), np.zeros(1, np.int32))
    np.testing.assert_allclose(settled(bank, head, weights)[0, 0, 0], 0.2440923 * w, atol=1e-4)


@pytest.mark.parametrize("squared", [True, False])
def test_the_losses_are_those_of_a_plain_computation(squared):
    rng = np.random.default_rng(3)
    head = inversion.Head(*(jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in ((5, 3), (3,), (5,), (5,))))
    z, labels = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32), jnp.array([0, 2, 1, 1, 0, 2])
    logits = (z - head.mean) / np.sqrt(head.var + 1e-5) @ head.kernel + head.bias
    error = np.mean([np.log(np.exp(row).sum()) - row[y] for row, y in zip(logits, labels)])
    gaps = z.mean(0) - head.mean, z.var(0) - head.var
    if squared:
        bn, length = sum((g**2).sum() for g in gaps), (z**2).sum(1).mean()
    else:
        bn, length = sum(np.sqrt((g**2).sum()) for g in gaps), np.sqrt((z**2).sum(1)).mean()
    weights = inversion.InversionWeights(clsz=0.7, bn=0.3, norm=0.2)
    found = inversion.inversion_loss(z, labels, head, weights, squared)
    np.testing.assert_allclose(found, 0.7 * error + 0.3 * bn + 0.2 * length, rtol=1e-5)


def test_a_domains_latents_do_not_depend_on_the_heads_of_others():
    rng = np.random.default_rng(4)
    head = lambda: inversion.Head(
        *(jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in ((4, 3), (3,), (4,), (4,)))
    )
    first, second, third = head(), head(), head()
    choice = inversion.choose_heads(jnp.array([[5, 0], [0, 5]]), 2)
    made = []
    for other in (second, third):
        heads = several(first, other)
        bank = inversion.start_bank(heads, choice, 8, True, KEY)
        made.append(inversion.invert(bank, heads, inversion.InversionWeights(), 0.1, 5).z)
    chex.assert_trees_all_equal(made[0][0], made[1][0])
    assert not np.allclose(made[0][1], made[1][1])
    assert not np.allclose(made[0][0, 0], made[0][0, 1])  # nor are two batches of a client alike


@pytest.mark.parametrize("matched", [True, False])
def test_latents_start_from_the_clients_statistics_or_from_a_standard_normal(matched):
    head = plain_head(np.zeros((3, 4)))._replace(mean=jnp.array([1.0, -2.0, 0.0]), var=jnp.array([4.0, 0.25, 1.0]))
    bank = inversion.start_bank(several(head), jnp.zeros((1, 200), jnp.int32), 32, matched, KEY)
    assert bank.z.shape == (1, 200, 32, 3) and bank.labels.shape == (1, 200, 32)
    m, v = (head.mean, head.var) if matched else (np.zeros(3), np.ones(3))
    np.testing.assert_allclose(bank.z.mean((0, 1, 2)), m, atol=0.1)
    np.testing.assert_allclose(bank.z.var((0, 1, 2)), v, rtol=0.1)
    np.testing.assert_allclose(np.bincount(bank.labels.ravel(), minlength=4) / 6400, 0.25, atol=0.03)


def test_heads_are_inverted_as_often_as_their_clients_hold_a_domains_examples():
    counts = jnp.array([[0, 10], [30, 0], [0, 0], [10, 30]])
    chosen = np.asarray(inversion.choose_heads(counts, 40))
    np.testing.assert_array_equal(np.bincount(chosen[0], minlength=4), [0, 30, 0, 10])
    np.testing.assert_array_equal(np.bincount(chosen[1], minlength=4), [10, 0, 0, 30])


# --- stage 3 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares_", [0.0, 0.3, 1.0])
def test_gradient_penalty_of_a_linear_critic(shares_):
    a = jnp.array([1.0, 2.0, 2.0])
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)), jnp.float32)
    share = jnp.full((4, 1), shares_)
    found = translation.gradient_penalty(lambda u: u @ a, rows[0], rows[1], share)
    np.testing.assert_allclose(found, 4.0, rtol=1e-5)  # (3 - 1)^2; over all rows jointly it would be (6 - 1)^2


def networks(width=4, hidden=8, num_domains=3):
    return translation.Networks(
        translation.Translator(width, hidden, False), translation.Discriminator(hidden, num_domains)
    )


def latents_of(rows=40, width=4, num_domains=3):
    rng = np.random.default_rng(5)
    domain = jnp.asarray(np.arange(rows) % num_domains, jnp.int32)
    z = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32) + 3 * domain[:, None]
    return translation.Latents(z, jnp.asarray(rng.integers(0, 2, rows), jnp.int32), domain)


def size_of(params):
    return sum(x.size for x in jax.tree.leaves(params))


def test_sizes_are_those_of_the_paper():
    """Its Tables V and VI, for PACS and OfficeHome: 2.1 M, 1.0 M, 24.6 M, 33.3 K."""
    nets = networks(512, 1024, 3)
    players = jax.eval_shape(nets.init, KEY)
    assert (size_of(players.translator), size_of(players.discriminator)) == (2_109_952, 1_055_236)
    backbone = with_bottleneck(resnet50(num_classes=65))
    params = dict(jax.eval_shape(backbone.init, KEY).params)
    assert size_of(params.pop("head")) == 33_345
    assert size_of(params) == 24_557_120


def test_features_are_as_wide_as_the_paper_has_them():
    width = lambda backbone: with_bottleneck(backbone).num_features
    assert width(resnet50(num_classes=7)) == 512
    assert width(alexnet(num_classes=7)) == 4096
    assert width(lenet5(num_classes=7)) == 84
    assert width(resnet18(num_classes=7)) == 512
    assert with_bottleneck(lenet5(num_classes=7), 20).num_features == 20


def test_a_step_of_the_discriminator_does_not_move_the_translator_and_every_fifth_is_followed_by_one():
    nets, latents = networks(), latents_of()
    heads = several(plain_head(np.eye(4)[:, :2]))
    start = jax.jit(nets.init)(KEY)
    play = jax.jit(
        lambda players, first, steps: translation.play(
            players, nets, heads, jnp.ones(1), latents, translation.TranslationWeights(), 1e-3, first, steps, KEY
        )
    )
    four, five = play(start, 0, 4), play(start, 0, 5)
    chex.assert_trees_all_equal(four.translator, start.translator)
    assert not np.allclose(four.discriminator["domain"]["kernel"], start.discriminator["domain"]["kernel"])
    assert not np.allclose(five.translator["dense1"]["kernel"], start.translator["dense1"]["kernel"])
    chex.assert_trees_all_equal(play(four, 4, 1), five)  # going on is the same as not having stopped


def test_the_translators_loss_is_that_of_a_plain_computation(monkeypatch):
    """With a G that adds d' - d, a D that scores by the first entry, and two heads for three domains."""
    shift = lambda self, params, z, source, target, key=None: z + (target - source)[:, None]
    judged = lambda self, params, z, key=None: (z[:, 0], z @ jnp.eye(4)[:, :3])
    monkeypatch.setattr(translation.Networks, "translate", shift)
    monkeypatch.setattr(translation.Networks, "judge", judged)
    latents, target = latents_of(6), jnp.array([2, 0, 1, 1, 2, 0])
    heads = several(plain_head(np.eye(4)[:, :2]), plain_head(np.eye(4)[:, 2:]))
    weights = translation.TranslationWeights(cls=0.5, rec=10.0, y=0.1)
    found = translation.translator_loss(
        (), (), networks(), heads, jnp.array([0.25, 0.75]), latents, target, weights, KEY
    )
    fake = latents.z + (target - latents.domain)[:, None]
    error = lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    kept = 0.25 * error(fake[:, :2], latents.labels) + 0.75 * error(fake[:, 2:], latents.labels)
    expected = -fake[:, 0].mean() + 0.5 * error(fake[:, :3], target) + 0.1 * 3 * kept  # the way back is exact
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_discriminators_loss_is_that_of_a_plain_computation(monkeypatch):
    shift = lambda self, params, z, source, target, key=None: z + params["move"] * (target - source)[:, None]
    judged = lambda self, params, z, key=None: (z @ params["a"], z @ jnp.eye(4)[:, :3])
    monkeypatch.setattr(translation.Networks, "translate", shift)
    monkeypatch.setattr(translation.Networks, "judge", judged)
    latents, target = latents_of(6), jnp.array([2, 0, 1, 1, 2, 0])
    a = jnp.array([1.0, 2.0, 0.0, 2.0])
    weights = translation.TranslationWeights(cls=0.5, gp=10.0)
    loss = lambda move: translation.discriminator_loss(
        {"a": a}, {"move": move}, networks(), latents, target, weights, KEY
    )
    fake = latents.z + (target - latents.domain)[:, None]
    error = optax.softmax_cross_entropy_with_integer_labels(latents.z[:, :3], latents.domain).mean()
    expected = (fake @ a).mean() - (latents.z @ a).mean() + 0.5 * error + 10.0 * (3 - 1) ** 2
    np.testing.assert_allclose(loss(1.0), expected, rtol=1e-5)
    assert jax.grad(loss)(1.0) == 0


def test_a_translator_learns_to_move_features_between_domains():
    """Three domains of two classes on a line: the class stays, the domain changes, the way back is short."""
    rng = np.random.default_rng(6)
    domain, label = (rng.integers(0, n, 600).astype(np.int32) for n in (3, 2))
    z = rng.normal(size=(600, 4)).astype(np.float32) * 0.2
    z[:, 0] += domain - 1.0
    z[:, 1] += 2.0 * label - 1.0
    latents = translation.Latents(jnp.asarray(z), jnp.asarray(label), jnp.asarray(domain))
    kernel = np.zeros((4, 2), np.float32)
    kernel[1] = -4.0, 4.0
    heads, nets = several(plain_head(kernel)), networks(hidden=64)
    weights = translation.TranslationWeights()
    play = jax.jit(
        lambda players: translation.play(players, nets, heads, jnp.ones(1), latents, weights, 1e-3, 0, 4000, KEY)
    )
    start = jax.jit(nets.init)(KEY)
    before, after = (
        translation.quality(players, nets, heads, jnp.ones(1), latents, KEY) for players in (start, play(start))
    )
    assert before["domain_accuracy"] < 0.6 and before["cycle_error"] > 0.4
    assert after["domain_accuracy"] > 0.9 and after["class_accuracy"] > 0.95 and after["cycle_error"] < 0.25


# --- before round 1 -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages():
    """The first round of a small run: what each stage left and told, the start, the state after the round."""
    federation = tiny_federation([[6, 4], [5, 7], [4, 0]], batch_size=4)
    round_fn = make_round(tiny_backbone(), lsi(**SMALL), federation.topology)
    left, told = {}, {}

    def stage(name, state, advance, blocks, tell=None):
        state = run_stage(name, state, advance, blocks)
        left[name] = jax.tree.map(np.array, state)
        told[name] = {} if tell is None else {k: float(v) for k, v in tell(state).items()}
        return state

    state = round_fn.init(KEY)
    start = jax.tree.map(np.array, state.variables)
    reached = next(run_blocks(round_fn, state, federation, 1, KEY, stage=stage))
    return left, told, start, reached.state


def test_the_stages_run_in_turn_and_leave_the_translator_alone(stages):
    left, told, _, state = stages
    assert list(left) == ["heads", "latents", "translator"]
    heads, counts = left["heads"]
    np.testing.assert_array_equal(counts.sum(1), [6, 4, 5, 7, 4, 0])
    assert heads.kernel.shape == (6, 5, CLASSES) and left["latents"].z.shape == (3, 2, 32, 5)
    assert set(told["translator"]) == {"domain_accuracy", "class_accuracy", "cycle_error"}
    assert all(np.isfinite(value) for numbers in told.values() for value in numbers.values())
    chex.assert_trees_all_equal(state.shared.translator, left["translator"].translator)
    np.testing.assert_array_equal(state.shared.sources, [0, 1, 2])


def test_heads_come_from_one_start_and_each_from_its_own_client(stages):
    """The first stage is local training of FedAvg's loss on the network with a bottleneck."""
    left, _, start, _ = stages
    head = left["heads"][0]
    empty = jax.tree.map(lambda x: x[5], head)  # a client without data keeps the common start
    np.testing.assert_array_equal(empty.kernel, start.params["head"]["kernel"])
    np.testing.assert_array_equal(empty.mean, start.batch_stats["head_norm"]["mean"])
    assert not np.allclose(head.kernel[0], head.kernel[1])


@pytest.mark.slow
def test_the_discriminator_knows_the_domains_of_real_features_when_round_1_begins():
    """As all clients start from one model, latents and the features of round 1 live in one basis. Chance is 1/3."""
    federation = tiny_federation([[24], [24], [24]], batch_size=8)
    clients = federation.clients
    shifts = jnp.array([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0]])  # of the images' two channels, by domain
    clients = clients._replace(inputs=clients.inputs + shifts[:, None, None, None, None, :])
    federation = dataclasses.replace(federation, clients=clients)
    options = {"num_sources": 3, "hidden": 64, "head_epochs": 20, "bank": 10}
    algorithm = lsi(
        LSIHparams(client_lr=0.002, translator_lr=1e-3), **options, inversion_steps=2000, translator_steps=2000
    )
    round_fn = make_round(tiny_backbone(), algorithm, federation.topology)
    left = {}

    def stage(name, state, advance, blocks, tell=None):
        left[name] = jax.tree.map(np.array, run_stage(name, state, advance, blocks))
        return jax.tree.map(jnp.array, left[name])

    state = round_fn.init(KEY)
    start = jax.tree.map(np.array, state.variables)
    next(run_blocks(round_fn, state, federation, 1, KEY, stage=stage))
    nets = translation.Networks(translation.Translator(5, 64, False), translation.Discriminator(64, 3))
    features = round_fn.backbone.features(start, clients.inputs.reshape(-1, 6, 6, 2))
    _, domain = nets.judge(left["translator"].discriminator, features)
    accuracy = (np.asarray(domain.argmax(-1)).reshape(3, 24) == np.arange(3)[:, None]).mean()
    assert accuracy > 0.5, accuracy


def test_another_number_of_domains_is_refused_before_round_1():
    federation = tiny_federation([[6, 4], [5, 7]], batch_size=4)
    round_fn = make_round(tiny_backbone(), lsi(**SMALL), federation.topology)
    with pytest.raises(ValueError, match="num_sources=3, but clients hold examples of 2 domains: give num_sources=2"):
        next(run_blocks(round_fn, round_fn.init(KEY), federation, 1, KEY))


@pytest.mark.parametrize(
    "options",
    [{"reduction": "max"}, {"output": "relu"}, {"latent_start": "zero"}, {"bank": 0}, {"translator_steps": -1}],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        lsi(**options)


# --- stage 4 --------------------------------------------------------------------------------------------------------


def received_of(**changes):
    variables = fresh(BACKBONE)
    start = lsi(**SMALL, **changes).init(BACKBONE, variables, KEY)
    return Received(variables, start.shared, (), ())


def one_step(hparams=LSIHparams(client_lr=0.1), batch=None, **options):
    algorithm = lsi(hparams, lambda lr: optax.sgd(lr), **SMALL, **options)
    received = received_of()
    optimizer, tally = algorithm.begin(BACKBONE, received, ())
    start = Local(received.variables, optimizer, (), tally)
    batch = one_batch(domains=3) if batch is None else batch
    return jax.jit(lambda b: algorithm.step(BACKBONE, received, start, b, KEY))(batch)


def test_without_the_invariance_loss_it_is_fedavg_on_the_same_network():
    plain = functools.partial(lambda hparams, optimizer: fedavg(optimizer=optimizer)._replace(init=lsi(**SMALL).init))
    ours = lambda hparams, optimizer: lsi(hparams, optimizer, **SMALL)
    received, examples = received_of(), examples_of(domains=3)
    (trained, *_), (expected, *_) = (
        programs(method, momentum, BACKBONE)[1](LSIHparams(lambda_di=0.0), received, examples, KEY)
        for method in (ours, plain)
    )
    chex.assert_trees_all_close(trained.local.variables, expected.local.variables, rtol=1e-5, atol=1e-6)
    with_it, *_ = programs(ours, momentum, BACKBONE)[1](LSIHparams(), received, examples, KEY)
    assert not np.allclose(
        with_it.local.variables.params["conv"]["kernel"], expected.local.variables.params["conv"]["kernel"]
    )


def test_an_identical_translation_costs_nothing(monkeypatch):
    monkeypatch.setattr(translation.Networks, "translate", lambda self, params, z, *_: z)
    (local, metrics), (plain, _) = one_step(), one_step(LSIHparams(client_lr=0.1, lambda_di=0.0))
    assert metrics["invariance"] == 0
    chex.assert_trees_all_close(local.variables, plain.variables, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sg_target", [False, True])
def test_a_constant_shift_has_a_gradient_only_towards_a_fixed_target(monkeypatch, sg_target):
    shift = jnp.array([1.0, 2.0, -2.0, 4.0])
    monkeypatch.setattr(translation.Networks, "translate", lambda self, params, z, *_: z + shift)
    (local, metrics), (plain, _) = one_step(sg_target=sg_target), one_step(LSIHparams(client_lr=0.1, lambda_di=0.0))
    np.testing.assert_allclose(metrics["invariance"], 25.0, rtol=1e-5)
    same = np.allclose(
        local.variables.params["bottleneck"]["bias"], plain.variables.params["bottleneck"]["bias"], atol=1e-5
    )
    assert same != sg_target
    _, averaged = one_step(sg_target=sg_target, reduction="mean")
    np.testing.assert_allclose(averaged["invariance"], 25.0 / 4, rtol=1e-5)


def test_targets_are_drawn_among_all_source_domains_and_domains_are_numbered_by_their_place(monkeypatch):
    """Domains 1, 4 and 6 of a data set are 0, 1 and 2 to the translator."""
    seen = []

    def translate(self, params, z, source, target, key=None):
        seen.append((source, target))
        return z

    monkeypatch.setattr(translation.Networks, "translate", translate)
    batch = jax.tree.map(lambda x: jnp.concatenate([x] * 40), one_batch(domains=3))
    algorithm = lsi(**SMALL)
    received = received_of()
    received = received._replace(shared=received.shared._replace(sources=jnp.array([1, 4, 6])))
    ids = jnp.where(batch.mask, jnp.array([1, 4, 6])[batch.domain], 0)
    optimizer, tally = algorithm.begin(BACKBONE, received, ())
    start = Local(received.variables, optimizer, (), tally)

    @jax.jit
    def drawn(batch):
        algorithm.step(BACKBONE, received, start, batch, KEY)
        return seen[0]

    (source, target), real = drawn(batch._replace(domain=ids)), np.asarray(batch.mask)
    np.testing.assert_array_equal(source[real], batch.domain[real])
    np.testing.assert_allclose(np.bincount(target, minlength=3) / target.size, 1 / 3, atol=0.08)
    assert (target == source)[real].any()  # a domain may be its own target


# --- the network ----------------------------------------------------------------------------------------------------


def test_the_head_normalises_by_the_batch_in_training_and_by_running_statistics_after():
    variables, batch = fresh(BACKBONE), one_batch(domains=3)
    forward = BACKBONE.forward(variables, batch.inputs, batch.mask, KEY)
    rows = forward.z[batch.mask]
    normed = (rows - rows.mean(0)) / jnp.sqrt(rows.var(0) + 1e-5)
    head = variables.params["head"]
    np.testing.assert_allclose(forward.logits[batch.mask], normed @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-5)
    left = forward.batch_stats["head_norm"]
    np.testing.assert_allclose(left["mean"], 0.1 * rows.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(left["var"], 0.9 + 0.1 * rows.var(0), rtol=1e-4)
    moved = Variables(variables.params, forward.batch_stats)
    later = (forward.z - left["mean"]) / jnp.sqrt(left["var"] + 1e-5) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(BACKBONE.head(moved, forward.z), later, rtol=1e-4, atol=1e-5)
    nothing = BACKBONE.forward(variables, batch.inputs, jnp.zeros_like(batch.mask), KEY)
    assert np.isfinite(nothing.logits).all()


# --- stage 5 --------------------------------------------------------------------------------------------------------


def merged(theta, omega, weights, eps_rel=1e-6):
    stack = lambda rows: {"w": jnp.asarray(rows, jnp.float32)}
    return np.asarray(merge_by(stack(theta), stack(omega), jnp.asarray(weights, jnp.float32), eps_rel)["w"])


def test_each_parameter_is_averaged_by_its_importance_and_by_size_where_it_has_none():
    np.testing.assert_allclose(merged([[1, 2], [3, 6]], [[3, 0], [1, 0]], [0.25, 0.75]), [1.5, 5.0], atol=1e-5)


def test_equal_importances_are_the_uniform_mean_whatever_the_sizes():
    np.testing.assert_allclose(merged([[1, 2], [3, 6]], [[2, 2], [2, 2]], [0.25, 0.75]), [2.0, 4.0], rtol=1e-5)


def test_identical_models_stay_as_they_are_and_the_merge_is_between_its_models():
    rng = np.random.default_rng(0)
    theta, omega = rng.normal(size=(3, 50)), rng.exponential(size=(3, 50)) * 1e-12
    same = merged([theta[0]] * 3, omega, [1, 2, 3])
    np.testing.assert_array_equal(same, theta[0].astype(np.float32))
    between = merged(theta, omega, [1, 2, 3])
    assert (theta.min(0) - 1e-6 <= between).all() and (between <= theta.max(0) + 1e-6).all()
    np.testing.assert_allclose(between, (omega * theta).sum(0) / omega.sum(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [1.0, 0.0, 3.0]])
def test_weights_of_every_parameter_sum_to_one(weights):
    omega = jnp.asarray(np.random.default_rng(1).exponential(size=(3, 20)) * 1e-12, jnp.float32)
    found = shares(omega.at[:, 0].set(0.0), jnp.asarray(weights), 1e-6)
    np.testing.assert_allclose(found.sum(0), 1.0, atol=1e-6)
    np.testing.assert_allclose(found[:, 0], np.array(weights) / sum(weights), rtol=1e-5)
    assert (found[1] == 0).all() == (weights[1] == 0)


class Linear(nn.Module):
    """z = x W, logits = z V."""

    def setup(self):
        self.body = nn.Dense(3, use_bias=False)
        self.head = nn.Dense(2, use_bias=False)

    def features(self, x, train, mask=None):
        return self.body(x)

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


LINEAR = Backbone(Linear(), input_shape=(4,), num_features=3, num_classes=2)


def examples_from(inputs, mask=None):
    inputs = jnp.asarray(inputs, jnp.float32)
    no = jnp.zeros(len(inputs), jnp.int32)
    return Examples(inputs, no, no == 0 if mask is None else jnp.asarray(mask), no)


def omega_of(inputs, mask=None, **options):
    variables = fresh(LINEAR)
    rule = importance(**options)
    found = rule.measure(LINEAR, variables, variables, examples_from(inputs, mask), KEY, None)
    return variables.params, found


def test_importance_of_a_linear_encoder_in_closed_form():
    params, found = omega_of(np.eye(4)[:1])
    omega = found.omega["body"]["kernel"]
    np.testing.assert_allclose(omega[0], 2 * np.abs(params["body"]["kernel"][0]), rtol=1e-5)
    np.testing.assert_array_equal(omega[1:], 0.0)
    z, v = params["body"]["kernel"][0], params["head"]["kernel"]
    np.testing.assert_allclose(found.omega["head"]["kernel"], np.abs(2 * np.outer(z, z @ v)), rtol=1e-4)


def test_the_codes_form_takes_the_logits_for_all():
    params, found = omega_of(np.eye(4)[:1], form="code")
    z, v = params["body"]["kernel"][0], params["head"]["kernel"]
    np.testing.assert_allclose(found.omega["body"]["kernel"][0], np.abs(2 * v @ (z @ v)), rtol=1e-4)


def test_the_norm_itself_is_half_as_steep_over_its_length():
    params, found = omega_of(np.eye(4)[:1], squared=False)
    row = params["body"]["kernel"][0]
    np.testing.assert_allclose(found.omega["body"]["kernel"][0], np.abs(row) / np.linalg.norm(row), rtol=1e-4)


def test_opposite_signs_cancel_in_the_gradient_of_a_batch_and_not_in_that_of_its_rows():
    """x and -x have the same || z ||^2; with a constant beside them their gradients differ in sign."""
    inputs = np.array([[1.0, 1.0, 0, 0], [1.0, -1.0, 0, 0]])
    one, both = (omega_of(inputs, microbatch=size)[1].omega["body"]["kernel"] for size in (1, 2))
    w = omega_of(inputs)[0]["body"]["kernel"]
    expected = 2 * (np.abs(w[0] + w[1]) + np.abs(w[0] - w[1]))
    np.testing.assert_allclose(one[1], expected, rtol=1e-4)
    np.testing.assert_allclose(both[1], 2 * np.abs((w[0] + w[1]) - (w[0] - w[1])), rtol=1e-4, atol=1e-6)
    more = omega_of(inputs, microbatch=5)[1].omega["body"]["kernel"]  # than there are examples
    np.testing.assert_allclose(more, both, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_importance_adds_up_over_examples_whatever_their_number_at_a_time_and_padding_counts_for_nothing(rows):
    inputs = np.random.default_rng(2).normal(size=(7, 4)).astype(np.float32)
    parts = [omega_of(inputs[i : i + 1])[1].omega for i in range(5)]
    padded = inputs.copy()
    padded[5:] = np.nan
    found = omega_of(padded, np.arange(7) < 5, rows=rows)[1]
    assert found.examples == 5
    chex.assert_trees_all_close(found.omega, jax.tree.map(lambda *x: sum(x), *parts), rtol=1e-5)


@pytest.mark.parametrize(
    ("scale", "expected"), [("model", [[0.5, 1.5], [0.5, 1.5]]), ("leaf", [[1.0, 1.0], [1.0, 1.0]])]
)
def test_importances_in_units_of_their_mean(scale, expected):
    omega = {"a": jnp.array([[1.0], [10.0]]), "b": jnp.array([[3.0], [30.0]])}
    found = in_units(omega, scale == "leaf")
    np.testing.assert_allclose(np.concatenate([found["a"], found["b"]], 1), expected, rtol=1e-6)


def test_twice_the_logits_have_four_times_the_importance():
    variables = fresh(LINEAR)
    doubled = variables._replace(
        params={**variables.params, "head": {"kernel": 2 * variables.params["head"]["kernel"]}}
    )
    data = examples_from(np.random.default_rng(3).normal(size=(5, 4)))
    once, twice = (importance(form="code").measure(LINEAR, v, v, data, KEY, None).omega for v in (variables, doubled))
    np.testing.assert_allclose(twice["body"]["kernel"], 4 * once["body"]["kernel"], rtol=1e-4)
    np.testing.assert_allclose(twice["head"]["kernel"], 2 * once["head"]["kernel"], rtol=1e-4)


def test_a_large_epsilon_is_plain_averaging_and_the_info_says_who_counts():
    federation = tiny_federation([[6, 3], [2, 5]], batch_size=4)
    rounds = {
        name: make_round(tiny_backbone(), fedavg(), federation.topology, to_server=rule)
        for name, rule in (("importance", importance(eps_rel=1e12)), ("mean", mean()), ("default", importance()))
    }
    states = {name: jax.jit(r.step)(r.init(KEY), federation.data, KEY) for name, r in rounds.items()}
    chex.assert_trees_all_close(states["importance"][0].variables, states["mean"][0].variables, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states["importance"][1].server_merge["share"], [9 / 16, 7 / 16], rtol=1e-4)
    np.testing.assert_allclose(states["default"][1].server_merge["share"].sum(), 1.0, rtol=1e-5)
    assert not np.allclose(
        states["default"][0].variables.params["conv"]["kernel"], states["mean"][0].variables.params["conv"]["kernel"]
    )


@pytest.mark.parametrize(
    "options", [{"form": "both"}, {"omega_scale": "row"}, {"rows": 0}, {"microbatch": 0}, {"bn_pool": "x"}]
)
def test_options_of_importance_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)).replace("bn_pool", "pool")):
        importance(**options)
