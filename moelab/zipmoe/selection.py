"""Selection probabilities: conditional Bernoulli sampling of k experts a step with given inclusion
probabilities.

Source: ZipMoE §3.4 and appendix D (eq. 15–24), after Chen, Dempster and Liu, "Weighted finite
population sampling to maximize entropy", Biometrika 81 (1994). Of all distributions over sets of k
experts of which rank r is in a share f_r, the one of maximum entropy is that of independent
Bernoulli variables with probabilities q_r, given that their sum is k. Finding q from f is a concave
problem in the log odds λ_r = log(q_r / (1 − q_r)), with gradient f − f(λ).

The paper solves it by iterative proportional fitting, w_r ← w_r · f_r / f_r(w) with w = e^λ (its
printed update, w_r ← w_r · f_r / R(k, N), is a misprint), which converges slowly where an f_r is
near 1. Levenberg and Marquardt's method takes some seven rounds; its Jacobian is the covariance of
the experts.

Shapes: f, q [E], by rank. Steps with different numbers of experts are only approximated, by
`whole`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit

#: nearer than this to 0 or 1, an inclusion probability counts as 0 or 1
CERTAIN = 1e-12


def selection_probabilities(f: np.ndarray) -> tuple[np.ndarray, int]:
    """(q [E], k), P(r selected | k selected in all) = f_r (ZipMoE eq. 24), of the f that `whole`
    gives.

    Multiplying all odds q / (1 − q) by one number changes nothing given k; they are chosen so that
    q, too, sums to k.

    f : [E], shares of steps that need the expert of each rank, in any order."""
    f, k = whole(f)
    return _uncertain(f, k, _fit), k


def whole(f: np.ndarray) -> tuple[np.ndarray, int]:
    """The nearest (f, k) with f summing to an integer k, for steps whose number of experts varies,
    as of a batch.

    k is the mean number, rounded; all odds f / (1 − f) are multiplied by one number until they sum
    to it."""
    f = np.asarray(f, np.float64)
    k = round(float(f.sum()))
    return _uncertain(f, k, lambda inner, m: _shifted(logit(inner), m)[1]), k


def _uncertain(f: np.ndarray, k: int, solve: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """f with its certain entries rounded, and the m of k that are left distributed over the others
    by `solve`."""
    out = (f > 0.5).astype(np.float64)
    inner = (f > CERTAIN) & (f < 1 - CERTAIN)
    m = k - int(out[~inner].sum())
    # where all or none of the others are left, they are as certain as rounding lets them be
    out[inner] = solve(f[inner], m) if 0 < m < inner.sum() else float(m > 0)
    return out


def inclusion(q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(f [E], pairs [E, E]): P(r selected | k selected) and P(r and s selected | k selected), s <
    r; 0 elsewhere.

    Row i of `counts` is the distribution of the number selected so far, jointly with i being one of
    them; the last row is without that condition. Sums of products of probabilities only."""
    E = len(q)
    after = np.zeros((E + 1, k + 1))  # [r, h]: P(h among the ranks from r on)
    after[E, 0] = 1
    for r in reversed(range(E)):
        after[r] = add_one(after[r + 1], q[r])
    f = np.zeros(E)
    pairs = np.zeros((E, E))
    counts = np.zeros((E + 1, k + 1))
    counts[E, 0] = 1
    for r in range(E):
        joint = counts[:, :k] @ after[r + 1, k - 1 :: -1] * (q[r] / after[0, k])  # [E + 1]
        pairs[r], f[r] = joint[:E], joint[E]
        row = np.concatenate([[0], counts[E, :k] * q[r]])
        counts = add_one(counts, q[r])
        counts[r] = row
    return f, pairs


def sample(q: np.ndarray, k: int, n: int, seed: int = 0) -> np.ndarray:
    """n independent draws of k experts with the selection probabilities q: bool [n, E], k in each
    row.

    They have the popularity of a recorded run, but a step tells nothing about the next.
    """
    rng = np.random.default_rng(seed)
    E = len(q)
    found = [np.zeros((0, E), bool)]
    missing = n
    while missing > 0:
        draws = rng.random((8 * missing + 64, E)) < q
        found.append(draws[draws.sum(1) == k][:missing])
        missing -= len(found[-1])
    return np.concatenate(found)


def add_one(hits: np.ndarray, q: float) -> np.ndarray:
    """Distributions [..., h] of a number of hits, with one more expert that is hit with probability
    q (Algorithm 2)."""
    out = hits * (1 - q)
    out[..., 1:] += hits[..., :-1] * q
    return out


def _fit(f: np.ndarray, k: int) -> np.ndarray:
    """Levenberg and Marquardt's method on the log odds, each on the scale of its expert's standard
    deviation; all f strictly between 0 and 1, summing to k."""
    from scipy.optimize import root  # a second of imports, for who plans pools

    scale = np.sqrt(f * (1 - f))
    unit = scale / np.linalg.norm(scale)  # all log odds together: there nothing else changes
    start = _shifted(logit(f), k)[0] * scale

    def residual(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found, pairs = inclusion(_shifted(x / scale, k)[1], k)
        covariance = pairs + pairs.T + np.diag(found) - np.outer(found, found)
        jacobian = covariance / np.outer(scale, scale) + np.outer(unit, unit)
        return (found - f) / scale + unit * (unit @ (x - start)), jacobian

    q = _shifted(root(residual, start, jac=True, method="lm").x / scale, k)[1]
    if (error := np.abs(inclusion(q, k)[0] - f).max()) > 1e-8:
        raise ArithmeticError(
            f"no selection probabilities were found: {error:.1e} is left of the inclusion "
            f"probabilities {np.array2string(f, threshold=8)}"
        )
    return q


def _shifted(logits: np.ndarray, total: float) -> tuple[np.ndarray, np.ndarray]:
    """Log odds moved by one constant so that the probabilities sum to `total`, and those
    probabilities."""
    from scipy.optimize import brentq

    low = -logits.max() - 50
    high = -logits.min() + 50
    by = brentq(lambda by: expit(logits + by).sum() - total, low, high)
    return logits + by, expit(logits + by)
