"""The noise scale in a round: from estimates of each replica alone, or from the steps of a single one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxche.scaling._checks import check_positive
from jaxche.scaling._groups import group_squares
from jaxche.scaling.noise_scale import (
    NoiseScale,
    Sums,
    add_estimate,
    check_contributors,
    difference,
    precondition,
    solve,
)


class Estimates(NamedTuple):
    """One replica's estimates, weighted so that those of several replicas can be added."""

    sqr: jax.Array  # [G], weight times the squared norm of the true gradient
    trace: jax.Array  # [G], weight times the trace of one example's covariance
    weight: jax.Array  # number of batches minus one, the degrees of freedom; 0 below two batches
    preconditioned: jax.Array  # the weight of estimates of preconditioned gradients
    examples: jax.Array  # number of examples of the estimates
    contributors: jax.Array  # number of batches of the estimates


def local_estimates(noise: NoiseScale, sums: Sums, mean_grads: Any, *, opt_state: Any = None) -> Estimates:
    """Estimates from the sums and the mean gradient of the batches of one replica; all 0 for fewer than two batches."""
    # Each replica compares only its own gradients, so differences between the parameters of replicas do not count as
    # noise. Differences between its own steps do, so rounds must be short compared with the time in which the gradient
    # changes.
    active, factors = precondition(opt_state, mean_grads)
    sqr, trace = solve(sums, group_squares(noise.groups, jax.tree.leaves(mean_grads), factors))
    weight = sums.contributors - 1
    estimates = Estimates(
        sqr=weight * sqr,
        trace=weight * trace,
        weight=weight,
        preconditioned=weight * active.astype(jnp.float32),
        examples=sums.examples,
        contributors=sums.contributors,
    )
    return jax.tree.map(lambda x: jnp.where(sums.contributors >= 2, x, jnp.zeros_like(x)), estimates)


def update_from_estimates(noise: NoiseScale, estimates: Estimates) -> NoiseScale:
    """The next noise scale, from the summed estimates of all replicas; the same if they are not finite or not alike."""
    # Not finite, too, if no replica had two batches.
    sqr, trace = estimates.sqr / estimates.weight, estimates.trace / estimates.weight
    active = estimates.preconditioned > 0
    return add_estimate(
        noise,
        sqr,
        trace,
        grads=noise.previous,
        examples=estimates.examples,
        contributors=estimates.contributors,
        preconditioned=active,
        alike=~active | (estimates.preconditioned == estimates.weight),
    )


def update_from_one(noise: NoiseScale, grads: Any, batch_size: Any, *, opt_state: Any = None) -> NoiseScale:
    """The next noise scale, from a single contributor: the result of ``update_from_sums`` with less work."""
    check_positive("batch_size", batch_size, "batch_size=32")
    check_contributors(noise, 1)
    examples = jnp.asarray(batch_size).astype(jnp.float32)
    active, factors = precondition(opt_state, grads)
    sqr, trace = difference(noise, grads, factors, examples)
    return add_estimate(
        noise,
        sqr,
        trace,
        grads=grads,
        examples=examples,
        contributors=jnp.float32(1),
        preconditioned=active,
    )
