"""Kernel 9: the error of the output at the probes."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.primitives import load_rows, split_batch_head


@triton.jit
def report_kernel(
    o, probe_tokens, probe_exact, probes,
    stride_ob, stride_oh, stride_ot, H, num_probes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write |output - exact|^2 of the probes of one head to probes (B * H, num_probes, 3). Grid: (B * H,)."""
    batch, head, batch_head = split_batch_head(tl.program_id(0), H)
    index = tl.arange(0, BLOCK_P)
    is_probe = index < num_probes
    lines = batch_head * num_probes + index
    tokens = tl.load(probe_tokens + lines, mask=is_probe, other=-1)
    o += batch * stride_ob + head * stride_oh
    output = load_rows(o, tokens, stride_ot, tokens >= 0, D, BLOCK_D).to(tl.float32)
    exact = load_rows(probe_exact, lines, D, tokens >= 0, D, BLOCK_D)
    difference = output - exact
    tl.store(probes + lines * 3, tl.sum(difference * difference, 1), mask=is_probe)
