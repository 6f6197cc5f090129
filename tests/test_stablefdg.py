"""StableFDG: styles against plain numpy, who receives whose, the highlighter, and what is left of it without each part."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client import BACKBONE, examples_of, fresh, one_batch, programs
from flax import linen as nn
from tiny import tiny_federation

from fedjax_dg import local, make_round, styles
from fedjax_dg.algorithms import FedAvgHparams, StableFDGHparams, fedavg, stablefdg
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.stablefdg import Offer, first_rows, map_widths, partner_of, styled_pass, unit
from fedjax_dg.alignment import permute
from fedjax_dg.backbones import Backbone, alexnet, in_precision, lenet5, resnet18, vgg11
from fedjax_dg.backbones.backbone import Forward, first_readers
from fedjax_dg.backbones.layers import Layer, Stage, groups_of, normalise
from fedjax_dg.styles import Summary, at_stages, style_of
from fedjax_dg.types import Examples, Received, Variables

KEY = jax.random.key(0)
KEYS = [jax.random.key(i) for i in range(8)]
MASK = np.array([1, 0, 1, 1, 1, 1, 0, 1, 1], bool)
LABELS = np.array([2, 2, 0, 2, 3, 0, 0, 2, 2], np.int32)  # of the real rows: class 2 four times, 0 twice, 3 once
GARBAGE = 1e4

PLAIN = functools.partial(stablefdg, highlight=False)


class StagedNet(nn.Module):
    """Three 3 x 3 convolutions with batch norm, a stage's end after each but the last, the mean over places, a head."""

    def setup(self):
        self.head = nn.Dense(3)

    @nn.compact
    def maps(self, x, train, mask=None):
        for i, filters in enumerate((3, 4, 6), 1):
            x = nn.Conv(filters, (3, 3), padding="VALID", use_bias=False, name=f"conv{i}")(x)
            x = nn.relu(normalise(x, "batch", not train, mask, f"norm{i}"))
            if i < 3:
                x, mask = Stage()(x, mask)
        return x

    def reduce(self, maps, train):
        return maps.mean((1, 2))

    def features(self, x, train, mask=None):
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def layer(i, size):
    return Layer(f"conv{i}", f"conv{i - 1}" if i > 1 else None, f"conv{i}", size, norm=f"norm{i}", bias=False)


WIRING = [*(layer(i, size) for i, size in enumerate((3, 4, 6), 1)), Layer("head", "conv3", None, dense=True)]
STAGED = Backbone(StagedNet(), (8, 8, 2), num_features=6, num_classes=3, groups=groups_of(WIRING, "batch"))


def drawn(*shape, seed=0, mask=MASK):
    """Random rows, garbage where they are not real."""
    values = np.random.default_rng(seed).normal(size=(len(mask), *shape)).astype(np.float32)
    values[~mask] = GARBAGE
    return values


# --- styles ---------------------------------------------------------------------------------------------------------


def test_a_style_is_mean_and_deviation_over_places():
    maps = drawn(3, 5, 2)
    style = style_of(jnp.asarray(maps))
    expected = np.concatenate([maps.mean((1, 2)), np.sqrt(maps.var((1, 2), ddof=1) + 1e-6)], axis=1)
    np.testing.assert_allclose(style[MASK], expected[MASK], rtol=1e-5, atol=1e-6)
    lone = style_of(jnp.asarray(maps[:, :1, :1]))  # a map of one place
    np.testing.assert_allclose(lone[:, 2:], 1e-3, rtol=1e-5)


def test_a_new_style_is_what_a_map_then_has():
    maps, new = drawn(4, 4, 3), abs(drawn(6, seed=1)) + 1
    styled = styles.restyle(jnp.asarray(maps), style_of(jnp.asarray(maps)), jnp.asarray(new))
    np.testing.assert_allclose(style_of(styled)[MASK], new[MASK], rtol=1e-4)
    same = styles.restyle(jnp.asarray(maps), style_of(jnp.asarray(maps)), style_of(jnp.asarray(maps)))
    np.testing.assert_allclose(same[MASK], maps[MASK], rtol=1e-5, atol=1e-5)


def test_extrapolation_by_hand():
    style = jnp.array([[1.0], [GARBAGE], [3.0]])
    mask = jnp.array([True, False, True])
    np.testing.assert_allclose(styles.extrapolate(style, mask, 3.0)[mask], [[-2.0], [6.0]], rtol=1e-6)
    np.testing.assert_array_equal(styles.extrapolate(style, mask, 0.0), style)


def test_mixed_styles_lie_between_a_row_and_its_partner():
    style = jnp.asarray(drawn(2))
    order = np.asarray(jax.vmap(lambda key: styles.permutation(jnp.asarray(MASK), key))(jnp.stack(KEYS)))
    real = np.flatnonzero(MASK)
    assert all(sorted(one[MASK]) == list(real) and (one[~MASK] == np.flatnonzero(~MASK)).all() for one in order)
    assert len({tuple(one) for one in order}) == len(KEYS)
    mixed = styles.mix(style, jnp.asarray(MASK), 1.0, KEY)
    other = style[styles.permutation(jnp.asarray(MASK), jax.random.split(KEY)[1])]
    share = (mixed - other) / jnp.where(style == other, 1.0, style - other)
    moved = MASK & np.asarray(style != other).all(1)
    assert ((share[moved] > 0) & (share[moved] < 1)).all() and moved.sum() > 3
    np.testing.assert_allclose(share[moved, 0], share[moved, 1], rtol=1e-3)  # one share a row
    assert len(np.unique(np.round(share[moved, 0], 3))) == moved.sum()
    np.testing.assert_array_equal(styles.mix(style, jnp.asarray(MASK), 0.0, KEY), style)


def test_shares_are_mostly_near_none_or_all():
    """Beta(0.1, 0.1): above 0.9 or below 0.1 four times in five."""
    style = jnp.arange(2000.0)[:, None] % 2
    mixed = styles.mix(style, jnp.ones(2000, bool), 0.1, KEY)
    extreme = (jnp.minimum(mixed, 1 - mixed) < 0.1).mean()
    assert 0.85 < extreme < 0.95  # with half of the rows having a partner of the same value


def test_sampled_styles():
    summary = Summary(jnp.array([-1.0, 2.0, 0.1, 3.0]), jnp.zeros(4))
    np.testing.assert_array_equal(styles.sample(summary, 5, KEY), np.tile(summary.mean, (5, 1)))
    wide = styles.sample(summary._replace(std=jnp.array([1.0, 0.0, 1.0, 0.5])), 4000, KEY)
    assert wide[:, 2].min() == 0 and wide[:, 0].min() < -2  # deviations are cut off at 0, means are not
    np.testing.assert_allclose(wide.mean(0)[jnp.array([0, 1, 3])], [-1, 2, 3], atol=0.05)
    np.testing.assert_allclose(wide.std(0)[jnp.array([0, 3])], [1, 0.5], atol=0.05)


def test_seeds_are_of_different_clusters():
    """Three tight clusters of 4, 2 and 1 real rows, with padding in the middle of nowhere."""
    points = jnp.asarray(drawn(2, seed=3) * 0.01 + 10.0 * LABELS[:, None])

    @functools.partial(jax.jit, static_argnums=1)
    def seeds(points, number):
        return jax.vmap(lambda key: styles.seed(points, jnp.asarray(MASK), number, key))(jnp.stack(KEYS))

    few, many, equal = (np.asarray(x) for x in (seeds(points, 3), seeds(points, 9), seeds(jnp.ones((9, 2)), 9)))
    assert (np.sort(LABELS[few]) == [0, 2, 3]).all() and MASK[few].all()
    for one in (many, equal):  # all that there are, each once, then anything
        assert (np.sort(one[:, :7]) == np.flatnonzero(MASK)).all()
    assert len(set(few[:, 0])) > 2


def test_centres_are_means_of_the_nearest_rows():
    points = drawn(3, seed=4)
    seeds, used = np.array([3, 0, 7, 5]), np.array([True, True, True, False])
    centres = styles.centres_of(*map(jnp.asarray, (points, MASK, seeds, used)))
    nearest = ((points[:, None] - points[seeds[:3]]) ** 2).sum(-1).argmin(1)
    for i in range(3):
        np.testing.assert_allclose(centres[i], points[MASK & (nearest == i)].mean(0), rtol=1e-5)


@pytest.mark.parametrize("real", [(1,) * 8, (1, 0, 1, 1, 1, 1, 0, 0), (0, 0, 0, 1, 0, 0, 0, 0), (1,)])
def test_half_of_the_real_rows_are_shifted(real):
    mask = np.array(real, bool)
    maps = drawn(3, 3, 2, mask=mask)
    summary = Summary(jnp.array([5.0, -6.0, 2.0, 3.0]), jnp.zeros(4))
    styled = np.asarray(jax.jit(styles.shift)(jnp.asarray(maps), jnp.asarray(mask), summary, KEY))
    changed = (styled != maps).any((1, 2, 3))
    assert changed.sum() == mask.sum() // 2 and not changed[~mask].any()
    np.testing.assert_allclose(
        style_of(jnp.asarray(styled))[changed], np.tile(summary.mean, (changed.sum(), 1)), rtol=1e-4
    )


def test_the_rows_that_stay_are_those_of_rare_styles():
    """Four rows in one style and two in others: of the three that stay, two are those."""
    mask = np.ones(6, bool)
    maps = drawn(3, 3, 1, mask=mask) * 1e-3 + np.array([0, 0, 7, 0, 0, -9.0], np.float32)[:, None, None, None]
    summary = Summary(jnp.array([50.0, 1.0]), jnp.zeros(2))
    some = jax.jit(jax.vmap(lambda key: styles.shift(jnp.asarray(maps), jnp.asarray(mask), summary, key)))
    for styled in np.asarray(some(jnp.stack(KEYS))):
        assert not (styled != maps).any((1, 2, 3))[[2, 5]].any()


def test_first_rows_in_the_styles_of_centres():
    maps = jnp.asarray(drawn(3, 3, 2))
    summary = Summary(jnp.array([5.0, -6.0, 2.0, 3.0]), jnp.zeros(4))
    styled = jax.jit(functools.partial(styles.shift, kept="centres"))(maps, jnp.asarray(MASK), summary, KEY)
    new, real = style_of(styled), np.flatnonzero(MASK)  # seven: four stay
    np.testing.assert_array_equal(styled[~MASK], maps[~MASK])
    np.testing.assert_allclose(new[real[4:]], np.tile(summary.mean, (3, 1)), rtol=1e-4)
    seeds = styles.seed(style_of(maps), jnp.asarray(MASK), 5, jax.random.split(KEY)[0])
    centres = styles.centres_of(style_of(maps), jnp.asarray(MASK), seeds, jnp.arange(5) < 4)
    np.testing.assert_allclose(new[real[:4]], centres[:4], rtol=1e-3, atol=1e-4)


def test_no_gradient_flows_through_styles_that_are_shared():
    """Of a shifted row: new deviation over old one, as if both were given."""
    maps, mask = jnp.asarray(drawn(3, 3, 1)), jnp.asarray(MASK)
    summary = Summary(jnp.array([0.0, 2.0]), jnp.zeros(2))
    total = lambda x: (styles.shift(x, mask, summary, KEY).sum(), styles.shift(x, mask, summary, KEY))
    gradient, styled = jax.jit(jax.grad(total, has_aux=True))(maps)
    changed = (styled != maps).any((1, 2, 3))
    expected = jnp.where(changed, 2.0 / style_of(maps)[:, 1], 1.0)[:, None, None, None] * jnp.ones_like(maps)
    np.testing.assert_allclose(gradient[MASK], expected[MASK], rtol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_a_summary_of_a_clients_styles(monkeypatch, offset):
    """In batches of four; a small spread about a large mean is not lost."""
    monkeypatch.setattr(local, "PASS_SIZE", 4)
    values = drawn(3) + offset
    values[~MASK] = np.nan
    zeros = jnp.zeros(len(MASK), jnp.int32)
    examples = Examples(jnp.asarray(values), zeros, jnp.asarray(MASK), zeros)
    summary, count = styles.summarise(lambda batch: batch.inputs, examples)
    exact = values[MASK].astype(np.float64)
    assert count == 7
    np.testing.assert_allclose(summary.mean, exact.mean(0), rtol=1e-5)
    np.testing.assert_allclose(summary.std, exact.std(0), rtol=1e-5)
    summary, count = styles.summarise(lambda batch: batch.inputs, examples._replace(mask=jnp.zeros(len(MASK), bool)))
    chex.assert_trees_all_equal((summary, count), (Summary(jnp.zeros(3), jnp.zeros(3)), jnp.float32(0)))


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [LABELS, np.zeros(9, np.int32), np.arange(9, dtype=np.int32)])
def test_copies_even_out_classes(labels):
    seen = set()
    some = jax.jit(jax.vmap(lambda key: styles.oversample(jnp.asarray(labels), jnp.asarray(MASK), 10, key)))
    for rows, taken in zip(*map(np.asarray, some(jnp.stack(KEYS)))):
        assert taken.sum() == MASK.sum() and MASK[rows[taken]].all()
        counts = np.bincount(labels[MASK], minlength=10)
        level = np.where(counts > 0, counts, GARBAGE)
        for _ in range(MASK.sum()):  # one at a time to the rarest
            level[level.argmin()] += 1
        after = np.bincount(labels[rows[taken]], minlength=10) + counts
        assert sorted(after[counts > 0]) == sorted(level[counts > 0]) and not after[counts == 0].any()
        # the rows of a class take turns
        copied = np.bincount(rows[taken], minlength=9)
        assert all(np.ptp(copied[MASK & (labels == k)]) <= 1 for k in np.unique(labels[MASK]))
        seen.add(tuple(rows[taken]))
    assert len(seen) > 2


def test_without_rows_nothing_is_copied():
    _, taken = styles.oversample(jnp.asarray(LABELS), jnp.zeros(9, bool), 4, KEY)
    assert not taken.any()


def test_the_next_row_of_the_same_class():
    following = np.asarray(styles.next_of_class(jnp.asarray(LABELS), jnp.asarray(MASK)))
    np.testing.assert_array_equal(following, [3, 1, 5, 7, 4, 2, 6, 8, 0])


# --- partners -------------------------------------------------------------------------------------------------------


def test_partners_are_one_cycle_of_the_clients_with_data():
    draws = jnp.asarray(np.random.default_rng(0).permutation(9), jnp.float32)
    draws = jnp.where(MASK, draws, jnp.inf)
    offers = Offer(draws, Summary(jnp.arange(9.0)[:, None], jnp.arange(9.0)[:, None]))
    following = {}
    for client in np.flatnonzero(MASK):
        peer = partner_of(offers, draws[client])
        assert peer.another
        following[client] = int(np.asarray(peer.styles.mean)[0])
    place, path = 0, []
    for _ in range(MASK.sum()):
        path.append(place)
        place = following[place]
    assert place == 0 and sorted(path) == list(np.flatnonzero(MASK))


def test_a_client_alone_has_no_partner():
    offers = Offer(jnp.array([jnp.inf, 0.3, jnp.inf]), Summary(jnp.zeros((3, 2)), jnp.zeros((3, 2))))
    assert not partner_of(offers, jnp.float32(0.3)).another


def offers_of(mean):
    """Three clients' offers, with these means [3, d] and no spread."""
    return Offer(jnp.array([0.1, 0.5, 0.9]), Summary(jnp.asarray(mean), jnp.zeros_like(mean)))


def test_a_batch_takes_in_the_styles_of_the_partner():
    """NaN in the one it must read, or in all others."""
    step = programs(PLAIN, momentum)[0]
    hparams = StableFDGHparams(share_prob=1.0, explore_prob=0.0)
    partner = np.zeros((3, 8), np.float32)
    partner[2] = np.nan
    others = np.full((3, 8), np.nan, np.float32)
    others[2] = 1.0
    losses = []
    for mean in (partner, others):
        received = Received(fresh(), offers_of(mean), (), jnp.float32(0.5))
        losses.append(float(step(hparams, received, one_batch(), KEY)[1]["loss"]))
    assert np.isnan(losses[0]) and np.isfinite(losses[1])


def test_sharing_happens_half_of_the_time():
    step = programs(PLAIN, momentum)[0]
    received = Received(fresh(), offers_of(np.full((3, 8), 9.0, np.float32)), (), jnp.float32(0.5))
    plain = received._replace(shared=())
    hparams = StableFDGHparams(explore_prob=0.0)
    keys = [jax.random.key(i) for i in range(40)]
    losses = np.array([step(hparams, received, one_batch(), key)[1]["loss"] for key in keys])
    happened = losses != float(step(hparams, plain, one_batch(), KEY)[1]["loss"])
    assert 10 < happened.sum() < 30


# --- exploration ----------------------------------------------------------------------------------------------------


def staged_batch(labels, side=8):
    """Rows of these labels and one of padding, for the network with two stages."""
    mask = np.append(np.ones(len(labels), bool), False)
    inputs = drawn(side, side, 2, mask=mask)
    inputs[-1] = 0.0
    return Examples(*(jnp.asarray(x) for x in (inputs, np.append(labels, 0), mask, np.zeros(len(mask), np.int32))))


def staged_step(labels, hparams):
    """One step of the network with two stages, without sharing or highlighter."""
    batch = staged_batch(labels)
    step = programs(PLAIN, momentum, STAGED)[0]
    received = Received(fresh(STAGED), (), (), jnp.zeros(()))
    return [step(hparams, received, batch, key) for key in KEYS]


def spread(stats, norm):
    return np.asarray(stats[norm]["var"])


def test_copies_count_from_the_first_stage_where_styles_are_explored():
    """Batch statistics tell: before it they are of the batch alone, whose rows are half of one class."""
    plain = staged_step([0, 0, 0, 0, 1, 2], StableFDGHparams(explore_prob=0.0))
    norms = [f"norm{i}" for i in (1, 2, 3)]
    expected = plain[0][0].variables.batch_stats
    firsts = set()
    for moved, metrics in staged_step([0, 0, 0, 0, 1, 2], StableFDGHparams()):
        same = [np.allclose(spread(moved.variables.batch_stats, n), spread(expected, n), rtol=1e-5) for n in norms]
        first = same.index(False) if False in same else 3
        assert same == [True] * first + [False] * (3 - first)
        assert metrics["copies"] == (6 if first < 3 else 0)
        firsts.add(first)
    assert firsts >= {1, 2} and 0 not in firsts
    assert all(metrics["copies"] == 0 for _, metrics in plain)


def test_copies_in_their_own_styles_change_nothing():
    """Where each row is copied once: neither loss nor statistics."""
    balanced = [0, 0, 1, 1, 2, 2]
    plain = staged_step(balanced, StableFDGHparams(explore_prob=0.0))
    same = staged_step(balanced, StableFDGHparams(explore=0.0, mix_alpha=0.0, explore_prob=1.0))
    for (one, metrics), (other, copied) in zip(plain, same):
        assert copied["copies"] == 6
        chex.assert_trees_all_close(metrics["loss"], copied["loss"], rtol=1e-5)
        chex.assert_trees_all_close(one.variables.batch_stats, other.variables.batch_stats, rtol=1e-4, atol=1e-5)
    explored = staged_step(balanced, StableFDGHparams(mix_alpha=0.0, explore_prob=1.0))
    assert all(abs(float(x[1]["loss"] - y[1]["loss"])) > 1e-3 for x, y in zip(same, explored))


def captured(backbone, batch, hparams):
    """``styled_pass`` of a fresh network, what its ``reduce`` was given, and the rows that are copied."""
    return run_captured(backbone, fresh(backbone), batch, hparams)


@functools.partial(jax.jit, static_argnums=0)
def run_captured(backbone, variables, batch, hparams):
    seen = []

    def capture(next_method, args, kwargs, context):
        if context.method_name == "reduce":
            seen.append(args[0])
        return next_method(*args, **kwargs)

    with nn.intercept_methods(capture):
        forward, labels, mask = styled_pass(backbone, variables, batch, None, KEY, hparams, "rows")
    copy_key = jax.random.split(jax.random.fold_in(KEY, 1), 4)[0]
    rows, _ = styles.oversample(batch.labels, batch.mask, backbone.num_classes, copy_key)
    return forward, labels, mask, seen[0], rows


def stage_maps(variables, batch):
    """Of the tiny network, by its only stage."""
    with at_stages() as passed:
        BACKBONE.maps(variables, batch.inputs, batch.mask, KEY)
    return passed[0][0]


def test_copied_rows_take_the_extrapolated_styles():
    """At the only stage of the tiny network; the batch's own rows keep theirs."""
    batch = one_batch()
    hparams = StableFDGHparams(explore_prob=1.0, mix_alpha=0.0)
    forward, labels, mask, maps, rows = captured(BACKBONE, batch, hparams)
    plain = stage_maps(fresh(), batch)
    np.testing.assert_array_equal(labels, [*batch.labels, *batch.labels[rows]])
    np.testing.assert_array_equal(mask, [True] * 7 + [False] + [True] * 7 + [False])
    assert forward.logits.shape == (16, 3)
    np.testing.assert_allclose(maps[:8], nn.relu(plain), rtol=1e-5, atol=1e-5)
    own = np.asarray(style_of(plain))
    far = own[rows[:7]] + 3 * (own[rows[:7]] - own[:7].mean(0))
    expected = styles.restyle(plain[rows[:7]], jnp.asarray(own[rows[:7]]), jnp.asarray(far))
    np.testing.assert_allclose(maps[8:15], nn.relu(expected), rtol=1e-3, atol=1e-4)


def test_a_batch_of_32_leaves_with_64_rows():
    given = fresh(), staged_batch(np.arange(32) % 3, 6), StableFDGHparams()
    forward, labels, mask, *_ = jax.eval_shape(functools.partial(run_captured, BACKBONE), *given)
    assert labels.shape == (66,) == mask.shape and forward.logits.shape == (66, 3)


# --- the highlighter ------------------------------------------------------------------------------------------------


def highlighted(backbone):
    return stablefdg().adapt(backbone)


def random_variables(backbone, seed=0):
    rng = np.random.default_rng(seed)
    random = lambda x: jnp.asarray(0.5 + abs(rng.normal(size=x.shape)), x.dtype)
    signed = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    shapes = jax.eval_shape(backbone.init, KEY)
    return Variables(jax.tree.map(signed, shapes.params), jax.tree.map(random, shapes.batch_stats))


def images(backbone, rows=4):
    return jnp.asarray(np.random.default_rng(5).normal(size=(rows, *backbone.input_shape)), jnp.float32)


def test_no_keys_make_both_parts_the_mean_of_the_map():
    backbone = highlighted(STAGED)
    variables = random_variables(backbone)
    params = {**variables.params, "key": jax.tree.map(jnp.zeros_like, variables.params["key"])}
    z = backbone.features(variables._replace(params=params), images(STAGED))
    assert z.shape == (4, 12) == (4, backbone.num_features)
    np.testing.assert_allclose(z[:, :6], z[:, 6:], rtol=1e-5, atol=1e-6)
    z = backbone.features(variables, images(STAGED))
    assert abs(z[:, :6] - z[:, 6:]).max() > 1e-3


def attended(maps, params, following):
    """The pooled maps by the whole matrix of places against places."""
    places = np.asarray(maps, np.float64).reshape(len(maps), -1, maps.shape[-1])
    layers = (places @ np.asarray(params[name]["kernel"]) for name in ("query", "key"))
    query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in layers)
    scores = np.einsum("bpd,bqd->bpq", (query + query[following]) / 2, key).mean(1)
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return np.einsum("bq,bqc->bc", weights, places)


def test_attention_by_hand():
    """Own queries in evaluation; in training those of the next row of the class too. Logits are a dense layer on both."""
    backbone = highlighted(BACKBONE)
    variables, batch = random_variables(backbone), one_batch()
    plain, _ = BACKBONE.maps(variables, batch.inputs, batch.mask, KEY)
    z = backbone.features(variables, batch.inputs)
    np.testing.assert_allclose(z[:, 5:], attended(plain, variables.params, np.arange(8)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z[:, :5], BACKBONE.features(variables, batch.inputs), rtol=1e-6)
    head = variables.params["head"]
    kernel = jnp.concatenate([head["kernel"], variables.params["highlight"]["kernel"]])
    np.testing.assert_allclose(backbone.head(variables, z), z @ kernel + head["bias"], rtol=1e-4, atol=1e-4)

    hparams = StableFDGHparams(explore_prob=0.0)
    forward, labels, mask, *_ = run_captured(backbone, variables, batch, hparams)
    following = np.asarray(styles.next_of_class(labels, mask))
    assert (following[:7] != np.arange(7)).sum() >= 4 and (following < 7)[:7].all()
    expected = attended(plain, variables.params, following[:8])
    np.testing.assert_allclose(forward.z[:7, 5:], expected[:7], rtol=1e-4, atol=1e-4)
    assert abs(forward.z - z[jnp.arange(16) % 8]).max() > 1e-3


def test_vectors_of_no_length_have_a_gradient():
    assert jnp.isfinite(jax.grad(lambda x: unit(x).sum())(jnp.zeros((2, 3)))).all()


@pytest.mark.parametrize(
    "make", [lambda: BACKBONE, lambda: STAGED, lambda: lenet5(3)], ids=["tiny", "staged", "lenet5"]
)
def test_permuting_every_group_keeps_the_function(make):
    backbone = highlighted(make())
    variables, x = random_variables(backbone), images(backbone)
    evaluate = jax.jit(backbone.apply)
    permuted, left = variables, variables
    for group in backbone.groups:
        order = jnp.asarray(np.roll(np.arange(group.size), 1))
        permuted = permute(permuted, group, order)
        consumers = tuple(axis for axis in group.consumers if "highlight" not in axis.leaf)
        left = permute(left, group._replace(consumers=consumers), order)
    expected = evaluate(variables, x)
    scale = abs(expected).max()
    assert abs(evaluate(permuted, x) - expected).max() < 1e-5 * scale
    assert abs(evaluate(left, x) - expected).max() > 1e-3 * scale
    moved = {axis.leaf for group in backbone.groups for axis in group.consumers}
    assert moved >= {f"params/{name}/kernel" for name in ("query", "key", "highlight")}


def test_statistics_are_of_the_batchs_own_rows():
    """And layers that read the same map still share one Gram."""
    backbone = highlighted(BACKBONE)
    inputs = jnp.arange(32.0)[:, None]
    shapes = jax.eval_shape(functools.partial(run_captured, backbone), fresh(backbone), one_batch(), StableFDGHparams())
    seen = shapes[0].dense_inputs
    assert set(seen) == {"dense", "query", "key", "head", "highlight"} and {x.shape[0] for x in seen.values()} == {16}
    forward = Forward(inputs, inputs, {}, {"query": inputs, "key": inputs, "head": inputs + 1})
    own = first_rows(forward, 8).dense_inputs
    assert {layer: x.shape[0] for layer, x in own.items()} == dict.fromkeys(("query", "key", "head"), 8)
    assert first_readers(own) == {"query": "key", "key": "key", "head": "head"}
    chex.assert_trees_all_equal(own, jax.tree.map(lambda x: x[:8], forward.dense_inputs))


# --- the method -----------------------------------------------------------------------------------------------------


def test_without_its_parts_it_is_fedavg():
    """One step, batch norm's statistics included."""
    hparams, received = (
        StableFDGHparams(share_prob=0.0, explore_prob=0.0),
        Received(fresh(STAGED), (), (), jnp.zeros(())),
    )
    batch = staged_batch([0, 0, 0, 0, 1, 2])
    step, plain = (programs(method, momentum, STAGED)[0] for method in (PLAIN, fedavg))
    expected, metrics = plain(FedAvgHparams(), received._replace(origin=()), batch, KEY)
    moved, ours = step(hparams, received, batch, KEY)
    chex.assert_trees_all_close(moved.variables, expected.variables, rtol=1e-5, atol=1e-6)
    assert abs(metrics["loss"] - ours["loss"]) < 1e-6


def rounds(method):
    """Two rounds of a federation of three clients, as a program of hyper-parameters and data."""

    @jax.jit
    def run(hparams, federation):
        round_fn = make_round(BACKBONE, method(hparams), tiny_federation([[6, 0, 0]], batch_size=3).topology)
        start = round_fn.init(KEY)
        return jax.lax.scan(lambda state, _: round_fn.step(state, federation, KEY), start, length=2)[0]

    return run


def test_one_client_with_data_shares_nothing():
    """Sharing alone, at every step: with two clients it is not FedAvg, with one it is; without sharing always."""
    plain, ours = rounds(fedavg), rounds(PLAIN)
    always = StableFDGHparams(share_prob=1.0, explore_prob=0.0)
    never = always._replace(share_prob=0.0)
    for sizes, hparams, same in (
        ([[6, 0, 0]], always, True),
        ([[6, 0, 4]], always, False),
        ([[6, 0, 4]], never, True),
    ):
        data = tiny_federation(sizes).data
        expected, state = plain(FedAvgHparams(), data), ours(hparams, data)
        away = jax.tree.map(lambda x, y: abs(x - y).max(), expected.variables.params, state.variables.params)
        assert (max(jax.tree.leaves(away)) < 1e-6) == same
        assert not jax.tree.leaves(state.shared)


def test_what_is_uploaded_before_the_round():
    """4 C + 1 floats, of the first stage of the received model in evaluation mode."""
    algorithm, backbone = stablefdg(), highlighted(BACKBONE)
    assert algorithm.survey is not None
    variables = random_variables(backbone)
    received = Received(variables, (), (), jnp.zeros(()))
    survey = jax.jit(functools.partial(algorithm.survey, backbone))
    draw, offer = survey(received, jnp.zeros(()), examples_of(), KEY)
    assert sum(x.size for x in jax.tree.leaves(offer)) == 4 * 4 + 1
    rows = np.asarray(style_of(stage_maps(variables, one_batch())))[:7]
    assert offer.draw == draw and 0 < draw < 1
    np.testing.assert_allclose(offer.styles.mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(offer.styles.std, rows.std(0), rtol=1e-3, atol=1e-5)


def test_in_bfloat16():
    backbone = highlighted(in_precision(STAGED, "bfloat16"))
    given = (jax.eval_shape(backbone.init, KEY), staged_batch([0, 1, 2]), StableFDGHparams())
    forward, _, _, maps, _ = jax.eval_shape(functools.partial(run_captured, backbone), *given)
    assert forward.logits.dtype == jnp.float32 and maps.dtype == jnp.bfloat16


STAGES = {
    lenet5: (6, 16, 1),
    alexnet: (64, 256, 2),
    vgg11: (64, 512, 3),
    resnet18: (64, 512, 3),
}


@pytest.mark.parametrize("make", STAGES)
def test_stages_of_the_networks(make):
    """Channels at the first end, and of the last map; how many ends there are, and none of them is the last map."""
    backbone = make(3)
    *widths, stages = STAGES[make]
    assert map_widths(backbone) == tuple(widths)

    def run(variables, x):
        with at_stages() as passed:
            maps, _ = backbone.maps(variables, x, jnp.ones(2, bool), KEY)
        return [maps for maps, _ in passed], maps

    inputs = jax.ShapeDtypeStruct((2, *backbone.input_shape), jnp.float32)
    ends, last = jax.eval_shape(run, jax.eval_shape(backbone.init, KEY), inputs)
    assert len(ends) == stages and all(x.shape != last.shape and x.ndim == 4 for x in ends)
    assert highlighted(backbone).num_features == backbone.num_features + last.shape[-1]


def test_bad_options_and_networks():
    with pytest.raises(ValueError, match="kept"):
        stablefdg(kept="columns")

    class Flat(nn.Module):
        def setup(self):
            self.head = nn.Dense(3)

        def features(self, x, train, mask=None):
            return x

        def classify(self, z):
            return self.head(z)

        def __call__(self, x, train):
            return self.classify(x)

    with pytest.raises(ValueError, match="stages"):
        make_round(Backbone(Flat(), (4,), 4, 3), stablefdg(), tiny_federation([[2]]).topology)
    tokens = dataclasses.replace(BACKBONE, module=Flat())
    with pytest.raises(ValueError, match="resnet18"):
        stablefdg(highlight=False).adapt(tokens)
