"""Collectives in compiled HLO are counted once per execution, and by what a device receives."""

import pytest

from benchmarks.tpu_compile import collectives

HLO = """HloModule jit_step

%body (p: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
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


def test_loops_multiply_and_called_computations_count():
    counts, received = collectives(HLO)
    assert counts == {"all-reduce": 48, "all-gather": 1}
    # 22 bytes reduced over 4 devices, 48 times; 32 bytes gathered over 8
    assert received == pytest.approx(48 * 2 * 22 * 3 / 4 + 32 * 7 / 8)


def test_a_loop_of_unknown_length_is_not_guessed():
    with pytest.raises(AssertionError, match="a loop without a known trip count"):
        collectives(HLO.replace("s32[] constant(48)", "s32[] parameter(1)"))
