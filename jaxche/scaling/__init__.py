"""The noise scale of gradients, and learning rates that follow the batch."""

from jaxche.scaling import noise_scale
from jaxche.scaling._round_noise import local_estimates as local_estimates
from jaxche.scaling._round_noise import update_from_estimates as update_from_estimates
from jaxche.scaling._round_noise import update_from_one as update_from_one
from jaxche.scaling._rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRule,
    SqrtScale,
    effective_replicas,
)
from jaxche.scaling._second_moments import has_moments_of_magnitudes as has_moments_of_magnitudes
from jaxche.scaling._second_moments import has_second_moments as has_second_moments
from jaxche.scaling._transform import ScaleLearningRateState, progress_schedule, scale_learning_rate
from jaxche.scaling._transform import with_extra_args as with_extra_args

# For users; what is imported "as" itself is for the other packages.
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
