"""Splits: DomainBed's item for item, the others' proportions, what is refused, and the digest that a run folder keeps."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_domains

from fedjax_dg import federate, splits
from fedjax_dg.datasets import load

GOLDEN = json.loads((Path(__file__).parent / "golden" / "domainbed_splits.json").read_text())


def ragged(sizes=(20, 7, 33)):
    """Domains of several sizes, their rows not in order of domain."""
    data = tiny_domains(per_domain=max(sizes))
    keep = np.concatenate([np.flatnonzero(data.domain == i)[:n] for i, n in enumerate(sizes)])
    keep = np.random.default_rng(0).permutation(keep)
    return data._replace(inputs=data.inputs[keep], labels=data.labels[keep], domain=data.domain[keep])


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda c: f"{c['n']} items, seed {c['trial_seed']}, domain {c['domain_index']}"
)
def test_the_holdout_is_domainbeds(case):
    held, trained = splits.domainbed_holdout(case["n"], case["trial_seed"], case["domain_index"])
    assert splits.seed_hash(case["trial_seed"], case["domain_index"]) == case["seed"]
    assert len(held) == case["holdout"] and held.sum() == case["sum_holdout"]
    assert held[: len(case["first_holdout"])].tolist() == case["first_holdout"]
    assert held[-1:].tolist() == ([] if case["last_holdout"] is None else [case["last_holdout"]])
    assert trained[: len(case["first_train"])].tolist() == case["first_train"]
    assert sorted([*held, *trained]) == list(range(case["n"]))


def test_domainbed_draws_every_domain_by_its_place_in_the_list():
    data = ragged()
    chosen = splits.draw(data, "domainbed", None, seed=3)
    for index in range(3):
        here = np.flatnonzero(data.domain == index)
        expected = splits.domainbed_holdout(len(here), 3, index)[0]
        assert sorted(np.flatnonzero(chosen[here])) == sorted(expected)
    assert np.bincount(data.domain[chosen]).tolist() == [4, 1, 6]


def test_domainbeds_share_can_be_another():
    data = ragged()
    chosen = splits.draw(data, "domainbed", 0.5, seed=0)
    assert np.bincount(data.domain[chosen]).tolist() == [10, 3, 16]


def test_ninety_ten_is_the_same_for_every_seed():
    data = tiny_domains(per_domain=30)
    one, other = (splits.draw(data, "90/10", None, seed) for seed in (0, 1))
    assert np.array_equal(one, other)
    assert np.bincount(data.domain[one]).tolist() == [3, 3, 3]
    places = [np.flatnonzero(one[data.domain == index]).tolist() for index in range(3)]
    assert places[0] != [27, 28, 29] and places[0] == places[1] == places[2]  # shuffled, each from the same start


def test_random_depends_on_the_seed_and_ninety_ten_has_its_own_share():
    data = tiny_domains(per_domain=30)
    first, second = (splits.draw(data, "random", None, seed) for seed in (0, 1))
    assert first.sum() == second.sum() == 18 and not np.array_equal(first, second)
    assert splits.draw(data, "90/10", 0.2, 0).sum() == 18


def test_official_is_the_data_sets_own_and_the_default_where_there_is_one():
    data = load("emoji_styles")
    assert splits.draw(data, "official", 0.5, 7) is data.validation
    assert splits.draw(data, None, 0.5, 7) is data.validation
    assert splits.draw(tiny_domains(), None, None, 7).sum() == 18


@pytest.mark.parametrize("split", ["domainbed", "90/10"])
def test_items_that_recur_are_not_divided_domain_by_domain(split):
    with pytest.raises(
        ValueError, match=f"split={split} divides every domain by itself, but in emoji_styles the same items"
    ):
        splits.draw(load("emoji_styles"), split, None, 0)


@pytest.mark.parametrize(
    ("split", "fraction", "message"),
    [
        ("domainbet", None, "Unknown split 'domainbet'; did you mean 'domainbed'"),
        ("official", None, "split=official is given, but tiny was read without a split of its own"),
        ("random", 1.0, r"validation_fraction=1.0 is not in \[0, 1\)"),
        ("domainbed", -0.1, r"validation_fraction=-0.1 is not in \[0, 1\)"),
        ("90/10", float("nan"), r"validation_fraction=nan is not in \[0, 1\)"),
    ],
)
def test_what_cannot_be_split_so(split, fraction, message):
    with pytest.raises(ValueError, match=message):
        splits.draw(tiny_domains(), split, fraction, 0)


def test_domainbed_tests_on_the_part_of_the_held_out_domain_that_is_not_held_out():
    data = ragged()
    chosen = splits.draw(data, "domainbed", None, seed=0)
    for split, tested in (("domainbed", (data.domain == 2) & ~chosen), (None, data.domain == 2)):
        domain = np.asarray(federate(data, "domain2", 2, 2, split=split).evaluation.examples.domain)
        assert (domain == 2).sum() == tested.sum()
    federation = federate(data, "domain2", 2, 2, split="domainbed")
    rows = np.flatnonzero(np.where(data.domain == 2, ~chosen, chosen))
    assert np.array_equal(federation.evaluation.examples.inputs, data.inputs[rows].astype(np.float32))
    assert federation.mask.sum() == ((data.domain != 2) & ~chosen).sum()


def test_the_digest_knows_files_and_sides():
    data = ragged()._replace(files=tuple(f"dömain/class/{i}.jpg" for i in range(60)))
    side = splits.draw(data, "domainbed", None, 0)
    again = splits.digest(data, side.copy())
    moved = np.roll(side, 1)
    renamed = data._replace(files=("domain/class/new.jpg", *data.files[1:]))
    unnamed = data._replace(files=None)
    relabelled = unnamed._replace(labels=(data.labels + 1) % 3)
    digests = [
        splits.digest(*pair)
        for pair in ((data, side), (data, moved), (renamed, side), (unnamed, side), (relabelled, side))
    ]
    assert digests[0] == again and len(set(digests)) == 5


def test_what_a_run_folder_keeps():
    told = splits.describe(ragged(), splits.draw(ragged(), "domainbed", None, 0))
    assert told["domains"]["domain2"] == {"train": 27, "validation": 6} and len(told["digest"]) == 64
