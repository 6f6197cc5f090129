"""FedDG-GA, FedRC, Fisher merging, OT fusion, trimmed mean and median: by hand, by their reductions, at both tiers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from client import examples_of, fresh, one_batch
from tiny import contract_federation, tiny_backbone

from fedjax_dg import local, make_round, tree
from fedjax_dg.aggregators import (
    AGGREGATORS,
    feddg_ga,
    fedrc,
    fisher,
    hfedatm,
    mean,
    measure_fisher,
    median,
    merge_by,
    otfusion,
    server_optimizer,
    trimmed_mean,
)
from fedjax_dg.aggregators.feddg_ga import Told, adjust
from fedjax_dg.aggregators.fedrc import Gaussian, bhattacharyya, closeness, gaussian_of, moment_match
from fedjax_dg.aggregators.robust import inner_mean
from fedjax_dg.algorithms import fedavg, mtgc, scaffold
from fedjax_dg.alignment import Axis, Group, permute
from fedjax_dg.types import Variables

BACKBONE, KEY = tiny_backbone(), jax.random.key(0)
RULES = ("feddg_ga", "fedrc", "fisher", "otfusion", "trimmed_mean", "median")


def near(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def models_of(*values):
    """Models [n] of one parameter and one batch statistic, 10 times as large."""
    values = jnp.asarray(values)
    return Variables({"w": values}, {"m": 10.0 * values})


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def other(seed, scale=0.3):
    """Another model of the tiny network."""
    leaves, tree_def = jax.tree.flatten(fresh())
    rng = np.random.default_rng(seed)
    moved = [x + scale * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree_def, moved)


def shown(rule):
    """The same rule; what it was given is told beside its info."""

    def merge(backbone, state, start, models, weights, messages):
        merged, after, info = rule.merge(backbone, state, start, models, weights, messages)
        given = {"models": models, "messages": messages, "weights": weights, "start": start}
        return merged, after, {**info, "given": given}

    return rule._replace(merge=merge)


@functools.cache
def rounds(name, count, both=False, **options):
    """States and infos of ``count`` rounds on the contract's federation; the rule at the server, or at both tiers."""
    federation, rule = contract_federation(), shown(AGGREGATORS[name](**options))
    algorithm = fedavg()
    round_fn = make_round(BACKBONE, algorithm, federation.topology, rule, rule if both else None, chunk=0)
    step = jax.jit(round_fn.step)
    states, infos = [round_fn.init(KEY)], []
    for _ in range(count):
        state, info = step(states[-1], federation.data, KEY)
        states.append(state)
        infos.append(info)
    return states, infos


def data_of(station):
    """All examples of a station's clients: inputs and labels."""
    clients = jax.tree.map(lambda x: np.asarray(x[station]), contract_federation().clients)
    return clients.inputs[clients.mask], clients.labels[clients.mask]


# --- all six --------------------------------------------------------------------------------------------------------


# the contract suite has every rule with SCAFFOLD, at the server
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [scaffold, mtgc])
@pytest.mark.parametrize("name", ["feddg_ga", *(pytest.param(n, marks=pytest.mark.slow) for n in RULES[1:])])
def test_a_rule_works_at_both_tiers_under_a_server_optimizer(name, algorithm):
    federation, rule = contract_federation(), AGGREGATORS[name]()
    to_server = server_optimizer(rule, optax.adam(0.1))
    round_fn = make_round(BACKBONE, algorithm(), federation.topology, to_server, rule, chunk=0)
    start = round_fn.init(KEY)
    state, info = jax.jit(round_fn.step)(start, federation.data, KEY)
    assert info.finite.all() and info.merged_finite
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, info)))
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), state.variables.params, start.variables.params)
    near(jnp.stack(jax.tree.leaves(moved)), jnp.full(6, 0.1), 1e-3)  # Adam's first step


@functools.cache
def messages_of(name):
    """What each of three models of the tiny network sends with a rule, all the same."""
    if name == "feddg_ga":
        return told([2.0] * 3, [3.0] * 3, [4.0] * 3)
    measure = jax.jit(functools.partial(AGGREGATORS[name]().measure, BACKBONE))
    one = measure(fresh(), fresh(), examples_of(), KEY, None)
    return jax.tree.map(lambda x: jnp.stack([x] * 3), one)


@functools.cache
def merger(name, wrapped=False):
    """Compiled (models, weights, messages) -> (model, state, info), from the fresh model; without weight, no message."""
    before = fresh()

    @jax.jit
    def merge(models, weights, messages):
        rule = server_optimizer(AGGREGATORS[name](), optax.sgd(1.0)) if wrapped else AGGREGATORS[name]()
        here = weights > 0
        messages = jax.tree.map(lambda x: jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0), messages)
        state = rule.init(before, len(weights))
        merged, state, _, info = local.merge_models(BACKBONE, rule, state, before, models, weights, messages)
        return merged, state, info

    return merge


@pytest.mark.parametrize("name", RULES)
def test_a_server_optimizer_of_one_changes_nothing(name):
    given = stack([other(i) for i in (1, 2, 3)]), jnp.array([3.0, 1.0, 2.0]), messages_of(name)
    near(merger(name, wrapped=True)(*given)[0], merger(name)(*given)[0], 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_equal_models_are_the_model_and_no_weight_keeps_the_start(name):
    model = other(1)
    for weights, expected in (([3.0, 1.0, 2.0], model), ([0.0, 0.0, 0.0], fresh())):
        merged, state, info = merger(name)(stack([model] * 3), jnp.asarray(weights), messages_of(name))
        near(merged, expected, 1e-6)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, info)))


@pytest.mark.parametrize("name", RULES)
def test_models_without_weight_do_not_count(name):
    weights, messages = jnp.array([3.0, 0.0, 1.0]), messages_of(name)
    merged, again = (
        merger(name)(stack([other(1), absent, other(2)]), weights, messages)[0]
        for absent in (fresh(), other(5, scale=100.0))
    )
    assert_same(merged, again)
    first_two = jax.tree.map(lambda x: x[:2], messages)
    near(merged, merger(name)(stack([other(1), other(2)]), weights[jnp.array([0, 2])], first_two)[0], 1e-6)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (feddg_ga, {"metric": "acc"}, "Unknown metric 'acc'; did you mean 'accuracy'?"),
        (feddg_ga, {"form": "papers"}, "Unknown form 'papers'; did you mean 'paper'?"),
        (fedrc, {"of": "input"}, "Unknown side of a client's data 'input'; did you mean 'inputs'?"),
        (fisher, {"labels": "date"}, "Unknown labels of the Fisher information 'date'; did you mean 'data'?"),
        (otfusion, {"cost": "square"}, "Unknown cost 'square'; did you mean 'squared'?"),
        (median, {"bn_pool": "exact"}, "bn_pool=exact is given, but medians and trimmed means treat batch statistics"),
        (trimmed_mean, {"weighting": "sample"}, "Unknown weighting 'sample'; did you mean 'samples'?"),
    ],
)
def test_bad_options_are_named(rule, options, message):
    with pytest.raises(ValueError) as error:
        rule(**options)
    assert str(error.value).startswith(message)


# --- FedDG-GA -------------------------------------------------------------------------------------------------------


THREE = jnp.ones(3, bool)


def adjusted(a, gaps, step, form, counts=THREE):
    return adjust(jnp.asarray(a), jnp.asarray(gaps), counts, step, form, 1e-6)


def test_equal_gaps_leave_the_weights_as_they_are_when_centred():
    for a in ([1 / 3] * 3, [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]):
        for gap in (0.2, 0.1, -0.7):
            assert_same(adjusted(a, [gap] * 3, 0.2, "paper"), jnp.asarray(a))


def test_equal_gaps_uncentred_pull_towards_uniform():
    near(adjusted([1 / 3] * 3, [0.2] * 3, 0.2, "code"), [1 / 3] * 3, 1e-6)
    near(adjusted([0.5, 0.3, 0.2], [0.2] * 3, 0.2, "code"), [0.4722, 0.3056, 0.2222], 1e-4)
    assert_same(adjusted([0.5, 0.3, 0.2], [0.0] * 3, 0.2, "code"), jnp.array([0.5, 0.3, 0.2]))


def test_the_largest_gap_gains_a_whole_step():
    gaps = [0.3, 0.0, -0.3]
    near(adjusted([1 / 3] * 3, gaps, 0.2, "code"), [0.4, 1 / 3, 4 / 15], 1e-6)
    near(adjusted([1 / 3] * 3, gaps, 0.2, "paper"), [8 / 15, 1 / 3, 2 / 15], 1e-6)
    assert_same(adjusted([0.5, 0.25, 0.25], gaps, 0.0, "paper"), jnp.array([0.5, 0.25, 0.25]))


def test_weights_stay_on_the_simplex():
    rng = np.random.default_rng(0)
    for form in ("paper", "code"):
        for _ in range(20):
            a = adjusted(rng.dirichlet([1.0] * 3).astype(np.float32), rng.normal(size=3).astype(np.float32), 0.6, form)
            assert (a >= 0).all()
            near(a.sum(), 1.0, 1e-6)


def test_a_model_that_is_not_compared_neither_moves_nor_shifts_the_mean():
    a = adjusted([0.5, 0.3, 0.2], [0.3, 99.0, -0.3], 0.2, "paper", jnp.array([True, False, True]))
    near(a, [0.7, 0.3, 0.0], 1e-6)


def told(received, trained, count):
    return Told(*(jnp.asarray(x, jnp.float32) for x in (received, trained, count)))


def ga_run(rule, sequence, weights=(1.0, 2.0)):
    """Merges of models 0 and 1; the weight of the second after each, and the merged parameter."""
    state, weights = rule.init(None, len(weights)), jnp.asarray(weights)
    models, seen = models_of(*np.arange(len(weights), dtype=np.float32)), []
    for messages in sequence:
        merged, state, info = rule.merge(None, state, tree.take(models, 0), models, weights, messages)
        near(merged.params["w"], (info["a"] * models.params["w"]).sum(), 1e-6)
        near(merged.batch_stats["m"], 10.0 * merged.params["w"], 1e-6)
        seen.append(info["a"].tolist())
    return seen


def test_the_gap_is_of_this_merges_received_model_and_the_last_merges_trained_one():
    """Accuracies; received in the second merge 0.5 and 0.9, trained in the first 0.9 and 0.8: gaps -0.4 and 0.1."""
    first = told([1.0, 2.0], [9.0, 8.0], [10.0, 10.0])
    second = told([5.0, 18.0], [2.0, 18.0], [10.0, 20.0])
    third = told([2.0, 0.0], [0.0, 0.0], [10.0, 20.0])  # gaps 0.0 and -0.9: the other way round
    rule = feddg_ga(step=0.2, decay_rounds=4)
    near(np.array(ga_run(rule, [first, second, third])), [[0.5, 0.5], [0.7, 0.3], [0.55, 0.45]], 1e-6)


def test_steps_decay_to_nothing():
    worse = told([0.0, 9.0], [9.0, 9.0], [9.0, 9.0])
    seen = ga_run(feddg_ga(step=0.1, decay_rounds=2), [worse] * 5)
    near(np.array(seen)[:, 0], [0.5, 0.6, 0.65, 0.65, 0.65], 1e-6)


def test_losses_are_accuracies_turned_round():
    sequence = [told([0.3, 0.5], [0.9, 0.8], [1.0, 1.0]), told([0.5, 0.9], [0.2, 0.1], [1.0, 1.0])]
    turned = [told(-x.received, -x.trained, x.count) for x in sequence]
    for form in ("paper", "code"):
        by_accuracy = ga_run(feddg_ga(form=form), sequence)
        assert by_accuracy == ga_run(feddg_ga(form=form, metric="loss"), turned)
        assert by_accuracy[1][0] > 0.5  # the first lost accuracy


def test_rounding_of_equal_gaps_is_no_gap():
    """0.9 - 0.8 and 0.2 - 0.1 differ by 4e-8 in float32."""
    assert np.float32(0.9) - np.float32(0.8) != np.float32(0.2) - np.float32(0.1)
    first, second = told([0, 0], [0.8, 0.1], [1, 1]), told([0.9, 0.2], [0, 0], [1, 1])
    assert ga_run(feddg_ga(), [first, second]) == [[0.5, 0.5]] * 2


def test_models_without_data_have_no_ga_weight():
    worse = told([0.0, 9.0, 0.0], [9.0, 9.0, 0.0], [9.0, 9.0, 0.0])
    seen = ga_run(feddg_ga(step=0.1), [worse, worse], weights=(1.0, 2.0, 0.0))
    near(np.array(seen), [[0.5, 0.5, 0.0], [0.6, 0.4, 0.0]], 1e-6)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_client_reports_sums_of_both_models(metric):
    """Padding holds NaN; several clients add up."""
    rule, start, trained = feddg_ga(metric=metric), other(1), other(2)
    message = rule.measure(BACKBONE, start, trained, examples_of(), KEY, None)
    batch = one_batch()

    def by_hand(model):
        logits = np.asarray(BACKBONE.apply(model, batch.inputs), np.float64)[:7]
        labels = np.asarray(batch.labels)[:7]
        if metric == "accuracy":
            return (logits.argmax(1) == labels).sum()
        return (np.log(np.exp(logits).sum(1)) - logits[np.arange(7), labels]).sum()

    near(message, Told(by_hand(start), by_hand(trained), 7.0))
    assert abs(message.received - message.trained) > 0.1
    near(rule.combine(stack([message, message]), jnp.ones(2)), jax.tree.map(lambda x: 2.0 * x, message))


def test_stations_are_judged_by_their_merged_models():
    """Two rounds: what the second received is the first's merged model, on all examples of the station's clients."""
    states, infos = rounds("feddg_ga", 2, metric="loss", step=0.1)

    def losses(model, station):
        inputs, labels = data_of(station)
        logits = np.asarray(BACKBONE.apply(model, jnp.asarray(inputs)), np.float64)
        return (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]).sum()

    gaps = []
    for s, count in enumerate((14, 11)):
        first, second = (x.server_merge["given"]["messages"] for x in infos)
        station = tree.take(infos[0].server_merge["given"]["models"], s)
        assert first.count[s] == second.count[s] == count
        near(second.received[s], losses(states[1].variables, s), 1e-4)
        near(first.trained[s], losses(station, s), 1e-4)
        gaps.append((losses(states[1].variables, s) - losses(station, s)) / count)
    assert abs(gaps[0] - gaps[1]) > 1e-3
    assert infos[0].server_merge["a"].tolist() == [0.5, 0.5]
    moved = 0.1 * np.sign(gaps[0] - gaps[1])
    near(infos[1].server_merge["a"], [0.5 + moved, 0.5 - moved], 1e-5)


def test_clients_are_judged_by_their_trained_models():
    """At the station tier every station round judges; the empty client has no weight."""
    _, infos = rounds("feddg_ga", 1, both=True, metric="loss", step=0.1)
    given, a = infos[0].station_merge["given"], infos[0].station_merge["a"]
    near(a.sum(1), [1.0, 1.0], 1e-6)
    assert a[1, 1] == 0.0 and len(set(a[0].tolist())) > 1
    assert given["messages"].count.tolist() == [[3.0, 5.0, 2.0, 4.0], [4.0, 0.0, 6.0, 1.0]]
    measure = jax.jit(lambda *client: feddg_ga(metric="loss").measure(BACKBONE, *client, KEY, None))
    for c in range(4):
        clients = jax.tree.map(lambda x, c=c: x[0, c], contract_federation().clients)
        model = jax.tree.map(lambda x, c=c: x[0, c], given["models"])
        message = measure(tree.take(given["start"], 0), model, clients)
        near(message, jax.tree.map(lambda x, c=c: x[0, c], given["messages"]))


# --- FedRC ----------------------------------------------------------------------------------------------------------


def gaussians(seed, count=3, channels=2):
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=(count, channels)), rng.uniform(0.5, 2.0, (count, channels))
    return Gaussian(*(jnp.asarray(x, jnp.float32) for x in (mean, variance)))


def test_the_distance_of_gaussians():
    parts = gaussians(0)
    one, two = tree.take(parts, 0), tree.take(parts, 1)
    (m, v), (n, w) = (jax.tree.map(np.float64, tuple(x)) for x in (one, two))
    middle = (v + w) / 2
    expected = ((m - n) ** 2 / middle).sum() / 8 + (np.log(middle) - (np.log(v) + np.log(w)) / 2).sum() / 2
    near(bhattacharyya(one, two), expected)
    assert bhattacharyya(one, two) == bhattacharyya(two, one) > 0
    assert_same(bhattacharyya(parts, parts), jnp.zeros(3))


def test_a_channel_that_never_varies_is_not_infinitely_far():
    still = Gaussian(jnp.zeros((3, 1)), jnp.array([[0.0], [0.0], [1.0]]))
    close, distances = closeness(still, jnp.ones(3), 1.0)
    assert np.isfinite(close).all() and np.isfinite(distances).all()
    assert bhattacharyya(tree.take(still, 0), tree.take(still, 1)) == 0.0


def test_moment_match_is_the_mixture():
    parts, weights = gaussians(1), np.array([2.0, 0.0, 6.0])
    mu, v = (np.asarray(x, np.float64) for x in parts)
    p = weights / 8.0
    mean = p @ mu
    near(moment_match(parts, jnp.asarray(weights, jnp.float32)), Gaussian(mean, p @ (v + mu**2) - mean**2))


def weights_of(parts, n, tau):
    """FedRC's weights in NumPy, written out."""
    mu, v = (np.asarray(x, np.float64) for x in parts)
    p = np.asarray(n) / np.sum(n)
    mean = p @ mu
    variance = p @ (v + mu**2) - mean**2
    middle = (v + variance) / 2
    d = ((mu - mean) ** 2 / middle / 8 + (np.log(middle) - (np.log(v) + np.log(variance)) / 2) / 2).sum(1)
    w = np.asarray(n) * np.exp(-d / tau)
    return w / w.sum(), d


def test_fedrc_merges_by_closeness_to_the_barycentre():
    parts, n, models = gaussians(2), [4.0, 1.0, 3.0], models_of(1.0, 2.0, 4.0)
    for tau in (1.0, 0.05):
        merged, state, info = fedrc(tau=tau).merge(None, (), models_of(0.0), models, jnp.asarray(n), parts)
        w, d = weights_of(parts, n, tau)
        near(info, {"shares": w, "distance": d})
        near(merged.params["w"], w @ [1.0, 2.0, 4.0])
        near(merged.batch_stats["m"], 10.0 * merged.params["w"])
        assert state == ()
        assert abs(w - np.array(n) / 8.0).max() > 1e-3


@pytest.mark.parametrize(("tau", "same"), [(1e9, False), (1.0, True)])
def test_fedrc_is_the_weighted_mean_of_equal_data_and_for_a_large_tau(tau, same):
    parts = jax.tree.map(lambda x: jnp.stack([x[0]] * 3), gaussians(3)) if same else gaussians(3)
    models, weights = models_of(1.0, 2.0, 4.0), jnp.array([4.0, 1.0, 3.0])
    merged, _, info = fedrc(tau=tau).merge(None, (), models_of(0.0), models, weights, parts)
    near(info["shares"], weights / 8.0, 1e-6)
    near(merged, tree.weighted_mean(models, weights), 1e-6)


def test_fedrc_never_loses_all_weights():
    """Distances of hundreds, as features have: exp(-D / tau) alone would be 0 for all."""
    parts, n = Gaussian(jnp.array([[0.0], [1.0], [3.0]]), jnp.ones((3, 1))), jnp.array([0.0, 2.0, 1.0])
    close, _ = closeness(parts, n, 1e-4)
    near(close / close.sum(), [0.0, 1.0, 0.0], 1e-6)


def test_moments_far_from_zero_keep_their_digits(monkeypatch):
    """Mean 3000, variance 1: a mean of squares minus a square would have no digit left. In batches of 3, NaN in padding."""
    monkeypatch.setattr(local, "PASS_SIZE", 3)
    examples = examples_of()
    shifted = examples._replace(inputs=examples.inputs + 3000.0)
    message = fedrc().measure(BACKBONE, None, None, shifted, KEY, None)
    pixels = np.asarray(shifted.inputs, np.float64)[:7].reshape(-1, 2)
    near(message.mean, pixels.mean(0), 1e-6)
    near(message.variance, pixels.var(0), 1e-4)


def test_features_are_those_of_the_model_that_came_down():
    start, trained = other(1), other(2)
    message = fedrc(of="features").measure(BACKBONE, start, trained, examples_of(), KEY, None)
    z = np.asarray(BACKBONE.features(start, one_batch().inputs), np.float64)[:7]
    near(message, Gaussian(z.mean(0), z.var(0)))


def test_token_ids_have_no_moments():
    tokens = examples_of()._replace(inputs=jnp.zeros((8, 5), jnp.int32))
    with pytest.raises(ValueError, match="Inputs of type int32 have no mean to compare: choose of=features"):
        fedrc().measure(BACKBONE, None, None, tokens, KEY, None)


def test_fedrc_at_both_tiers_is_hierarchical():
    """A station's Gaussian is its clients' by their FedRC weights, and the server weighs stations by theirs."""
    _, infos = rounds("fedrc", 1, both=True, tau=0.01)
    clients, told = contract_federation().clients, infos[0]
    stations = []
    for s in range(2):
        held = [c for c in range(4) if clients.mask[s, c].any()]
        pixels = [np.asarray(clients.inputs[s, c])[np.asarray(clients.mask[s, c])].reshape(-1, 2) for c in held]
        parts = Gaussian(*(np.array([f(x.astype(np.float64), 0) for x in pixels]) for f in (np.mean, np.var)))
        n = np.array([clients.mask[s, c].sum() for c in held])
        w, d = weights_of(parts, n, 0.01)
        near(told.station_merge["shares"][s][np.array(held)], w, 1e-4)
        near(told.station_merge["distance"][s][np.array(held)], d, 1e-4)
        assert abs(w - n / n.sum()).max() > 0.02
        mean = w @ parts.mean
        stations.append((mean, w @ (parts.variance + parts.mean**2) - mean**2))
    both = Gaussian(*(np.array(x) for x in zip(*stations)))
    near(told.server_merge["given"]["messages"], both, 1e-4)
    w, d = weights_of(both, [14, 11], 0.01)
    near(told.server_merge["shares"], w, 1e-4)
    near(told.server_merge["distance"], d, 1e-4)


def test_an_image_channel_is_pooled_over_pixels_of_real_rows():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 3, 2, 3)).astype(np.float32), np.array([True, False, True, True])
    moments, count = gaussian_of(jnp.asarray(x), jnp.asarray(mask))
    pixels = x[mask].reshape(-1, 3)
    near(moments, Gaussian(pixels.mean(0), pixels.var(0)))
    assert count == 3


# --- merging by scores ----------------------------------------------------------------------------------------------


def scored(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    models = {"a": draw(3, 4, 2), "b": draw(3, 5)}
    return models, jax.tree.map(lambda x: scale * x**2 * (x > -0.5), {"a": draw(3, 4, 2), "b": draw(3, 5)})


@pytest.mark.parametrize("eps_rel", [1e-6, 0.1, 100.0])
def test_merge_by_is_its_formula(eps_rel):
    models, scores = scored()
    weights = np.array([2.0, 0.0, 6.0])
    merged = merge_by(models, scores, jnp.asarray(weights, jnp.float32), eps_rel)
    for name, leaf in merged.items():
        omega = np.asarray(scores[name], np.float64) * (weights > 0).reshape(-1, *[1] * leaf.ndim)
        eps = eps_rel * omega.sum(0).mean()
        w = (omega + eps * (weights / 8.0).reshape(-1, *[1] * leaf.ndim)) / (omega.sum(0) + eps)
        near(w.sum(0), np.ones(leaf.shape), 1e-6)
        near(leaf, (w * np.asarray(models[name], np.float64)).sum(0))


def test_merge_by_needs_only_ratios_of_scores():
    weights = jnp.array([1.0, 2.0, 3.0])
    near(merge_by(*scored(scale=1e-18), weights, 1e-3), merge_by(*scored(), weights, 1e-3))


def test_merge_by_nothing_is_the_weighted_mean_exactly():
    models, scores = scored()
    weights, none = jnp.array([1.0, 2.0, 3.0]), tree.zeros(scores)
    assert_same(merge_by(models, none, weights, 1e-6), tree.weighted_mean(models, weights))
    some = scores | {"b": scores["b"].at[:, 2].set(0.0)}
    merged = merge_by(models, some, weights, 1e-6)
    near(merged["b"][2], tree.weighted_mean(models, weights)["b"][2], 1e-6)
    assert abs(merged["b"] - tree.weighted_mean(models, weights)["b"]).max() > 0.1


# --- Fisher ---------------------------------------------------------------------------------------------------------


def head_squares(model, labels):
    """Squared gradients of log p of the head, per example: (onehot - p) z^T and onehot - p."""
    batch = one_batch()
    z = np.asarray(BACKBONE.features(model, batch.inputs), np.float64)[:7]
    logits = np.asarray(BACKBONE.head(model, jnp.asarray(z, jnp.float32)), np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    rest = np.eye(3)[labels] - p
    return {"kernel": (z[:, :, None] * rest[:, None]) ** 2, "bias": rest**2}, p


@functools.cache
def fisher_of(labels, rows=4):
    return jax.jit(functools.partial(measure_fisher, BACKBONE, labels=labels, rows=rows))


def test_the_empirical_fisher_by_hand():
    """Padding holds NaN. The layers below against one gradient an example."""
    model, batch = other(1), one_batch()
    measured = fisher_of("data")(model, examples_of(), KEY)
    expected, _ = head_squares(model, np.asarray(batch.labels)[:7])
    assert measured.count == 7
    near(measured.squares["head"], jax.tree.map(lambda x: x.sum(0), expected))

    @jax.jit
    @jax.grad
    def gradient(params, x, y):
        return jax.nn.log_softmax(BACKBONE.apply(Variables(params, {}), x[None]))[0, y]

    total = [jax.tree.map(np.square, gradient(model.params, batch.inputs[i], batch.labels[i])) for i in range(7)]
    near(measured.squares, jax.tree.map(lambda *x: sum(x), *total))


def test_drawn_labels_follow_the_prediction():
    """Of one example, over many keys: sum_y p(y) (1[y] - p)^2 = p (1 - p)."""
    model = other(1, scale=1.0)
    one = examples_of()._replace(mask=jnp.arange(8) == 3)
    keys = jax.random.split(KEY, 2000)
    drawn = jax.jit(jax.vmap(lambda key: measure_fisher(BACKBONE, model, one, key).squares["head"]["bias"]))(keys)
    squares, p = head_squares(model, np.zeros(7, int))
    each = np.stack([head_squares(model, np.full(7, y))[0]["bias"][3] for y in range(3)])
    assert all(np.isclose(row, each, atol=1e-5).all(1).any() for row in np.asarray(drawn[:50]))
    near(drawn.mean(0), p[3] * (1 - p[3]), 0.02)
    assert np.ptp(np.asarray(drawn), axis=0).max() > 0.05
    alike = examples_of()._replace(inputs=jnp.stack([examples_of().inputs[3]] * 8))
    summed = fisher_of("model")(model, alike, KEY).squares["head"]["bias"]
    assert not np.isclose(summed, 7.0 * each, atol=1e-4).all(1).any()  # each example has a draw of its own


@pytest.mark.parametrize("labels", ["model", "data"])
def test_neither_microbatches_nor_padding_matter(labels):
    model, examples = other(1), examples_of()
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x[-1:], x[-1:], x[-1:]]), examples)
    expected = fisher_of(labels)(model, examples, KEY)
    for rows, given in ((1, examples), (3, examples), (100, examples), (4, longer)):
        near(fisher_of(labels, rows)(model, given, KEY), expected, 1e-6)


def fisher_messages(seed=0):
    rng = np.random.default_rng(seed)
    squares = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0, 1, (2, *x.shape)), jnp.float32), fresh().params)
    return type(fisher_of("data")(fresh(), examples_of(), KEY))(squares, jnp.array([2.0, 5.0]))


def test_fisher_weighs_every_parameter():
    """Sums become means over examples; weights of models multiply them."""
    models, messages, weights = stack([other(1), other(2)]), fisher_messages(), jnp.array([3.0, 1.0])
    merged, state, info = jax.jit(functools.partial(fisher().merge, BACKBONE))((), fresh(), models, weights, messages)

    def by_hand(theta, total):
        theta, total = np.asarray(theta, np.float64), np.asarray(total, np.float64)
        f = 3.0 * total[0] / 2.0, 1.0 * total[1] / 5.0
        return (f[0] * theta[0] + f[1] * theta[1]) / (f[0] + f[1])

    near(merged.params, jax.tree.map(by_hand, models.params, messages.squares), 1e-4)
    leaves = [np.asarray(x) for x in jax.tree.leaves(messages.squares)]
    near(info["fisher"], [np.concatenate([x[i].ravel() for x in leaves]).mean() / n for i, n in ((0, 2), (1, 5))])
    assert state == ()


def test_fisher_of_equal_information_is_the_mean():
    models, weights = stack([other(1), other(2)]), jnp.array([3.0, 1.0])
    messages = jax.tree.map(lambda x: jnp.stack([2.0 * x[0], 5.0 * x[0]]), fisher_messages().squares)
    messages = fisher_messages()._replace(squares=messages)
    merged = fisher().merge(BACKBONE, (), fresh(), models, weights, messages)[0]
    near(merged, mean().merge(BACKBONE, (), fresh(), models, weights, ())[0], 1e-6)
    drawn = fisher(eps_rel=1e6).merge(BACKBONE, (), fresh(), models, weights, fisher_messages())[0]
    near(drawn, tree.weighted_mean(models, weights), 1e-5)


def test_fisher_at_the_server_is_of_the_stations_models():
    _, infos = rounds("fisher", 1, labels="data")
    given = infos[0].server_merge["given"]
    for s in range(2):
        clients = jax.tree.map(lambda x, s=s: x[s], contract_federation().clients)
        model = tree.take(given["models"], s)
        each = [fisher_of("data")(model, tree.take(clients, c), KEY) for c in range(4)]
        near(tree.take(given["messages"], s), jax.tree.map(lambda *x: sum(x), *each), 1e-4)


def test_batch_statistics_are_pooled_by_weights():
    models = Variables({"w": jnp.array([1.0, 3.0])}, {"mean": jnp.array([0.0, 2.0]), "var": jnp.array([1.0, 1.0])})
    messages = type(fisher_messages())({"w": jnp.array([1.0, 0.0])}, jnp.ones(2))
    merged = fisher(bn_pool="exact").merge(None, (), tree.take(models, 0), models, jnp.ones(2), messages)[0]
    near(merged, Variables({"w": 1.0}, {"mean": 1.0, "var": 2.0}), 1e-5)


# --- OT fusion ------------------------------------------------------------------------------------------------------


@functools.cache
def copies():
    """The tiny network with its dense layer's units as a group too, every leaf random, and three copies with all units in
    another order."""
    dense = Group(
        "dense",
        5,
        producers=(Axis("params/dense/kernel", 1),),
        followers=(Axis("params/dense/bias", 0),),
        consumers=(Axis("params/head/kernel", 0),),
    )
    backbone, rng = dataclasses.replace(BACKBONE, groups=(*BACKBONE.groups, dense)), np.random.default_rng(0)
    model, shuffled = other(1, scale=1.0), []
    for _ in range(3):
        copy = model
        for group in backbone.groups:
            copy = permute(copy, group, jnp.roll(jnp.asarray(rng.permutation(group.size)), 1))
        shuffled.append(copy)
    return backbone, model, stack(shuffled)


@functools.cache
def fused(rule, **options):
    backbone, model, shuffled = copies()
    merge = jax.jit(lambda: local.merge_models(backbone, rule(**options), (), model, shuffled, jnp.ones(3), {}))
    return merge()


def apart(one, model):
    return max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (one, model))))


def test_fusion_of_shuffled_copies_is_the_model():
    """Dense layers included, which HFedATM leaves as they are."""
    _, model, shuffled = copies()
    merged, state, orders, info = fused(otfusion)
    assert apart(merged, model) < 1e-5 < 0.1 < apart(tree.weighted_mean(shuffled, jnp.ones(3)), model)
    assert apart(fused(hfedatm, regmean=False)[0], model) > 0.1
    assert sorted(info) == ["fot", "outputs_moved"] and (info["outputs_moved"] < 1e-5).all()
    assert {name: x.shape for name, x in orders.items()} == {"conv": (3, 4), "dense": (3, 5)}
    assert state == ()


def test_the_first_model_can_be_the_reference():
    assert apart(fused(otfusion, reference="first")[0], tree.take(copies()[2], 0)) < 1e-5


def test_soft_fusion_moves_by_the_plan():
    """Units are mixtures by the transport plan."""
    merged, _, orders, _ = fused(otfusion, soft=True, epsilon=0.3)
    plans, kernels = (np.asarray(x, np.float64) for x in (orders["conv"], copies()[2].params["conv"]["kernel"]))
    near(plans.sum(1), np.ones((3, 4)), 0.05)
    near(plans.sum(2), np.ones((3, 4)), 0.05)
    assert 0.05 < plans.max() < 0.999
    near(merged.params["conv"]["kernel"], np.einsum("eab,ehwib->hwia", plans, kernels) / 3)


def test_fusion_weighs_models_by_examples():
    assert otfusion().weigh(jnp.array([10, 4]), jnp.array([2, 1])).tolist() == [10.0, 4.0]


# --- trimmed mean and median ----------------------------------------------------------------------------------------


def values_of(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def robustly(rule, values, weights):
    models = Variables({"w": jnp.asarray(values)}, {"var": jnp.asarray(values) ** 2})
    start = Variables({"w": jnp.full(values.shape[1:], 7.0)}, {"var": jnp.full(values.shape[1:], 8.0)})
    merged, state, info = rule.merge(None, (), start, models, jnp.asarray(weights, jnp.float32), ())
    assert (state, info) == ((), {})
    return merged


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_median_is_of_those_that_count(count):
    """Whatever their weights; batch statistics likewise."""
    values = values_of(9)
    weights = np.zeros(9)
    weights[np.random.default_rng(1).permutation(9)[:count]] = np.arange(1, count + 1)
    here = values[weights > 0]
    expected = Variables({"w": np.median(here, 0)}, {"var": np.median(here**2, 0)})
    near(robustly(median(), values, weights), expected, 1e-6)
    near(robustly(trimmed_mean(trim=0.5), values, weights), expected, 1e-6)


@pytest.mark.parametrize("trim", [0.0, 0.1, 0.2, 0.3, 0.45])
def test_the_trimmed_mean_by_hand(trim):
    """One program for every share and every number of models."""
    values = values_of(10)
    merge = jax.jit(lambda trim, weights: robustly(trimmed_mean(trim), values, weights))
    for count in (10, 5, 1):
        here = np.sort(values[:count], 0)
        cut = min(int(trim * count + 1e-9), (count - 1) // 2)
        merged = merge(trim, np.arange(10) < count)
        near(merged.params["w"], here[cut : count - cut].mean(0), 1e-6)


def test_shares_that_are_whole_numbers_drop_so_many():
    """0.3 of 10 is 3, in float32 too."""
    pairs = [(count, cut) for count in range(1, 41) for cut in range((count - 1) // 2 + 1)]
    values = np.arange(40, dtype=np.float32) ** 2
    merge = lambda trim, count: robustly(trimmed_mean(trim), values, jnp.arange(40) < count).params["w"]
    shares = jnp.array([cut / count for count, cut in pairs])
    merged = jax.jit(jax.vmap(merge))(shares, jnp.array([count for count, _ in pairs]))
    near(merged, [values[cut : count - cut].mean() for count, cut in pairs], 1e-5)


def test_no_trim_and_equal_weights_is_the_mean():
    values = values_of(6)
    models = Variables({"w": jnp.asarray(values)}, {"var": jnp.asarray(values) ** 2})
    near(robustly(trimmed_mean(trim=0.0), values, np.ones(6)), tree.weighted_mean(models, jnp.ones(6)), 1e-6)


@pytest.mark.parametrize("rule", [median, functools.partial(trimmed_mean, 0.2)])
@pytest.mark.parametrize("hostile", [1e30, -1e30, np.inf, np.nan])
def test_one_hostile_model_stays_within_the_others(rule, hostile):
    values = values_of(5)
    values[2] = hostile
    others = np.delete(values, 2, 0)
    merged = robustly(rule(), values, [1.0, 1.0, 1000.0, 1.0, 1.0]).params["w"]
    assert (others.min(0) <= merged).all() and (merged <= others.max(0)).all()


def test_more_broken_models_than_are_dropped_show():
    values = values_of(5)
    values[1:3] = np.nan
    assert np.isnan(robustly(trimmed_mean(trim=0.2), values, np.ones(5)).params["w"]).all()
    assert np.isfinite(robustly(trimmed_mean(trim=0.4), values, np.ones(5)).params["w"]).all()
    beside_an_absent_one = robustly(trimmed_mean(trim=0.0), values, [0.0, 1.0, 0.0, 1.0, 1.0]).params["w"]
    assert np.isnan(beside_an_absent_one).all()


def test_types_of_leaves_stay():
    leaves = {"h": jnp.asarray([[1.0], [2.0], [9.0]], jnp.bfloat16), "n": jnp.array([[3], [4], [8]])}
    middle = inner_mean(leaves, jnp.ones(3), jnp.int32(0))
    assert {k: (str(x.dtype), x.tolist()) for k, x in middle.items()} == {"h": ("bfloat16", [4.0]), "n": ("int32", [5])}
