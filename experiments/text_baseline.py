"""Texts as counts of words and a linear classifier: how far from each other are the domains of a text data set?

command:  python experiments/text_baseline.py vader_sentiment --data-dir D     (needs scikit-learn: pip install scikit-learn)
cost:     half a minute on one core
data:     a text data set of ``fedjax-dg data list``
printed:  a table; with --out also written, as experiments/results/text_baseline_vader.md was

TF-IDF of words and pairs of words that occur in at least two texts, counts damped by their logarithm; logistic
regression that weighs both classes alike. Nothing is tuned. Items that a data set keeps whole (sentences of one review)
are in one fold.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import Pipeline, make_pipeline

from fedjax_dg.datasets.corpus import Corpus, sound
from fedjax_dg.datasets.domains import few
from fedjax_dg.datasets.texts import READERS

FOLDS = 5


def classifier() -> Pipeline:
    """Words and pairs of words, then logistic regression."""
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    return make_pipeline(words, LogisticRegression(max_iter=1000, class_weight="balanced"))


def fitted_score(texts: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray) -> float:
    """Balanced accuracy on ``test`` of a classifier of ``train``, rows of both."""
    model = classifier().fit(texts[train], labels[train])
    return float(balanced_accuracy_score(labels[test], model.predict(texts[test])))


def thinned(corpus: Corpus, most: int | None) -> Corpus:
    """The texts that a run with ``--examples-per-domain`` has; None: all."""
    if most is None:
        return corpus
    rows = few(corpus.domain, most)
    identity = None if corpus.identity is None else corpus.identity[rows]
    texts, labels, domain = tuple(corpus.texts[row] for row in rows), corpus.labels[rows], corpus.domain[rows]
    return corpus._replace(texts=texts, labels=labels, domain=domain, identity=identity)


def scores(corpus: Corpus) -> dict[str, tuple[float, float]]:
    """Of each domain: balanced accuracy trained on all others, and the mean over folds trained within it."""
    texts, labels = np.asarray(corpus.texts, object), corpus.labels
    items = np.arange(len(labels)) if corpus.identity is None else corpus.identity
    out = {}
    for number, name in enumerate(corpus.domain_names):
        here, others = np.flatnonzero(corpus.domain == number), np.flatnonzero(corpus.domain != number)
        folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0).split(here, labels[here], items[here])
        within = [fitted_score(texts, labels, here[train], here[test]) for train, test in folds]
        out[name] = fitted_score(texts, labels, others, here), float(np.mean(within))
    return out


def table(corpus: Corpus, found: dict[str, tuple[float, float]]) -> str:
    """The scores as Markdown."""
    lines = [
        f"{corpus.name}, balanced accuracy of TF-IDF and logistic regression; within: mean of {FOLDS} folds.",
        "",
        "| domain | texts | trained on the others | within |",
        "| --- | --- | --- | --- |",
    ]
    for number, (name, (others, within)) in enumerate(found.items()):
        lines.append(f"| {name} | {corpus.counts[number].sum():,} | {others:.3f} | {within:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", choices=tuple(READERS))
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--examples-per-domain", type=int, help="at most so many texts of every domain")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    corpus = thinned(sound(READERS[arguments.dataset](arguments.data_dir)), arguments.examples_per_domain)
    text = table(corpus, scores(corpus))
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
