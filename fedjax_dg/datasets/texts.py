"""Text data sets as ids of tokens: Amazon reviews, VADER's sentences, and files of one's own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_dg.datasets import kept, reviews, text_files, tokenizing, vader
from fedjax_dg.datasets.benchmarks import given
from fedjax_dg.datasets.corpus import Corpus, sound
from fedjax_dg.datasets.domains import Domains, Summary
from fedjax_dg.datasets.folders import version_note
from fedjax_dg.datasets.layouts import Layout
from fedjax_dg.errors import unknown

#: Of the kept ids; those of another one are made again.
SCHEMA = 1
MAX_LENGTH, VOCAB_SIZE = 128, 8192

READERS: dict[str, Callable[[str], Corpus]] = {
    "amazon_reviews": reviews.read,
    "vader_sentiment": vader.read,
    "text_folder": text_files.read,
}
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (reviews.LAYOUT, vader.LAYOUT)}
SUMMARIES: dict[str, Summary] = {
    layout.name: Summary(layout.domain_names, layout.class_names, layout.versions[0].total, layout.licence)
    for layout in LAYOUTS.values()
} | {"text_folder": Summary((), (), 0, "your own", "texts of your own, in files domain.csv, .tsv or .jsonl")}


def load(
    name: str,
    data_dir: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    held_out: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Domains:
    """A text data set: ``inputs`` int32 [M, L], ids of tokens, then -1 to the length L of the longest text.

    Texts are tokenised once for every data set, tokenizer and length; the ids are kept in ``cache_dir`` and mapped into
    memory afterwards. What is kept is checked by its digest, and made again where that does not fit.

    Args:
      name: a key of ``READERS``, which say what ``data_dir`` may be.
      data_dir: the folder of the data set.
      tokenizer: folder of a model with its tokenizer, see ``tokenizing.read_folder``; None: a byte-level BPE is trained
        on the texts, without their labels.
      max_length: tokens of a text, special ones too; longer ones are cut and counted in ``notice``. None: 128.
      vocab_size: most tokens of a trained tokenizer.
      held_out: domain whose texts a trained tokenizer does not see; None: it sees all domains.
      cache_dir: where ids are kept; None: ``fedjax_dg/texts`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
      ValueError: files are missing or malformed, or no such tokenizer, domain or length.
    """
    max_length = MAX_LENGTH if max_length is None else max_length
    if isinstance(max_length, bool) or max_length < 1:
        raise ValueError(f"max_length={max_length} is not positive: give the most tokens of a text, such as 128.")
    corpus = sound(READERS[name](given(name, data_dir)))
    if held_out is not None and held_out not in corpus.domain_names:
        raise unknown("held-out domain", held_out, corpus.domain_names)
    unseen = None if held_out is None else corpus.domain_names.index(held_out)
    if tokenizer is not None:
        recipe = ["folder", tokenizing.digest(tokenizer)]
        vocabulary: Callable[[], tokenizing.Vocabulary] = partial(tokenizing.read_folder, tokenizer)
        told = f"Tokenizer: {os.fspath(tokenizer)}"
        if not tokenizing.files_of(tokenizer):
            vocabulary()  # raises
    else:
        recipe = ["train", vocab_size, unseen]
        seen = (text for text, domain in zip(corpus.texts, corpus.domain) if domain != unseen)
        vocabulary = partial(tokenizing.train, seen, vocab_size)
        who = "all domains" if held_out is None else f"all domains but {held_out}"
        told = f"Tokenizer: byte-level BPE trained on the texts of {who}, without labels"
    tokens = _kept(
        corpus, recipe, vocabulary, max_length, kept.folder("texts") if cache_dir is None else Path(cache_dir)
    )
    notes = (
        *(version_note(LAYOUTS[name], corpus.counts) if name in LAYOUTS else ()),
        *corpus.notes,
        f"{told}, {tokens.vocab_size:,} tokens.",
        *_cut_note(tokens, max_length),
        *tokens.notes,
    )
    return Domains(
        name=name,
        inputs=tokens.ids,
        labels=corpus.labels,
        domain=corpus.domain,
        identity=corpus.identity,
        validation=None,
        domain_names=corpus.domain_names,
        class_names=corpus.class_names,
        notice=" ".join(notes),
        vocab_size=tokens.vocab_size,
    )


LOADERS = {name: partial(load, name) for name in READERS}


# --- kept ids --------------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    ids: np.ndarray
    vocab_size: int
    cut: int  # texts that are longer
    longest: int  # tokens of the longest text, uncut
    notes: tuple[str, ...] = ()


def _cut_note(tokens: _Tokens, max_length: int) -> tuple[str, ...]:
    """How many texts are cut; nothing where none is."""
    if not tokens.cut:
        return ()
    of_all = f"{tokens.cut:,} of {len(tokens.ids):,} texts"
    return (f"{of_all} have more than {max_length} tokens, up to {tokens.longest:,}, and are cut.",)


def _kept(
    corpus: Corpus,
    recipe: list[Any],
    vocabulary: Callable[[], tokenizing.Vocabulary],
    max_length: int,
    cache: Path,
) -> _Tokens:
    """The ids as they were kept, else made and kept."""
    path = cache / _key(corpus, [SCHEMA, tokenizing.package().__version__, *recipe, max_length])
    if (found := kept.read(path)) is not None:
        ids, about = found
        if ids.dtype == np.int32 and ids.ndim == 2 and len(ids) == len(corpus.texts):
            return _Tokens(ids, **about)
    vocab = vocabulary()
    ids, lengths = tokenizing.encode(vocab, corpus.texts, max_length)
    made = _Tokens(ids, vocab.size, int((lengths > max_length).sum()), int(lengths.max()))
    failed = kept.keep(path, ids, {name: getattr(made, name) for name in ("vocab_size", "cut", "longest")})
    return made if failed is None else made._replace(notes=(f"Tokens {failed}",))


def _key(corpus: Corpus, recipe: list[Any]) -> str:
    """What the ids depend on: every text, its domain (of which the tokenizer may not see one), the recipe."""
    whole = hashlib.sha256(json.dumps(recipe).encode())
    whole.update(corpus.domain.tobytes())
    for text in corpus.texts:
        content = text.encode()
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()[:32]
