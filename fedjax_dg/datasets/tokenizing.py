"""Texts as ids of tokens, by the tokenizer of a pretrained model or one that is trained on the texts themselves.

Needs the package tokenizers (``pip install 'fedjax-dg[text]'``); nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dg.datasets.layouts import shown
from fedjax_dg.errors import unknown

#: Of each family, by ``model_type`` of its config.json: what is put before and after a text.
FAMILIES = {"roberta": ("<s>", "</s>"), "deberta": ("[CLS]", "[SEP]"), "bert": ("[CLS]", "[SEP]")}
#: Tokens of a trained tokenizer beside bytes and merges; their ids are RoBERTa's, but for that of the last.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BYTES = 256
#: Files of which one, or of the second two, make a folder that of a tokenizer.
FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
#: Texts that are tokenised at a time: each takes kilobytes on the way.
BLOCK = 4096


class Vocabulary(NamedTuple):
    """A tokenizer and what frames a text.

    Attributes:
      tokenizer: of the package tokenizers, without padding and truncation.
      before, after: ids that every text starts and ends with.
      size: ids are below it; at least what the tokenizer knows, at most the rows of a model's embedding.
    """

    tokenizer: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    size: int


def package() -> Any:
    """The package tokenizers. Raises ``ValueError`` without it."""
    try:
        import tokenizers  # optional, and slow to import
    except ImportError:
        raise ValueError(
            "Texts are cut into tokens by the package tokenizers, which is not installed: run `pip install "
            "'fedjax-dg[text]'`."
        ) from None
    return tokenizers


def files_of(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """The files of a folder that make its tokenizer, see ``FILES``; none where it holds no tokenizer."""
    folder = os.fspath(folder)
    return next((names for names in FILES if all(os.path.isfile(os.path.join(folder, name)) for name in names)), ())


def read_folder(folder: str | os.PathLike[str]) -> Vocabulary:
    """The tokenizer of a folder as models are published in.

    ``tokenizer.json`` as it is; else ``vocab.json`` and ``merges.txt``, GPT-2's byte-level BPE as RoBERTa and DeBERTa use
    it; else ``vocab.txt``, BERT's word pieces. The last two are framed by the tokens of the family (``FAMILIES``) that
    ``config.json`` names; ``do_lower_case``, ``strip_accents``, ``tokenize_chinese_chars`` and ``add_prefix_space`` are
    taken from ``tokenizer_config.json`` if it is there. Unlike the published code, a special token that somebody wrote in
    a text is then text; ``tokenizer.json`` decides for itself.

    Raises:
      ValueError: no tokenizer in the folder, a damaged file, a family that is not known or whose tokens are missing, more
        tokens than the ``vocab_size`` of ``config.json``, or the package tokenizers is missing.
    """
    folder = os.fspath(folder)
    names = files_of(folder)
    if not names:
        kind = "holds no tokenizer" if os.path.isdir(folder) else "is no folder"
        raise ValueError(
            f"tokenizer={shown(folder)!r} {kind}: give a folder with tokenizer.json, with vocab.json and "
            "merges.txt, or with vocab.txt, and config.json."
        )
    package()
    config = _json(folder, "config.json")
    try:
        tokenizer = _BUILDERS[names[0]](folder, _json(folder, "tokenizer_config.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(
            f"{' or '.join(os.path.join(shown(folder), name) for name in names)} cannot be read ({error}): copy it again."
        ) from None
    before, after = _frame_of(tokenizer) if names == FILES[0] else ((), ())
    if not before:
        before, after = _frame_by_family(tokenizer, folder, config)
    known = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    size = config.get("vocab_size", known)
    if not isinstance(size, int) or size < known:
        raise ValueError(
            f"The tokenizer in {shown(folder)} has ids up to {known - 1}, but config.json there says vocab_size={size!r}: "
            "give the folder of one model."
        )
    return Vocabulary(tokenizer, before, after, size)


def train(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """A byte-level BPE (as GPT-2's and RoBERTa's) of up to ``vocab_size`` tokens, the merges that occur most in the texts.

    The same texts give the same tokens. A text becomes ``<s> text </s>`` with RoBERTa's ids 0 and 2. Raises ``ValueError``
    for fewer tokens than bytes and special tokens.
    """
    least = BYTES + len(SPECIAL)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} is less than the {least} of all bytes and special tokens: give more, such as 8192."
        )
    package()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # as in the text: an "<s>" that someone wrote is three characters
    tokenizer.encode_special_tokens = True
    before, after = SPECIAL[0], SPECIAL[2]
    ids = tokenizer.token_to_id
    return Vocabulary(tokenizer, (ids(before),), (ids(after),), tokenizer.get_vocab_size())


def encode(vocabulary: Vocabulary, texts: Sequence[str], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [M, L], -1 where there is none, and the numbers of tokens [M] that the texts have uncut.

    A longer text is cut at its end, what frames it is kept. ``L`` is the largest number of tokens, at most
    ``max_length``. Raises ``ValueError`` if ``max_length`` leaves no room for a token of the text.
    """
    frame = len(vocabulary.before) + len(vocabulary.after)
    if max_length <= frame:
        raise ValueError(
            f"max_length={max_length} leaves no room beside the {frame} special tokens of every text: give more, such "
            "as 128."
        )
    rows: list[np.ndarray] = []
    lengths: list[int] = []
    for ids in _bare_ids(vocabulary, texts):
        lengths.append(len(ids) + frame)
        rows.append(np.array((*vocabulary.before, *ids[: max_length - frame], *vocabulary.after), np.int32))
    out = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return out, np.asarray(lengths, np.int64)


def _bare_ids(vocabulary: Vocabulary, texts: Sequence[str]) -> Iterator[list[int]]:
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        for encoding in vocabulary.tokenizer.encode_batch(block, add_special_tokens=False):
            yield encoding.ids


def digest(folder: str | os.PathLike[str]) -> str:
    """SHA-256 of all files of a folder that decide what its tokenizer does."""
    whole = hashlib.sha256()
    for name in (*files_of(folder), "config.json", "tokenizer_config.json"):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
            whole.update(f"{name}\t{content}\n".encode())
    return whole.hexdigest()


# --- folders ---------------------------------------------------------------------------------------------------------


def _json(folder: str, name: str) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ``ValueError`` for a damaged one."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{shown(path)} cannot be read ({type(error).__name__}): copy it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{shown(path)} holds no JSON object: copy it again.")
    return content


def _published(folder: str, options: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _byte_level(folder: str, options: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model: Any = models.BPE.from_file(os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt"))
    tokenizer: Any = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space", False)))
    return tokenizer


def _word_pieces(folder: str, options: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model: Any = models.WordPiece.from_file(os.path.join(folder, "vocab.txt"), unk_token="[UNK]")
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


_BUILDERS = {"tokenizer.json": _published, "vocab.json": _byte_level, "vocab.txt": _word_pieces}


def _frame_of(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a published tokenizer puts before and after a text; nothing where it only cuts."""
    bare, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = (start for start in range(len(framed) - len(bare) + 1) if framed[start : start + len(bare)] == bare)
    start = next(starts, 0) if bare else 0
    return tuple(framed[:start]), tuple(framed[start + len(bare) :])


def _frame_by_family(tokenizer: Any, folder: str, config: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if (kind := config.get("model_type")) is None:
        raise ValueError(
            f"{shown(folder)} does not say which tokens frame a text: add the model's config.json, with model_type one of "
            f"{', '.join(FAMILIES)}."
        )
    if kind not in FAMILIES:
        raise unknown(f"model_type in {shown(os.path.join(folder, 'config.json'))}", str(kind), FAMILIES)
    frame = FAMILIES[kind]
    missing = [token for token in frame if tokenizer.token_to_id(token) is None]
    if missing:
        raise ValueError(
            f"The tokenizer in {shown(folder)} has no {' and no '.join(missing)}, which frame a text of model_type {kind}: "
            "give the files of one model."
        )
    before, after = (tokenizer.token_to_id(token) for token in frame)
    return (before,), (after,)
