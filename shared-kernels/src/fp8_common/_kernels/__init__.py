"""Triton kernels and the plans of their launches.

No other part of fp8-common imports triton. Each plan function describes the launch of one kernel as a `Launch`, for
torch and JAX. `run` launches it, `compile_launch` compiles it ahead of time. Every kernel equals the NumPy definition
of its function bit for bit, except that the codes of NaN may differ.

Conventions: pointers end in `_ptr`; M, N and n are sizes; constants (`tl.constexpr`) are in upper case. Sizes are not
specialized, so that one compiled kernel serves all sizes. Offsets are int64, because tensors may exceed 2^31 elements.
Tiles that lie entirely inside a flat tensor are loaded without masks: the compiler loads single elements if it cannot
prove the alignment of a mask.

After a `return` inside a branch on a compiled-in value, the rest must be in an `else`: Triton compiles the code after
the `if` even when that branch is taken, and fails if types or values do not fit there.
"""

from fp8_common._kernels.blocks import block_both, blockwise, mx
from fp8_common._kernels.decoding import dequantize, dequantize_mx
from fp8_common._kernels.foreach import foreach_amax, foreach_cast, foreach_chunks
from fp8_common._kernels.gated import gated_back_amax, gated_back_cast, gated_rows
from fp8_common._kernels.gradient_messages import pack_gradients, sum_gradients
from fp8_common._kernels.groups import fill_rows_with_zeros, group_amax, group_cast, group_columns, transpose_rows
from fp8_common._kernels.launch import Compiled, Launch, Out, compile_launch, interpreting, run, scale_rule
from fp8_common._kernels.matmuls import matmul_over_rows, matmul_rows
from fp8_common._kernels.rows import amax_both, cast_both, rowwise, rowwise_transposed
from fp8_common._kernels.scales import delayed_update, scales_of_amax
from fp8_common._kernels.tensor import Delayed, amax, cast, cast_transpose
