"""RoBERTa and BERT: encoders with absolute positions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.backbones.transformer import EncoderConfig, text_backbone

ROBERTA_BASE = EncoderConfig("roberta", 50265, 768, 12, 12, 3072, 514, 1, 1e-5, pad_token_id=1)
BERT_BASE = EncoderConfig("bert", 30522, 768, 12, 12, 3072, 512, 2, 1e-12)
ROBERTA_TINY = EncoderConfig("roberta", 1000, 32, 2, 4, 64, 130, 1, 1e-5, pad_token_id=1)


def roberta(
    config: EncoderConfig | str | os.PathLike[str] | Mapping[str, Any],
    num_classes: int = 2,
    max_length: int = 128,
    dropout: float | None = None,
    freeze_encoder: bool = False,
    remat: bool = False,
) -> Backbone:
    """RoBERTa, or by its configuration BERT, with a classifier on the first token, for [B, max_length] token ids.

    Inputs are int32 ids with -1 where there is no token (``transformer.store_tokens``), or a tokenizer's
    (input_ids, attention_mask). ``config``: a folder of the model hub, its ``config.json``, or a record;
    ``weights.load(backbone, folder)`` then reads the weights. ``dropout``: of all layers, instead of the configuration's.
    ``freeze_encoder`` keeps the encoder as it is and in evaluation mode, and only the classifier trains. ``remat`` keeps of
    each layer only its input for the backward pass, and computes the rest anew: less memory, a third more time. (Not on CPU,
    where XLA's default schedule computes anew too early: no less memory; a model's own is what counts there.)

    RoBERTa's positions start behind its pad token's row (at 2), and pad tokens are recognised by their id; BERT's start
    at 0. Both are post-norm with the error function's GELU. Raises ``ValueError`` for another ``model_type``, a
    ``max_length`` without positions, a ``dropout`` outside [0, 1).
    Source: Liu et al., 2019, https://arxiv.org/abs/1907.11692; Devlin et al., NAACL 2019, https://arxiv.org/abs/1810.04805.

    >>> roberta(ROBERTA_TINY, num_classes=4).num_features
    32
    """
    return text_backbone(
        "roberta", ("roberta", "bert"), config, num_classes, max_length, dropout, freeze_encoder, remat
    )


def roberta_base(num_classes: int = 2, config: EncoderConfig = ROBERTA_BASE, **options: Any) -> Backbone:
    """``roberta`` of the published size: 124,645,632 parameters below its head, features of width 768."""
    return roberta(config, num_classes, **options)


def bert_base(num_classes: int = 2, config: EncoderConfig = BERT_BASE, **options: Any) -> Backbone:
    """``roberta`` of BERT's family and published size, uncased: features of width 768."""
    return roberta(config, num_classes, **options)


def roberta_tiny(num_classes: int = 2, config: EncoderConfig = ROBERTA_TINY, **options: Any) -> Backbone:
    """``roberta`` with two layers of width 32 and a vocabulary of 1,000, for tests and for CPU."""
    return roberta(config, num_classes, **options)
