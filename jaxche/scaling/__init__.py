"""Layer 1, scaling: trees of gradients. How noisy they are, and how long a step a larger batch allows."""

from jaxche.scaling import noise_scale
from jaxche.scaling._deltas import effective_replicas
from jaxche.scaling._progress import progress_schedule
from jaxche.scaling._rules import AdamScale, AdaScale, LEGWScale, LinearScale, ScalingRule, SqrtScale
from jaxche.scaling._transform import ScaleLearningRateState, scale_learning_rate

__all__ = [
    "AdaScale",
    "AdamScale",
    "LEGWScale",
    "LinearScale",
    "ScaleLearningRateState",
    "ScalingRule",
    "SqrtScale",
    "effective_replicas",
    "noise_scale",
    "progress_schedule",
    "scale_learning_rate",
]
