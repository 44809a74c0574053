"""The memory of a training step: as explained, as planned, and as the device needs it; one question a process."""

from __future__ import annotations

from typing import Any

import jax

import jaxche
from gpu_parts import workloads
from gpu_parts.context import is_out_of_memory
from gpu_parts.processes import program_parser, write
from gpu_parts.sharded import make
from jaxche.sharding import NoShard, compare_strategies

_LARGEST = 1 << 20  # rows


def main() -> None:
    parser = program_parser()
    parser.add_argument("question", choices=("use", "limit", "plan", "largest"))
    parser.add_argument("--strategy", default="NoShard")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--begin", type=int, default=1)
    args = parser.parse_args()
    workload = workloads.transformer(args.cpu)
    answer: dict[str, Any] = {"limit": statistics_of("bytes_limit")}
    if args.question == "use":
        answer = use(workload, args.strategy)
    elif args.question == "plan":
        answer = {"rows": largest(lambda rows: planned(workload, rows) <= args.limit, estimate(workload, args.limit))}
    elif args.question == "largest":
        answer = {"rows": largest(lambda rows: fits(workload, rows, args.limit), power_of_two(args.begin))}
    write(args.out, 0, answer)


def statistics_of(name: str) -> int | None:
    """A number of the device's allocator; None where it has none."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def power_of_two(rows: int) -> int:
    """The largest power of two up to ``rows``."""
    return 1 << (rows.bit_length() - 1)


def estimate(workload: Any, limit: int) -> int:
    """About the largest power of two of rows that fits, from the bytes of two steps; most bytes are in proportion."""
    few, more = planned(workload, workload.rows), planned(workload, 2 * workload.rows)
    a_row = max(1, (more - few) // workload.rows)
    return power_of_two(max(1, (limit - few) // a_row + workload.rows))


def largest(works: Any, rows: int) -> int:
    """The largest power of two of rows that works, searched from ``rows`` up, or down; 0 if none does."""
    while rows and not works(rows):
        rows //= 2
    while 0 < rows < _LARGEST and works(2 * rows):
        rows *= 2
    return rows


def use(workload: Any, name: str) -> dict[str, Any]:
    """Bytes by ``explain``, and the most that the device had in use after a few steps."""
    strategy = make(name)
    step = jaxche.sharded_step(workload.loss_fn, workload.tx, strategy, strategy.mesh(jax.devices()[:1]))
    batch = workload.batch(workload.rows, 0)
    # First, because a compiler that tries kernels takes memory: the step then finds its program in the cache.
    explained = step.explain(jax.eval_shape(workload.init), batch).peak
    compiling = statistics_of("peak_bytes_in_use")
    state = step.init(workload.init)
    for _ in range(3):
        state, _ = step(state, batch)
        jax.block_until_ready(state)
    in_use = statistics_of("peak_bytes_in_use")
    return {"rows": workload.rows, "in_use": in_use, "compiling": compiling, "explained": explained}


def planned(workload: Any, rows: int) -> int:
    """Bytes of a step on these devices, by ``compare_strategies``, as `jaxche plan` prints them."""
    shapes = jax.eval_shape(workload.init)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), workload.batch(1, 0))
    costs = compare_strategies(
        workload.loss_fn, workload.tx, shapes, batch, strategies=[NoShard()], devices=jax.devices()[:1]
    )
    return costs.explanations[0].peak


def fits(workload: Any, rows: int, limit: int) -> bool:
    """Whether the device trains on batches of so many rows; by its plan of the memory where it has no limit."""
    if statistics_of("bytes_limit") is None:
        return planned(workload, rows) <= limit
    strategy = NoShard()
    step = jaxche.sharded_step(workload.loss_fn, workload.tx, strategy, strategy.mesh(jax.devices()[:1]))
    try:
        state = step.init(workload.init)
        for seed in range(2):
            state, metrics = step(state, workload.batch(rows, seed))
            float(metrics["loss"])
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


if __name__ == "__main__":
    main()
