"""The benchmark that reads schedules: collectives that overlap with a matmul, and exposed ones."""

from jaxlib import _hlo

from overlap import LOOPS, in_schedule, tally
from spanax.check.hlo.module import read_module

PROGRAM = """
HloModule program, is_scheduled=true

doubled {
  x = f32[512,512] parameter(0)
  ROOT sum = f32[512,512] add(x, x)
}

ENTRY main {
  a = f32[256,1024] parameter(0)
  b = f32[256,1024] parameter(1)
  c = f32[512,512] parameter(2)
  begun = (f32[256,1024], f32[512,1024]) all-gather-start(a), replica_groups={{0,1}}, dimensions={0}
  twice = f32[512,512] fusion(c), kind=kLoop, calls=doubled
  ORDER
  waited = f32[512,1024] all-gather(b), replica_groups={{0,1}}, dimensions={0}
  small = f32[8] parameter(3)
  scale = f32[16] all-gather(small), replica_groups={{0,1}}, dimensions={0}
  ROOT out = (f32[512,1024], f32[512,512], f32[512,1024], f32[16]) tuple(gathered, product, waited, scale)
}
"""
PRODUCT = "product = f32[512,512] dot(twice, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DONE = "gathered = f32[512,1024] all-gather-done(begun)"


def counted(*order: str) -> dict[str, int]:
    program = PROGRAM.replace("ORDER", "\n  ".join(order))
    data = _hlo.hlo_module_from_text(program).as_serialized_hlo_module_proto()
    module = read_module(data)
    instructions = next(order for computation, order in in_schedule(module, data) if computation is module.entry)
    return dict(tally(module, instructions))


def test_an_asynchronous_gather_overlaps_and_a_synchronous_one_is_exposed() -> None:
    assert counted(PRODUCT, DONE) == {"matmuls": 1, "beside a matmul": 1, "waited for": 1}
    assert counted(DONE, PRODUCT) == {"matmuls": 1, "beside something else": 1, "waited for": 1}


SUMMING = """
HloModule program, is_scheduled=true

added {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}

scattered {
  whole = f32[1024,1024] parameter(0)
  ROOT part = f32[512,1024] reduce-scatter(whole), replica_groups={{0,1}}, dimensions={0}, to_apply=added
}

ENTRY main {
  gradient = f32[1024,1024] parameter(0)
  a = f32[512,512] parameter(1)
  other = f32[512,1024] parameter(2)
  begun = ((f32[1024,1024]), f32[512,1024]) async-start(gradient), calls=scattered
  product = f32[512,512] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  mine = f32[512,1024] async-done(begun)
  all = f32[512,1024] all-reduce-start(other), replica_groups={{0,1}}, to_apply=added
  everyones = f32[512,1024] all-reduce-done(all)
  waited = f32[512,1024] all-reduce(mine), replica_groups={{0,1}}, to_apply=added
  ROOT out = (f32[512,512], f32[512,1024], f32[512,1024]) tuple(product, everyones, waited)
}
"""


def test_all_reduces_and_all_gathers_are_counted_separately() -> None:
    data = _hlo.hlo_module_from_text(SUMMING).as_serialized_hlo_module_proto()
    module = read_module(data)
    instructions = next(order for computation, order in in_schedule(module, data) if computation is module.entry)
    expected = {"matmuls": 1, "sums beside a matmul": 1, "sums beside something else": 1, "sums waited for": 1}
    assert tally(module, instructions) == expected


LOOPING = """
HloModule program, is_scheduled=true

windowed_dot_general_body_ag {
  x = f32[8] parameter(0)
  ROOT y = f32[8] negate(x)
}

windowed_dot_general_body_rs.1 {
  x = f32[8] parameter(0)
  ROOT y = f32[8] negate(x)
}

forever {
  x = f32[8] parameter(0)
  ROOT yes = pred[] constant(true)
}

ENTRY main {
  x = f32[8] parameter(0)
  gathered = f32[8] while(x), condition=forever, body=windowed_dot_general_body_ag
  ROOT scattered = f32[8] while(gathered), condition=forever, body=windowed_dot_general_body_rs.1
}
"""


def test_loops_of_permutes_are_counted_by_what_they_implement() -> None:
    data = _hlo.hlo_module_from_text(LOOPING).as_serialized_hlo_module_proto()
    module = read_module(data)
    instructions = next(order for computation, order in in_schedule(module, data) if computation is module.entry)
    assert tally(module, instructions) == dict.fromkeys(LOOPS.values(), 1)


def test_a_fused_scatter_is_exposed() -> None:
    scattered = SUMMING[SUMMING.index("scattered {") : SUMMING.index("ENTRY")]
    # A computation has either synchronous or asynchronous callers.
    program = SUMMING.replace("ENTRY", scattered.replace("scattered {", "fused {") + "ENTRY").replace(
        "waited = f32[512,1024] all-reduce(mine), replica_groups={{0,1}}, to_apply=added",
        "waited = f32[512,1024] fusion(gradient), kind=kCustom, calls=fused",
    )
    data = _hlo.hlo_module_from_text(program).as_serialized_hlo_module_proto()
    module = read_module(data)
    instructions = next(order for computation, order in in_schedule(module, data) if computation is module.entry)
    assert tally(module, instructions)["sums waited for"] == 1
