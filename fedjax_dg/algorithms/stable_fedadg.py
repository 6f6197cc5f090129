"""Stable-FedADG (Zhao, Ai, 2025): FedADG between clients, stable learning inside each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg import reweighting
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.fedadg import FedADGHparams, adversarial
from fedjax_dg.types import Algorithm


class StableFedADGHparams(NamedTuple):
    client_lr: ArrayLike = 0.05  # lr_f
    adversary_lr: ArrayLike = 0.035  # lr_g and lr_d
    lambda_adv: ArrayLike = 0.15  # the printed lambda_0 is 0.85, and lambda_1 below 0.15: see ``fedadg``
    lambda_cls: ArrayLike = 0.85
    smoothing: ArrayLike = 0.0  # the paper has the plain cross-entropy
    label_scale: ArrayLike = 1.0
    lambda_p: ArrayLike = 0.5  # larger: more even weights
    weight_lr: ArrayLike = 1.0  # lr_w, of the inner descent; 0: even weights


#: The weights that the paper prints.
STABLE_FEDADG_PAPER = StableFedADGHparams(lambda_adv=0.85, lambda_cls=0.15)


def stable_fedadg(
    hparams: StableFedADGHparams = StableFedADGHparams(),
    optimizer: Callable = momentum,
    warmup_epochs: int = 3,
    adv_form: str = "ls",
    share_discriminator: bool = False,
    rectify: bool = True,
    noise_width: int = 0,
    generator_width: int = 0,
    discriminator_width: int = 0,
    fourier: int = 5,
    inner_steps: int = reweighting.STEPS,
    memory_rows: int = 0,
    persist_memory: bool = False,
    reweight_in_warmup: bool = True,
) -> Algorithm:
    """``fedadg`` whose classification loss is ``stablenet``'s: sum_i q_i CE_i, in the warm-up too (``reweight_in_warmup``).

    The adversarial terms stay unweighted. Order of a step: z = F(x), q, D, (F, C), G, memory. E0 = 3 and E1 = 5 passes a
    station round are the paper's (the command line's default), with batches of 64. Client state: D, its optimizer, and
    with ``persist_memory`` the memory, which holds features and never leaves. Upload: the model, which is F, C and G.
    weight_lr = 0 is FedADG to rounding. Raises ``ValueError`` as ``fedadg`` and ``stablenet``.

    Deviations: weights are solved per batch, where eq. (6) does so over a client's whole data; eq. (7)'s weights are
    squared, here they are those of a true weighted covariance; eqs. (4), (5), (9) are read as three problems with the others
    constant. The paper's learning rates are in a table that we could not obtain: ours are FedADG's and StableNet's.
    Source: Zhao, Ai, Open Journal of Applied Sciences 15(4), 2025, https://doi.org/10.4236/ojapps.2025.154067.
    """
    return adversarial(
        FedADGHparams(*(getattr(hparams, name) for name in FedADGHparams._fields)),
        optimizer,
        reweighting.weigher(hparams.lambda_p, hparams.weight_lr, fourier, inner_steps),
        warmup_epochs=warmup_epochs,
        adv_form=adv_form,
        share_discriminator=share_discriminator,
        rectify=rectify,
        widths=(noise_width, generator_width, discriminator_width),
        local_epochs=warmup_epochs + 5,
        weigh_warmup=reweight_in_warmup,
        memory=reweighting.memory_of(memory_rows, persist_memory),
    )
