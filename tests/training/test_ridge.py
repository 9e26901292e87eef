"""The ridge regression by which connector and blocks start."""

import numpy as np
import torch

from helpers.references.ridge_regression import ridge


def test_the_regression_solves_the_penalised_equations():
    """A penalty that is missing, or a bias that belongs to other outputs."""
    generator = torch.Generator().manual_seed(0)
    features, targets = torch.randn(40, 6, generator=generator), torch.randn(40, 3, generator=generator)
    weight, bias = ridge(features, targets)
    inputs = np.vstack([np.hstack([features.numpy(), np.ones((40, 1))]), np.eye(7)])
    expected = np.linalg.lstsq(inputs, np.vstack([targets.numpy(), np.zeros((7, 3))]), rcond=None)[0]
    np.testing.assert_allclose(torch.cat([weight, bias[:, None]], dim=1).T, expected, atol=1e-5)
