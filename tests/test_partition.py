"""Partition into clients and stations: the published numbers, and the properties every partition must have."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_dg import partition
from fedjax_dg.partition import assign_stations, by_domain_mix, domain_counts

# PACS domains in the benchmark's order photo, art painting, cartoon, sketch. "acs-p" is its training part when photo is
# held out (about 5 % + 5 % of each domain are kept for validation); the other three are whole domains, for which the
# rule, depending on ratios only, must give the same numbers of clients as for their training parts.
PACS_ACS_P = [0, 1852, 2122, 3559]
PACS_CLIENTS = {
    "acs-p": (PACS_ACS_P, [0, 25, 28, 47]),
    "acs-p whole": ([0, 2048, 2344, 3929], [0, 25, 28, 47]),
    "pcs-a whole": ([1670, 0, 2344, 3929], [21, 0, 30, 49]),
    "pas-c whole": ([1670, 2048, 0, 3929], [22, 27, 0, 51]),
    "pac-s whole": ([1670, 2048, 2344, 0], [28, 34, 38, 0]),
}

quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def clients_owned(counts):
    return np.bincount(counts.argmax(axis=1), minlength=counts.shape[1])


def foreign(counts):
    """Examples outside the client's main domain, [clients]."""
    return counts.sum(axis=1) - counts.max(axis=1)


# --- domain_counts: the benchmark's numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("remainders", ["first", "owners"])
@pytest.mark.parametrize("split", PACS_CLIENTS)
def test_pacs_clients_per_domain(split, remainders):
    sizes, expected = PACS_CLIENTS[split]
    counts = domain_counts(sizes, 100, 0.0, remainders=remainders)
    assert clients_owned(counts).tolist() == expected
    assert np.all(np.diff(counts.argmax(axis=1)) >= 0)  # clients in order of domain


@pytest.mark.parametrize(
    ("domain_mix", "first_client", "last_client"),
    [
        (0.0, [0, 75, 1, 1], [0, 0, 0, 75]),
        (0.1, [0, 69, 3, 4], [0, 1, 2, 71]),
        (1.0, [0, 19, 22, 36], [0, 18, 21, 35]),
    ],
)
def test_pacs_compat_counts(domain_mix, first_client, last_client):
    counts = domain_counts(PACS_ACS_P, 100, domain_mix, remainders="first")
    assert counts[0].tolist() == first_client
    assert counts[99].tolist() == last_client
    assert counts.sum(axis=0).tolist() == PACS_ACS_P


def test_pacs_compat_has_34_impure_clients():
    assert np.count_nonzero(foreign(domain_counts(PACS_ACS_P, 100, 0.0, remainders="first"))) == 34


def test_fewer_clients_than_domains():
    counts = domain_counts([10, 6, 4, 3, 1], 2, 0.5, remainders="first")
    assert counts.tolist() == [[8, 2, 1, 3, 1], [2, 4, 3, 0, 0]]


def test_compat_repeats_the_rounding_of_the_released_code():
    # 49 * (1 / 49) is just below 1 in floating point: every floor is 0, and all 49 examples count as remainder.
    counts = domain_counts([50, 49], 99, 0.0, remainders="first")
    assert counts[:49, 1].tolist() == [1] * 49
    assert not counts[50:].any()
    assert foreign(domain_counts([50, 49], 99, 0.0)).max() == 0


# --- domain_counts: properties --------------------------------------------------------------------------------------


@st.composite
def partition_cases(draw):
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any))
    block = draw(st.integers(1, min(5, sum(sizes))))
    clients = block * draw(st.integers(1, max(1, min(30, sum(sizes) // block))))
    mix = draw(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0]) | st.floats(0, 1))
    return sizes, clients, mix, block


@given(partition_cases(), st.sampled_from(["owners", "first"]))
@quick
def test_counts_cover_every_domain_exactly(case, remainders):
    sizes, clients, mix, block = case
    counts = domain_counts(sizes, clients, mix, remainders=remainders, block=block)
    assert counts.shape == (clients, len(sizes)) and counts.dtype == np.int64
    assert counts.sum(axis=0).tolist() == sizes
    assert counts.min() >= 0
    if remainders == "owners":
        assert counts.sum(axis=1).min() >= 1
    np.testing.assert_array_equal(counts, domain_counts(sizes, clients, mix, remainders=remainders, block=block))


@given(partition_cases())
@quick
def test_counts_are_pure_without_mix(case):
    sizes, clients, _, _ = case
    counts = domain_counts(sizes, clients, 0.0)
    if clients >= np.count_nonzero(sizes):
        assert not foreign(counts).any()
    else:  # every domain is whole at one client
        assert np.count_nonzero(counts, axis=0).tolist() == [int(n > 0) for n in sizes]


@given(partition_cases(), st.sampled_from(["owners", "first"]))
@quick
def test_full_mix_gives_equal_shares(case, remainders):
    sizes, clients, _, _ = case
    counts = domain_counts(sizes, clients, 1.0, remainders=remainders)
    assert np.all(np.abs(counts - np.array(sizes) / clients) <= 1)


@pytest.mark.parametrize("domain_mix", [0.0, 0.1, 0.5, 1.0])
def test_owners_keep_client_sizes_balanced(domain_mix):
    held = domain_counts(PACS_ACS_P, 100, domain_mix).sum(axis=1)
    compat = domain_counts(PACS_ACS_P, 100, domain_mix, remainders="first").sum(axis=1)
    assert np.ptp(held) <= np.ptp(compat)
    assert np.ptp(held) <= 2


def test_remainders_go_to_small_clients_first():
    held = domain_counts([5, 5, 5], 10, 1.0).sum(axis=1)
    assert sorted(held.tolist()) == [1] * 5 + [2] * 5


def test_as_many_clients_as_domains_hold_one_each_in_order():
    assert domain_counts([3, 6, 0, 2], 3, 0.0).tolist() == [[3, 0, 0, 0], [0, 6, 0, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize("block", [1, 5, 10, 20])
def test_blocks_make_pure_stations(block):
    counts = domain_counts(PACS_ACS_P, 100, 0.0, block=block)
    stations = counts.reshape(-1, block, 4).sum(axis=1)
    assert not foreign(stations).any()
    assert counts.sum(axis=0).tolist() == PACS_ACS_P
    for members in counts.reshape(-1, block, 4):
        assert np.ptp(members.sum(axis=1)) <= 1


def test_block_gets_shards_by_the_same_rule():
    per_block = domain_counts(PACS_ACS_P, 10, 0.0)
    per_client = domain_counts(PACS_ACS_P, 100, 0.0, block=10)
    assert clients_owned(per_client).tolist() == (10 * clients_owned(per_block)).tolist()


def test_fewer_blocks_than_domains_hold_whole_domains_evenly():
    counts = domain_counts([10, 6, 4, 3, 1], 4, 0.0, block=2)
    assert counts.reshape(2, 2, 5).sum(axis=1).tolist() == [[10, 0, 0, 3, 0], [0, 6, 4, 0, 1]]
    assert counts.sum(axis=1).tolist() == [7, 6, 6, 5]


def test_domain_smaller_than_its_block_leaves_no_client_empty():
    counts = domain_counts([1, 19], 10, 0.0, block=5)
    assert counts.sum(axis=0).tolist() == [1, 19]
    assert counts.sum(axis=1).min() == 1


# --- by_domain_mix --------------------------------------------------------------------------------------------------


def example_ids(sizes, num_classes, seed=0):
    """Domain and label of each example, in mixed order."""
    generator = np.random.default_rng(seed)
    domain = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return domain, generator.integers(0, num_classes, len(domain))


@pytest.mark.parametrize("label_alpha", [None, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("clients", [2, 30])
def test_parts_are_exact_and_follow_the_counts(clients, label_alpha):
    sizes = [40, 0, 70, 25, 90]
    domain, labels = example_ids(sizes, 6)
    parts = by_domain_mix(domain, clients, 0.3, seed=1, labels=labels, label_alpha=label_alpha)
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(sizes)))
    held = [np.bincount(domain[part], minlength=len(sizes)).tolist() for part in parts]
    assert held == domain_counts(sizes, clients, 0.3).tolist()


@given(partition_cases(), st.sampled_from([None, 1e-320, 0.01, 1.0, 1e6]), st.integers(0, 2**32))
@quick
def test_parts_cover_every_example_once(case, label_alpha, seed):
    sizes, clients, mix, block = case
    domain, labels = example_ids(sizes, 4)
    parts = by_domain_mix(domain, clients, mix, seed, block=block, labels=labels, label_alpha=label_alpha)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and len(part) > 0 for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(domain)))


@pytest.mark.parametrize("label_alpha", [None, 0.5])
def test_seed_fixes_the_parts(label_alpha):
    domain, labels = example_ids([200, 300], 5)

    def parts(seed):
        return np.concatenate(by_domain_mix(domain, 10, 0.2, seed, labels=labels, label_alpha=label_alpha))

    np.testing.assert_array_equal(parts(3), parts(3))
    assert not np.array_equal(parts(3), parts(4))


def test_parts_are_one_permutation_a_domain_handed_out_in_turn():
    domain, _ = example_ids([30, 50], 2)
    parts = by_domain_mix(domain, 4, 0.5, seed=7, remainders="first")
    generator = np.random.default_rng(7)
    for k in (0, 1):
        handed_out = np.concatenate([part[domain[part] == k] for part in parts])
        np.testing.assert_array_equal(handed_out, generator.permutation(np.flatnonzero(domain == k)))


def label_shares(parts, labels, num_classes):
    return np.stack([np.bincount(labels[part], minlength=num_classes) / len(part) for part in parts])


def test_large_label_alpha_follows_the_prior():
    domain, labels = example_ids([6000, 4000], 5)
    shares = label_shares(by_domain_mix(domain, 20, 0.5, 0, labels=labels, label_alpha=100.0), labels, 5)
    off = np.abs(shares - 0.2)
    assert off.mean() < 0.05
    assert np.quantile(off, 0.9) < 0.1  # not the maximum: the client that draws last gets what the others left


def test_small_label_alpha_concentrates_clients_on_few_classes():
    domain, labels = example_ids([6000, 4000], 5)
    shares = {
        alpha: label_shares(by_domain_mix(domain, 20, 0.5, 0, labels=labels, label_alpha=alpha), labels, 5).max(axis=1)
        for alpha in (0.01, 1.0, 100.0)
    }
    assert shares[0.01].mean() > 0.8
    assert shares[0.01].mean() > shares[1.0].mean() + 0.1
    assert shares[1.0].mean() > shares[100.0].mean() + 0.1


def test_label_skew_is_one_draw_a_client_across_its_domains():
    domain, labels = example_ids([5000, 5000], 4)
    parts = by_domain_mix(domain, 40, 1.0, 0, labels=labels, label_alpha=0.01)
    main = [[np.bincount(labels[part[domain[part] == k]], minlength=4).argmax() for k in (0, 1)] for part in parts]
    # Clients that draw late find their class gone in one domain or the other; independent draws would agree in 1/4.
    assert np.mean([a == b for a, b in main]) > 0.7


def test_clients_that_want_the_same_class_share_what_there_is():
    # 10 examples each of three classes; clients 0 and 1 both want class 2, then class 0; client 2 wants class 1.
    label = np.repeat([0, 1, 2], 10)
    log_q = np.array([[-100.0, -200.0, 0.0], [-100.0, -200.0, 0.0], [-100.0, 0.0, -200.0]])
    pool = partition._skew(np.arange(30), label, np.array([10, 10, 10]), log_q, np.random.default_rng(0))
    first, second, third = label[pool].reshape(3, 10).tolist()
    assert sorted([first, second]) == [[0] * 10, [2] * 10]
    assert third == [1] * 10


def test_what_is_left_does_not_always_fall_on_the_last_clients():
    domain, labels = example_ids([2000], 5)
    main_class = np.mean(
        [
            label_shares(by_domain_mix(domain, 20, 0.0, seed, labels=labels, label_alpha=0.01), labels, 5).max(axis=1)
            for seed in range(20)
        ],
        axis=0,
    )
    assert abs(main_class[:15].mean() - main_class[15:].mean()) < 0.03


def test_bulk_draws_have_the_distribution_of_single_draws():
    q, stock, num = np.array([0.7, 0.2, 0.1]), np.array([2, 3, 4]), 5

    def mean_of_single_draws(taken, left):
        if left == 0:
            return np.array(taken, float)
        weight = np.where(np.array(taken) < stock, q, 0)
        weight = weight / weight.sum()
        one_more = [tuple(t + (i == j) for j, t in enumerate(taken)) for i in range(3)]
        return sum(weight[i] * mean_of_single_draws(one_more[i], left - 1) for i in range(3) if weight[i] > 0)

    generator = np.random.default_rng(0)
    draws = np.stack([partition._draw_classes(num, np.log(q), stock, generator) for _ in range(4000)])
    assert np.all(draws.sum(axis=1) == num) and np.all(draws <= stock)
    np.testing.assert_allclose(draws.mean(axis=0), mean_of_single_draws((0, 0, 0), num), atol=0.05)


@pytest.mark.parametrize("label_alpha", [1e-320, 1e-12, 0.05, 1e12])
def test_thousand_clients_with_any_label_alpha(label_alpha):
    domain, labels = example_ids([8000, 500, 11500], 10)
    with np.errstate(all="raise", under="ignore"):
        parts = by_domain_mix(domain, 1000, 0.1, 0, labels=labels, label_alpha=label_alpha)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(20000))


def test_labels_may_have_gaps():
    domain, labels = example_ids([50, 60], 3)
    parts = by_domain_mix(domain, 5, 0.5, 2, labels=labels, label_alpha=0.3)
    with_gaps = by_domain_mix(domain, 5, 0.5, 2, labels=7 * labels - 3, label_alpha=0.3)
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(with_gaps))


# --- assign_stations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", partition.STATION_RULES)
def test_stations_are_a_permutation_of_the_clients(how):
    counts = domain_counts(PACS_ACS_P, 100, 0.1)
    stations = assign_stations(counts, 20, how, seed=3)
    assert stations.shape == (20, 5) and stations.dtype == np.int64
    assert sorted(stations.ravel().tolist()) == list(range(100))
    np.testing.assert_array_equal(stations, assign_stations(counts, 20, how, seed=3))


def test_station_rules():
    counts = np.array([[3, 0], [0, 3], [2, 1], [1, 2], [1, 1], [0, 4]])
    assert assign_stations(counts, 2, "contiguous", 0).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert assign_stations(counts, 2, "round-robin", 0).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert assign_stations(counts, 2, "by-domain", 0).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert assign_stations(counts, 1, "random", 0).tolist() != assign_stations(counts, 1, "random", 1).tolist()


def test_by_domain_makes_pure_stations_of_shuffled_block_clients():
    counts = np.random.default_rng(0).permutation(domain_counts(PACS_ACS_P, 100, 0.0, block=10))
    stations = assign_stations(counts, 10, "by-domain", seed=0)
    assert not foreign(counts[stations].sum(axis=1)).any()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 0}, "clients is 0, but must be at least 1"),
        ({"clients": 10}, "10 clients for 9 examples"),
        ({"domain_mix": -0.1}, r"domain_mix is -0.1, but must lie in \[0, 1\]"),
        ({"domain_mix": 1.5}, r"domain_mix is 1.5, but must lie in \[0, 1\]"),
        ({"domain_mix": float("nan")}, r"domain_mix is nan, but must lie in \[0, 1\]"),
        ({"remainders": "last"}, "last.*owners, first"),
        ({"block": 0}, "block is 0, but must be at least 1 and divide the 4 clients"),
        ({"block": 3}, "block is 3, but must be at least 1 and divide the 4 clients"),
        ({"sizes": [5, -1, 5]}, "sizes holds -1"),
        ({"sizes": [5.0, 4.0]}, "sizes has shape"),
    ],
)
def test_bad_counts(changes, message):
    with pytest.raises(ValueError, match=message):
        domain_counts(**({"sizes": [5, 4], "clients": 4, "domain_mix": 0.5} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 5}, "5 clients for 4 examples"),
        ({"domain_mix": 2.0}, "domain_mix is 2.0"),
        ({"domain": np.array([0, 1, -1])}, "domain holds the id -1"),
        ({"domain": np.array([[0, 1]])}, r"domain has shape \(1, 2\)"),
        ({"domain": np.array([], dtype=int)}, "2 clients for 0 examples"),
        ({"label_alpha": 0.0}, "label_alpha is 0.0, but must be a positive finite number"),
        ({"label_alpha": -1.0}, "label_alpha is -1.0, but must be a positive finite number"),
        ({"label_alpha": float("nan")}, "label_alpha is nan, but must be a positive finite number"),
        ({"label_alpha": float("inf")}, "label_alpha is inf, but must be a positive finite number"),
        ({"label_alpha": 1.0, "labels": None}, "label_alpha is 1.0 without labels"),
        ({"label_alpha": 1.0, "labels": np.zeros(3, int)}, "3 labels for 4 examples"),
        ({"label_alpha": 1.0, "labels": np.zeros((4, 2), int)}, r"labels has shape \(4, 2\)"),
        ({"label_alpha": 1.0, "labels": np.zeros(4)}, "labels has shape .* type float64"),
    ],
)
def test_bad_parts(changes, message):
    given_arguments = {"domain": np.array([0, 0, 1, 1]), "clients": 2, "domain_mix": 0.5, "seed": 0}
    given_arguments |= {"labels": np.array([0, 1, 0, 1])}
    with pytest.raises(ValueError, match=message):
        by_domain_mix(**(given_arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stations": 4}, "10 clients do not divide into 4 stations of equal size; choose stations from 1, 2, 5, 10"),
        ({"stations": 0}, "10 clients do not divide into 0 stations"),
        ({"stations": 20}, "10 clients do not divide into 20 stations"),
        ({"how": "round_robin"}, "round_robin.*round-robin"),
        ({"counts": np.ones(10, int)}, r"counts has shape \(10,\)"),
    ],
)
def test_bad_stations(changes, message):
    given_arguments = {"counts": np.ones((10, 2), int), "stations": 2, "how": "contiguous", "seed": 0}
    with pytest.raises(ValueError, match=message):
        assign_stations(**(given_arguments | changes))


def test_docstring_examples():
    assert doctest.testmod(partition).failed == 0
