"""OT fusion: every layer of every model aligned to a reference by optimal transport, then averaged."""

from __future__ import annotations

from jaxtyping import ArrayLike

from fedjax_dg.aggregators.hfedatm import hfedatm
from fedjax_dg.types import Aggregator


def otfusion(
    epsilon: ArrayLike = 0.05,
    matching: str = "sequential",
    cost: str = "squared",
    assignment: str = "sinkhorn",
    soft: bool = False,
    reference: str = "previous_global",
    weighting: str = "samples",
    bn_pool: str = "naive",
) -> Aggregator:
    """Weighted mean of models whose hidden units, of convolutions and dense layers, are put into the order of a reference.

    Layer by layer, the inputs of a layer are put in place first; then its units are matched to the reference's by the
    transport plan between their incoming weights, uniform marginals, cost D = 2 - 2 cos (``alignment.align``; options as
    there). Classes and pixels stay. What ``hfedatm(regmean=False, align_dense=True)`` does, weighted by examples.

    ``soft``: the transport plan itself, which mixes units, as in the paper; by default it is rounded to a permutation, so
    that no model's function changes and states shaped like parameters can follow. ``epsilon``, traced, is Sinkhorn's
    regularisation in standard deviations of the cost. ``reference``: ``previous_global``, or ``first``, one of the models
    as in the paper, here that of station 1. ``weighting``, ``bn_pool``: see ``mean``.

    State: none. Upload: the model. Info: as ``hfedatm``, ``fot`` per group and ``outputs_moved``. Raises ``ValueError`` for
    an unknown option.
    Deviations: permutations by default; units compared by direction, without their length; the bias moves along but is not
    compared; a regularised plan only, and no matching by activations; residual streams have one order for all their
    kernels; norms and their statistics move along.
    Source: Singh & Jaggi, NeurIPS 2020, https://arxiv.org/abs/1910.05653.
    """
    return hfedatm(
        epsilon=epsilon,
        regmean=False,
        matching=matching,
        cost=cost,
        assignment=assignment,
        soft=soft,
        reference=reference,
        align_dense=True,
        weighting=weighting,
        bn_pool=bn_pool,
    )
