"""Confusion counts, the scores read off them, and the rules that select a round's model: all checked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dg.evaluate import SELECTIONS, EvaluationSet, evaluate, is_better, scores
from fedjax_dg.local import PASS_SIZE
from fedjax_dg.types import Examples, Variables

DOMAINS = ("left", "middle", "right")
NOTHING = Variables({}, {})


def told(variables, inputs, key):
    """A model whose logits are its inputs [B, 3]."""
    return inputs


def judged_set(domain, label, answer, mask=None, unseen=None):
    """An evaluation set on which ``told`` answers ``answer``: its logit is 2, the others are 0."""
    total = len(label)
    logits = np.zeros((total, 3), np.float32)
    logits[np.arange(total), answer] = 2.0
    mask = np.ones(total, bool) if mask is None else np.asarray(mask)
    logits[~mask] = np.nan
    unseen = np.ones(total, bool) if unseen is None else np.asarray(unseen)
    examples = Examples(
        jnp.asarray(logits), jnp.asarray(label, jnp.int32), jnp.asarray(mask), jnp.asarray(domain, jnp.int32)
    )
    return EvaluationSet(examples, jnp.asarray(unseen))


def judge(data, key, predict=told):
    return evaluate(predict, len(DOMAINS), 3, NOTHING, data, key)


def test_counts_by_hand(key):
    counts = judge(judged_set(domain=[0, 0, 0, 2, 2], label=[0, 0, 1, 2, 2], answer=[0, 1, 1, 2, 0]), key)
    expected = np.zeros((3, 3, 3))
    expected[0] = [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    expected[2] = [[0, 0, 0], [0, 0, 0], [1, 0, 1]]
    assert np.array_equal(counts.confusion, expected)
    assert np.array_equal(counts.confusion_unseen, expected)  # no identities: all are unseen


def test_loss_by_hand(key):
    counts = judge(judged_set(domain=[0, 0, 1], label=[0, 0, 1], answer=[0, 1, 1]), key)
    normaliser = np.log(np.exp(2) + 2)
    assert np.allclose(counts.loss, [(normaliser - 2) + normaliser, normaliser - 2, 0], rtol=1e-5)


def test_unseen_counts_are_of_unseen_examples(key):
    data = judged_set([1, 1, 1], label=[0, 0, 1], answer=[0, 2, 1], unseen=[True, True, False])
    assert np.asarray(judge(data, key).confusion_unseen[1]).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def shares(variables, inputs, key):
    """Logits whose sum is 1: NaN for an image of zeros, as padding is."""
    return inputs / inputs.sum(-1, keepdims=True)


@pytest.mark.parametrize("predict", [told, shares])
def test_padding_is_not_counted_even_if_it_holds_or_gives_nan(predict, key):
    data = judged_set([0, 0, 1, 1], label=[0, 1, 2, 0], answer=[0, 1, 2, 0], mask=[True, False, True, False])
    counts = judge(data, key, predict)
    assert float(counts.confusion.sum()) == 2 == float(counts.confusion_unseen.sum())
    assert counts.confusion[0, 0, 0] == counts.confusion[1, 2, 2] == 1
    assert np.isfinite(counts.loss).all()


@pytest.mark.parametrize("total", [PASS_SIZE - 1, PASS_SIZE, PASS_SIZE + 1, 2 * PASS_SIZE + 44])
def test_every_example_is_counted_once_in_chunks(total, key):
    rng = np.random.default_rng(total)
    domain, label, answer = rng.integers(0, 3, (3, total))
    mask, unseen = rng.random((2, total)) < 0.7
    counts = judge(judged_set(domain, label, answer, mask, unseen), key)
    expected, expected_unseen = np.zeros((2, 3, 3, 3))
    np.add.at(expected, (domain[mask], label[mask], answer[mask]), 1)
    both = mask & unseen
    np.add.at(expected_unseen, (domain[both], label[both], answer[both]), 1)
    assert np.array_equal(counts.confusion, expected)
    assert np.array_equal(counts.confusion_unseen, expected_unseen)


def test_a_pass_holds_at_most_pass_size_examples(key):
    held = []

    def watched(variables, inputs, key):
        held.append(inputs.shape[0])
        return inputs

    total = 3 * PASS_SIZE
    judge(judged_set([0] * total, [0] * total, [0] * total), key, watched)
    assert set(held) == {PASS_SIZE}


def test_predictions_that_draw_get_another_key_in_each_chunk(key):
    def drawn(variables, inputs, key):
        return inputs + 100 * jnp.eye(3)[jax.random.randint(key, (), 0, 3)]

    total = 8 * PASS_SIZE
    answers = judge(judged_set([0] * total, [0] * total, [0] * total), key, drawn).confusion[0, 0]
    assert (np.asarray(answers) > 0).sum() > 1


def test_no_examples_at_all(key):
    counts = judge(judged_set([], np.zeros(0, int), np.zeros(0, int)), key)
    assert not counts.confusion.any()
    assert scores(counts, DOMAINS, "left")["accuracy"] is None
    assert scores(counts, DOMAINS, "left")["source_accuracy"] is None


def test_scores_by_hand(key):
    data = judged_set(
        # left: 3 of 4 right; middle, held out: 3 of 4 of class 0, 0 of 1 of class 2; right: 1 of 2
        domain=[0] * 4 + [1] * 5 + [2] * 2,
        label=[0, 0, 1, 2] + [0, 0, 0, 0, 2] + [1, 1],
        answer=[0, 0, 1, 0] + [0, 0, 0, 1, 0] + [1, 2],
        unseen=[True] * 4 + [True, False, False, True, False] + [True] * 2,
    )
    got = scores(judge(data, key), DOMAINS, "middle")
    normaliser = np.log(np.exp(2) + 2)
    assert got == {
        "source_accuracy": (3 / 4 + 1 / 2) / 2,
        "accuracy": 3 / 5,
        "balanced_accuracy": (3 / 4 + 0) / 2,
        "accuracy_unseen": 1 / 2,
        "loss": pytest.approx(normaliser - 2 * 3 / 5, rel=1e-5),
        "accuracy/left": 3 / 4,
        "accuracy/middle": 3 / 5,
        "accuracy/right": 1 / 2,
    }


def test_balanced_accuracy_is_of_the_classes_present(key):
    got = scores(judge(judged_set([1] * 4, [0, 0, 0, 1], [0, 0, 0, 1]), key), DOMAINS, "middle")
    assert got["balanced_accuracy"] == 1.0


def test_scores_without_a_held_out_domain(key):
    got = scores(judge(judged_set([0, 2], [0, 1], [0, 0]), key), DOMAINS, None)
    assert got == {"source_accuracy": 0.5, "accuracy/left": 1.0, "accuracy/middle": None, "accuracy/right": 0.0}


def test_scores_without_examples_of_the_held_out_domain(key):
    got = scores(judge(judged_set([0], [0], [0]), key), DOMAINS, "middle")
    assert [got[k] for k in ("accuracy", "balanced_accuracy", "accuracy_unseen", "loss")] == [None] * 4
    assert got["source_accuracy"] == 1.0


def test_scores_without_unseen_identities(key):
    got = scores(judge(judged_set([1], [0], [0], unseen=[False]), key), DOMAINS, "middle")
    assert (got["accuracy"], got["accuracy_unseen"]) == (1.0, None)


LOW, HIGH = {"accuracy": 0.2, "source_accuracy": 0.9}, {"accuracy": 0.7, "source_accuracy": 0.3}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_first_round_is_always_selected(selection):
    assert is_better(selection, {"accuracy": None, "source_accuracy": None}, None)


@pytest.mark.parametrize(
    ("selection", "low_wins", "high_wins"),
    [("source-validation", True, False), ("oracle", False, True), ("last", True, True)],
)
def test_selection_reads_its_own_score(selection, low_wins, high_wins):
    assert is_better(selection, LOW, HIGH) is low_wins
    assert is_better(selection, HIGH, LOW) is high_wins


def test_ties_keep_the_earlier_round_but_for_last():
    assert [is_better(s, LOW, dict(LOW)) for s in ("source-validation", "oracle", "last")] == [False, False, True]


@pytest.mark.parametrize("selection", ["source-validation", "oracle"])
def test_no_score_is_worse_than_any(selection):
    nothing, zero = {"accuracy": None, "source_accuracy": None}, {"accuracy": 0.0, "source_accuracy": 0.0}
    assert is_better(selection, zero, nothing)
    assert not is_better(selection, nothing, zero)
    assert not is_better(selection, nothing, nothing)
