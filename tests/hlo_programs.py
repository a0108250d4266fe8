"""Minimal HLO programs, each with one feature that a naive reader misinterprets."""

from jaxlib import _hlo

from spanax.check.hlo.module import Module, read_module

HEAD = """HloModule m, num_partitions=8
add {
 a = f32[] parameter(0)
 b = f32[] parameter(1)
 ROOT c = f32[] add(a, b)
}
"""


def read_text(program: str) -> Module:
    return read_module(_hlo.hlo_module_from_text(program).as_serialized_hlo_module_proto())


def entry(*lines: str, before: str = "") -> str:
    """A program of these lines, the last of them its result."""
    *first, last = lines
    return HEAD + before + "ENTRY e {\n " + "\n ".join([*first, f"ROOT {last}"]) + "\n}\n"


def all_reduce(groups: str) -> str:
    return entry(
        "p = f32[4] parameter(0)",
        f"r = f32[4] all-reduce(p), channel_id=1, use_global_device_ids=true, replica_groups={groups}, to_apply=add",
    )


def loop(start: str, test: str, step: str, config: str = "") -> str:
    """A loop around one all-reduce; `test` and `step` read the count `i` and the bound `n`."""
    before = f"""
body {{
 s = (s32[], s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 n = s32[] get-tuple-element(s), index=1
 x = f32[4] get-tuple-element(s), index=2
 one = s32[] constant(1)
 two = s32[] constant(2)
 j = s32[] {step}
 y = f32[4] all-reduce(x), channel_id=1, use_global_device_ids=true, replica_groups=[1,8]<=[8], to_apply=add
 ROOT t = (s32[], s32[], f32[4]) tuple(j, n, y)
}}
test {{
 s = (s32[], s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 n = s32[] get-tuple-element(s), index=1
 ROOT go = pred[] {test}
}}
"""
    return entry(
        "p = f32[4] parameter(0)",
        "q = s32[] parameter(1)",
        "zero = s32[] constant(0)",
        "ten = s32[] constant(10)",
        f"init = (s32[], s32[], f32[4]) tuple({start}, p)",
        f"w = (s32[], s32[], f32[4]) while(init), condition=test, body=body{config}",
        "out = f32[4] get-tuple-element(w), index=2",
        before=before,
    )


STARTED = entry(
    "p = bf16[4] parameter(0)",
    "s = (bf16[4], bf16[32]) all-gather-start(p), channel_id=1, use_global_device_ids=true, "
    "replica_groups=[1,8]<=[8], dimensions={0}",
    "r = bf16[32] all-gather-done(s)",
)
"""A gather in two halves: once."""

WRAPPED = entry(
    "p = f32[32] parameter(0)",
    "s = ((f32[32]), f32[4], u32[]) async-start(p), calls=wrapped",
    "r = f32[4] async-done(s)",
    before="""wrapped {
 p = f32[32] parameter(0)
 ROOT r = f32[4] reduce-scatter(p), channel_id=1, use_global_device_ids=true, """
    """replica_groups=[1,8]<=[8], dimensions={0}, to_apply=add
}
""",
)
"""A reduce-scatter in a computation that is started and awaited: once."""

_GATHER = (
    "g = f32[32] all-gather(p), channel_id=7, use_global_device_ids=true, replica_groups=[1,8]<=[8], dimensions={0}"
)
CLONED = entry(
    "p = f32[4] parameter(0)",
    "a = (f32[32], u32[]) fusion(p), kind=kCustom, calls=starts",
    "b = f32[32] fusion(p), kind=kCustom, calls=meanwhile",
    "c = f32[32] fusion(p), kind=kCustom, calls=ends",
    "d = f32[32] add(b, c)",
    before=f"""starts {{
 p = f32[4] parameter(0)
 {_GATHER}
 ROOT s = (f32[32], u32[]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}
meanwhile {{
 p = f32[4] parameter(0)
 ROOT {_GATHER}
}}
ends {{
 p = f32[4] parameter(0)
 {_GATHER}
 ROOT s = f32[32] custom-call(g), custom_call_target="AsyncCollectiveDone"
}}
""",
)
"""A gather that a TPU program starts, continues and ends in three fusions: once."""

VARIADIC = entry(
    "p = f32[4] parameter(0)",
    "q = bf16[8] parameter(1)",
    "r = (f32[4], bf16[8]) all-reduce(p, q), channel_id=1, use_global_device_ids=true, replica_groups=[1,8]<=[8], "
    "to_apply=add",
)
"""One collective of two arrays: the bytes of both."""


def sliced(offset: str) -> str:
    """An all-reduce of which every device keeps an eighth, at `offset` of the partition `id`."""
    return entry(
        "p = f32[32] parameter(0)",
        "r = f32[32] all-reduce(p), channel_id=1, use_global_device_ids=true, replica_groups=[2,4]<=[8], to_apply=add",
        "id = u32[] partition-id()",
        "table = u32[8] constant({0, 8, 16, 24, 0, 8, 16, 24})",
        "same = u32[8] constant({0, 0, 0, 0, 8, 8, 8, 8})",
        f"one = u32[1] dynamic-slice({offset}, id), dynamic_slice_sizes={{1}}",
        "at = u32[] reshape(one)",
        "s = f32[8] dynamic-slice(r, at), dynamic_slice_sizes={8}",
    )


def windowed(how: str, *, is_conditional: bool = False) -> str:
    """A loop of permutes around a matmul, as XLA names it, and the permute that brings the last part home.

    A conditional one is skipped in the last iteration.
    """
    ring = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    permute = f"collective-permute(x), channel_id=1, source_target_pairs={ring}"
    branches = f"""
permuted {{
 x = f32[4] parameter(0)
 ROOT y = f32[4] {permute}
}}
skipped {{
 ROOT x = f32[4] parameter(0)
}}
"""
    choice = "conditional(last, x, x), true_computation=permuted, false_computation=skipped"
    before = f"""{branches if is_conditional else ""}
windowed_dot_general_body_{how}.clone {{
 s = (s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 x = f32[4] get-tuple-element(s), index=1
 one = s32[] constant(1)
 j = s32[] add(i, one)
 last = pred[] compare(i, one), direction=EQ
 y = f32[4] {choice if is_conditional else permute}
 ROOT t = (s32[], f32[4]) tuple(j, y)
}}
windowed_dot_general_cond_{how}.clone {{
 s = (s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 n = s32[] constant(3)
 ROOT go = pred[] compare(i, n), direction=LT
}}
"""
    return entry(
        "p = f32[4] parameter(0)",
        "zero = s32[] constant(0)",
        "init = (s32[], f32[4]) tuple(zero, p)",
        f"w = (s32[], f32[4]) while(init), condition=windowed_dot_general_cond_{how}.clone, "
        f"body=windowed_dot_general_body_{how}.clone",
        "last = f32[4] get-tuple-element(w), index=1",
        f"home = f32[4] collective-permute(last), channel_id=2, source_target_pairs={ring}",
        before=before,
    )


BETWEEN_SLICES = entry(
    "after = token[] after-all()",
    "r = (bf16[8,16], u32[], token[]) recv(after), channel_id=1, is_host_transfer=true, frontend_attributes="
    '{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}',
    "d = (bf16[8,16], token[]) recv-done(r), channel_id=1, is_host_transfer=true",
)
"""What the runtime sums between slices: the program only receives it."""


def chained(*, adds: bool) -> str:
    """Permutes from an empty sum both ways around a ring, with parts added between them; or sent on as they came."""
    on, back = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "{{0,3},{1,0},{2,1},{3,2},{4,7},{5,4},{6,5},{7,6}}"
    between = "add({0}, p)" if adds else "negate({0})"
    return entry(
        "p = f32[4] parameter(0)",
        "zero = f32[] constant(0)",
        "empty = f32[4] broadcast(zero), dimensions={}",
        f"on1 = f32[4] collective-permute(empty), channel_id=1, source_target_pairs={on}",
        f"back1 = f32[4] collective-permute(empty), channel_id=2, source_target_pairs={back}",
        f"on1p = f32[4] {between.format('on1')}",
        f"back1p = f32[4] {between.format('back1')}",
        f"on2 = f32[4] collective-permute(on1p), channel_id=3, source_target_pairs={on}",
        f"back2 = f32[4] collective-permute(back1p), channel_id=4, source_target_pairs={back}",
        f"on2p = f32[4] {between.format('on2')}",
        f"on3 = f32[4] collective-permute(on2p), channel_id=5, source_target_pairs={on}",
        "sum = f32[4] add(on3, back2)",
    )
