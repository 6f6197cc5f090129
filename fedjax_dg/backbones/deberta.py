"""DeBERTa (v1): an encoder whose attention looks at contents and at distances apart from each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.backbones.transformer import POSITION_TERMS, EncoderConfig, text_backbone

DEBERTA_BASE = EncoderConfig(
    "deberta", 50265, 768, 12, 12, 3072, 512, 0, 1e-7,
    position_biased_input=False, max_relative_positions=512, pos_att_type=POSITION_TERMS,
)  # fmt: skip
DEBERTA_TINY = DEBERTA_BASE._replace(
    vocab_size=1000,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=128,
    max_relative_positions=128,
)


def deberta(
    config: EncoderConfig | str | os.PathLike[str] | Mapping[str, Any],
    num_classes: int = 2,
    max_length: int = 128,
    dropout: float | None = None,
    freeze_encoder: bool = False,
    remat: bool = False,
) -> Backbone:
    """DeBERTa v1 with a classifier on the first token; inputs, arguments and errors as ``roberta``.

    Attention adds to content the terms from content to distance and back (``transformer.Layer.disentangled_scores``); there
    are no absolute positions unless the configuration says so, so inputs may have any length. Projections of the table of
    distances read parameters, not examples: RegMean leaves them to the mean. v2 and v3 are other networks.
    Source: He et al., ICLR 2021, https://arxiv.org/abs/2006.03654.

    >>> deberta(DEBERTA_TINY, num_classes=4).num_features
    32
    """
    return text_backbone("deberta", ("deberta",), config, num_classes, max_length, dropout, freeze_encoder, remat)


def deberta_base(num_classes: int = 2, config: EncoderConfig = DEBERTA_BASE, **options: Any) -> Backbone:
    """``deberta`` of the published size: 138,601,728 parameters in its encoder, features of width 768."""
    return deberta(config, num_classes, **options)


def deberta_tiny(num_classes: int = 2, config: EncoderConfig = DEBERTA_TINY, **options: Any) -> Backbone:
    """``deberta`` with two layers of width 32 and a vocabulary of 1,000, for tests and for CPU."""
    return deberta(config, num_classes, **options)
