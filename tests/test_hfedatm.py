"""HFedATM in whole rounds: where Grams come from, either tier, the paper's word, batch statistics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import linen as nn
from scipy.optimize import linear_sum_assignment
from tiny import backbone_for, tiny_backbone, tiny_federation, tiny_method

from fedjax_dg import local, make_round, tree
from fedjax_dg.aggregators import Gram, fedavgm, hfedatm, hfedatm_literal, mean, pool, regmean
from fedjax_dg.algorithms import ALGORITHMS, FedAvgHparams, fedavg
from fedjax_dg.algorithms.common import keep_batch_stats
from fedjax_dg.backbones import Backbone
from fedjax_dg.backbones.backbone import max_pool
from fedjax_dg.backbones.layers import Layer, groups_of
from fedjax_dg.local import merge_models
from fedjax_dg.types import Algorithm, Local, Received, Topology, Variables

BACKBONE = tiny_backbone()
KEY = jax.random.key(0)
LR = 0.1
# Unequal sizes, a station of one client with data, padding, fewer participants than clients.
FEDERATION = tiny_federation(
    [[3, 5, 2], [4, 0, 0]], padding=2, fill=np.nan, station_rounds=2, local_epochs=2, batch_size=2, participants=2
)


def near(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def shown(rule):
    """The same rule; what it was given is told beside its info."""

    def merge(backbone, state, start, models, weights, messages):
        merged, state, info = rule.merge(backbone, state, start, models, weights, messages)
        return merged, state, {**info, "given": {"models": models, "messages": messages, "weights": weights}}

    return rule._replace(merge=merge)


# --- where Grams come from ------------------------------------------------------------------------------------------


def measuring(gram_at):
    """The mean by samples, with Grams measured for it."""
    plain = mean()
    return hfedatm(gram_at=gram_at)._replace(merge=plain.merge, weigh=plain.weigh, align=None)


@functools.cache
def round_of(gram_at):
    """Jitted lr -> the start and what the first round tells; stations look at their clients' trained models, the server
    at what ``gram_at`` says.
    """

    @jax.jit
    def first(lr):
        algorithm = fedavg(FedAvgHparams(client_lr=lr))
        to_station, to_server = shown(measuring("client")), shown(measuring(gram_at))
        round_fn = make_round(BACKBONE, algorithm, FEDERATION.topology, to_server, to_station)
        state = round_fn.init(KEY)
        return state.variables, round_fn.step(state, FEDERATION.data, KEY)[1]

    return first


def gram_of(batches):
    """Statistics of rows in NumPy."""
    x = np.concatenate(batches)
    return Gram(jnp.asarray(x.T @ x), jnp.asarray(x.sum(0)), jnp.float32(len(x)))


def added(grams):
    return jax.tree.map(lambda *x: sum(x), *grams)


dense_inputs = jax.jit(BACKBONE.dense_inputs)


def measured(model, batches):
    """Statistics by layer of what a model reads in ``batches``."""
    seen = [dense_inputs(model, x) for x in batches]
    return {layer: gram_of([np.asarray(x[layer]) for x in seen]) for layer in ("dense", "head")}


def taking_part(info):
    """{station: [(place among participants, Client)]} of those with data."""
    clients = reference.clients_of(FEDERATION)
    picked = np.asarray(info.participants)
    return {int(s): [(p, clients[s][c]) for p, c in enumerate(picked[s]) if c in clients[s]] for s in clients}


def of_stations(info):
    """The Grams that reach the server [S]."""
    return info.server_merge["given"]["messages"]


def of_clients(info):
    """The Grams that reach the stations [S, P]."""
    return info.station_merge["given"]["messages"]


def test_a_model_that_stands_still_reads_the_same_wherever_it_is_measured():
    """Training passes, the client's model after training, the station's: one model, each example once."""
    start, info = round_of("training")(0.0)
    near(of_stations(round_of("station")(0.0)[1]), of_stations(info))
    near(jax.tree.map(lambda x: x.sum(1), of_clients(info)), of_stations(info))
    for s, clients in taking_part(info).items():
        expected = measured(start, [client.examples[0] for _, client in clients])
        near(tree.take(of_stations(info), s), expected, 1e-4)
        assert of_stations(info)["head"].rows[s] == sum(client.size for _, client in clients)
    assert len(taking_part(info)[0]) == 2  # of three
    assert len(taking_part(info)[1]) == 1  # and an empty one


def test_training_grams_are_of_the_passes_before_each_step():
    """Of the last pass of the last station round, each batch by the weights that it met."""
    start, info = round_of("training")(LR)
    topology, gradient = FEDERATION.topology, reference.plain_gradient(BACKBONE)
    local_key = jax.random.split(jax.random.fold_in(KEY, 0), 3)[2]
    for s, clients in taking_part(info).items():
        params = start.params
        for number in range(topology.station_rounds):
            trained, grams = [], []
            for _, client in clients:
                batches = list(reference.batches(client, topology, jax.random.fold_in(local_key, number)))
                own, velocity, noted = params, reference.scale(params, 0.0), []
                for step, (inputs, labels) in enumerate(batches):
                    if step >= len(batches) // topology.local_epochs:
                        noted.append(measured(Variables(own, {}), [inputs]))
                    velocity = reference.add(reference.scale(velocity, 0.9), gradient(own, inputs, labels))
                    own = reference.subtract(own, reference.scale(velocity, LR))
                trained.append(own)
                grams.append(added(noted))
            params = reference.average(trained, [client.size for _, client in clients])
        near(tree.take(of_stations(info), s), added(grams), 1e-3)  # of values up to a hundred
    assert abs(of_stations(info)["head"].gram - of_clients(info)["head"].gram.sum(1)).max() > 0.1


def test_client_grams_are_of_each_clients_trained_model():
    _, info = round_of("training")(LR)
    for s, clients in taking_part(info).items():
        for place, client in clients:
            model, grams = (
                tree.take(tree.take(info.station_merge["given"][x], s), place) for x in ("models", "messages")
            )
            near(grams, measured(model, [client.examples[0]]), 1e-3)
    assert not any(x[1, 1].any() for x in jax.tree.leaves(of_clients(info)))  # the empty one


def test_station_grams_are_of_the_stations_merged_model():
    _, info = round_of("station")(LR)
    models, own = info.server_merge["given"]["models"], info.station_merge["given"]["models"]
    for s, clients in taking_part(info).items():
        merged = tree.take(models, s)
        near(tree.take(of_stations(info), s), measured(merged, [client.examples[0] for _, client in clients]), 1e-3)
        trained = [tree.take(tree.take(own, s), place) for place, _ in clients]
        near(merged, reference.average(trained, [client.size for _, client in clients]))


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"local_steps": 7}, 5),  # the last three steps are a pass's worth wherever they begin
        ({"local_steps": 2}, 4),  # not even one pass
    ],
    ids=str,
)
def test_the_last_pass_covers_every_example_once(options, rows):
    """5 examples in batches of 2 among 9 places of padding, by a model that does not move."""
    federation = tiny_federation([[5]], padding=4, fill=np.nan)
    examples = jax.tree.map(lambda x: x[0, 0], federation.clients)
    topology, start = Topology(1, 1, batch_size=2, **options), jax.jit(BACKBONE.init)(KEY)
    algorithm, rules = fedavg(FedAvgHparams(client_lr=0.0)), (mean(), hfedatm(gram_at="training"))

    @jax.jit
    def watched():
        received = Received(start, (), (), ())
        seen = local.train(BACKBONE, algorithm, topology, rules, received, (), examples, KEY).seen
        return rules[1].measure(BACKBONE, start, start, examples, KEY, seen)

    grams = watched()
    assert grams["dense"].rows == rows
    if rows == 5 and options != {"local_steps": 7}:
        near(grams, measured(start, [examples.inputs[examples.mask]]), 1e-4)


def showing_nothing() -> Algorithm:
    """FedAvg whose steps keep their forward passes to themselves."""
    inner = fedavg()

    def step(*inputs):
        moved, metrics = inner.step(*inputs)
        return moved._replace(seen=()), metrics

    return inner._replace(step=step)


def test_an_algorithm_that_shows_no_forward_pass_is_told_what_to_do():
    federation = tiny_federation([[2, 3]], batch_size=2)

    def shapes(gram_at):
        round_fn = make_round(BACKBONE, showing_nothing(), federation.topology, to_server=hfedatm(gram_at=gram_at))
        return jax.eval_shape(round_fn.step, jax.eval_shape(round_fn.init, KEY), federation.data, KEY)

    message = (
        r"The steps of this algorithm do not show their forward passes \(Local.seen\), so nothing can be gathered from "
        "them: choose gram_at=client."
    )
    with pytest.raises(ValueError, match=message):
        shapes("training")
    for gram_at in ("client", "station"):
        assert sorted(shapes(gram_at)[1].server_merge["regmean"]) == ["dense", "head"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_shows_what_its_dense_layers_read(name):
    algorithm = tiny_method(name)
    backbone = algorithm.adapt(backbone_for(name))
    batch = jax.tree.map(lambda x: x[0, 0], tiny_federation([[4]]).clients)

    def one(key):
        start = algorithm.init(backbone, backbone.init(key), key)
        received = Received(start.variables, start.shared, start.station, start.client)
        optimizer, tally = algorithm.begin(backbone, received, start.client)
        at = Local(start.variables, optimizer, start.client, tally)
        return algorithm.step(backbone, received, at, batch, key)[0].seen, start.variables

    seen, variables = jax.eval_shape(one, KEY)
    assert sorted(seen) == sorted(backbone.dense_layers(variables))
    # StableFDG's attention reads at every place of a map
    assert {layer: (x.shape[0], x.shape[-1]) for layer, x in seen.items()} == {
        layer: (4, variables.params[layer]["kernel"].shape[0]) for layer in seen
    }


# --- either tier ----------------------------------------------------------------------------------------------------


@functools.cache
def tiers(station, server, **options):
    """The state and info of a first round with these rules."""
    rules = {"mean": mean, "hfedatm": functools.partial(hfedatm, **options)}
    federation = tiny_federation([[3, 5, 2], [4, 0, 6]], batch_size=2)
    to_station, to_server = shown(rules[station]()), shown(rules[server]())
    round_fn = make_round(BACKBONE, fedavg(), federation.topology, to_station=to_station, to_server=to_server)
    return jax.jit(lambda: round_fn.step(round_fn.init(KEY), federation.data, KEY))()


def merged_stations(info, **options):
    """RegMean of what each station was given."""
    given = info.station_merge["given"]
    return stack([regmean(*(tree.take(given[x], s) for x in GIVEN), **options).variables for s in range(2)])


GIVEN = ("models", "messages", "weights")


def test_regmean_at_both_tiers_is_regmean_of_all_clients():
    """With summed Grams and no ridge; what is no dense layer is the mean of all clients with data."""
    state, info = tiers("hfedatm", "hfedatm", fot=False, ridge=0.0)
    everyone = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), info.station_merge["given"])
    flat = regmean(*(everyone[x] for x in GIVEN), ridge=0.0)
    assert everyone["weights"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert info.server_merge["given"]["weights"].tolist() == [3.0, 2.0]
    near(info.server_merge["given"]["models"], merged_stations(info, ridge=0.0), 1e-4)
    near(state.variables, flat.variables, 1e-4)
    plain = tree.weighted_mean(everyone["models"], everyone["weights"])
    assert abs(plain.params["dense"]["kernel"] - flat.variables.params["dense"]["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_hfedatm_at_the_stations_and_the_mean_at_the_server():
    """The station's RegMean of its clients, then the mean by examples."""
    state, info = tiers("hfedatm", "mean")
    near(info.server_merge["given"]["models"], merged_stations(info), 1e-4)
    near(state.variables, tree.weighted_mean(merged_stations(info), jnp.array([10.0, 10.0])), 1e-4)
    assert sorted(info.station_merge) == ["fot", "given", "outputs_moved", "regmean"]
    assert info.station_merge["fot"]["conv"]["identity_fraction"].tolist() == [[1.0] * 3] * 2
    assert not info.station_merge["outputs_moved"].any()
    assert info.merged_finite
    assert info.finite.all()


# --- info -----------------------------------------------------------------------------------------------------------


def random_models(backbone, count, seed=0):
    """Models whose every leaf is random, [count]."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(backbone.init, jax.random.key(0))

    def leaf(x):
        return jnp.asarray(rng.normal(size=(count, *x.shape)) / max(1.0, np.sqrt(np.prod(x.shape[:-1]))), jnp.float32)

    return jax.tree.map(leaf, shapes)


def random_messages(backbone, count, rows=30, seed=1):
    """A Gram of random inputs for every dense layer of every model."""
    rng = np.random.default_rng(seed)
    start = jax.eval_shape(backbone.init, jax.random.key(0))
    widths = {layer: start.params[layer]["kernel"].shape[0] for layer in backbone.dense_layers(start)}
    xs = {layer: rng.normal(size=(count, rows, width)).astype(np.float32) + 0.3 for layer, width in widths.items()}
    return {
        layer: Gram(jnp.asarray(x.swapaxes(1, 2) @ x), jnp.asarray(x.sum(1)), jnp.full(count, float(rows)))
        for layer, x in xs.items()
    }


def test_info_is_what_the_docstring_names():
    models, messages = random_models(BACKBONE, 3), random_messages(BACKBONE, 3)
    start = tree.take(models, 0)
    merge = jax.jit(lambda *given: merge_models(BACKBONE, hfedatm(assignment="hungarian"), (), *given))
    info = merge(start, models, jnp.ones(3), messages)[3]
    told = {name: sorted(x) if isinstance(x, dict) else None for name, x in info.items()}
    assert told == {"fot": ["conv"], "outputs_moved": None, "regmean": ["dense", "head"]}
    assert sorted(info["fot"]["conv"]) == ["cost_after", "cost_before", "identity_fraction"]
    assert all(x.shape == (3,) for x in info["fot"]["conv"].values())
    assert sorted(info["regmean"]["head"]) == ["bytes", "condition", "fallback", "raised", "residual"]
    for name in (*info, *info["fot"]["conv"], *info["regmean"]["head"]):
        assert f"``{name}``" in str(hfedatm.__doc__)
    assert info["regmean"]["dense"]["bytes"] == 4 * (16**2 + 16 + 1)
    moved = info["outputs_moved"]
    assert moved[0] == 0.0
    assert (info["fot"]["conv"]["identity_fraction"][1:] < 1.0).all()
    assert (moved < 1e-5).all()
    still = merge(start, stack([start] * 3), jnp.ones(3), messages)[3]
    assert still["outputs_moved"].tolist() == [0.0, 0.0, 0.0]


# --- the paper's word -----------------------------------------------------------------------------------------------


class TwoConvs(nn.Module):
    """Two convolutions of one width, a flatten of 2 x 2 places, two dense layers."""

    def setup(self):
        self.conv1, self.conv2 = nn.Conv(8, (3, 3)), nn.Conv(8, (3, 3))
        self.dense, self.head = nn.Dense(6), nn.Dense(3)

    def features(self, x, train, mask=None):
        x = max_pool(nn.relu(self.conv2(nn.relu(self.conv1(x)))))
        return nn.relu(self.dense(x.reshape(x.shape[0], -1)))

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


WIRING = [
    Layer("conv1", None, "conv1", 8),
    Layer("conv2", "conv1", "conv2", 8),
    Layer("dense", "conv2", None, dense=True, positions=4),
]
TWO_CONVS = Backbone(TwoConvs(), (4, 4, 3), num_features=6, num_classes=3, groups=groups_of(WIRING))


def literally(models, grams, weights, clients):
    """The summary's rule in NumPy: ``models`` and per-client ``grams`` are lists over stations."""
    aligned = []
    for model in models:
        params = {layer: dict(leaves) for layer, leaves in model.items()}
        for layer in ("conv1", "conv2"):
            rows = [
                np.moveaxis(m[layer]["kernel"], 3, 0).reshape(m[layer]["kernel"].shape[3], -1)
                for m in (models[0], model)
            ]
            first, own = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rows)
            order = linear_sum_assignment(((first[:, None] - own[None]) ** 2).sum(-1))[1]
            params[layer] = {"kernel": model[layer]["kernel"][..., order], "bias": model[layer]["bias"][order]}
        aligned.append(params)
    shares = np.asarray(weights) / np.sum(weights)
    merged: dict[str, dict] = {
        layer: {leaf: sum(g * m[layer][leaf] for g, m in zip(shares, aligned)) for leaf in aligned[0][layer]}
        for layer in aligned[0]
    }
    for layer in grams[0]:
        means = [g[layer] / n for g, n in zip(grams, clients)]
        shrunken = [0.75 * g + 0.25 * np.diag(np.diag(g)) for g in means]
        target = sum(g @ m[layer]["kernel"] for g, m in zip(shrunken, aligned))
        merged[layer] = {**merged[layer], "kernel": np.linalg.solve(sum(shrunken), target)}
    return merged


def test_hfedatm_literal_is_the_summary():
    """Outputs of convolutions alone are reordered, to station 1; mean Grams of unequal stations; no ridge, mean bias."""
    backbone, rng = TWO_CONVS, np.random.default_rng(0)
    first = jax.tree.map(lambda x: np.asarray(x[0], np.float64), random_models(backbone, 1)).params

    def station(number):
        """Near station 1, its filters in another order."""
        params = jax.tree.map(lambda x: x + 0.02 * rng.normal(size=x.shape), first)
        order = np.roll(np.arange(8), number)
        turned = {layer: {leaf: x[..., order] for leaf, x in params[layer].items()} for layer in ("conv1", "conv2")}
        return {**params, **turned}

    models, weights, clients = [station(i) for i in range(3)], [2.0, 3.0, 1.0], [2, 3, 1]
    messages = [random_messages(backbone, n, rows=50, seed=n) for n in clients]
    summed = [{layer: np.asarray(g.gram, np.float64).sum(0) for layer, g in m.items()} for m in messages]
    expected = literally(models, summed, weights, clients)

    rule = hfedatm_literal()
    combined = []
    for message, n in zip(messages, clients):
        empty = jax.tree.map(lambda x: jnp.concatenate([x, 9.0 * x[:1]]), message)  # weight 0: not one of them
        combined.append(rule.combine(empty, jnp.array([5.0] * n + [0.0])))
        assert combined[-1]["head"].rows == 50.0
    stacked = jax.tree.map(lambda x: x.astype(jnp.float32), Variables(stack(models), {}))
    start = tree.take(random_models(backbone, 1, seed=9), 0)  # not looked at
    merge = jax.jit(lambda *given: merge_models(backbone, rule, (), *given))
    merged, _, orders, info = merge(start, stacked, jnp.asarray(weights), stack(combined))
    near(merged.params, expected, 1e-4)
    assert orders == {}  # nothing else follows
    assert info["fot"]["conv2"]["identity_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert info["outputs_moved"][0] == 0.0
    assert (info["outputs_moved"][1:] > 1e-2).all()


# --- batch statistics -----------------------------------------------------------------------------------------------


def halves(batch_stats):
    """Two models of equal weight: means 0 and 2, variances 1 and 1."""
    return Variables({"w": jnp.array([1.0, 3.0])}, batch_stats)


def norm_stats():
    return {"mean": jnp.array([[0.0], [2.0]]), "var": jnp.ones((2, 1))}


@pytest.mark.parametrize("rule", [mean, fedavgm, hfedatm])
def test_exact_pooling_is_the_variance_of_the_mixture(rule):
    """Means 0 and 2, variances 1: the mean of variances is 1, that of the mixture 2; however deep the norm lies."""
    models = halves({"norm1": norm_stats(), "block": {"norm2": norm_stats()}, "count": jnp.array([4, 8])})
    start = tree.take(models, 0)
    for bn_pool, variance in (("naive", 1.0), ("exact", 2.0)):
        made = rule(bn_pool=bn_pool) if rule is not hfedatm else rule(bn_pool=bn_pool, regmean=False, fot=False)
        merged = made.merge(None, made.init(start, 2), start, models, jnp.array([3.0, 3.0]), {})[0]
        expected = {"mean": [1.0], "var": [variance]}
        assert jax.tree.map(lambda x: x.reshape(-1).tolist(), merged.batch_stats) == {
            "norm1": expected,
            "block": {"norm2": expected},
            "count": [6],
        }
        assert merged.params["w"] == 2.0


def test_exact_pooling_is_what_all_examples_together_have():
    rng = np.random.default_rng(0)
    groups = [rng.normal(loc=100.0 * i, scale=i + 1, size=(n, 3)) for i, n in enumerate((10, 5, 20))]
    stats = {"mean": jnp.asarray([x.mean(0) for x in groups]), "var": jnp.asarray([x.var(0) for x in groups])}
    pooled = pool(Variables({}, {"norm": stats}), jnp.array([10.0, 5.0, 20.0]), "exact").batch_stats["norm"]
    together = np.concatenate(groups)
    near(pooled, {"mean": together.mean(0), "var": together.var(0)}, 1e-4)


class NormNet(nn.Module):
    """A batch norm over pixels and a linear head."""

    def setup(self):
        self.norm, self.head = nn.BatchNorm(momentum=0.5), nn.Dense(3)

    def features(self, x, train, mask=None):
        where = None if mask is None else mask[:, None, None, None]
        return self.norm(x, use_running_average=not train, mask=where).mean((1, 2))

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


NORM_NET = Backbone(NormNet(), input_shape=(6, 6, 2), num_features=2, num_classes=3)


@functools.cache
def norm_rounds(keep) -> Any:
    """The states after each of three rounds of two clients at each of two stations, one of them empty; one step each."""
    federation = tiny_federation([[4, 4], [4, 0]], batch_size=4)
    algorithm = fedavg(FedAvgHparams(client_lr=LR))
    round_fn = make_round(NORM_NET, keep_batch_stats(algorithm) if keep else algorithm, federation.topology)

    def one(state, _):
        state = round_fn.step(state, federation.data, KEY)[0]
        return state, state

    return federation, jax.jit(lambda: jax.lax.scan(one, round_fn.init(KEY), length=3)[1])()


def test_a_client_keeps_its_own_batch_statistics():
    """Running means of its own examples alone, round after round; the server's are the mean of all."""
    federation, states = norm_rounds(True)
    kept = states.clients[1].batch_stats["norm"]
    inputs, mask = np.asarray(federation.clients.inputs), np.asarray(federation.clients.mask)
    present = [(0, 0), (0, 1), (1, 0)]
    for number in range(3):
        for s, c in present:
            examples = inputs[s, c][mask[s, c]]
            share = 1 - 0.5 ** (number + 1)
            near(kept["mean"][number, s, c], share * examples.mean((0, 1, 2)), 1e-4)
            near(kept["var"][number, s, c], share * examples.var((0, 1, 2)) + 1 - share, 1e-4)
        near(
            states.variables.batch_stats["norm"]["mean"][number],
            sum(kept["mean"][number, s, c] for s, c in present) / 3,
        )
        near(kept["mean"][number, 1, 1], [0.0, 0.0])  # the empty one
    assert abs(kept["mean"][2, 0, 0] - kept["mean"][2, 0, 1]).max() > 0.1


def test_training_does_not_read_running_statistics():
    """So keeping them changes no parameter."""
    near(norm_rounds(True)[1].variables.params, norm_rounds(False)[1].variables.params)
    assert norm_rounds(False)[1].clients == ()
