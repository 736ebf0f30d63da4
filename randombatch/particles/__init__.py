"""Interacting particles by the random batch method: systems, kernels, steppers, one driver, and the error predicted.

    dX_i = b(X_i) dt + 1/(N-1) sum_{j != i} m_j K(X_i, X_j) dt + sigma dW_i

| file | what it says |
|---|---|
| kernels.py | K, each with its dense form and valid range |
| singular.py | kernels that grow without bound as particles meet, with their exact pair flows |
| pair_motion.py | two particles alone: what exact pair flows are made of |
| spaces.py | R^d, periodic box, unit sphere |
| system.py | drift, kernel, masses, noise, friction together, and the force in a batch |
| batches.py | who interacts in a step: all, a division, random picks |
| steppers.py | Euler, RK4, exact pair flow, BAOAB: one batch through one step |
| simulation.py | the state, which stays in the order of the last division, and one step of it |
| driver.py | `simulate`: particles through time |
| observables.py | what one looks at in a state |
| compiled.py | the same Euler step for small batches as machine code |
| theory.py | covariance of the batch force, Lyapunov equation, `predict_error` |
| rates.py | `convergence`: measures what theory.py predicts |
| study.py | `randombatch converge`: all of it with its files |
| softmax.py | attention normalised inside the batch, which the theory does not cover |
"""

from randombatch.particles import observables
from randombatch.particles.driver import Trajectory, simulate
from randombatch.particles.kernels import (
    Attention,
    BoundedConfidence,
    Consensus,
    CuckerSmale,
    Function,
    Gaussian,
    Kernel,
    Morse,
    Wealth,
)
from randombatch.particles.rates import convergence, measure_error, softmax_floor
from randombatch.particles.singular import Coulomb, LogGas
from randombatch.particles.softmax import SoftmaxAttention
from randombatch.particles.spaces import Box, Euclidean, Sphere
from randombatch.particles.system import System, dyson, wealth
from randombatch.particles.theory import predict_error

__all__ = [
    "Attention",
    "BoundedConfidence",
    "Box",
    "Consensus",
    "Coulomb",
    "CuckerSmale",
    "Euclidean",
    "Function",
    "Gaussian",
    "Kernel",
    "LogGas",
    "Morse",
    "SoftmaxAttention",
    "Sphere",
    "System",
    "Trajectory",
    "Wealth",
    "convergence",
    "dyson",
    "measure_error",
    "observables",
    "predict_error",
    "simulate",
    "softmax_floor",
    "wealth",
]
