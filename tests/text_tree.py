"""Texts and models on disk as users have them: files of labelled sentences, folders of a published model."""

import json

import numpy as np
import safetensors.numpy
from tokenizers import ByteLevelBPETokenizer

from fedjax_dg.alignment.groups import leaves_of

WORDS = (
    *("the", "plot", "of", "this", "film", "was", "dull", "but", "its", "cast", "and", "made", "me", "smile,"),
    "don't!",
)


def sentence(number, words=6):
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(WORDS, words)) + f" {number}"


TEXTS = tuple(sentence(i, words) for i, words in enumerate((3, 40, 8, 1, 25))) + (
    "Café naïve 🙂  two  spaces\n<s> [SEP]",
)
CONTROL = {"roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), "deberta": ("[PAD]", "[CLS]", "[SEP]", "[UNK]")}
CONTROL["bert"] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_folder(folder, num=8, names=("books.csv", "films.tsv", "songs.jsonl")):
    """Three files of ``num`` texts, good and bad in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        rows = [(sentence(100 * place + i), ("good", "bad")[i % 2]) for i in range(num)]
        if name.endswith(".jsonl"):
            lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        else:
            mark = "," if name.endswith(".csv") else "\t"
            quote = '"' if name.endswith(".csv") else ""
            lines = [f"label{mark}text", *(f"{label}{mark}{quote}{text}{quote}" for text, label in rows)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def review(text, rating):
    return (
        f"<review>\n<unique_id>\n1:a&b\n</unique_id>\n<unique_id>\n2\n</unique_id>\n<rating>\n{rating}\n</rating>\n"
        f"<title>\nA <b>title</b> & more\n</title>\n<review_text>\n{text}\n</review_text>\n</review>\n"
    )


def write_reviews(root, num=3, domains=("books", "dvd", "electronics", "kitchen_&_housewares")):
    for place, domain in enumerate(domains):
        (root / domain).mkdir(parents=True)
        for kind, rating in (("negative", 1.0), ("positive", 5.0)):
            content = "".join(review(sentence(100 * place + i), rating) for i in range(num))
            (root / domain / f"{kind}.review").write_text(content, encoding="latin-1")
    return root


def model_folder(folder, family, **config):
    """Files of a small model as they are published: byte-level BPE trained here, or BERT's word pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    if family == "bert":
        pieces = [
            *CONTROL["bert"],
            *"abcdefghijklmnopqrstuvwxyzé0123456789",
            *(f"##{x}" for x in "abcdefghijklmnopqrstuvwxyz"),
        ]
        (folder / "vocab.txt").write_text("\n".join([*pieces, "the", "film", "dull", "!", "##0", "##1"]) + "\n")
        return folder
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS[:5], vocab_size=320, special_tokens=list(CONTROL[family]), show_progress=False)
    trained.save_model(str(folder))
    return folder


def publish(folder, backbone, variables, without=()):
    """Writes a model's weights under the names that published files have, but for layers below ``without``."""
    kinds, state = {"kernel": "weight", "embedding": "weight", "scale": "weight"}, {}
    for leaf, x in leaves_of(variables).items():
        _, *layer, kind = leaf.split("/")
        if layer[0] not in without:
            name = backbone.weight_names["/".join(layer)][0]
            array = np.asarray(x)
            state[f"{name}.{kinds.get(kind, kind)}"] = np.ascontiguousarray(array.T if kind == "kernel" else array)
    safetensors.numpy.save_file(state, folder / "model.safetensors")
    return folder
