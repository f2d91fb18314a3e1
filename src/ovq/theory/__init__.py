"""The theory of OVQ attention as executable equations, in float64; see ``docs/theory.md``.

A statement is a function named by its claim (``..._is_...``): it computes both sides from their own
definitions and returns them as :class:`Sides`. For reading and testing: no speed, nothing of the
operators, layers or models.
"""

from ovq.theory.dictionary_read import (
    dictionary_read,
    dictionary_read_is_conditional_mean,
    isotropic_mixture,
    norm_corrected_read,
    norm_corrected_read_is_conditional_mean,
)
from ovq.theory.expectation_maximization import (
    em_step,
    em_step_is_newton_step,
    em_step_is_newton_step_of_surrogate,
    likelihood_hessian_is_complete_minus_missing,
    surrogate_gradient_is_likelihood_gradient,
)
from ovq.theory.gaussian_mixture_regression import (
    GaussianMixture,
    conditional_mean,
    conditional_mean_is_ratio_of_integrals,
    joint_density,
)
from ovq.theory.hard_assignment import (
    assigned_error,
    kmeans_step_is_newton_step,
    quantization_error,
    running_means_step_is_gradient_step,
    running_means_step_is_newton_step,
)
from ovq.theory.kernel_regression import (
    gaussian_kernel_regression,
    softmax_attention,
    softmax_attention_is_kernel_regression,
    softmax_attention_is_weighted_kernel_regression,
    squared_distances,
)
from ovq.theory.merged_keys import (
    dictionary_read_is_softmax_attention,
    exact_log_weight,
    exact_weight_is_above_merged_weight,
    exact_weight_is_second_order_weight,
    key_covariance,
    merged_log_weight,
    second_order_log_weight,
    trace_of_covariance_is_one_minus_squared_norm,
)
from ovq.theory.mixture_likelihood import (
    log_joint,
    negative_log_likelihood,
    responsibilities,
    surrogate,
)
from ovq.theory.newton import gradient_and_hessian, newton_step
from ovq.theory.running_means import (
    batch_means,
    chunked_means_are_batch_means,
    nearest_centroids,
    nearest_has_largest_product,
    online_kmeans_step,
    running_means_step,
)
from ovq.theory.sides import Sides

__all__ = [
    "GaussianMixture",
    "Sides",
    "assigned_error",
    "batch_means",
    "chunked_means_are_batch_means",
    "conditional_mean",
    "conditional_mean_is_ratio_of_integrals",
    "dictionary_read",
    "dictionary_read_is_conditional_mean",
    "dictionary_read_is_softmax_attention",
    "em_step",
    "em_step_is_newton_step",
    "em_step_is_newton_step_of_surrogate",
    "exact_log_weight",
    "exact_weight_is_above_merged_weight",
    "exact_weight_is_second_order_weight",
    "gaussian_kernel_regression",
    "gradient_and_hessian",
    "isotropic_mixture",
    "joint_density",
    "key_covariance",
    "kmeans_step_is_newton_step",
    "likelihood_hessian_is_complete_minus_missing",
    "log_joint",
    "merged_log_weight",
    "nearest_centroids",
    "nearest_has_largest_product",
    "negative_log_likelihood",
    "newton_step",
    "norm_corrected_read",
    "norm_corrected_read_is_conditional_mean",
    "online_kmeans_step",
    "quantization_error",
    "responsibilities",
    "running_means_step",
    "running_means_step_is_gradient_step",
    "running_means_step_is_newton_step",
    "second_order_log_weight",
    "softmax_attention",
    "softmax_attention_is_kernel_regression",
    "softmax_attention_is_weighted_kernel_regression",
    "squared_distances",
    "surrogate",
    "surrogate_gradient_is_likelihood_gradient",
    "trace_of_covariance_is_one_minus_squared_norm",
]
