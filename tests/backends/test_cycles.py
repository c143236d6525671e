"""The time of a compiled program by its code: bundles times windows, exchanges, overlap."""

import pytest
from ltx2rt_tpu.cycles import FLOP_PER_CYCLE, bundles, last_parts, times

from ltx2rt.placement.devices import device_kind

V6E = device_kind("v6e")
CLOCK = V6E.flops_per_s / FLOP_PER_CYCLE


def window(*iterations: int, estimated: int = 7) -> str:
    bounds = ",".join(f'"{n}"' for n in iterations)
    return f'backend_config={{"window_config":{{"estimated_cycles":"{estimated}","iteration_bounds":[{bounds}]}}}}'


HLO = f"""HloModule jit_step

%fused_product (a: bf16[512,512], b: bf16[512,512]) -> bf16[512,512] {{
  %a = bf16[512,512]{{1,0}} parameter(0)
  %b = bf16[512,512]{{1,0}} parameter(1)
  ROOT %c = bf16[512,512]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf
}}

%fused_norm (a: bf16[512,512]) -> bf16[512] {{
  %x = bf16[512,512]{{1,0}} parameter(0)
  ROOT %s = bf16[512]{{0}} reduce(%x, %z), dimensions={{1}}, to_apply=%sum
}}

%body (p: (s32[], bf16[512,512])) -> (s32[], bf16[512,512]) {{
  %p = (s32[], bf16[512,512]{{1,0}}) parameter(0)
  %product = bf16[512,512]{{1,0:T(8,128)(2,1)}} fusion(%x, %y), kind=kOutput, calls=%fused_product, {window(2, 3)}
  %norm.1 = bf16[512]{{0:T(128)S(1)}} fusion(%product), kind=kLoop, calls=%fused_norm, {window(4)}
  %norm.2 = bf16[512]{{0:T(128)}} fusion(%product), kind=kLoop, calls=%fused_norm, {window(4)}
  %sent = (bf16[9000000]{{0}}, bf16[9000000]{{0}}) collective-permute-start(%w), channel_id=1
  %copy.1 = bf16[512,512]{{0,1}} copy(%product), {window(50)}
  %came = bf16[9000000]{{0}} collective-permute-done(%sent)
  %sum.1 = bf16[4500000]{{0}} all-reduce(%v), replica_groups={{{{0,1}}}}, to_apply=%sum
  ROOT %t = (s32[], bf16[512,512]{{1,0}}) tuple(%i, %copy.1)
}}

%condition (p: (s32[], bf16[512,512])) -> pred[] {{
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: bf16[512,512]) -> bf16[512,512] {{
  %w = (s32[], bf16[512,512]) while(%init), condition=%condition, body=%body
  %splash.4 = bf16[8,1536,128]{{2,1,0}} custom-call(%q, %k, %v), custom_call_target="tpu_custom_call", operand_layout_constraints={{s8[1,2,2]{{2,1,0}}, bf16[8,1536,128]{{2,1,0}}, bf16[8,1000,128]{{2,1,0}}}}, frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 768, \\"block_kv\\": 512, \\"block_kv_compute\\": 256}}"
}}}}, metadata={{op_name="attention"}}
  %neighbourhood_attention.7 = bf16[2,16,6,4,256,384]{{5,4,3,2,1,0}} custom-call(%q, %k, %v), custom_call_target="tpu_custom_call"
  ROOT %add.1 = bf16[512,512]{{1,0}} add(%r, %r), {window(1, estimated=1234)}
}}
"""  # noqa: E501
CODE = {
    "product": 100, "norm.1": 20, "copy.1": 40000, "splash.4": 500, "neighbourhood_attention.7": 20,
}  # fmt: skip


def test_every_class_has_its_bundles_and_what_is_waited_for_is_exposed():
    found = times(HLO, CODE, V6E)
    cycles = {name: round(s * CLOCK, 3) for name, s in found.items() if name != "exposed"}
    # A product of 512^3 takes 512 cycles at the peak, fewer than 100 x 6; the second norm has the
    # code of the first.
    assert cycles == {
        "products": 10 * 600, "reductions": 10 * 2 * 20 * 4, "copies": 10 * 40000 * 50,
        "kernels": 500 * 8 * 2 * 2 + 20 * 2 * 16 * 6 * 4 * 3, "guessed": 1234,
    }  # fmt: skip
    # Of bytes that arrive over one link of a pair.
    permuted, reduced = (18e6 / 90e9 + 2e-6, 9e6 / 90e9 + 2e-6)
    hidden = 40000 * 50 / CLOCK
    assert hidden > permuted and found["exposed"] == pytest.approx(10 * reduced)
    quick = times(HLO, CODE | {"copy.1": 40}, V6E)
    assert quick["exposed"] == pytest.approx(10 * (permuted - 40 * 50 / CLOCK + reduced))


def test_a_loop_that_data_ends_counts_as_often_as_it_runs_on_average():
    """The taps of the vocoder's convolutions, in a loop that is itself within another."""
    inner = HLO.replace("ENTRY %main", "%outer").replace("constant(10)", "parameter(1)")
    inner += """
%always (p: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

ENTRY %main (p: bf16[512,512]) -> bf16[512,512] {
  %w.2 = (s32[]) while(%init), condition=%always, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
"""
    with pytest.raises(ValueError, match="without a known trip count"):
        times(inner, CODE, V6E)
    assert times(inner, CODE, V6E, inner=7)["products"] * CLOCK == pytest.approx(3 * 7 * 600)


def test_of_two_branches_the_one_of_a_true_predicate_is_counted():
    """Of attention, that without a running maximum, which any normalised q and k take."""
    inner = HLO.replace("ENTRY %main", "%likely")
    other = inner.split("%likely")[1].replace("splash.4", "splash.5")
    chosen = "%c = f32[] conditional(%n, %a, %b), branch_computations={%rare, %likely}"
    outer = f"%rare{other}\nENTRY %main (p: f32[]) -> f32[] {{\n  {chosen}\n}}\n"
    assert times(inner + outer, CODE | {"splash.5": 9000}, V6E) == times(HLO, CODE, V6E)


def test_no_product_is_faster_than_the_peak():
    assert times(HLO, CODE | {"product": 1}, V6E)["products"] == pytest.approx(10 * 512 / CLOCK)


def test_what_the_code_does_not_tell_is_not_guessed():
    with pytest.raises(ValueError, match="a kernel"):
        times(HLO, {name: n for name, n in CODE.items() if name != "splash.4"}, V6E)
    inner = HLO.replace("s32[] constant(10)", "s32[] parameter(1)").replace("ENTRY %main", "%inner")
    outer = "ENTRY %main (p: f32[]) -> f32[] {\n  %c = f32[] call(%p), to_apply=%inner\n}\n"
    with pytest.raises(ValueError, match="trip count"):
        times(inner + outer, CODE, V6E)


def test_bundles_are_read_by_instruction(tmp_path):
    report = "Schedule analysis:\n\ttotal scheduled bundles:    51\n"
    (tmp_path / "1795-fusion.496-00-schedule-analysis_final_bundles.txt").write_text(report)
    (tmp_path / "1795-fusion.496-01-final_bundles.txt").write_text("0x0 nop")
    assert bundles(tmp_path) == {"fusion.496": 51}


BRANCHES = """\
     0   :  { %4 = vsyncpa [#allocation4], 0 } /* Start region 2 */
  0x2b   : > { %109 = sbr.rel (%p17_p3) target = $region17  ;;  %s2 = scalar_lea.sflag 1 }
  0x5e PF: > { %p18_p10 = scmp.ge.s32 %s1, 1 } /* Start/End empty region 17 :: Start region 22 */
  0x61   : > { %187 = sbr.rel (%p184_p12) target = $region25 }
  0x70   : > { %188 = sbr.rel (%p185_p12) target = $region28 }
  0x74 PF: > { } /* Start/End empty region 28 */
0x197f   : > { %177 = vst [vmem:[#allocation2] sm:$0xff] %v17  ;;  %298 = sbr.rel (%p18_p7) target = $region34 }
0x1a00   : > { %299 = sbr.rel (%p19_p7) target = $region33 }
0x1a40 PF: > { } /* Start/End empty region 33 */
0x2e85 PF: > { %s22 = sld [smem:[#allocation18_spill]] } /* Start/End empty region 34 */
0x2e9e PF: > { %s23 = sld [smem:[#allocation15_spill]] } /* Start/End empty region 25 */
0x2eac   : > { %17 = sbr.rel (!%p22_p8) target = $region20846 }
"""


def test_what_a_loop_skips_but_for_the_last_part_of_a_sum_counts_once(tmp_path):
    """Of a product of 16384 terms, in 22 parts, with GELU behind it, compiled for v6e."""
    (tmp_path / "1795-product-01-final_bundles.txt").write_text(BRANCHES)
    assert last_parts(tmp_path) == {"product": 4 + 0x2E85 - 0x197F}
    last, code = {"product": 200, "copy.1": 3}, CODE | {"product": 1000}
    before, after = times(HLO, code, V6E), times(HLO, code, V6E, last=last)
    saved = {name: before[name] - after[name] for name in before if before[name] != after[name]}
    assert saved.keys() == {"products"}
    assert saved["products"] == pytest.approx(10 * 2 * (3 - 1) * 200 / CLOCK)
