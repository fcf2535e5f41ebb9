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
from hf_xai.gradients.projections import (
    GradientProjection,
    KroneckerProjection,
    RademacherProjection,
    RandomMaskProjection,
    SparseProjection,
    make_projection,
    projection_from_config,
)
from hf_xai.gradients.rows import RowLayout, segments_of_positions
from hf_xai.gradients.store import GradientStore
from hf_xai.gradients.store_config import GradientStoreConfig, parameters_fingerprint
from hf_xai.gradients.top_k import TopK

__all__ = [
    "DenseFactors",
    "FactorCollector",
    "GradientCapture",
    "GradientFactors",
    "GradientProjection",
    "GradientStore",
    "GradientStoreConfig",
    "IndexFactors",
    "KroneckerProjection",
    "OuterFactors",
    "ProductAccumulator",
    "RademacherProjection",
    "RandomMaskProjection",
    "RowLayout",
    "SparseProjection",
    "TopK",
    "adam_directions",
    "cosines",
    "cross_products",
    "gradient_norms",
    "gradient_products",
    "hookable_parameters",
    "make_projection",
    "mean_gradient",
    "pairwise_products",
    "parameters_fingerprint",
    "per_sample_gradients",
    "projection_from_config",
    "read_factors",
    "segments_of_positions",
]
