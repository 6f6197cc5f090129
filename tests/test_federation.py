"""``federate``: who holds what, what is judged, and every refusal; and the fit of a federation with a round."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny_backbone, tiny_domains, tiny_federation

from fedjax_dg import algorithms, federate, make_round
from fedjax_dg.datasets import Domains
from fedjax_dg.federation import deal, in_fewer_shapes, place
from fedjax_dg.run import check_fit
from fedjax_dg.splits import at_random
from fedjax_dg.types import Topology


def shared_items(items=20, domains=3):
    """Every item once in each domain, as the emoji; the input of an example is its row number."""
    total = items * domains
    return Domains(
        "items",
        inputs=np.arange(total, dtype=np.float32)[:, None],
        labels=np.tile(np.arange(items, dtype=np.int32) % 3, domains),
        domain=np.repeat(np.arange(domains, dtype=np.int32), items),
        identity=np.tile(np.arange(items, dtype=np.int32), domains),
        validation=None,
        domain_names=tuple(f"domain{i}" for i in range(domains)),
        class_names=tuple("abc"),
    )


def split_items(items=20, domains=3, validation=5):
    """The same with a validation split of its own: the last items of every domain."""
    data = shared_items(items, domains)
    return data._replace(validation=data.identity >= items - validation)


def held(federation):
    """Rows held by each client, in [S, C] lists."""
    rows, mask = np.asarray(federation.inputs)[..., 0].astype(int), np.asarray(federation.mask)
    return [[r[m] for r, m in zip(*station)] for station in zip(rows, mask)]


def all_rows(federation):
    return np.concatenate([rows for station in held(federation) for rows in station])


def judged_rows(federation):
    return np.asarray(federation.evaluation.examples.inputs)[:, 0].astype(int)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip((*a.data[0], a.ids), (*b.data[0], b.ids)))


@pytest.mark.parametrize("how", ["by-domain", "contiguous", "round-robin", "random"])
@pytest.mark.parametrize("domain_mix", [0.0, 0.3, 1.0])
def test_every_training_example_of_the_sources_is_held_once_and_nothing_else(how, domain_mix):
    data = split_items()
    federation = federate(data, "domain1", 3, 2, domain_mix, seed=3, station_assignment=how)
    training = np.flatnonzero((data.domain != 1) & ~data.validation)
    assert sorted(all_rows(federation)) == training.tolist()


def test_labels_and_domains_travel_with_the_examples():
    data = split_items()
    federation = federate(data, "domain0", 2, 2, domain_mix=0.5)
    rows, mask = np.asarray(federation.inputs)[..., 0].astype(int), np.asarray(federation.mask)
    assert np.array_equal(np.asarray(federation.labels)[mask], data.labels[rows[mask]])
    assert np.array_equal(np.asarray(federation.domain)[mask], data.domain[rows[mask]])


def test_clients_are_padded_to_the_largest_and_masked():
    federation = federate(split_items(items=21), "domain2", 2, 2)
    mask = np.asarray(federation.mask)
    assert mask.shape == (2, 2, 8)
    assert mask.sum() == 2 * 16 and mask.sum(-1).max() == 8 and mask.sum(-1).min() < 9
    uneven = federate(split_items(items=22), "domain2", 1, 3, station_assignment="contiguous")
    mask = np.asarray(uneven.mask)
    assert sorted(mask.sum(-1).ravel()) == [8, 9, 17] and mask.shape == (1, 3, 17)
    assert all(np.all(m[: m.sum()]) for m in mask[0])  # the real ones come first
    assert not any(np.asarray(values)[~mask].any() for values in uneven.clients)


def test_judged_on_the_validation_of_the_sources_and_all_of_the_held_out_domain():
    data = split_items()
    federation = federate(data, "domain1", 2, 2)
    expected = np.flatnonzero((data.domain == 1) | data.validation)
    assert judged_rows(federation).tolist() == expected.tolist()
    examples = federation.evaluation.examples
    assert np.array_equal(examples.labels, data.labels[expected])
    assert np.array_equal(examples.domain, data.domain[expected])
    assert examples.mask.all()


def test_unseen_are_the_identities_that_no_client_trains_on():
    data = split_items()
    federation = federate(data, "domain1", 2, 2)
    assert np.array_equal(federation.evaluation.unseen, data.identity[judged_rows(federation)] >= 15)


def test_without_identities_every_judged_example_is_unseen():
    federation = federate(split_items()._replace(identity=None), "domain1", 2, 2)
    assert federation.evaluation.unseen.all()


def test_no_domain_held_out():
    data = split_items()
    federation = federate(data, None, 3, 1)
    assert federation.held_out is None
    assert sorted(all_rows(federation)) == np.flatnonzero(~data.validation).tolist()
    assert judged_rows(federation).tolist() == np.flatnonzero(data.validation).tolist()


def test_by_domain_stations_hold_one_domain_each():
    """Half of 6 clients would be one station and a half."""
    counts = federate(tiny_domains(), "domain2", 3, 2).counts()
    assert ((counts.sum(1) > 0).sum(-1) == 1).all()
    assert counts.sum((0, 1)).tolist() == [24, 24, 0]


def test_round_robin_stations_hold_all_domains():
    counts = federate(tiny_domains(), "domain2", 3, 4, station_assignment="round-robin").counts()
    assert (counts.sum(1)[:, :2] > 0).all()


def test_full_mix_gives_every_client_every_domain():
    counts = federate(tiny_domains(), "domain0", 2, 4, domain_mix=1.0).counts()
    assert (counts[..., 1:] == 3).all() and not counts[..., 0].any()


def test_counts_are_the_masked_examples():
    federation = federate(tiny_domains(), "domain2", 2, 5, domain_mix=0.4)
    counts = federation.counts()
    assert counts.shape == (2, 5, 3)
    assert np.array_equal(counts.sum(-1), np.asarray(federation.mask).sum(-1))


def test_ids_name_the_clients_wherever_they_are_placed():
    data = split_items(40)
    plain = federate(data, "domain2", 2, 3, station_assignment="contiguous")
    assert np.asarray(plain.ids).tolist() == [[0, 1, 2], [3, 4, 5]]
    placed = federate(data, "domain2", 2, 3, station_assignment="round-robin")
    assert np.asarray(placed.ids).tolist() == [[0, 2, 4], [1, 3, 5]]
    rows = {i: r.tolist() for ids, rs in zip(np.asarray(plain.ids), held(plain)) for i, r in zip(ids, rs)}
    for ids, rs in zip(np.asarray(placed.ids), held(placed)):
        assert [r.tolist() for r in rs] == [rows[i] for i in ids]


def test_a_seed_fixes_everything_and_another_changes_it():
    once, again, other = (federate(tiny_domains(), "domain2", 3, 2, 0.5, seed=s) for s in (7, 7, 8))
    assert same(once, again) and np.array_equal(once.evaluation.examples.inputs, again.evaluation.examples.inputs)
    assert not same(once, other)
    assert not np.array_equal(once.evaluation.examples.inputs, other.evaluation.examples.inputs)  # drawn validation


def test_label_skew_keeps_the_cover():
    data = split_items(60)
    plain, skewed = (federate(data, "domain0", 2, 3, label_alpha=a) for a in (None, 0.05))
    assert sorted(all_rows(skewed)) == sorted(all_rows(plain))
    largest = [np.bincount(data.labels[all_], minlength=3).max() / len(all_) for all_ in sum(held(skewed), [])]
    assert max(largest) > 0.7  # without skew every class has about a third


def test_validation_is_drawn_as_the_same_share_of_every_domain():
    data = tiny_domains(per_domain=30)
    chosen = at_random(data, 0.2, seed=0)
    assert np.bincount(data.domain[chosen]).tolist() == [6, 6, 6]
    assert not at_random(data, 0.0, seed=0).any()


def test_validation_is_drawn_by_identity_where_items_recur():
    data = shared_items()
    chosen = at_random(data, 0.25, seed=4)
    assert np.bincount(data.domain[chosen]).tolist() == [5, 5, 5]
    assert len(np.unique(data.identity[chosen])) == 5


def test_a_drawn_validation_is_in_no_client():
    data = shared_items()
    federation = federate(data, "domain2", 2, 2, validation_fraction=0.25, seed=5)
    chosen = at_random(data, 0.25, seed=5)
    assert sorted(all_rows(federation)) == np.flatnonzero(~chosen & (data.domain != 2)).tolist()
    assert judged_rows(federation).tolist() == np.flatnonzero(chosen | (data.domain == 2)).tolist()
    assert np.array_equal(federation.evaluation.unseen, np.isin(judged_rows(federation), np.flatnonzero(chosen)))


def test_own_validation_is_used_and_not_drawn():
    data = split_items()
    most, none = (federate(data, "domain2", 2, 2, validation_fraction=share) for share in (0.9, 0.0))
    assert same(most, none)


def test_nothing_to_judge_on_is_allowed():
    federation = federate(tiny_domains(), None, 2, 2, validation_fraction=0.0)
    assert federation.evaluation.unseen.shape == (0,)


def test_round_sizes_pass_through():
    sizes = {"station_rounds": 3, "local_epochs": 2, "local_steps": 5, "batch_size": 4, "participants": 1}
    assert federate(tiny_domains(), "domain1", 2, 2, **sizes).topology == Topology(2, 2, **sizes)
    assert federate(tiny_domains(), "domain1", 2, 3).topology == Topology(2, 3)


# --- who holds which domain -----------------------------------------------------------------------------------------


def test_single_domain_shares_one_domain_among_all_clients():
    federation = federate(tiny_domains(), "domain2", 2, 3, setting="single-domain", sources=("domain1",))
    counts = federation.counts()
    assert counts.sum((0, 1)).tolist() == [0, 21, 0]  # 30 examples less 30 %
    assert (counts[..., 1] > 0).all()
    judged = np.asarray(federation.evaluation.examples.domain)
    assert np.bincount(judged, minlength=3).tolist() == [0, 9, 30]


def test_leave_one_domain_out_is_one_source_domain_a_client():
    counts = federate(tiny_domains(), "domain2", 2, 3, setting="leave-one-domain-out").counts()
    assert ((counts > 0).sum(-1) == 1).all() and counts.sum((0, 1)).tolist() == [21, 21, 0]
    assert same(
        federate(tiny_domains(), "domain2", 2, 3, setting="leave-one-domain-out", validation_fraction=0.2),
        federate(tiny_domains(), "domain2", 2, 3),
    )


def test_mixed_clients_hold_several_domains_in_different_shares():
    counts = federate(tiny_domains(), "domain2", 2, 3, setting="mixed").counts()[..., :2]
    assert (counts > 0).all()
    shares = counts[..., 0] / counts.sum(-1)
    assert shares.max() > 0.7 and shares.min() < 0.3
    even = federate(tiny_domains(), "domain2", 2, 3, setting="mixed", domain_mix=1.0).counts()[..., :2]
    assert np.abs(even[..., 0] - even[..., 1]).max() <= 1


def test_sources_leave_out_what_is_neither_trained_on_nor_held_out():
    federation = federate(tiny_domains(domains=4), "domain3", 2, 2, sources=("domain2", "domain0"))
    assert federation.counts().sum((0, 1)).tolist() == [24, 0, 24, 0]
    assert np.bincount(np.asarray(federation.evaluation.examples.domain)).tolist() == [6, 0, 6, 30]


def test_names_pass_through():
    federation = federate(tiny_domains(), "domain1", 2, 2)
    assert federation.domain_names == ("domain0", "domain1", "domain2")
    assert (federation.class_names, federation.held_out) == (tuple("abc"), "domain1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": "domian1"}, r"Unknown held-out domain 'domian1'; did you mean 'domain1'\? Available: domain0, "),
        ({"stations": 0}, "stations=0 is not a positive whole number: give 1 or more"),
        ({"clients_per_station": -1}, "clients_per_station=-1 is not a positive whole number: give 1 or more"),
        ({"clients_per_station": 100}, "200 clients for 48 examples, .*; pass 48 clients or fewer"),
        ({"domain_mix": 1.5}, r"domain_mix is 1.5, but must lie in \[0, 1\]; pass 0 for"),
        ({"domain_mix": float("nan")}, r"domain_mix is nan, but must lie in \[0, 1\]; pass 0 for"),
        ({"station_assignment": "by_domain"}, r"Unknown station rule 'by_domain'; did you mean 'by-domain'\?"),
        ({"station_assignment": "nearest"}, "Unknown station rule 'nearest'.*contiguous, round-robin, random"),
        ({"remainders": "owner"}, r"Unknown remainders 'owner'; did you mean 'owners'\?"),
        ({"label_alpha": 0.0}, "label_alpha is 0.0, but must be a positive finite number; pass None"),
        ({"label_alpha": float("inf")}, "label_alpha is inf, but must be a positive finite number; pass None"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1.0 is not in \[0, 1\): give a share such as 0.2"),
        ({"validation_fraction": float("nan")}, r"validation_fraction=nan is not in \[0, 1\): give a share"),
        ({"station_rounds": 0}, "station_rounds=0 is not a positive whole number: give 1 or more"),
        ({"local_epochs": 0}, "local_epochs=0 is not a positive whole number: give 1 or more"),
        ({"local_steps": 0}, "local_steps=0 is not a positive whole number: give 1 or more"),
        ({"batch_size": 0}, "batch_size=0 is not a positive whole number: give 1 or more"),
        ({"participants": 0}, "participants=0 is not a positive whole number: give 1 or more"),
        ({"setting": "mix"}, r"Unknown setting 'mix'; did you mean 'mixed'\?"),
        ({"setting": "single-domain"}, "setting=single-domain trains on 1 domain, but sources=None names 0: name 1"),
        (
            {"setting": "single-domain", "sources": ("domain0",), "domain_mix": 0.5},
            "setting=single-domain has domain_mix=1, not 0.5: leave domain_mix out, or setting",
        ),
        ({"setting": "leave-one-domain-out", "domain_mix": 0.1}, "setting=leave-one-domain-out has domain_mix=0, not"),
        ({"sources": ("domain7",)}, "Unknown source domain 'domain7'"),
        ({"sources": ("domain2",)}, r"sources=\['domain2'\] with held_out=domain2: name each source once"),
        ({"sources": ("domain0", "domain0")}, r"sources=\['domain0', 'domain0'\] with held_out=domain2: name"),
        ({"sources": ()}, r"sources=\[\] with held_out=domain2: name each source once"),
        ({"participants": 3}, "participants=3 is more than the 2 clients of a station: give at most 2"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(options, message):
    given = {"held_out": "domain2", "stations": 2, "clients_per_station": 2} | options
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        federate(tiny_domains(), **given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def tiny_round(stations=2, clients=2, backbone=None):
    return make_round(backbone or tiny_backbone(), algorithms.fedavg(), Topology(stations, clients))


def test_a_federation_fits_the_round_made_for_it():
    check_fit(tiny_round(), tiny_federation([[3, 2], [2, 3]]))


@pytest.mark.parametrize(
    ("round_fn", "message"),
    [
        (tiny_round(stations=3), "The round was made for 3 stations x 2 clients, but the federation has 2 x 2: pass"),
        (tiny_round(clients=4), "The round was made for 2 stations x 4 clients, but the federation has 2 x 2: pass"),
        (
            tiny_round(backbone=dataclasses.replace(tiny_backbone(), num_classes=5)),
            "The backbone has 5 classes, but the data set has 3: build it with num_classes=3",
        ),
        (
            tiny_round(backbone=dataclasses.replace(tiny_backbone(), input_shape=(7, 7, 2))),
            r"The backbone takes inputs of shape \(7, 7, 2\), but the data set has \(6, 6, 2\): choose",
        ),
    ],
)
def test_a_federation_of_other_sizes_is_refused(round_fn, message):
    federation = tiny_federation([[3, 2], [2, 3]])
    with pytest.raises(ValueError, match=f"^{message}"):
        check_fit(round_fn, federation)


def test_deals_are_padded_to_fewer_shapes():
    """Sizes within a tenth of a larger one take it; what is held and judged stays the same, in its order."""
    data = tiny_domains(per_domain=40)
    sizes = ((100, 30), (91, 11), (89, 10), (80, 3))  # 80 is more than a tenth below 89

    def dealt(places, judged):
        held = np.full((1, 2, places), -1)
        held[0, 0, : places - 5], held[0, 1, 0] = np.arange(places - 5) % 120, 7
        return deal(data, data.domain_names[0], stations=1, clients_per_station=2)._replace(
            held=held, judged=np.arange(judged), unseen=np.ones(judged, bool)
        )

    deals = {i: dealt(*size) for i, size in enumerate(sizes)}
    padded = in_fewer_shapes(deals)
    assert [d.held.shape[-1] for d in padded.values()] == [100, 100, 89, 80]
    assert [len(d.judged) for d in padded.values()] == [len(d.unseen) for d in padded.values()] == [30, 11, 11, 3]
    for i, (places, judged) in enumerate(sizes):
        np.testing.assert_array_equal(padded[i].held[..., :places], deals[i].held)
        assert (padded[i].held[..., places:] == -1).all()
        assert padded[i].judged.tolist() == [*range(judged), *[-1] * (len(padded[i].judged) - judged)]
        assert padded[i].unseen.sum() == judged
    placed = place(data, padded[2])
    assert placed.evaluation.examples.mask.tolist() == [True] * 10 + [False]
    assert in_fewer_shapes({0: deals[3]})[0].held.shape == deals[3].held.shape
