"""Sentences of four domains with their sentiment, rated by at least twenty people each: VADER's ground truth.

Domains: snippets of film reviews, of product reviews at Amazon, of New York Times editorials, and tweets.

Source: Hutto, Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014,
https://ojs.aaai.org/index.php/ICWSM/article/view/14550. The files are part of the source distribution of the PyPI package
vaderSentiment 3.3.2 (``pip download --no-deps --no-binary :all: vaderSentiment==3.3.2``), not of its wheel.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from fedjax_dg.datasets.corpus import MOST_PROBLEMS, Corpus, Malformed, decoded, int32
from fedjax_dg.datasets.layouts import Layout, Version, shown

#: What each domain's file is called; of those with a number of the review or article in their ids, ``12_3``.
FILES = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}
GROUPED = ("amazon", "nyt")
INNER, SDIST = "hutto_ICWSM_2014.tar.gz", re.compile(r"vadersentiment-.*\.tar\.gz", re.IGNORECASE)
#: Sentences whose mean rating is nearer to 0 are left out.
LEAST = 0.5
FETCH = "pip download --no-deps --no-binary :all: vaderSentiment==3.3.2"

LAYOUT = Layout(
    name="vader_sentiment",
    folders=(),
    domains=tuple((name,) for name in FILES),
    classes=(("negative",), ("positive",)),
    versions=(Version("vaderSentiment 3.3.2", (10_072, 2_985, 2_970, 3_432)),),
    licence="MIT on the package; the texts are quoted from Rotten Tomatoes, Amazon, The New York Times and Twitter",
    home=f"the source distribution, `{FETCH}`",
    unit="sentences",
)


def read(data_dir: str) -> Corpus:
    """Sentences with a mean rating of at least 0.5 (positive, 1) or at most -0.5 (negative, 0), in [-4, 4].

    ``identity`` is the review (amazon) or the editorial (nyt) that a sentence is of, so that a split keeps these whole.

    Args:
      data_dir: the source distribution, packed or not, the ``hutto_ICWSM_2014.tar.gz`` in it, packed or not, or a
        folder that holds one of these, up to three folders above it.

    Raises:
      ValueError: there is none, or an archive cannot be read.
    """
    root, files = _find(data_dir)
    problems: list[str] = []
    texts: list[str] = []
    labels: list[int] = []
    domain: list[int] = []
    groups: list[tuple[str, str]] = []
    total = 0
    for number, (name, file) in enumerate(FILES.items()):
        if file not in files:
            problems.append(f"{file} is missing: complete it from {LAYOUT.home}")
            continue
        before = len(texts), len(problems)
        for text, mean, group in _sentences(name, files[file], problems):
            total += 1
            if abs(mean) >= LEAST:
                texts.append(text)
                labels.append(int(mean > 0))
                domain.append(number)
                groups.append((name, group))
        if before == (len(texts), len(problems)):
            problems.append(f"{file} holds no sentence that is rated as one or the other: get it from {LAYOUT.home}")
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    corpus = Corpus(
        LAYOUT.name,
        root,
        tuple(texts),
        int32(labels),
        int32(domain),
        int32([places[group] for group in groups]),
        LAYOUT.domain_names,
        LAYOUT.class_names,
    )
    left_out = f"Left out: {total - len(texts):,} of {total:,} sentences, rated between -{LEAST} and {LEAST}."
    return corpus._replace(problems=tuple(problems), notes=(left_out,))


def _sentences(name: str, content: bytes, problems: list[str]) -> Iterator[tuple[str, float, str]]:
    """Text, mean rating and review (else the sentence itself) of each line; what is wrong goes to ``problems``."""
    file = FILES[name]
    wanted = re.compile(r"(\d+)_\d+" if name in GROUPED else r"(\d+)", re.ASCII)
    try:
        lines = decoded(content, file).split("\n")
    except Malformed as error:
        problems.append(str(error))
        return
    most = len(problems) + MOST_PROBLEMS
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key, _, rest = line.partition("\t")
        rating, _, text = rest.partition("\t")
        match, mean = wanted.fullmatch(key), _mean(rating)
        if match is None or mean is None or not text.strip():
            problems.append(
                f"{file} line {number} is {shown(line[:60])!r}, expected an id{' such as 12_3' * (name in GROUPED)}, a mean "
                f"rating in [-4, 4] and a text, with tabs between: take the file of {LAYOUT.home}"
            )
            if len(problems) >= most:
                return
            continue
        yield text.strip(), mean, match[1]


def _mean(rating: str) -> float | None:
    try:
        value = float(rating)
    except ValueError:
        return None
    return value if -4 <= value <= 4 else None


# --- finding ---------------------------------------------------------------------------------------------------------


def _find(data_dir: str) -> tuple[str, dict[str, bytes]]:
    """Where the files were found, and their bytes by name."""
    path = Path(data_dir)
    if path.is_file():
        return str(path), _unpacked(path.name, path.read_bytes())
    below = sorted(found for depth in range(4) for found in path.glob("*/" * depth + "*") if found.is_file())
    ours = [found for found in below if found.name in FILES.values()]
    if ours:
        folders = sorted({found.parent for found in ours})
        if len(folders) > 1:
            raise ValueError(
                f"{folders[0]} and {folders[1]} both hold sentences of vader_sentiment: give one of them as --data-dir."
            )
        return str(folders[0]), {found.name: found.read_bytes() for found in ours}
    for wanted in (lambda name: name == INNER, lambda name: SDIST.fullmatch(name) is not None):
        if found := next((found for found in below if wanted(found.name)), None):
            return str(found), _unpacked(str(found), found.read_bytes())
    kind = "holds none of the files" if path.is_dir() else "does not exist"
    raise ValueError(
        f"data_dir={os.fspath(data_dir)!r} {kind}: give the folder of vaderSentiment's source distribution, {INNER} or "
        f"{FILES['movie']} and the like, which `{FETCH}` gets (its wheel has none of them)."
    )


def _unpacked(name: str, content: bytes) -> dict[str, bytes]:
    """The files of an archive by their names without folders; of the source distribution those of the archive in it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            found = {
                base: file.read()
                for member in archive
                if (base := member.name.rpartition("/")[2]) in (INNER, *FILES.values())
                and (file := archive.extractfile(member)) is not None
            }
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(
            f"{shown(name)} is cut off, damaged or no tar.gz ({type(error).__name__}): get it again, `{FETCH}`."
        ) from None
    if INNER in found and not name.endswith(INNER):
        return _unpacked(f"{name}/{INNER}", found[INNER])
    if not found:
        raise ValueError(
            f"{shown(name)} holds none of {', '.join(FILES.values())}: give vaderSentiment's source distribution, `{FETCH}`."
        )
    return found
