"""Text data sets: what is read of files sound and malformed, tokens against the package tokenizers, kept tokens."""

import io
import json
import re
import sys
import tarfile

import numpy as np
import pytest
from text_tree import TEXTS, model_folder, review, sentence, write_folder, write_reviews
from tiny import tiny_domains
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, pre_tokenizers, processors

from fedjax_dg import datasets, federate, splits
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, check
from fedjax_dg.datasets import reviews, text_files, texts, tokenizing, vader
from fedjax_dg.datasets.checking import check as check_files
from fedjax_dg.experiment import load_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is kept beside the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedjax_dg" / "texts"


def one(problems):
    (problem,) = problems
    assert "\n" not in problem
    return problem


# --- a folder of files ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "data")


def test_files_of_ones_own(folder):
    (folder / "README.md").write_text("about")
    (folder / ".hidden.csv").write_text("no data")
    corpus = text_files.read(str(folder))
    assert corpus.problems == () and corpus.notes == ("Not read: README.md.",)
    assert corpus.domain_names == ("books", "films", "songs") and corpus.class_names == ("bad", "good")
    assert corpus.texts == tuple(sentence(100 * place + i) for place in range(3) for i in range(8))
    assert corpus.labels.tolist() == [1, 0] * 12 and corpus.domain.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert corpus.identity is None and corpus.counts.tolist() == [[4, 4]] * 3


def test_quotes_byte_order_marks_line_ends_and_letters_of_all_kinds(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        '\ufeff"text", label\r\n"two\r\nlines, ""quoted""\u2028",1\r\n\r\nplain,10\r\n'.encode()
    )
    (tmp_path / "b.tsv").write_bytes('text\tlabel\r\n"an open quote\t2\r\nca\u0301fe\x85 \u732b\t10\r\n'.encode())
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"label": 2, "text": " \\ud83d\\ude00\\n"}\r\n\n{"text": "x\xe2\x80\xa8y", "label": " 10 "}'
    )
    corpus = text_files.read(str(tmp_path))
    assert corpus.problems == ()
    assert corpus.texts[:2] == ('two\r\nlines, "quoted"\u2028', "plain")
    assert corpus.texts[2:] == ('"an open quote', "ca\u0301fe\x85 \u732b", " \U0001f600\n", "x\u2028y")
    assert corpus.class_names == ("1", "2", "10") and corpus.labels.tolist() == [0, 2, 1, 2, 1, 2]


def test_a_domain_of_one_class_is_told(tmp_path):
    write_folder(tmp_path, names=("a.csv", "b.csv"))
    (tmp_path / "b.csv").write_text("text,label\nfine,good\n")
    assert text_files.read(str(tmp_path)).notes == ("b.csv has one class only, good.",)


MALFORMED = {
    "empty text": ("b.csv", b"text,label\nx,1\n  ,2\n", "b.csv line 3 has an empty text"),
    "no label": ("b.csv", b'text,label\n"two\nlines",1\nx,\n', "b.csv line 4 has no label"),
    "no label of two lines": ("b.csv", b'text,label\n"two\nlines",\n', "b.csv line 2 has no label"),
    "other column": (
        "b.csv",
        b"sentence,label\nx,1\n",
        "b.csv line 1 names 'sentence', 'label', expected text and label",
    ),
    "one more column": ("b.csv", b"id,text,label\n1,x,1\n", "b.csv line 1 names 'id', 'text', 'label', expected text"),
    "column twice": ("b.csv", b"text,text,label\nx,y,1\n", "b.csv line 1 names 'text', 'text', 'label'"),
    "no header": ("b.csv", b"nice film,1\n", "b.csv line 1 names 'nice film', '1'"),
    "more fields": ("b.csv", b"text,label\nx,1\nwell, no,1\n", "b.csv line 3 has 3 fields, expected 2"),
    "fewer fields": ("b.tsv", b"text\tlabel\nx\n", "b.tsv line 2 has 1 field, expected 2"),
    "open quote": ("b.csv", b'text,label\nx,1\n"y,2\n', "b.csv line 3 cannot be read ("),
    "text behind a quote": ("b.csv", b'text,label\n"y"z,2\n', "b.csv line 2 cannot be read ("),
    "no rows": ("b.csv", b"text,label\n", "b.csv has no rows"),
    "nothing": ("b.jsonl", b"", "b.jsonl has no rows"),
    "not UTF-8": ("b.csv", b"text,label\nfine,1\ncaf\xe9,1\n", "b.csv line 3 is not UTF-8 (byte 0xe9)"),
    "no JSON": ("b.jsonl", b'{"text": "x", "label": "1"}\n{"text": "x"\n', "b.jsonl line 2 is no JSON (Expecting"),
    "too deep": ("b.jsonl", b"[" * 200_000, "b.jsonl line 1 is no JSON (RecursionError)"),
    "no object": ("b.jsonl", b'["x", 1]', "b.jsonl line 1 is no JSON object"),
    "other key": ("b.jsonl", b'{"text": "x", "stars": 1}', "b.jsonl line 1 names 'text', 'stars', expected text"),
    "no string": ("b.jsonl", b'{"text": 5, "label": 1}', "b.jsonl line 1 has the text 5, which is no string"),
    "truth": ("b.jsonl", b'{"text": "x", "label": true}', "b.jsonl line 1 has the label True"),
    "fraction": ("b.jsonl", b'{"text": "x", "label": 0.5}', "b.jsonl line 1 has the label 0.5"),
    "null": ("b.jsonl", b'{"text": "x", "label": null}', "b.jsonl line 1 has the label None"),
    "half a pair": ("b.jsonl", b'{"text": "\\ud83d", "label": 1}', "b.jsonl line 1 has half a pair of surrogates"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_are_named_with_their_line(tmp_path, kind):
    name, content, message = MALFORMED[kind]
    write_folder(tmp_path, names=("a.csv",))
    (tmp_path / name).write_bytes(content)
    assert one(text_files.read(str(tmp_path)).problems).startswith(message)
    with pytest.raises(ValueError, match=re.escape(f"text_folder in {tmp_path}: {message}") + r".*\.$"):
        datasets.load("text_folder", data_dir=str(tmp_path))


def test_all_problems_are_told_but_not_endless_ones(tmp_path):
    write_folder(tmp_path, names=("a.csv",))
    (tmp_path / "b.csv").write_text("text,label\n" + ",1\n" * 1000)
    (tmp_path / "c.jsonl").write_text("no\n" * 1000)
    found = check_files("text_folder", str(tmp_path))
    assert len(found.problems) == 40 and found.counts == ((4, 4), (0, 0), (0, 0))
    with pytest.raises(ValueError, match=r"; 39 more problems: see `fedjax-dg data check text_folder --data-dir"):
        datasets.load("text_folder", data_dir=str(tmp_path))


def test_folders_that_are_none(tmp_path, folder):
    for given, message in (
        (None, "text_folder is read from your own folder, and none is given"),
        (str(tmp_path / "no"), "does not exist: give the folder that holds a file for each domain"),
        (str(folder / "books.csv"), "is no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            datasets.load("text_folder", data_dir=given)
    (folder / "Books.jsonl").write_text("")
    with pytest.raises(ValueError, match="has Books.jsonl and books.csv for one domain"):
        text_files.read(str(folder))
    for names, message in ((("a.csv",), "holds only a.csv"), ((), "holds no .csv, .tsv, .jsonl file")):
        write_folder(tmp_path / f"{len(names)}", names=names)
        with pytest.raises(ValueError, match=message):
            text_files.read(str(tmp_path / f"{len(names)}"))


def test_texts_of_one_class_are_refused(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("text,label\nx,1\n")
    assert one(text_files.read(str(tmp_path)).problems) == "all labels are 1: give texts of two or more classes"


# --- Amazon reviews ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "kitchen"), [("sorted_data_acl", "kitchen_&_housewares"), ("a/sorted_data", "kitchen")]
)
def test_amazon_reviews(tmp_path, place, kitchen):
    root = write_reviews(tmp_path / place, domains=("apparel", "books", "dvd", "electronics", kitchen))
    (root / "books" / "unlabeled.review").write_text("ignored")
    mixed = (
        b"\n\n"
        + review("  line one &\n<br>\n   caf\xe9 isn\x92t\x1a\x81 <review>\x85\xa0x ", "4.0")
        .encode("latin-1")
        .replace(b"\n", b"\r\n")
        + review("so so", 3.0).encode()
        + review("the stars say otherwise", 2.0).encode()
        + b"<review>\n<rating>5</rating>\n<review_text>in one line</review_text>\n</review>"
    )
    (root / "dvd" / "positive.review").write_bytes(mixed)
    corpus = reviews.read(str(tmp_path))
    assert corpus.problems == () and corpus.root == str(root)
    assert corpus.domain_names == ("books", "dvd", "electronics", "kitchen")
    assert corpus.class_names == ("negative", "positive")
    assert corpus.counts.tolist() == [[3, 3], [4, 2], [3, 3], [3, 3]]
    here = [text for text, domain in zip(corpus.texts, corpus.domain) if domain == 1]
    assert here[3:] == ["line one & <br> café isn’t <review>… x", "the stars say otherwise", "in one line"]
    assert corpus.labels[corpus.domain == 1].tolist() == [0, 0, 0, 1, 0, 1]
    assert corpus.texts[0] == sentence(100) and corpus.texts[-1] == sentence(402)
    assert corpus.notes == (
        "Left out: 1 reviews with a rating of 3.",
        "1 reviews are rated otherwise than the name of their file says; the rating counts.",
    )


SPOILED = {
    "cut off": (review("fine", 5.0) + review("x", 5.0)[:-12], "line 18: the review is not closed"),
    "inside a field": (review("x", 5.0)[:-26], "line 1: the review is not closed"),
    "field not closed": (
        review("x", 5.0).replace("</review_text>\n", ""),
        "line 16: </review> inside of <review_text>",
    ),
    "review not closed": (
        review("x", 5.0).replace("</review>\n", "") + review("y", 5.0),
        "line 17: a review starts inside of that of line 1",
    ),
    "outside": ("hello\n" + review("x", 5.0), "line 1: 'hello' is outside of a <review>"),
    "outside of a field": (review("x", 5.0).replace("<title>", "title"), "line 11: 'title' is outside of a field"),
    "no rating": (
        re.sub("<rating>.*</rating>\n", "", review("x", 5), flags=re.S),
        "line 1: the review has no <rating>",
    ),
    "bad rating": (review("x", "five"), "line 1: the review has the rating 'five', expected 1 to 5"),
    "other rating": (review("x", "nan"), "line 1: the review has the rating 'nan', expected 1 to 5"),
    "no text": (review("fine", 5.0) + review(" ", 5.0), "line 18: the review has no text"),
    "empty": ("\n", "holds no review"),
    "missing": (None, "cannot be read (FileNotFoundError)"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_spoiled_reviews_are_named_with_their_line(tmp_path, kind):
    content, message = SPOILED[kind]
    file = write_reviews(tmp_path) / "books" / "positive.review"
    file.unlink()
    if content is not None:
        file.write_text(content, encoding="latin-1")
    assert one(reviews.read(str(tmp_path)).problems).startswith(f"books/positive.review {message}")


def test_bags_of_words_are_refused_and_domains_missed(tmp_path):
    root = write_reviews(tmp_path / "processed_acl")
    for file in root.glob("*/*.review"):
        file.write_text("bad:1 very_bad:1 #label#:negative\n")
    with pytest.raises(
        ValueError, match=r"books/negative.review is a bag of words \(processed_acl\).* sorted_data_acl"
    ):
        datasets.load("amazon_reviews", data_dir=str(tmp_path))
    assert len(reviews.read(str(tmp_path)).problems) == 1
    root = write_reviews(tmp_path / "part", domains=("books", "dvd", "kitchen", "kitchen_&_housewares"))
    problems = reviews.read(str(root)).problems
    assert problems[0] == "kitchen and kitchen_&_housewares are both kitchen: remove one"
    assert problems[1].startswith("the domain electronics is missing: add its folder")
    with pytest.raises(ValueError, match="No amazon_reviews in .*kitchen in it or up to 3 folders below"):
        datasets.load("amazon_reviews", data_dir=str(tmp_path / "part" / "books"))


# --- VADER's sentences ------------------------------------------------------------------------------------------------


def vader_files():
    """Some lines of each file: of movie and tweets a sentence each, of amazon and nyt three of every review."""
    out = {}
    for place, (name, file) in enumerate(vader.FILES.items()):
        lines = []
        for i in range(12):
            key = f"{i // 3 + 1}_{i % 3 + 1}" if name in ("amazon", "nyt") else f"{i + 1}"
            lines.append(f"{key}\t{(0.5, -0.5, 2.25, -4.0, 0.49, -0.49)[i % 6]}\t{sentence(100 * place + i)}\r\n")
        out[file] = "".join(lines).encode()
    return out


def packed(files, inside):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{inside}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


INNER = "hutto_ICWSM_2014.tar.gz"
FORMS = {
    "sdist": lambda d, files, inner: (
        put(d / "vaderSentiment-3.3.2.tar.gz", packed({f"extra/{INNER}": inner}, "v")).parent
    ),
    "sdist itself": lambda d, files, inner: put(d / "vadersentiment-3.3.2.tar.gz", packed({INNER: inner}, "v/extra")),
    "sdist unpacked": lambda d, files, inner: put(d / "v/vader/extra" / INNER, inner).parents[3],
    "archive": lambda d, files, inner: put(d / INNER, inner),
    "files": lambda d, files, inner: [put(d / "x/hutto" / name, content) for name, content in files.items()][0].parents[
        1
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_vaders_sentences(tmp_path, form):
    files = {**vader_files(), "tweets_anonDataRatings.txt": b"not read"}
    corpus = vader.read(str(FORMS[form](tmp_path / "d", files, packed(files, "hutto"))))
    assert corpus.problems == ()
    assert corpus.domain_names == ("movie", "amazon", "nyt", "tweets")
    assert corpus.class_names == ("negative", "positive")
    assert corpus.texts[:5] == tuple(sentence(i) for i in (0, 1, 2, 3, 6)) and len(corpus.texts) == 32
    assert corpus.labels.tolist() == [1, 0, 1, 0] * 8 and corpus.counts.tolist() == [[4, 4]] * 4
    assert corpus.notes == ("Left out: 16 of 48 sentences, rated between -0.5 and 0.5.",)
    sizes = [np.unique(corpus.identity[corpus.domain == g], return_counts=True)[1].tolist() for g in range(4)]
    assert sizes == [[1] * 8, [3, 1, 3, 1], [3, 1, 3, 1], [1] * 8]
    assert len(np.unique(corpus.identity)) == 24


BROKEN = {
    "no tabs": (b"1 2.0 fine", "is '1 2.0 fine', expected an id, a mean rating in [-4, 4] and a text"),
    "no number": (b"1\ttwo\tfine", "is '1\\ttwo\\tfine', expected"),
    "rating": (b"1\t4.5\tfine", "is '1\\t4.5\\tfine', expected"),
    "nan": (b"1\tnan\tfine", "is '1\\tnan\\tfine', expected"),
    "no text": (b"1\t2.0\t \r", "is '1\\t2.0\\t \\r', expected"),
    "id": (b"1_1\t2.0\tfine", "is '1_1\\t2.0\\tfine', expected"),
    "not UTF-8": (b"1\t2.0\tcaf\xe9", "is not UTF-8 (byte 0xe9)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_sentences_are_named_with_their_line(tmp_path, kind):
    line, message = BROKEN[kind]
    for name, content in vader_files().items():
        put(tmp_path / name, content)
    file = vader.FILES["tweets"]
    put(tmp_path / file, b"1\t2.0\tfine\n" + line + b"\n")
    assert one(vader.read(str(tmp_path)).problems).startswith(f"{file} line 2 {message}")


def test_a_domain_without_sentences_is_refused(tmp_path):
    for name, content in vader_files().items():
        put(tmp_path / name, content)
    put(tmp_path / vader.FILES["nyt"], b"1_1\t0.1\tneither\n")
    assert one(vader.read(str(tmp_path)).problems).startswith("nytEditorialSnippets_GroundTruth.txt holds no sentence")


def test_sentences_of_a_review_need_its_number(tmp_path):
    for name, content in vader_files().items():
        put(tmp_path / name, content)
    put(tmp_path / vader.FILES["amazon"], b"7\t2.0\tfine\n")
    assert "expected an id such as 12_3, a mean" in one(vader.read(str(tmp_path)).problems)
    (tmp_path / vader.FILES["amazon"]).unlink()
    assert one(vader.read(str(tmp_path)).problems).startswith("amazonReviewSnippets_GroundTruth.txt is missing")


def test_archives_that_are_none(tmp_path):
    files = vader_files()
    whole = packed(files, "hutto")
    cases = {
        "cut": (whole[: len(whole) // 2], "is cut off, damaged or no tar.gz"),
        "other": (b"PK no tar", "is cut off, damaged or no tar.gz"),
        "wheel": (packed({"lexicon.txt": b"x"}, "v"), "holds none of movieReviewSnippets_GroundTruth.txt, "),
        "inside": (packed({INNER: whole[:50]}, "v"), f"/{INNER} is cut off, damaged or no tar.gz"),
    }
    for kind, (content, message) in cases.items():
        file = put(tmp_path / kind / "vaderSentiment-3.3.2.tar.gz", content)
        with pytest.raises(ValueError, match=re.escape(message)):
            vader.read(str(file.parent))
    for path, message in ((tmp_path / "no", "does not exist"), (tmp_path, "holds none of the files")):
        if path.exists():
            path = path / "empty"
            path.mkdir()
        with pytest.raises(ValueError, match=f"{message}: give the folder of vaderSentiment's source distribution"):
            vader.read(str(path))
    for place in "ab":
        put(tmp_path / "two" / place / vader.FILES["movie"], b"")
    with pytest.raises(ValueError, match="both hold sentences of vader_sentiment: give one of them"):
        vader.read(str(tmp_path / "two"))


def test_reviews_are_not_torn_apart_by_a_split(tmp_path):
    for name, content in vader_files().items():
        put(tmp_path / name, content)
    domains = datasets.load("vader_sentiment", data_dir=str(tmp_path))
    for seed in range(5):
        validation = splits.draw(domains, None, 0.5, seed)
        assert not set(domains.identity[validation]) & set(domains.identity[~validation])
        items = [len(np.unique(domains.identity[validation & (domains.domain == g)])) for g in range(4)]
        assert items == [4, 2, 2, 4]  # half of the items of each domain
    for split in ("domainbed", "90/10"):
        with pytest.raises(ValueError, match=f"split={split} .* in vader_sentiment several may be parts of one item"):
            splits.draw(domains, split, None, 0)
    federation = federate(domains, "tweets", 2, 2, validation_fraction=0.5)
    assert bool(federation.evaluation.unseen.all())


# --- tokens -----------------------------------------------------------------------------------------------------------


def reference(folder, family):
    """The same, put together as the package's own manual does."""
    if family == "bert":
        tokenizer = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt")))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    else:
        tokenizer = ByteLevelBPETokenizer(*models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        after, before = {"roberta": (("</s>", 2), ("<s>", 0)), "deberta": (("[SEP]", 2), ("[CLS]", 1))}[family]
        tokenizer._tokenizer.post_processor = processors.RobertaProcessing(after, before)
    return tokenizer


@pytest.mark.parametrize("family", ["roberta", "deberta", "bert"])
@pytest.mark.parametrize("max_length", [12, 500])
def test_tokens_are_those_of_the_package(tmp_path, family, max_length):
    folder = model_folder(tmp_path, family)
    vocabulary = tokenizing.read_folder(folder)
    ids, lengths = tokenizing.encode(vocabulary, TEXTS, max_length)
    expected = reference(folder, family)
    assert lengths.tolist() == [len(expected.encode(text).ids) for text in TEXTS]
    expected.enable_truncation(max_length)
    rows = [expected.encode(text).ids for text in TEXTS]
    assert ids.dtype == np.int32 and ids.shape == (6, min(max_length, lengths.max()))
    assert [row[row >= 0].tolist() for row in ids] == rows
    assert [int((row >= 0).sum()) for row in ids] == np.minimum(lengths, max_length).tolist()
    assert all((row[: (row >= 0).sum()] >= 0).all() for row in ids)  # -1 only at the end
    first, last = {"roberta": (0, 2), "deberta": (1, 2), "bert": (2, 3)}[family]
    assert set(ids[:, 0]) == {first} and {row[row >= 0][-1] for row in ids} == {last}
    assert vocabulary.size == expected.get_vocab_size() > ids.max()


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path):
    tokenizer = reference(model_folder(tmp_path / "a", "deberta"), "deberta")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    (tmp_path / "b").mkdir()
    tokenizer.save(str(tmp_path / "b" / "tokenizer.json"))
    ours, theirs = (tokenizing.read_folder(tmp_path / name) for name in "ba")
    assert np.array_equal(tokenizing.encode(ours, TEXTS, 30)[0], tokenizing.encode(theirs, TEXTS, 30)[0])
    assert (ours.before, ours.after, ours.size) == ((1,), (2,), theirs.size)


def test_a_tokenizer_json_that_does_not_frame_is_framed_by_its_family(tmp_path):
    folder = model_folder(tmp_path, "roberta", vocab_size=512)
    plain = ByteLevelBPETokenizer(*models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    plain.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizing.read_folder(folder)
    assert (vocabulary.before, vocabulary.after, vocabulary.size) == ((0,), (2,), 512)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="does not say which tokens frame a text: add the model's config.json"):
        tokenizing.read_folder(folder)


def test_options_of_a_tokenizer_are_read(tmp_path):
    folder = model_folder(tmp_path / "bert", "bert")
    lower = tokenizing.read_folder(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "strip_accents": false}')
    cased = tokenizing.read_folder(folder)
    ids = [tokenizing.encode(v, ["The é"], 9)[0][0].tolist() for v in (lower, cased)]
    the, e, accented = (lower.tokenizer.token_to_id(token) for token in ("the", "e", "é"))
    assert ids == [[2, the, e, 3], [2, 1, accented, 3]]  # in lower case without accents; or unknown, and as it is
    folder = model_folder(tmp_path / "roberta", "roberta")
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    spaced = tokenizing.read_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    plain = tokenizing.read_folder(folder)
    assert np.array_equal(tokenizing.encode(spaced, ["film"], 9)[0], tokenizing.encode(plain, [" film"], 9)[0])


FOLDERS = {
    "not there": (lambda f: f.rename(f.with_name("other")), "is no folder: give a folder with tokenizer.json"),
    "nothing": (lambda f: (f / "merges.txt").unlink(), "holds no tokenizer: give a folder with tokenizer.json"),
    "damaged": (lambda f: (f / "vocab.json").write_text("{"), "vocab.json or .*merges.txt cannot be read"),
    "no config": (lambda f: (f / "config.json").unlink(), "does not say which tokens frame a text"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
    "family": (
        lambda f: (f / "config.json").write_text('{"model_type": "robeta"}'),
        "Unknown model_type in .*config.json 'robeta'; did you mean 'roberta'",
    ),
    "other family": (
        lambda f: (f / "config.json").write_text('{"model_type": "deberta"}'),
        r"has no \[CLS\] and no \[SEP\], which frame a text of model_type deberta",
    ),
    "too many": (
        lambda f: (f / "config.json").write_text('{"model_type": "roberta", "vocab_size": 100}'),
        r"has ids up to \d+, but config.json there says vocab_size=100",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_without_a_sound_tokenizer(tmp_path, folder, kind):
    spoil, message = FOLDERS[kind]
    model = model_folder(tmp_path / "model", "roberta")
    spoil(model)
    with pytest.raises(ValueError, match=message):
        datasets.load("text_folder", data_dir=str(folder), tokenizer=model)


def test_a_trained_tokenizer(folder):
    domains = datasets.load("text_folder", data_dir=str(folder), vocab_size=300)
    assert domains.vocab_size == 300 and domains.inputs.max() < 300
    assert set(domains.inputs[:, 0]) == {0} and all(row[row >= 0][-1] == 2 for row in domains.inputs)
    assert "BPE trained on the texts of all domains, without labels, 300 tokens." in domains.notice
    vocabulary = tokenizing.train(text_files.read(str(folder)).texts, 300)
    assert np.array_equal(domains.inputs, tokenizing.encode(vocabulary, text_files.read(str(folder)).texts, 128)[0])
    strange = "Ünseen 猫 </s>"  # no bytes are unknown, and a written token is text
    ids = [row[row >= 0] for row in tokenizing.encode(vocabulary, [strange], 99)[0]][0]
    assert 2 not in ids[1:-1] and 3 not in ids
    with pytest.raises(ValueError, match="vocab_size=260 is less than the 261 of all bytes and special tokens"):
        datasets.load("text_folder", data_dir=str(folder), vocab_size=260)


def test_a_held_out_domain_is_not_seen_by_the_trained_tokenizer(folder):
    (folder / "songs.jsonl").write_text(json.dumps({"text": "zzzzzzzz " * 50, "label": "good"}) + "\n")
    load = lambda held_out: datasets.load("text_folder", data_dir=str(folder), vocab_size=600, held_out=held_out)
    seen, unseen, other = load(None), load("songs"), load("books")
    song = lambda domains: int((domains.inputs[domains.domain == 2] >= 0).sum())
    assert song(seen) < 100 and song(other) < 100 and song(unseen) == 128
    assert "of all domains but songs, without" in unseen.notice
    with pytest.raises(ValueError, match="Unknown held-out domain 'song'; did you mean 'songs'"):
        load("song")


def test_long_texts_are_cut_and_counted(folder):
    uncut = datasets.load("text_folder", data_dir=str(folder))
    assert "cut" not in uncut.notice
    sizes = (uncut.inputs >= 0).sum(1)
    longest, limit = sizes.max(), int(np.median(sizes))
    assert uncut.inputs.shape == (24, longest) and limit < longest
    domains = datasets.load("text_folder", data_dir=str(folder), max_length=limit)
    assert domains.inputs.shape == (24, limit)
    assert (
        f"{(sizes > limit).sum()} of 24 texts have more than {limit} tokens, up to {longest}, and are cut."
        in domains.notice
    )
    assert np.array_equal(domains.inputs[:, : limit - 1][sizes > limit], uncut.inputs[:, : limit - 1][sizes > limit])
    assert (domains.inputs[sizes > limit, -1] == 2).all()
    for length, message in (
        (2, "max_length=2 leaves no room beside the 2 special tokens"),
        (0, "max_length=0 is not pos"),
    ):
        with pytest.raises(ValueError, match=message):
            datasets.load("text_folder", data_dir=str(folder), max_length=length)


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizers, which is not installed: run `pip install 'fedjax-dg\[text\]'`"):
        datasets.load("text_folder", data_dir=str(folder))
    assert check_files("text_folder", str(folder)).ok


# --- kept tokens ------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """How often texts were tokenised."""
    calls, encode = [], tokenizing.encode
    monkeypatch.setattr(tokenizing, "encode", lambda *args: calls.append(1) or encode(*args))
    return calls


def load(folder, **options):
    return datasets.load("text_folder", data_dir=str(folder), **options)


def test_tokens_are_kept_and_mapped(folder, own_cache, encoded):
    first, second = load(folder), load(folder)
    assert len(encoded) == 1 and isinstance(second.inputs, np.memmap)
    assert np.array_equal(first.inputs, second.inputs) and second.inputs.dtype == np.int32
    assert (first.notice, first.vocab_size) == (second.notice, second.vocab_size)
    assert sorted(file.suffix for file in own_cache.iterdir()) == [".json", ".npy"]
    assert all(federate(x, "songs", 1, 2).clients.inputs.shape[-1] == x.inputs.shape[1] for x in (first, second))


def test_whatever_the_tokens_depend_on_makes_them_anew(tmp_path, folder, encoded):
    model = model_folder(tmp_path / "model", "roberta")
    options = [
        {},
        {"max_length": 9},
        {"vocab_size": 270},
        {"held_out": "books"},
        {"held_out": "songs"},
        {"tokenizer": model},
    ]
    options += [{"tokenizer": model, "max_length": 9}, {"cache_dir": tmp_path / "else"}]
    for number, given in enumerate(options, 1):
        load(folder, **given)
        assert len(encoded) == number
    for given in options:
        load(folder, **given)
    assert len(encoded) == len(options)
    (model / "config.json").write_text('{"model_type": "roberta", "vocab_size": 999}')
    assert load(folder, tokenizer=model).vocab_size == 999
    texts_before = (folder / "songs.jsonl").read_text()
    (folder / "songs.jsonl").write_text(texts_before.replace("200", "201"))
    changed = load(folder)
    assert len(encoded) == len(options) + 2
    (folder / "songs.jsonl").write_text(texts_before)
    assert not np.array_equal(changed.inputs, load(folder).inputs) and len(encoded) == len(options) + 2


DAMAGE = {
    "token": lambda ids, about: ids.write_bytes(ids.read_bytes()[:-4] + b"\x05\x00\x00\x00"),
    "cut off": lambda ids, about: ids.write_bytes(ids.read_bytes()[:-100]),
    "empty": lambda ids, about: ids.write_bytes(b""),
    "gone": lambda ids, about: ids.unlink(),
    "about gone": lambda ids, about: about.unlink(),
    "about cut off": lambda ids, about: about.write_bytes(about.read_bytes()[:-20]),
    "about changed": lambda ids, about: about.write_text(about.read_text().replace('"cut": 0', '"cut": 7')),
    "about another": lambda ids, about: about.write_text("[]"),
    "about emptied": lambda ids, about: about.write_text("{}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_tokens_are_made_again(folder, own_cache, encoded, kind):
    sound = load(folder)
    (ids,), (about,) = own_cache.glob("*.npy"), own_cache.glob("*.json")
    DAMAGE[kind](ids, about)
    again = load(folder)
    assert len(encoded) == 2 and np.array_equal(again.inputs, sound.inputs) and again.notice == sound.notice
    assert isinstance(load(folder).inputs, np.memmap) and len(encoded) == 2


def test_a_write_that_fails_leaves_nothing_and_is_told(folder, own_cache, encoded, monkeypatch):
    def full(file, array):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        domains = load(folder)
    assert f"Tokens could not be kept in {own_cache} (No space left on device)" in domains.notice
    assert list(own_cache.iterdir()) == [] and np.array_equal(load(folder).inputs, domains.inputs)
    own_cache.parent.joinpath("file").write_text("")
    assert "could not be kept" in load(folder, cache_dir=own_cache.parent / "file").notice


# --- runs and checks --------------------------------------------------------------------------------------------------


def test_a_run_reads_texts(tmp_path, folder):
    model = model_folder(tmp_path / "model", "deberta", vocab_size=400)
    options = {"dataset": "text_folder", "data_dir": str(folder), "held_out": "songs", "backbone": "deberta_tiny"}
    domains = load_data(check(RunConfig(**options, max_length=9)))
    assert domains.inputs.shape[1] == 9 and "all domains but songs" in domains.notice
    assert "texts of all domains," in load_data(check(RunConfig(**options | {"held_out": "all"}))).notice
    domains = load_data(check(RunConfig(**options, pretrained=str(model))))
    assert domains.vocab_size == 400 and f"Tokenizer: {model}, 400 tokens." in domains.notice
    for given, message in (
        ({"max_length": 0}, "max_length=0 is not positive"),
        (
            {"dataset": "emoji_styles", "data_dir": None, "max_length": 9, "backbone": "lenet5"},
            "max_length=9 is given, but emoji_styles holds no",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_data(check(RunConfig(**options | given)))


def test_checks_of_texts(tmp_path, folder, capsys):
    assert main(["data", "check", "text_folder", "--data-dir", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"domain +texts +bad +good", printed) and re.search(r"films +8 +4 +4", printed)
    root = write_reviews(tmp_path / "sorted_data_acl")
    assert main(["data", "check", "amazon_reviews", "--data-dir", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["root"] == str(root) and found["expected"] == [2000] * 4 and found["counts"] == [[3, 3]] * 4
    assert len(found["problems"]) == 4 and found["version"] is None and found["unit"] == "reviews"
    assert found["problems"][0].startswith(
        "books has 6 reviews (negative 3 for 1,000, positive 3 for 1,000), expected 2,000 of amazon_reviews"
    )
    assert (
        "amazon_reviews: 24 reviews; the published set has 8,000."
        in datasets.load("amazon_reviews", data_dir=str(tmp_path)).notice
    )
    (problem,) = check_files("vader_sentiment", str(folder)).problems
    assert "holds none of the files" in problem


def test_published_numbers_of_the_sentences_are_known():
    assert texts.SUMMARIES["vader_sentiment"].num_examples == 10_072 + 2_985 + 2_970 + 3_432
    for name in texts.READERS:
        assert datasets.describe(name).startswith(f"{name}: ")
    assert "domain.csv" in datasets.describe("text_folder")


def test_items_within_and_across_domains():
    data = tiny_domains(per_domain=12)
    within = data._replace(identity=np.arange(36, dtype=np.int32) // 4)
    assert np.bincount(data.domain[splits.at_random(within, 0.34, 0)]).tolist() == [4, 4, 4]
    across = data._replace(
        identity=np.argsort(np.argsort(data.domain, kind="stable"), kind="stable").astype(np.int32) % 12
    )
    chosen = splits.at_random(across, 0.25, 1)
    assert np.bincount(data.domain[chosen]).tolist() == [3, 3, 3] and len(np.unique(across.identity[chosen])) == 3
