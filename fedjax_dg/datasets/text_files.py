"""Texts of one's own: a folder with a file for each domain, ``domain.csv``, ``domain.tsv`` or ``domain.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from typing import Any

from fedjax_dg.datasets.corpus import MOST_PROBLEMS, Corpus, Malformed, decoded, int32
from fedjax_dg.datasets.folders import existing
from fedjax_dg.datasets.layouts import composed, shown, some, spelled

EXTENSIONS = (".csv", ".tsv", ".jsonl")
COLUMNS = ("text", "label")


def read(data_dir: str) -> Corpus:
    """The rows of every file of ``data_dir``, domains by the sorted names of the files without their ends.

    A file is UTF-8, with or without a byte order mark, with a ``text`` and a ``label`` in every row and nothing else:
    ``.csv`` with these names in its first line and fields quoted where need be, over several lines too; ``.tsv`` the
    same without any quoting; ``.jsonl`` with one JSON object a line. A label is a word or a whole number. Classes are the
    labels of all files, sorted, by value if all are numbers. Empty lines are skipped.

    Raises:
      ValueError: no folder, fewer than two files in it, or two for one domain.
    """
    root = existing("a file for each domain", data_dir)
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_file() and not entry.name.startswith("."))
    files = [name for name in names if name.lower().endswith(EXTENSIONS)]
    if len(files) < 2:
        found = f"only {shown(files[0])}" if files else f"no {', '.join(EXTENSIONS)} file"
        raise ValueError(
            f"{root} holds {found}, but one of two or more domains is held out: give a file for each, such as books.csv."
        )
    spellings: dict[str, str] = {}
    for name in files:
        if (other := spellings.setdefault(spelled(_stem(name), exact=True), name)) != name:
            raise ValueError(f"{root} has {shown(other)} and {shown(name)} for one domain: join or rename them.")
    files.sort(key=_stem)
    problems: list[str] = []
    notes: list[str] = []
    rows: list[tuple[int, str, str]] = []
    for number, name in enumerate(files):
        before = len(problems)
        own = list(_rows(root, name, problems))
        if not own and len(problems) == before:
            problems.append(f"{shown(name)} has no rows: add some, or remove it")
        if own and len({label for _, label in own}) == 1:
            notes.append(f"{shown(name)} has one class only, {shown(own[0][1])}.")
        rows += [(number, text, label) for text, label in own]
    classes = sorted({label for _, _, label in rows})
    if all(name.removeprefix("-").isdecimal() for name in classes):
        classes.sort(key=int)
    if len(classes) == 1 and not problems:
        problems.append(f"all labels are {shown(classes[0])}: give texts of two or more classes")
    if ignored := [name for name in names if name not in files]:
        notes.append(f"Not read: {some(ignored)}.")
    label_of = {name: label for label, name in enumerate(classes)}
    return Corpus(
        name="text_folder",
        root=root,
        texts=tuple(text for _, text, _ in rows),
        labels=int32([label_of[label] for _, _, label in rows]),
        domain=int32([number for number, _, _ in rows]),
        identity=None,
        domain_names=tuple(composed(_stem(name)) for name in files),
        class_names=tuple(classes),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _rows(root: str, name: str, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Text and label of each row that has both; what is wrong goes to ``problems``."""
    most = len(problems) + MOST_PROBLEMS
    try:
        with open(os.path.join(root, name), "rb") as file:
            content = decoded(file.read(), name)
        records = _objects(content, name) if name.lower().endswith(".jsonl") else _cells(content, name)
        for line, record in records:
            if isinstance(record, dict) and (wrong := _wrong(record)) is None:
                yield record["text"], str(record["label"]).strip()
                continue
            problems.append(f"{shown(name)} line {line} {record if isinstance(record, str) else wrong}")
            if len(problems) >= most:
                return
    except Malformed as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{shown(name)} cannot be opened ({type(error).__name__}): check its permissions")


def _wrong(record: dict[str, Any]) -> str | None:
    """What is wrong with a row."""
    text, label = record["text"], record["label"]
    if not isinstance(text, str):
        return f"has the text {text!r}, which is no string: put it in quotes"
    if not text.strip():
        return "has an empty text: fill it in, or remove the row"
    if isinstance(label, bool) or not isinstance(label, str | int):
        return f"has the label {label!r}: give a string or a whole number"
    if not str(label).strip():
        return "has no label: fill it in, or remove the row"
    try:
        f"{text}{label}".encode()
    except UnicodeEncodeError:
        return "has half a pair of surrogates (\\ud800 to \\udfff), which is no character: correct or remove it"
    return None


def _named(found: list[str], name: str, line: int) -> None:
    """Raises ``Malformed`` for columns or keys that are not ``text`` and ``label``, each once."""
    if sorted(found) != sorted(COLUMNS):
        raise Malformed(
            f"{shown(name)} line {line} names {shown(', '.join(map(repr, found))) or 'nothing'}, expected text and label, "
            "each once and nothing else: rename or remove the others"
        )


def _objects(content: str, name: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line and object of each line, or what is wrong with it."""
    for line, raw in enumerate(content.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            why = getattr(error, "msg", type(error).__name__)
            yield line, f'is no JSON ({why}): write one object a line, such as {{"text": "...", "label": "..."}}'
            continue
        if not isinstance(record, dict):
            yield line, 'is no JSON object: write {"text": "...", "label": "..."}'
            continue
        _named(list(record), name, line)
        yield line, record


def _cells(content: str, name: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """First line and cells by column of each row, or what is wrong with it."""
    source = io.StringIO(content, newline="")  # ends of lines inside of quotes stay as they are
    if name.lower().endswith(".tsv"):
        rows = csv.reader(source, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        rows = csv.reader(source, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for cells in rows:
            line, start = start, rows.line_num + 1
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                _named(header, name, line)
            elif len(cells) != len(header):
                yield line, f"has {len(cells)} field{'s' * (len(cells) > 1)}, expected 2: quote what holds a separator"
            else:
                yield line, dict(zip(header, cells))
    except csv.Error as error:
        raise Malformed(f"{shown(name)} line {start} cannot be read ({error}): correct its quotes") from None
