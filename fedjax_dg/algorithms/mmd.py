"""MMD, features matched in a kernel space (Li et al., CVPR 2018), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg import penalties
from fedjax_dg.algorithms.common import classify, gradient_method, momentum
from fedjax_dg.types import Algorithm


class MMDHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    penalty: ArrayLike = 0.1  # gamma, the low end of DomainBed's range: at its default of 1 features collapse here


def mmd(
    hparams: MMDHparams = MMDHparams(), optimizer: Callable = momentum, gammas: tuple[float, ...] = penalties.GAMMAS
) -> Algorithm:
    """Features distributed alike: loss + gamma MMD^2, averaged over pairs of the batch's domains.

    Gaussian kernels exp(-g || a - b ||^2) for g in ``gammas`` are summed, by default DomainBed's 0.001, 0.01, ... 1000;
    the last of these turns float32's rounding of a feature into gradients 2000 times as large. gamma = 0 is FedAvg, and so
    is any gamma where clients hold one domain each. Upload: the model.

    Deviation: the paper's autoencoder with an adversarial prior is left out, as every benchmark does. Source: Li, Pan, Wang,
    Kot, CVPR 2018, https://openaccess.thecvf.com/content_cvpr_2018/html/Li_Domain_Generalization_With_CVPR_2018_paper.html.
    """

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        penalty = penalties.mmd(forward.z, penalties.rows_of(batch), gammas)
        return value + hparams.penalty * penalty, (forward, {"penalty": penalty})

    return gradient_method(loss, optimizer(hparams.client_lr))
