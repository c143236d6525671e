"""Collectives in compiled HLO are counted once per execution, and by what a device receives."""

import pytest
from ltx2rt_tpu.hlo import collectives, flops

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
""" + entry(
        "  %w = (s32[]) while(%i), condition=%few, body=%inner, "
        'backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert collectives(outer)[0] == {"all-reduce": 3 * 48, "all-gather": 3}


@pytest.mark.parametrize("line,kind,received", [
    ("f32[8]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%s", "reduce-scatter", 32 * 3),
    ("bf16[4,8]{1,0} all-to-all(%p), replica_groups=[1,4]<=[4]", "all-to-all", 64 * 3 / 4),
    ("((f32[2], bf16[4]), (f32[8], bf16[16])) all-gather-start(%p, %q), replica_groups=[1,4]<=[4]",
     "all-gather", 64 * 3 / 4),
    ("(f32[8], f32[8], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1",
     "collective-permute", 32),
])  # fmt: skip
def test_every_kind_is_counted_by_what_arrives(line, kind, received):
    done = f"  %d = f32[8]{{0}} {kind}-done(%r)"
    assert collectives(entry(f"  %r = {line}", done)) == ({kind: 1}, received)


def test_only_the_outermost_loop_may_have_bounds_from_outside():
    traced = HLO.replace("s32[] constant(48)", "s32[] parameter(1)")
    assert collectives(traced, steps=1)[0] == {"all-reduce": 1, "all-gather": 1}
    inner = traced.replace("ENTRY %main", "%inner")
    with pytest.raises(ValueError, match="a loop without a known trip count"):
        collectives(inner + "\n" + entry("  %c = f32[8] call(%p), to_apply=%inner"), steps=1)


def test_what_cannot_be_told_is_not_guessed():
    for hlo, said in (
        (HLO.replace("s32[] constant(48)", "s32[] parameter(1)"), "without a known trip count"),
        (HLO.replace("replica_groups=[2,4]<=[8]", "replica_groups={}"), "without replica groups"),
        (entry("  %r = f32[8]{0} collective-broadcast(%p)"), "bytes are not known"),
        ("HloModule empty", "without an ENTRY"),
    ):
        with pytest.raises(ValueError, match=said):
            collectives(hlo)


@pytest.mark.parametrize(
    ("shapes", "line", "multiply_adds"),
    [
        (("6,5", "7,5"), "f32[6,7] convolution(%x, %k), dim_labels=bf_oi->bf", 6 * 7 * 5),
        (("4,6,5", "4,7,5"), "f32[4,6,7] convolution(%x, %k), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, "
         # a batch of products, as the compiler writes one
         "dim_labels=0bf_0oi->0bf", 4 * 6 * 7 * 5),
        (("1,9,3", "3,3,8"), "f32[1,9,8] convolution(%x, %k), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
         (3 * 9 - 2) * 3 * 8),  # a tap at either border meets a zero
        (("1,1,3", "5,3,8"), "f32[1,5,8] convolution(%x, %k), window={size=5 pad=4_4 rhs_reversal=1}, "
         "dim_labels=b0f_0io->b0f", 5 * 3 * 8),
        (("2,9,3", "3,3,8"), "f32[2,4,8] convolution(%x, %k), window={size=3 stride=2}, dim_labels=b0f_0io->b0f",
         2 * 4 * 3 * 3 * 8),
        (("2,9,6", "3,1,6"), "f32[2,7,6] convolution(%x, %k), window={size=3}, dim_labels=b0f_0io->b0f, "
         "feature_group_count=6", 2 * 7 * 3 * 6),
    ],
)  # fmt: skip
def test_convolutions_are_counted_without_their_zeros(shapes, line, multiply_adds):
    x, kernel = shapes
    body = (
        f"  %x = f32[{x}]{{1,0}} parameter(0)",
        f"  %k = f32[{kernel}]{{1,0}} parameter(1)",
        f"  %r = {line}",
    )
    assert flops(entry(*body)) == 2 * multiply_adds


def test_products_in_loops_are_multiplied_and_kernels_have_no_figure():
    product = "%q = bf16[2,4]{1,0} parameter(0)\n  %y = bf16[2,4]{1,0} convolution(%q, %q), dim_labels=bf_io->bf"
    square = product.replace("2,4", "4,4")
    kernel = HLO[HLO.index("  %k = ") : HLO.index("  %a = ")]
    assert flops(HLO.replace(kernel, f"  {square}\n")) == 48 * 2 * 4**3
    with pytest.raises(ValueError, match="a kernel"):
        flops(HLO)


def test_a_windowed_product_takes_two_parts_at_a_time():
    windowed = HLO.replace("%condition", "%windowed_dot_general_cond_param")
    assert collectives(windowed)[0] == {"all-reduce": 24, "all-gather": 1}
