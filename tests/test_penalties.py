"""Penalties against loops over domains; the methods that are made of them, and their peers of the benchmarks."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from client import BACKBONE, examples_of, fresh, one_batch, programs
from tiny import tiny_federation

from fedjax_dg import make_round, penalties, run
from fedjax_dg.aggregators import mean
from fedjax_dg.aggregators.fedgma import agreement, masked
from fedjax_dg.algorithms import (
    AFLHparams,
    CoralHparams,
    FedAvgHparams,
    FedGMAHparams,
    FishHparams,
    GroupDROHparams,
    IRMHparams,
    MixupHparams,
    MMDHparams,
    VRExHparams,
    afl,
    coral,
    fedavg,
    fedgma,
    fish,
    groupdro,
    irm,
    mixup,
    mmd,
    vrex,
)
from fedjax_dg.algorithms.afl import Emphasis, threshold
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.mixup import partners
from fedjax_dg.types import Received, Variables

# Rows of three domains, 5, 3 and 2 of them, and three rows of padding in between.
DOMAIN = np.array([7, 7, -2, 7, 40, 7, 99, -2, 40, 7, -2, 7, 40], np.int32)
MASK = np.array([1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0], bool)
GARBAGE = 1e4
WIDTH, LOGITS = 6, 4

LR = 0.05


def rows_of(domain=DOMAIN, mask=MASK):
    return penalties.group_rows(jnp.asarray(domain, jnp.int32), jnp.asarray(mask))


def by_domain(domain=DOMAIN, mask=MASK):
    """The indices of every domain's real rows."""
    return [np.flatnonzero((domain == d) & mask) for d in np.unique(domain[mask])]


def pairs(domain=DOMAIN):
    return list(itertools.combinations(by_domain(domain), 2))


def drawn(*shape, seed=0, scale=1.0, padding=GARBAGE):
    """Random rows, with ``padding`` in those that are not real."""
    values = (scale * np.random.default_rng(seed).normal(size=(len(MASK), *shape))).astype(np.float32)
    values[~MASK] = padding
    return values


LABELS = np.random.default_rng(9).integers(0, LOGITS, len(MASK)).astype(np.int32)


def penalty_of(name, rows, padding=GARBAGE, order=slice(None)):
    """A penalty by name, of rows in some order."""
    losses, logits, z = (
        jnp.asarray(drawn(*shape, seed=seed, padding=padding)[order])
        for seed, shape in enumerate([(), (LOGITS,), (WIDTH,)])
    )
    labels = jnp.asarray(LABELS[order])
    return {
        "vrex": lambda: penalties.vrex(losses, rows),
        "irm": lambda: penalties.irm(logits, labels, rows),
        "irm, biased": lambda: penalties.irm(logits, labels, rows, unbiased=False),
        "mmd": lambda: penalties.mmd(z, rows),
        "coral": lambda: penalties.coral(z, rows),
    }[name]()


NAMES = ("vrex", "irm", "irm, biased", "mmd", "coral")


# --- rows and means -------------------------------------------------------------------------------------------------


def test_rows_know_their_domain():
    rows = rows_of()
    same, size, share = np.zeros((len(MASK), len(MASK))), np.ones(len(MASK)), np.zeros(len(MASK))
    for here in by_domain():
        for i in here:
            same[i, here], size[i], share[i] = 1.0, len(here), 1.0 / len(here)
    np.testing.assert_array_equal(rows.same, same)
    np.testing.assert_array_equal(rows.size, size)
    np.testing.assert_allclose(rows.share, share, rtol=1e-7)
    assert rows.num_domains == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("shape", [(), (WIDTH,), (2, 3)])
def test_domain_means_are_means(shape):
    values = drawn(*shape)
    expected = np.zeros_like(values)
    for here in by_domain():
        expected[here] = values[here].mean(0)
    np.testing.assert_allclose(penalties.domain_means(jnp.asarray(values), rows_of()), expected, atol=1e-6)


def test_every_domain_counts_once_in_the_mean_over_domains():
    values = drawn()
    expected = np.mean([values[here].mean() for here in by_domain()])
    assert penalties.mean_over_domains(jnp.asarray(values), rows_of()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_without_real_rows_there_is_no_penalty(name):
    assert penalty_of(name, rows_of(mask=np.zeros_like(MASK))) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    full = penalty_of(name, rows_of())
    assert full == penalty_of(name, rows_of(), padding=0.0)
    alone = penalty_of(name, rows_of(DOMAIN[MASK], MASK[MASK]), order=MASK)
    assert full == pytest.approx(float(alone), rel=1e-5)
    assert abs(full) > 1e-3


@pytest.mark.parametrize("name", ["mmd", "coral"])
def test_padding_gets_no_gradient(name):
    gradient = jax.grad(getattr(penalties, name))(jnp.asarray(drawn(WIDTH)), rows_of())
    assert not np.asarray(gradient)[~MASK].any()
    assert (np.abs(np.asarray(gradient)[MASK]).max(1) > 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name):
    order = np.random.default_rng(5).permutation(len(MASK))
    shuffled = penalty_of(name, rows_of(DOMAIN[order], MASK[order]), order=order)
    assert shuffled == pytest.approx(float(penalty_of(name, rows_of())), rel=1e-5)


@pytest.mark.parametrize("name", ["vrex", "mmd", "coral"])
def test_one_domain_has_no_pairs(name):
    assert penalty_of(name, rows_of(np.full_like(DOMAIN, 7))) == pytest.approx(0.0, abs=2e-6)


# --- V-REx and IRM --------------------------------------------------------------------------------------------------


def test_vrex_is_the_variance_of_the_mean_losses():
    losses = drawn()
    expected = np.var([losses[here].mean() for here in by_domain()])
    assert penalties.vrex(jnp.asarray(losses), rows_of()) == pytest.approx(expected, rel=1e-5)


def scaled_slopes(logits, labels):
    """d/dw CE(w logits, y) at w = 1, of every row by itself."""

    def loss(w, s, y):
        return -jax.nn.log_softmax(w * s)[y]

    return np.asarray(jax.vmap(jax.grad(loss), (None, 0, 0))(1.0, jnp.asarray(logits), jnp.asarray(labels)), np.float64)


def test_irm_is_the_squared_slope_of_each_domains_loss():
    logits = drawn(LOGITS)

    def loss(w, here):
        return -jax.nn.log_softmax(w * logits[here])[jnp.arange(len(here)), LABELS[here]].mean()

    expected = np.mean([float(jax.grad(loss)(1.0, here)) ** 2 for here in by_domain()])
    value = penalties.irm(jnp.asarray(logits), jnp.asarray(LABELS), rows_of(), unbiased=False)
    assert value == pytest.approx(expected, rel=1e-5)


def test_unbiased_irm_is_the_mean_over_pairs_of_different_rows():
    """One domain has a single row: it counts as a domain, with 0."""
    domain = DOMAIN.copy()
    domain[8] = 41  # 40 is left with one row, and so is 41
    logits = drawn(LOGITS)
    slopes = scaled_slopes(np.where(MASK[:, None], logits, 0.0), LABELS)
    of_domains = []
    for here in by_domain(domain):
        products = [slopes[i] * slopes[j] for i, j in itertools.permutations(here, 2)]
        of_domains.append(np.mean(products) if products else 0.0)
    assert of_domains.count(0.0) == 2 and len(of_domains) == 4
    value = penalties.irm(jnp.asarray(logits), jnp.asarray(LABELS), rows_of(domain))
    assert value == pytest.approx(np.mean(of_domains), rel=1e-5)


def test_unbiased_irm_of_lone_rows_is_zero():
    lone = rows_of(np.arange(len(MASK)))
    assert penalty_of("irm", lone) == pytest.approx(0.0, abs=1e-6)
    assert penalty_of("irm, biased", lone) > 0.1


@pytest.mark.parametrize(
    ("weight", "number", "expected"), [(5.0, 0, 1.0), (5.0, 2, 1.0), (5.0, 3, 5.0), (0.5, 0, 0.5), (0.5, 3, 0.5)]
)
def test_a_weight_is_at_most_one_until_it_is_annealed(weight, number, expected):
    assert penalties.annealed(weight, 3.0, number) == expected


# --- MMD and CORAL --------------------------------------------------------------------------------------------------


def test_the_gap_is_summed_over_pairs_of_domains():
    phi, weights = drawn(WIDTH, padding=0.0), drawn(seed=3, padding=0.0)
    sums = [[weights[i] @ phi[i] for i in pair] for pair in pairs()]
    expected = sum(((a - b) ** 2).sum() for a, b in sums)
    total = penalties.gap(jnp.asarray(phi @ phi.T), jnp.asarray(weights), rows_of())
    assert total == pytest.approx(expected, rel=1e-5)
    assert penalties.mean_over_pairs(total, rows_of()) == pytest.approx(expected / 3, rel=1e-5)


@pytest.mark.parametrize(("num", "divisor"), [(0, 1), (1, 1), (2, 1), (4, 6), (5, 10)])
def test_a_mean_over_pairs_divides_by_their_number(num, divisor):
    rows = rows_of(np.arange(len(MASK)), np.arange(len(MASK)) < num)
    assert penalties.mean_over_pairs(jnp.float32(30.0), rows) == pytest.approx(30.0 / divisor)


def test_mmd_is_the_distance_of_the_kernel_means():
    z = drawn(WIDTH, scale=0.5).astype(np.float64)

    def kernel(a, b):
        return sum(np.exp(-(10.0**power) * ((a - b) ** 2).sum()) for power in range(-3, 4))

    def between(a, b):
        return np.mean([kernel(z[i], z[j]) for i in a for j in b])

    expected = np.mean([between(a, a) + between(b, b) - 2 * between(a, b) for a, b in pairs()])
    value = penalties.mmd(jnp.asarray(z, jnp.float32), rows_of())
    assert value == pytest.approx(expected, rel=1e-5)


def naive_coral(z, domain=DOMAIN):
    def covariance(here):
        return np.cov(z[here], rowvar=False, ddof=1) if len(here) > 1 else np.zeros((z.shape[1], z.shape[1]))

    def between(a, b):
        means = ((z[a].mean(0) - z[b].mean(0)) ** 2).sum() / z.shape[1]
        return means + ((covariance(a) - covariance(b)) ** 2).sum() / z.shape[1] ** 2

    return np.mean([between(a, b) for a, b in pairs(domain)])


@pytest.mark.parametrize("lone", [False, True], ids=["", "a domain with one row"])
def test_coral_compares_means_and_covariances(lone):
    domain = DOMAIN.copy()
    if lone:
        domain[8] = 7  # 40 is left with one row
    z = drawn(WIDTH)
    value = penalties.coral(jnp.asarray(z), rows_of(domain))
    assert value == pytest.approx(naive_coral(z.astype(np.float64), domain), rel=1e-5)


def test_coral_does_not_know_where_the_origin_is():
    z = drawn(WIDTH)
    shifted = z + np.arange(WIDTH, dtype=np.float32)
    there, here = (penalties.coral(jnp.asarray(x), rows_of()) for x in (shifted, z))
    assert there == pytest.approx(float(here), rel=1e-5)


def test_coral_of_a_shifted_copy_is_the_squared_shift():
    """|| delta ||^2 / D: the covariances are the same."""
    z, delta = np.random.default_rng(1).normal(size=(4, WIDTH)), np.arange(WIDTH) / 4
    both = jnp.asarray(np.concatenate([z, z + delta]), jnp.float32)
    value = penalties.coral(both, rows_of(np.repeat([3, -3], 4), np.ones(8, bool)))
    assert value == pytest.approx((delta**2).mean(), rel=1e-5)


def test_the_first_of_equal_scores_ranks_higher():
    scores = jnp.array([[1.0, 3.0, 3.0, -2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(penalties.ranks(scores), [[3, 0, 1, 4, 2], [0, 1, 2, 3, 4]])


# --- what the methods need ------------------------------------------------------------------------------------------


def take_step(method, hparams, batch=None, optimizer=momentum, client=(), shared=(), number=0, seed=2):
    """One local step: the change of the parameters, what changed beside them, the metrics."""
    received = Received(fresh(), shared, (), client, jnp.int32(number))
    batch = one_batch(2) if batch is None else batch
    moved, metrics = programs(method, optimizer)[0](hparams, received, batch, jax.random.key(seed))
    return jax.tree.map(jnp.subtract, moved.variables.params, fresh().params), moved, metrics


def train(method, hparams, domains=2, client=()):
    """The parameters after two passes over a client's examples in batches of four."""
    received = Received(fresh(), (), (), client, jnp.int32(0))
    trained, *_ = programs(method, momentum)[1](hparams, received, examples_of(domains), jax.random.key(1))
    return trained.local.variables.params


def plain(domains=2):
    return train(fedavg, FedAvgHparams(LR), domains)


def apart(tree, other):
    """The largest difference of two trees."""
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other)))


evaluate, features = jax.jit(BACKBONE.apply), jax.jit(BACKBONE.features)


def row_losses(variables, batch):
    """The cross-entropy of every row."""
    logits = np.asarray(evaluate(variables, batch.inputs), np.float64)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), np.asarray(batch.labels)]


def risks_of(batch):
    """The mean loss of domains 0 and 1 at the start."""
    losses, domain, mask = row_losses(fresh(), batch), np.asarray(batch.domain), np.asarray(batch.mask)
    return np.array([losses[(domain == d) & mask].mean() for d in range(2)])


def gradient_of(params, batch, domain):
    """The gradient of one domain's mean loss."""
    rows = np.flatnonzero((np.asarray(batch.domain) == domain) & np.asarray(batch.mask))
    return reference.plain_gradient(BACKBONE)(params, batch.inputs[rows], batch.labels[rows])


# --- IRM, V-REx, MMD, CORAL as methods ------------------------------------------------------------------------------

BIASED = functools.partial(irm, unbiased=False)
METHODS = {
    "irm": (irm, IRMHparams),
    "irm, biased": (BIASED, IRMHparams),
    "vrex": (vrex, VRExHparams),
    "mmd": (mmd, MMDHparams),
    "coral": (coral, CoralHparams),
}
penalised = pytest.mark.parametrize("name", METHODS)


@penalised
def test_no_penalty_is_fedavg_bit_for_bit(name):
    method, hparams = METHODS[name]
    chex.assert_trees_all_equal(train(method, hparams(LR, penalty=0.0)), plain())


@penalised
def test_a_penalty_is_felt(name):
    method, hparams = METHODS[name]
    assert apart(train(method, hparams(LR, penalty=1.0)), plain()) > 1e-4


@pytest.mark.parametrize("name", ["vrex", "mmd", "coral"])
def test_a_client_of_one_domain_does_not_feel_it(name):
    method, hparams = METHODS[name]
    chex.assert_trees_all_close(train(method, hparams(LR, penalty=1.0), domains=1), plain(1), atol=1e-6)


@penalised
def test_the_loss_is_the_cross_entropy_and_the_weighted_penalty(name):
    """IRM's is divided by a weight above 1."""
    method, hparams = METHODS[name]
    metrics = take_step(method, hparams(LR, penalty=3.0))[2]
    batch = one_batch(2)
    rows, losses = penalties.rows_of(batch), jnp.asarray(row_losses(fresh(), batch), jnp.float32)
    logits, z = evaluate(fresh(), batch.inputs), features(fresh(), batch.inputs)
    penalty = {
        "irm": lambda: penalties.irm(logits, batch.labels, rows),
        "irm, biased": lambda: penalties.irm(logits, batch.labels, rows, False),
        "vrex": lambda: penalties.vrex(losses, rows),
        "mmd": lambda: penalties.mmd(z, rows),
        "coral": lambda: penalties.coral(z, rows),
    }[name]()
    assert metrics["penalty"] == pytest.approx(float(penalty), rel=1e-4, abs=1e-7)
    expected = losses[batch.mask].mean() + 3.0 * penalty
    assert metrics["loss"] == pytest.approx(float(expected) / (3.0 if "irm" in name else 1.0), rel=1e-5)


@pytest.mark.parametrize("name", ["irm", "vrex"])
def test_a_penalty_is_annealed_by_server_round(name):
    method, hparams = METHODS[name]
    early, late = (take_step(method, hparams(LR, 7.0, anneal_rounds=5.0), number=n)[0] for n in (4, 5))
    chex.assert_trees_all_equal(early, take_step(method, hparams(LR, 1.0))[0])
    chex.assert_trees_all_equal(late, take_step(method, hparams(LR, 7.0))[0])
    assert apart(early, late) > 1e-4


# --- Mixup ----------------------------------------------------------------------------------------------------------

DRAWS = 4000


def partner_counts(mask, domain, across_domains=True):
    """How often [i, j] row j is the partner of row i."""
    mask, domain = jnp.asarray(mask, bool), jnp.asarray(domain, jnp.int32)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(jax.vmap(lambda key: partners(mask, domain, key, across_domains)))(keys)
    return np.stack([(np.asarray(drawn) == j).sum(0) for j in range(len(mask))], axis=1)


@pytest.mark.parametrize("across", [True, False])
def test_partners_are_uniform_over_the_eligible(across):
    """Other real rows, of another domain if so wished; five standard errors."""
    mask, domain = [1, 1, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 1, 2]
    counts = partner_counts(mask, domain, across)
    for i in np.flatnonzero(mask):
        eligible = [j for j in np.flatnonzero(mask) if j != i and (domain[j] != domain[i] or not across)]
        share = 1 / len(eligible)
        assert not np.delete(counts[i], eligible).any()
        assert np.abs(counts[i, eligible] - share * DRAWS).max() < 5 * np.sqrt(DRAWS * share * (1 - share))


def test_where_there_is_one_domain_partners_are_of_it():
    counts = partner_counts([1, 1, 1, 0], [3, 3, 3, 4])
    assert not np.diag(counts)[:3].any() and not counts[:, 3].any()
    assert (counts[:3, :3] + DRAWS * np.eye(3) > 0.4 * DRAWS).all()


def test_a_lone_row_has_itself():
    np.testing.assert_array_equal(partner_counts([0, 1, 0], [0, 1, 2])[1], [0, DRAWS, 0])


OF_FEATURES = functools.partial(mixup, level="features")
LEVELS = pytest.mark.parametrize("method", [mixup, OF_FEATURES], ids=["inputs", "features"])


@LEVELS
def test_no_mixing_is_fedavg(method):
    chex.assert_trees_all_close(train(method, MixupHparams(LR, mix_alpha=0.0)), plain(), atol=1e-6)


def test_mixing_differs_by_level():
    of_inputs, of_features = (train(method, MixupHparams(LR, mix_alpha=1.0)) for method in (mixup, OF_FEATURES))
    assert min(apart(of_inputs, plain()), apart(of_features, plain()), apart(of_inputs, of_features)) > 1e-3


@LEVELS
def test_two_rows_of_two_domains_are_mixed_with_each_other(method):
    """s CE(., y_i) + (1 - s) CE(., y_j) of the mixture s x_i + (1 - s) x_j, averaged over both rows."""
    batch = jax.tree.map(lambda x: x[jnp.array([0, 7, 3])], one_batch(2))  # 7 is padding
    batch = batch._replace(labels=jnp.array([0, 0, 2], jnp.int32))
    metrics = take_step(method, MixupHparams(LR, mix_alpha=1.0), batch)[2]
    share, real = float(metrics["share"]), jnp.array([0, 2])
    assert 0.05 < share < 0.95
    mix = lambda x: share * x + (1 - share) * x[::-1]
    if method is mixup:
        logits = evaluate(fresh(), mix(batch.inputs[real]))
    else:
        logits = BACKBONE.head(fresh(), mix(features(fresh(), batch.inputs[real])))
    error = -np.asarray(jax.nn.log_softmax(logits))
    expected = [share * error[0, 0] + (1 - share) * error[0, 2], share * error[1, 2] + (1 - share) * error[1, 0]]
    assert metrics["loss"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_integers_cannot_be_mixed_but_their_features_can():
    whole = one_batch(2)._replace(inputs=one_batch(2).inputs.astype(jnp.int32))
    with pytest.raises(ValueError, match="int32.*level=features"):
        take_step(mixup, MixupHparams(LR), whole)
    assert np.isfinite(take_step(OF_FEATURES, MixupHparams(LR), whole)[2]["loss"])


def test_mixup_names_the_levels():
    with pytest.raises(ValueError, match="features"):
        mixup(level="feature")


# --- GroupDRO -------------------------------------------------------------------------------------------------------

EVEN = jnp.zeros(16)


def test_a_groupdro_client_starts_with_even_domains():
    np.testing.assert_array_equal(
        groupdro(num_domains=5).init(BACKBONE, fresh(), jax.random.key(0)).client, np.zeros(5)
    )


def test_without_eta_the_loss_is_the_mean_over_the_domains_present():
    _, _, metrics = take_step(groupdro, GroupDROHparams(LR, eta=0.0), client=EVEN)
    assert metrics["loss"] == pytest.approx(risks_of(one_batch(2)).mean(), rel=1e-5)
    assert metrics["largest_weight"] == pytest.approx(0.5)


def test_without_eta_the_gradient_is_the_mean_of_the_domains():
    move, _, _ = take_step(groupdro, GroupDROHparams(1.0, eta=0.0), client=EVEN, optimizer=optax.sgd)
    gradients = [gradient_of(fresh().params, one_batch(2), d) for d in range(2)]
    chex.assert_trees_all_close(move, reference.scale(reference.add(*gradients), -0.5), atol=1e-6)


def test_with_a_large_eta_the_worst_domain_is_all():
    _, _, metrics = take_step(groupdro, GroupDROHparams(LR, eta=1e4), client=EVEN)
    assert np.ptp(risks_of(one_batch(2))) > 1e-2
    assert metrics["largest_weight"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(risks_of(one_batch(2)).max(), rel=1e-5)


def test_the_weights_of_two_domains_move_as_known():
    """q_d exp(eta R_d), renormalised; a domain that is not in the batch keeps its q."""
    q, eta, risks = np.array([0.3, 0.7, 0.4]), 0.6, risks_of(one_batch(2))
    log_q = jnp.log(jnp.concatenate([jnp.asarray(q, jnp.float32), jnp.full(13, 0.1)]))
    _, moved, metrics = take_step(groupdro, GroupDROHparams(LR, eta), client=log_q)
    after = q * np.exp(eta * np.append(risks, 0.0))
    np.testing.assert_allclose(jax.nn.softmax(moved.client[:3]), after / after.sum(), rtol=1e-5)
    shares = after[:2] / after[:2].sum()
    assert metrics["loss"] == pytest.approx(shares @ risks, rel=1e-5)
    assert metrics["largest_weight"] == pytest.approx(shares.max(), rel=1e-5)


def test_groupdro_with_one_domain_is_fedavg():
    trained = train(groupdro, GroupDROHparams(LR, eta=0.5), domains=1, client=EVEN)
    chex.assert_trees_all_close(trained, plain(1), atol=1e-6)


# --- Fish -----------------------------------------------------------------------------------------------------------


def test_fish_with_one_domain_and_whole_meta_steps_is_fedavg():
    chex.assert_trees_all_close(train(fish, FishHparams(LR, meta_lr=1.0), domains=1), plain(1), atol=1e-6)


def test_fish_steps_through_the_domains_in_either_order():
    """theta + epsilon (theta' - theta), theta' after a step of plain descent for each of two domains."""
    lr, epsilon, start = 0.5, 0.3, fresh().params
    expected = []
    for order in ((0, 1), (1, 0)):
        params = start
        for domain in order:
            params = reference.subtract(params, reference.scale(gradient_of(params, one_batch(2), domain), lr))
        expected.append(reference.scale(reference.subtract(params, start), epsilon))
    assert apart(*expected) > 1e-3
    seen = set()
    for seed in range(6):
        move = take_step(fish, FishHparams(lr, epsilon), optimizer=optax.sgd, seed=seed)[0]
        near = [apart(move, one) < 1e-6 for one in expected]
        assert sum(near) == 1
        seen.add(near.index(True))
    assert seen == {0, 1}


@pytest.mark.parametrize("method", [fish, groupdro])
def test_too_few_ids_are_told_before_round_one(method, key):
    federation = tiny_federation([[3, 2]], domains=2)
    with pytest.raises(ValueError, match="num_domains=1.*num_domains=2"):
        method(num_domains=1).prepare(BACKBONE, (), federation.data, key, None)
    assert method(num_domains=2).prepare(BACKBONE, ("state",), federation.data, key, None) == ("state",)


def test_a_run_with_too_few_ids_does_not_start(key):
    federation = tiny_federation([[3, 2]], domains=2)
    round_fn = make_round(BACKBONE, fish(num_domains=1), federation.topology)
    with pytest.raises(ValueError, match="domain 1"):
        run(round_fn, round_fn.init(key), federation, 1, key)


# --- AFL ------------------------------------------------------------------------------------------------------------


def on_the_simplex(v, total):
    """The projection of v onto { x >= 0, sum x = total }, by sorting."""
    u = np.sort(v)[::-1]
    taus = (np.cumsum(u) - total) / np.arange(1, len(v) + 1)
    tau = taus[np.flatnonzero(u > taus)[-1]]
    return np.maximum(v - tau, 0.0)


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_threshold_projects_onto_the_simplex(size, spread):
    v = spread * np.random.default_rng(size).normal(size=size)
    tau = threshold(jnp.asarray(v, jnp.float32), jnp.full(size, 1 / size), jnp.float32(1.0))
    np.testing.assert_allclose(np.maximum(v - tau, 0.0), on_the_simplex(v, size), atol=2e-6 * max(1.0, spread))


@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_keeps_the_weighted_mass(seed):
    """Some clients have no weight: they count for nothing, whatever their value."""
    rng = np.random.default_rng(seed)
    weights, mass = rng.uniform(size=(3, 4)), rng.uniform(0.1, 1.0)
    weights[rng.uniform(size=(3, 4)) < 0.3] = 0.0
    values = rng.normal(size=(3, 4)) * rng.choice([0.1, 1.0, 10.0]) + 100.0 * (weights == 0)
    tau = threshold(*(jnp.asarray(x, jnp.float32) for x in (values, weights)), jnp.float32(mass))
    assert (weights * np.maximum(values - float(tau), 0.0)).sum() == pytest.approx(mass, abs=1e-5)


FEDERATION = tiny_federation([[3, 5], [6, 1]], batch_size=4, local_epochs=2)
SHARES = np.array([[3, 5], [6, 1]]) / 15


@functools.cache
def round_program(method):
    """Compiled (start, one round), for any hyper-parameters."""
    start = jax.jit(make_round(BACKBONE, method(), FEDERATION.topology).init)

    @jax.jit
    def step(hparams, state, key):
        return make_round(BACKBONE, method(hparams), FEDERATION.topology).step(state, FEDERATION.data, key)

    return start, step


def rounds(method, hparams, number):
    """The states after each of some rounds, the start among them."""
    start, step = round_program(method)
    states = [start(jax.random.key(0))]
    for _ in range(number):
        states.append(step(hparams, states[-1], jax.random.key(1))[0])
    return states


def client_losses(variables):
    """R_k [S, C] of a model."""
    every = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), FEDERATION.clients)
    losses = row_losses(variables, every).reshape(FEDERATION.mask.shape)
    return losses.mean(-1, where=np.asarray(FEDERATION.mask))


def test_afl_without_ascent_is_fedavg():
    still, averaged = (
        rounds(m, h, 2)[-1] for m, h in ((afl, AFLHparams(LR, lambda_lr=0.0)), (fedavg, FedAvgHparams(LR)))
    )
    chex.assert_trees_all_close(still.variables, averaged.variables, atol=1e-6)
    np.testing.assert_allclose(still.clients.ratio, np.ones((2, 2)), atol=1e-6)


def test_the_first_ascent_is_known():
    """r_k = 1 + gamma (R_k - sum_j p_j R_j), as long as none falls to 0."""
    start, after = rounds(afl, AFLHparams(LR, lambda_lr=0.5), 1)
    losses = client_losses(start.variables)
    expected = 1 + 0.5 * (losses - (SHARES * losses).sum())
    np.testing.assert_allclose(after.clients.ratio, expected, atol=1e-5)
    assert np.argmax(after.clients.ratio) == np.argmax(losses) and after.clients.ratio.max() > 1.05


@pytest.mark.parametrize("lambda_lr", [0.3, 20.0])
def test_afl_keeps_the_weight_of_all(lambda_lr):
    states = rounds(afl, AFLHparams(LR, lambda_lr), 4)
    for state in states[1:]:
        assert (SHARES * state.clients.ratio).sum() == pytest.approx(1.0, abs=1e-5)
        assert (np.asarray(state.clients.ratio) >= 0).all()
    # a large step drops clients
    assert (np.asarray(states[1].clients.ratio) == 0).any() == (lambda_lr == 20.0)
    assert apart(states[-1].clients.ratio, np.ones((2, 2))) > 0.05


def test_a_client_without_weight_adds_no_gradient():
    dropped = Emphasis(jnp.float32(0.2), jnp.float32(0.5))
    move, _, metrics = take_step(afl, AFLHparams(LR), client=dropped, shared=jnp.float32(0.7))
    assert metrics["ratio"] == 0.0 and metrics["cross_entropy"] > 0.1
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(move))


def test_a_client_descends_its_ratio_times_its_loss():
    kept = Emphasis(jnp.float32(1.0), jnp.float32(2.2))
    move, _, _ = take_step(afl, AFLHparams(LR), client=kept, shared=jnp.float32(0.7), optimizer=optax.sgd)
    whole, _, _ = take_step(fedavg, FedAvgHparams(LR), optimizer=optax.sgd)
    chex.assert_trees_all_close(move, reference.scale(whole, 1.5), atol=1e-6)


# --- FedGMA ---------------------------------------------------------------------------------------------------------


def models_of(*moves, start=1.0):
    """A start, and models whose one parameter vector has moved so."""
    stacked = Variables(
        {"w": jnp.asarray([[start + x for x in move] for move in moves])}, {"n": jnp.arange(len(moves)) * 1.0}
    )
    return Variables({"w": jnp.full(len(moves[0]), start)}, {"n": jnp.float32(-5.0)}), stacked


THREE = ((0.2, 0.2, 0.3, 0.0), (-0.4, 0.1, 0.2, 0.0), (0.1, -0.5, 0.9, 0.8))
WEIGHTS = jnp.array([1.0, 2.0, 1.0])


def merged_by(rule, start, models, weights):
    return rule.merge(BACKBONE, (), start, models, weights, ())


def test_agreement_is_the_weighted_mean_of_signs():
    """Signs (+ - +), (+ + -), (+ + +), (0 0 +) with weights 1/4, 1/2, 1/4."""
    start, models = models_of(*THREE)
    agreed = agreement(start.params, models.params, WEIGHTS)["w"]
    np.testing.assert_allclose(agreed, [0.0, 0.5, 1.0, 0.25], atol=1e-7)


def test_a_move_of_the_size_of_rounding_has_no_direction():
    start, models = models_of((1e-7, 0.1), (0.1, -1e-7), start=0.5)
    np.testing.assert_allclose(agreement(start.params, models.params, jnp.ones(2))["w"], [0.5, 0.5], atol=1e-7)


@pytest.mark.parametrize(
    ("level", "factor"), [(0.0, (1, 1, 1, 1)), (0.4, (0, 1, 1, 0.25)), (0.5, (0, 1, 1, 0.25)), (0.6, (0, 0.5, 1, 0.25))]
)
def test_a_step_is_masked_where_models_disagree(level, factor):
    start, models = models_of(*THREE)
    plainly = merged_by(mean(), start, models, WEIGHTS)[0]
    merged, _, info = merged_by(masked(mean(), level), start, models, WEIGHTS)
    step = plainly.params["w"] - start.params["w"]
    np.testing.assert_allclose(merged.params["w"], start.params["w"] + np.array(factor) * step, atol=1e-7)
    np.testing.assert_array_equal(merged.batch_stats["n"], plainly.batch_stats["n"])
    assert merged.batch_stats["n"] == 1.0
    assert info["agreement"] == pytest.approx(1.75 / 4)


def test_a_lone_model_agrees_with_itself():
    start, models = models_of((0.3, -0.2, 0.0))
    merged, _, _ = merged_by(masked(mean(), 1.0), start, models, jnp.ones(1))
    np.testing.assert_allclose(merged.params["w"], [1.3, 0.8, 1.0], atol=1e-7)


def test_two_that_disagree_do_not_move_a_parameter():
    start, models = models_of((0.3, 0.2), (-0.1, 0.4))
    merged, _, _ = merged_by(masked(mean()), start, models, jnp.full(2, 3.0))
    np.testing.assert_allclose(merged.params["w"], [1.0, 1.3], atol=1e-7)


def test_fedgma_without_a_threshold_is_fedavg():
    everywhere, averaged = (
        rounds(m, h, 1)[-1] for m, h in ((fedgma, FedGMAHparams(LR, threshold=0.0)), (fedavg, FedAvgHparams(LR)))
    )
    chex.assert_trees_all_close(everywhere.variables, averaged.variables, atol=2e-7)
    strict = rounds(fedgma, FedGMAHparams(LR, threshold=1.0), 1)[-1]
    assert apart(strict.variables, averaged.variables) > 1e-3
