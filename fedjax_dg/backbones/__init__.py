"""Networks, one family a file."""

from fedjax_dg.backbones.alexnet import alexnet
from fedjax_dg.backbones.backbone import PRECISIONS, Backbone, Forward, in_precision
from fedjax_dg.backbones.lenet import lenet5
from fedjax_dg.backbones.resnet import resnet18, resnet18_cifar, resnet50
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

__all__ = [
    "BACKBONES",
    "PRECISIONS",
    "Backbone",
    "Forward",
    "alexnet",
    "in_precision",
    "lenet5",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "vgg11",
    "vgg11_bn",
]
