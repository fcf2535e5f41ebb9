"""Measures that methods and benchmarks share: pure functions of arrays and tensors."""

from hf_xai.metrics.images import psnr, relative_error
from hf_xai.metrics.intervals import bootstrap_interval, ratio_of_means

__all__ = ["bootstrap_interval", "psnr", "ratio_of_means", "relative_error"]
