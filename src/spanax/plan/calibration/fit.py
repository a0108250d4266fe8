"""The fit of constants to measured steps: maximum a posteriori, near the numbers of the catalog.

A constant is the logarithm of how many times as long its work takes. All constants have a common factor, the speed of
the machine, and a smaller one of their own. So one run, which says how long all work takes together, moves them nearly
alike, and many layouts tell them apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

COMMON_WIDTH = 0.5
"""Prior standard deviation of the common factor, in logarithms.

Source: predictions are 1.4 to 2.1 times the measured times on 8 simulated devices, notes/planner.md.
"""

SEPARATE_WIDTH = 0.25
"""Prior standard deviation of each constant's factor, in logarithms.

Source: chosen among 0.1 to 1 on 58 layouts, where errors differ by less than 1 %: the data decide little.
"""

MODEL_ERROR = 0.05
"""The relative error of a prediction with the best constants, one layout to another."""

LARGEST = 3.0
"""The largest logarithm of a factor, 20 times: the limit of steps of the fit."""

SMALLEST_SHARE = 0.01
"""A constant that changes no measured step by this share of it is not fitted."""

DIFFERENCE = 1e-3
"""The step of finite differences, in logarithms."""

Predict = Callable[[Array], Array]
"""Returns the logarithms of predicted seconds, given those of the factors."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """The factors that fit best, in logarithms.

    Attributes:
      factors: one per constant; 0 for those that are not fitted.
      covariance: their covariance; 0 for those that are not fitted.
      is_fitted: whether the measurements depend on each constant.
    """

    factors: Array
    covariance: Array
    is_fitted: Array

    def uncertainty(self, sensitivity: Array) -> Array:
        """Returns the relative standard deviation of predictions with a sensitivity to each constant."""
        variance = np.einsum("...i,ij,...j->...", sensitivity, self.covariance, sensitivity)
        return np.sqrt(variance + MODEL_ERROR**2)


def sensitivity(predict: Predict, factors: Array) -> Array:
    """Returns the derivatives of predictions by factors, all in logarithms: (prediction, constant)."""
    columns = [predict(factors + DIFFERENCE * unit) for unit in np.eye(len(factors))]
    return np.stack([(column - predict(factors)) / DIFFERENCE for column in columns], axis=1)


def fitted(predict: Predict, measured: Array, errors: Array, num_constants: int) -> Posterior:
    """Returns the factors of the largest posterior probability, by Gauss-Newton steps.

    Args:
      predict: the cost model.
      measured: logarithms of measured seconds.
      errors: relative standard errors of the measurements, without `MODEL_ERROR`.
      num_constants: the number of factors.

    Source: Tarantola, "Inverse Problem Theory" (2005), eq. 3.51.

    Example:
      >>> shares = np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
      >>> posterior = fitted(lambda x: shares @ x, shares @ [0.3, -0.1], np.zeros(3), 2)
      >>> posterior.factors.round(1).tolist()
      [0.3, -0.1]
    """
    factors = np.zeros(num_constants)
    is_fitted = np.abs(sensitivity(predict, factors)).max(0) >= SMALLEST_SHARE
    prior = COMMON_WIDTH**2 + SEPARATE_WIDTH**2 * np.eye(num_constants)
    prior = np.where(np.outer(is_fitted, is_fitted), prior, 0.0)
    noise = np.diag(errors**2 + MODEL_ERROR**2)
    covariance = prior
    for _ in range(20):
        slope = sensitivity(predict, factors)
        gain = prior @ slope.T @ np.linalg.inv(slope @ prior @ slope.T + noise)
        target = gain @ (measured - predict(factors) + slope @ factors)
        step = np.clip(target, -LARGEST, LARGEST) - factors
        factors = factors + step
        covariance = prior - gain @ slope @ prior
        if np.abs(step).max(initial=0.0) < 1e-4:
            break
    return Posterior(factors, covariance, is_fitted)
