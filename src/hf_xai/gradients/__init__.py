"""Gradients of single rows of data: read from hooks without being made, projected, stored and compared."""

from hf_xai.gradients.capture import GradientCapture, hookable_parameters
from hf_xai.gradients.factors import DenseFactors, GradientFactors, IndexFactors, OuterFactors, cross_products
from hf_xai.gradients.passes import mean_gradient, read_factors
from hf_xai.gradients.products import (
    FactorCollector,
    ProductAccumulator,
    adam_directions,
    cosines,
    gradient_norms,
    gradient_products,
    pairwise_products,
    per_sample_gradients,
)
from hf_xai.gradients.rows import RowLayout, segments_of_positions

__all__ = [
    "DenseFactors",
    "FactorCollector",
    "GradientCapture",
    "GradientFactors",
    "IndexFactors",
    "OuterFactors",
    "ProductAccumulator",
    "RowLayout",
    "adam_directions",
    "cosines",
    "cross_products",
    "gradient_norms",
    "gradient_products",
    "hookable_parameters",
    "mean_gradient",
    "pairwise_products",
    "per_sample_gradients",
    "read_factors",
    "segments_of_positions",
]
