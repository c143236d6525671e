"""Collectives in compiled HLO are counted once per execution, and by what a device receives."""

import pytest
from ltx2rt_tpu.hlo import collectives

HLO = """HloModule jit_step

%body (p: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %k = bf16[2]{0} custom-call(%z), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block_q": 128
}}, metadata={op_name="attention"}
  %a = (bf16[2,4]{1,0}, bf16[3]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %t = (s32[], bf16[2,4]) tuple(%i, %z)
}

%condition (p: (s32[], bf16[2,4])) -> pred[] {
  %n = s32[] constant(48)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%called (p: f32[8]) -> f32[8] {
  %g = (f32[1]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %d = f32[8]{0} all-gather-done(%g)
}

ENTRY %main (p: bf16[2,4]) -> bf16[2,4] {
  %w = (s32[], bf16[2,4]) while(%init), condition=%condition, body=%body
  %c = f32[8]{0} fusion(%p), kind=kLoop, calls=%called
  ROOT %r = bf16[2,4] get-tuple-element(%w), index=1
}
"""


def entry(*lines: str) -> str:
    return "\n".join(["HloModule m", "", "ENTRY %main (p: f32[8]) -> f32[8] {", *lines, "}"])


def test_loops_multiply_and_called_computations_count():
    counts, received = collectives(HLO)
    assert counts == {"all-reduce": 48, "all-gather": 1}
    # 22 bytes reduced over 4 devices, 48 times; 32 bytes gathered over 8
    assert received == pytest.approx(48 * 2 * 22 * 3 / 4 + 32 * 7 / 8)


def test_nested_loops_multiply():
    outer = HLO.replace("ENTRY %main", "%inner").replace("%w = ", "%inner_w = ")
    outer += """
%few (p: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
""" + entry('  %w = (s32[]) while(%i), condition=%few, body=%inner, backend_config={"known_trip_count":{"n":"3"}}')
    assert collectives(outer)[0] == {"all-reduce": 3 * 48, "all-gather": 3}


@pytest.mark.parametrize(
    "line,kind,received",
    [
        ("%r = f32[8]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%s", "reduce-scatter", 32 * 3),
        ("%r = bf16[4,8]{1,0} all-to-all(%p), replica_groups=[1,4]<=[4]", "all-to-all", 64 * 3 / 4),
        (
            "%r = ((f32[2], bf16[4]), (f32[8], bf16[16])) all-gather-start(%p, %q), replica_groups=[1,4]<=[4]",
            "all-gather",
            64 * 3 / 4,
        ),
        (
            "%r = (f32[8], f32[8], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1",
            "collective-permute",
            32,
        ),
    ],
)
def test_every_kind_is_counted_by_what_arrives(line, kind, received):
    done = f"  %d = f32[8]{{0}} {kind}-done(%r)"
    assert collectives(entry("  " + line, done)) == ({kind: 1}, received)


def test_only_the_outermost_loop_may_have_bounds_from_outside():
    traced = HLO.replace("s32[] constant(48)", "s32[] parameter(1)")
    assert collectives(traced, steps=1)[0] == {"all-reduce": 1, "all-gather": 1}
    inner = traced.replace("ENTRY %main", "%inner")
    with pytest.raises(ValueError, match="a loop without a known trip count"):
        collectives(inner + "\n" + entry("  %c = f32[8] call(%p), to_apply=%inner"), steps=1)


def test_what_cannot_be_told_is_not_guessed():
    with pytest.raises(ValueError, match="a loop without a known trip count"):
        collectives(HLO.replace("s32[] constant(48)", "s32[] parameter(1)"))
    with pytest.raises(ValueError, match="without replica groups"):
        collectives(HLO.replace("replica_groups=[2,4]<=[8]", "replica_groups={}"))
    with pytest.raises(ValueError, match="bytes are not known"):
        collectives(entry("  %r = f32[8]{0} collective-broadcast(%p), replica_groups={{0,1}}"))
    with pytest.raises(ValueError, match="without an ENTRY"):
        collectives("HloModule empty")
