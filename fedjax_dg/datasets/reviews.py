"""Amazon product reviews of four domains with their sentiment, from the files that hold the text (``sorted_data_acl``).

Source: Blitzer, Dredze, Pereira, "Biographies, Bollywood, Boom-boxes and Blenders", ACL 2007,
https://aclanthology.org/P07-1056. Nothing is downloaded: the files may not be passed on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from fedjax_dg.datasets.corpus import MOST_PROBLEMS, Corpus, Malformed, int32
from fedjax_dg.datasets.folders import find_root, folders_in
from fedjax_dg.datasets.layouts import Layout, Version, lookup, shown

LAYOUT = Layout(
    name="amazon_reviews",
    folders=("sorted_data_acl", "sorted_data"),
    domains=(
        ("books",),
        ("dvd",),
        ("electronics",),
        ("kitchen", "kitchen_&_housewares", "kitchen_housewares"),
    ),
    classes=(("negative",), ("positive",)),
    versions=(Version("as published", (2000,) * 4, ((1000, 1000),) * 4),),
    licence="none stated; research use, not to be passed on",
    home="https://www.cs.jhu.edu/~mdredze/datasets/sentiment (domain_sentiment_data.tar.gz)",
    unit="reviews",
)
#: Line breaks are spaces; so are control characters, but for those that Windows (cp1252) has letters and quotes for.
_CLEAN = dict.fromkeys((*range(32), 127), " ")
_CLEAN |= {code: bytes([code]).decode("cp1252", "ignore") or " " for code in range(128, 160)}
_OPENED, _ONE_LINE = re.compile(r"<([a-z_]+)>"), re.compile(r"<([a-z_]+)>(.*)</\1>")


def read(data_dir: str) -> Corpus:
    """The labelled reviews of ``books``, ``dvd``, ``electronics``, ``kitchen`` (B, D, E, K), negative 0 and positive 1.

    ``sorted_data_acl/<domain>/{positive,negative}.review`` or ``sorted_data/...``, up to three folders below
    ``data_dir``; other domains and unlabelled files are ignored. The rating decides: above 3 positive, below 3
    negative, 3 left out and counted. The text is ``review_text`` without its title, white space collapsed. The files
    are no XML (bare ``&``), so lines that are a tag are what is looked for; bytes are latin-1, 0x80 to 0x9f cp1252.

    Raises:
      ValueError: no such folder, or two.
    """
    root = find_root(LAYOUT, data_dir)
    problems: list[str] = []
    notes: list[str] = []
    texts: list[str] = []
    labels: list[int] = []
    domain: list[int] = []
    neutral = contrary = 0
    for number, label, name in _files(root, problems):
        try:
            with open(os.path.join(root, name), "rb") as file:
                content = file.read().decode("latin-1")
        except OSError as error:
            problems.append(f"{shown(name)} cannot be read ({type(error).__name__}): complete it from {LAYOUT.home}")
            continue
        if "#label#:" in content.lstrip().partition("\n")[0]:
            problems.append(
                f"{shown(name)} is a bag of words (processed_acl), counts of words whose order is lost, which a network "
                f"that reads text cannot use: give the folder sorted_data_acl, of {LAYOUT.home}"
            )
            break  # so are the others
        for text, rating in _reviews(content, name, problems):
            if rating == 3:
                neutral += 1
                continue
            contrary += (rating > 3) != label
            texts.append(text)
            labels.append(int(rating > 3))
            domain.append(number)
    if neutral:
        notes.append(f"Left out: {neutral:,} reviews with a rating of 3.")
    if contrary:
        notes.append(f"{contrary:,} reviews are rated otherwise than the name of their file says; the rating counts.")
    corpus = Corpus(
        LAYOUT.name, root, tuple(texts), int32(labels), int32(domain), None, LAYOUT.domain_names, LAYOUT.class_names
    )
    return corpus._replace(problems=tuple(problems), notes=tuple(notes))


def _files(root: str, problems: list[str]) -> list[tuple[int, int, str]]:
    """Domain, label and path below the root of each file of labelled reviews; missing folders go to ``problems``."""
    folders: dict[int, str] = {}
    domain_of = lookup(LAYOUT.domains)
    for name in folders_in(root):
        if (place := domain_of(name)) is None:
            continue
        if (other := folders.setdefault(place, name)) != name:
            problems.append(f"{shown(other)} and {shown(name)} are both {LAYOUT.domain_names[place]}: remove one")
    for number, name in enumerate(LAYOUT.domain_names):
        if number not in folders:
            problems.append(f"the domain {name} is missing: add its folder, from {LAYOUT.home}")
    kinds = LAYOUT.class_names
    return [(n, label, f"{folders[n]}/{kind}.review") for n in sorted(folders) for label, kind in enumerate(kinds)]


def _reviews(content: str, name: str, problems: list[str]) -> Iterator[tuple[str, float]]:
    """Text and rating of each review of a file that has both; what is wrong goes to ``problems``."""
    count, before = 0, len(problems)
    try:
        for line, review in _parse(content, name):
            count += 1
            text = " ".join(review.get("review_text", "").translate(_CLEAN).split())
            rating = _number(review.get("rating", ""))
            if not text:
                problems.append(f"{shown(name)} line {line}: the review has no text (<review_text>): remove it")
            elif rating is None:
                given = f"the rating {review['rating'].strip()!r}" if "rating" in review else "no <rating>"
                problems.append(f"{shown(name)} line {line}: the review has {given}, expected 1 to 5: remove it")
            else:
                yield text, rating
            if len(problems) >= before + MOST_PROBLEMS:
                return
    except Malformed as error:
        problems.append(str(error))
    if not count and len(problems) == before:
        problems.append(f"{shown(name)} holds no review: complete it from {LAYOUT.home}")


def _number(rating: str) -> float | None:
    try:
        value = float(rating)
    except ValueError:
        return None
    return value if 1 <= value <= 5 else None


def _parse(content: str, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line where each review starts, and its fields. Raises ``Malformed`` where its tags do not fit."""

    def malformed(line: int, why: str) -> Malformed:
        return Malformed(f"{shown(name)} line {line}: {why}: take the file of {LAYOUT.home}")

    review: dict[str, str] | None = None
    field: str | None = None
    start, lines = 0, []
    for number, raw in enumerate(content.split("\n"), 1):  # not splitlines, which knows more ends of lines
        line = raw.strip(" \t\r")
        if field is not None and review is not None:
            if line == f"</{field}>":
                review.setdefault(field, "\n".join(lines))
                field = None
            elif line in ("<review>", "</review>"):
                raise malformed(number, f"{line} inside of <{field}>, which is not closed")
            else:
                lines.append(line)
        elif line == "<review>":
            if review is not None:
                raise malformed(number, f"a review starts inside of that of line {start}")
            review, start = {}, number
        elif not line:
            continue
        elif review is None:
            raise malformed(number, f"{line[:40]!r} is outside of a <review>")
        elif line == "</review>":
            yield start, review
            review = None
        elif (whole := _ONE_LINE.fullmatch(line)) is not None:
            review.setdefault(whole[1], whole[2])
        elif (opened := _OPENED.fullmatch(line)) is not None:
            field, lines = opened[1], []
        else:
            raise malformed(number, f"{line[:40]!r} is outside of a field such as <rating>")
    if review is not None:
        raise malformed(start, "the review is not closed, so the file is cut off")
