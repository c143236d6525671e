"""Each op of the table as a JAX function (`OPS`), and a TPU's replacements (`ON_TPU`); a module for
each subject enters its own."""

from ltx2rt_tpu.ops import arrays, attention, convolutions, exchanges, norms, products, stored  # noqa: F401
from ltx2rt_tpu.ops.attention import (
    attention_on_tpu,
    neighbourhood_attention_on_tpu,
)
from ltx2rt_tpu.ops.convolutions import conv_on_tpu, conv_transpose_on_tpu
from ltx2rt_tpu.ops.norms import rms_norm_on_tpu
from ltx2rt_tpu.ops.table import OPS

__all__ = ["ON_TPU", "OPS"]
ON_TPU = {
    "conv": conv_on_tpu,
    "conv_transpose": conv_transpose_on_tpu,
    "rms_norm": rms_norm_on_tpu,
    "attention": attention_on_tpu,
    "neighbourhood_attention": neighbourhood_attention_on_tpu,
}
