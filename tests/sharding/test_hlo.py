"""The collectives of a compiled program, read from its text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxche.sharding import Collective, FullShard, HybridShard, collectives


def program(body):
    return "\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            "%region_0.1 (a: f32[], b: f32[]) -> f32[] {",
            "  ROOT %add = f32[] add(%a, %b)",
            "}",
            "ENTRY %main.1 (x: f32[8]) -> f32[8] {",
            f"  {body}",
            "}",
        ]
    )


PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%a = f32[8]{0} all-gather(%x), replica_groups={{0,1},{2,3}}", ("all-gather", 32, PAIRS, 16)),
        ("%a = bf16[8]{0} all-gather(%x), replica_groups=[2,2]<=[4]", ("all-gather", 16, PAIRS, 8)),
        (
            "%a = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%region_0.1",
            ("all-reduce", 32, ((0, 2), (1, 3)), 32),
        ),
        ("%a = f32[2]{0} reduce-scatter(%x), replica_groups={}", ("reduce-scatter", 8, ((0, 1, 2, 3),), 24)),
        (
            "%a = (f32[2]{0}, /*index=1*/f32[]) all-reduce(%x, %y), replica_groups={{0,1,2,3}}",
            ("all-reduce", 12, ((0, 1, 2, 3),), 18),
        ),
        (
            "%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}",
            ("all-gather", 32, ((0, 1, 2, 3),), 24),
        ),
        (
            "%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 32, ((0, 1), (1, 0)), 32),
        ),
        (
            "%a = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 32, ((0, 1), (1, 0)), 32),
        ),
        (
            "%a = f32[8]{0} all-gather(%x), replica_groups=@mesh['replica'=2,'shard'=2]{'shard'}",
            ("all-gather", 32, PAIRS, 16),
        ),
        (
            "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['x'=4]{'x':(2)2}",
            ("all-gather", 32, PAIRS, 16),
        ),
    ],
)
def test_forms_of_one_collective(body, expected):
    [found] = collectives(program(body), 4)
    assert (found.kind, found.nbytes, found.groups, found.sent) == expected


@pytest.mark.parametrize(
    "body",
    [
        "%a = f32[8]{0} all-gather(%x), replica_groups={{0},{1},{2},{3}}",
        "%a = f32[8]{0} all-gather-done(%x)",
        "%a = f32[8]{0} add(%all-reduce.1, %x)",
    ],
)
def test_what_sends_nothing_is_none(body):
    assert collectives(program(body), 4) == []


def test_text_that_is_no_program_has_none():
    assert collectives("", 4) == []


def test_bytes_of_a_ring():
    everyone = (tuple(range(4)),)
    sent = {
        kind: Collective(kind, 64, everyone).sent
        for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    }
    assert sent == {
        "all-gather": 48,
        "all-reduce": 96,
        "all-to-all": 48,
        "collective-permute": 64,
        "reduce-scatter": 192,
    }
    assert Collective("all-gather", 64, everyone, times=3).sent == 144


def compiled(fn, mesh, shape, in_spec, out_spec):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    return collectives(jax.jit(mapped).lower(jnp.zeros(shape)).compile().as_text(), mesh.size)


def test_what_this_compiler_writes(devices):
    mesh = HybridShard(2).mesh(devices[:4])
    [gathered] = compiled(lambda x: lax.all_gather(x, "shard", tiled=True), mesh, 8, P("shard"), P())
    assert gathered == ("all-gather", 32, ((0, 1), (2, 3)), 1)
    [scattered] = compiled(lambda x: lax.psum_scatter(x, "shard", tiled=True), mesh, 8, P(), P("shard"))
    assert scattered == ("reduce-scatter", 16, ((0, 1), (2, 3)), 1)
    [summed] = compiled(lambda x: lax.psum(x, "replica"), mesh, 8, P("shard"), P("shard"))
    assert summed == ("all-reduce", 16, ((0, 2), (1, 3)), 1)


def test_a_loop_counts_its_turns(devices):
    mesh = FullShard().mesh(devices[:4])

    def loop(x):
        return lax.fori_loop(0, 5, lambda i, y: lax.psum(y, "shard") / 4 + i, x)

    found = compiled(loop, mesh, 8, P(), P())
    assert sum(c.times for c in found) == 5
    assert {c.kind for c in found} == {"all-reduce"}
