"""Networks, one family a file."""

from fedjax_dg.backbones.alexnet import alexnet
from fedjax_dg.backbones.backbone import PRECISIONS, Backbone, Forward, in_precision
from fedjax_dg.backbones.deberta import DEBERTA_BASE, DEBERTA_TINY, deberta, deberta_base, deberta_tiny
from fedjax_dg.backbones.lenet import lenet5
from fedjax_dg.backbones.resnet import resnet18, resnet18_cifar, resnet50
from fedjax_dg.backbones.roberta import (
    BERT_BASE,
    ROBERTA_BASE,
    ROBERTA_TINY,
    bert_base,
    roberta,
    roberta_base,
    roberta_tiny,
)
from fedjax_dg.backbones.transformer import EncoderConfig, on_encoded, read_config, store_tokens
from fedjax_dg.backbones.vgg import vgg11, vgg11_bn

BACKBONES = {
    "lenet5": lenet5,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "vgg11_bn": vgg11_bn,
    "resnet18": resnet18,
    "resnet18_cifar": resnet18_cifar,
    "resnet50": resnet50,
}

#: For text: (num_classes, config=..., max_length=...) instead of images and their sizes.
TEXT_BACKBONES = {
    "roberta_base": roberta_base,
    "bert_base": bert_base,
    "deberta_base": deberta_base,
    "roberta_tiny": roberta_tiny,
    "deberta_tiny": deberta_tiny,
}

__all__ = [
    "BACKBONES",
    "BERT_BASE",
    "DEBERTA_BASE",
    "DEBERTA_TINY",
    "PRECISIONS",
    "ROBERTA_BASE",
    "ROBERTA_TINY",
    "TEXT_BACKBONES",
    "Backbone",
    "EncoderConfig",
    "Forward",
    "alexnet",
    "bert_base",
    "deberta",
    "deberta_base",
    "deberta_tiny",
    "in_precision",
    "lenet5",
    "on_encoded",
    "read_config",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "roberta",
    "roberta_base",
    "roberta_tiny",
    "store_tokens",
    "vgg11",
    "vgg11_bn",
]
