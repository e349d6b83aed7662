"""The kernels of paged attention in Triton. `attention.py` explains the computation and launches them.

Shape suffixes in kernels: M rows of a program, S keys of a tile, D features of a key, E of a value, H query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(
    -1e30
)  # the initial running maximum: finite, so that differences are never NaN
AHEAD = tl.constexpr(4)  # segments that are loaded before the first of them is folded


@triton.jit
def fold(top, total, acc, m, z, o):
    """Fold a segment (m, z, o) into the result. Only the explicit fma operations are fused."""
    new = tl.maximum(top, m)
    a = tl.exp2(top - new)
    b = tl.exp2(m - new)
    total = tl.fma(total, a, z * b)
    acc = tl.fma(acc, a[:, None], o * b[:, None])
    return new, total, acc


@triton.jit
def start_of_fold(sinks_ptr, head, H: tl.constexpr, M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """A sink is a score without a value."""
    if HAS_SINKS:
        top = tl.load(sinks_ptr + tl.minimum(head, H - 1)).to(tl.float32) * 1.4426950408889634
        total = tl.full([M], 1.0, tl.float32)
    else:
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
    return top, total


@triton.jit
def finish(
    out_ptr, lse_ptr, top, total, acc, token, head, live,
    H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    out = acc / total[:, None]
    offsets = (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
    tl.store(
        out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (e < E)[None, :]
    )
    if HAS_LSE:
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + token.to(tl.int64) * H + head, lse, mask=live)


@triton.jit
def segment_of(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, position, low, first, last, factor, scale, softcap,
    stride_block, stride_head_size, kv_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    q_value, LATENT: tl.constexpr,
):  # fmt: skip
    """(m, z, o): maximum, sum and output of an online softmax over keys max(first, low) .. last.

    LATENT: q has the features that are not part of a value, q_value the others.
    """
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([M], LOWEST, tl.float32)
    z = tl.zeros([M], tl.float32)
    o = tl.zeros([M, BLOCK_E], tl.float32)
    for offsets in range(first, last + 1, S):
        key = offsets + tl.arange(0, S)
        inside = (key >= low) & (key <= last)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        line = block * stride_block + kv_head * stride_head_size + key % BLOCK_SIZE
        if LATENT:
            # Keys that no query sees may be unwritten memory, and 0 times NaN is NaN.
            v = tl.load(
                k_ptr + line[:, None] * D + e[None, :],
                mask=inside[:, None] & (e < E)[None, :],
                other=0.0,
            )
            k = tl.load(
                k_ptr + line[None, :] * D + E + d[:, None],
                mask=inside[None, :] & (d < D - E)[:, None],
                other=0.0,
            )
            s = tl.dot(q_value, tl.trans(v), input_precision="ieee")
            s = tl.dot(q, k, s, input_precision="ieee")
        else:
            k = tl.load(
                k_ptr + line[None, :] * D + d[:, None],
                mask=inside[None, :] & (d < D)[:, None],
                other=0.0,
            )
            s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALED:
            s = s * tl.load(k_scale_ptr + line, mask=inside, other=0.0)[None, :]
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)), in units of the exponent's base 2
            s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * scale)))
        seen = (key[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1) * factor)
        p = tl.exp2(tl.fma(s, factor, -new[:, None]))
        fade = tl.exp2(m - new)
        z = tl.fma(z, fade, tl.sum(p, axis=1))
        if SCALED:
            p = p * tl.load(v_scale_ptr + line, mask=inside, other=0.0)[None, :]
        if not LATENT:
            v = tl.load(
                v_ptr + line[:, None] * E + e[None, :],
                mask=inside[:, None] & (e < E)[None, :],
                other=0.0,
            )
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o * fade[:, None], input_precision="ieee")
        m = new
    return m, z, o


@triton.jit(
    do_not_specialize=["table_width", "num_segments", "lines", "splits"],
    do_not_specialize_on_alignment=["work_ptr"],
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, sums_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    work_ptr, table_ptr, starts_ptr, lengths_ptr, factor, scale, softcap,
    stride_qt, stride_qh, table_width, stride_block, num_segments, lines, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, SCALED: tl.constexpr,
    EVERY_ROW: tl.constexpr, SHARED: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = M // G
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if EVERY_ROW:
        row = item
        first_token = 0
    else:
        row = tl.load(work_ptr + 2 * item)
        first_token = tl.load(work_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    length = tl.load(lengths_ptr + row)
    r = tl.arange(0, M)
    new = first_token + r // G
    head = kv_head * G + r % G
    live = (new < count) & (r < TOKENS * G)
    position = length - count + new
    last = length - count + tl.minimum(first_token + TOKENS, count) - 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count + first_token - WINDOW + 1, 0)
    if CAPPED:
        factor = 1.4426950408889634
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q_at = (start + new).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh
    if LATENT:
        q_value = tl.load(
            q_ptr + q_at + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0
        )
        q = tl.load(
            q_ptr + q_at + E + d[None, :], mask=live[:, None] & (d < D - E)[None, :], other=0.0
        )
    else:
        q_value = 0.0
        q = tl.load(q_ptr + q_at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    top, total = start_of_fold(sinks_ptr, head, H, M, HAS_SINKS)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    here = table_ptr + row.to(tl.int64) * table_width
    begin = low // SEGMENT + tl.program_id(2)
    for segment in range(begin, last // SEGMENT + 1, splits):
        first = tl.maximum(segment * SEGMENT, low // S * S)
        end = tl.minimum(segment * SEGMENT + SEGMENT - 1, last)
        m, z, o = segment_of(
            q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, here, position, low, first, end, factor, scale, softcap,
            stride_block, BLOCK_SIZE, 0 if LATENT else kv_head, D, E, BLOCK_D, BLOCK_E, BLOCK_SIZE, M, S, WINDOW, CAPPED, SCALED,
            q_value, LATENT,
        )  # fmt: skip
        if SHARED:
            part = ((item * (H // G) + kv_head).to(tl.int64) * num_segments + segment) * lines
            tl.store(parts_ptr + (part + r)[:, None] * BLOCK_E + e[None, :], o, mask=live[:, None])
            tl.store(sums_ptr + 2 * part + r, m, mask=live)
            tl.store(sums_ptr + 2 * part + lines + r, z, mask=live)
        else:
            top, total, acc = fold(top, total, acc, m, z, o)
    if not SHARED:
        finish(
            out_ptr, lse_ptr, top, total, acc, start + new, head, live, H, E, BLOCK_E, HAS_LSE,
        )  # fmt: skip


@triton.jit
def part_of(parts_ptr, sums_ptr, line, lines, there, r, e, BLOCK_E: tl.constexpr):
    """Load the (m, z, o) of a segment that another program wrote."""
    o = tl.load(parts_ptr + line[:, None] * BLOCK_E + e[None, :], mask=there[:, None], other=0.0)
    m = tl.load(sums_ptr + 2 * line - r, mask=there, other=LOWEST)
    z = tl.load(sums_ptr + 2 * line - r + lines, mask=there, other=0.0)
    return m, z, o


@triton.jit(
    do_not_specialize=["num_segments", "lines"], do_not_specialize_on_alignment=["work_ptr"]
)
def merge_kernel(
    parts_ptr, sums_ptr, out_ptr, lse_ptr, sinks_ptr, work_ptr, starts_ptr, lengths_ptr,
    num_segments, lines,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr,
    SEGMENT: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    EVERY_ROW: tl.constexpr,
):  # fmt: skip
    """Fold the segments of programs that share a row, exactly as `attend_kernel` folds its own."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if EVERY_ROW:
        row = item
    else:
        row = tl.load(work_ptr + 2 * item)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    length = tl.load(lengths_ptr + row)
    r = tl.arange(0, M)
    e = tl.arange(0, BLOCK_E)
    new = r // G
    head = kv_head * G + r % G
    live = (new < count) & (r < lines)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count - WINDOW + 1, 0)
    top, total = start_of_fold(sinks_ptr, head, H, M, HAS_SINKS)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    base = (item * (H // G) + kv_head).to(tl.int64) * num_segments
    last = (length - 1) // SEGMENT
    for offsets in range(low // SEGMENT, last + 1, AHEAD):
        # Load all before the first fold. Segments beyond the last change nothing.
        line = (base + offsets) * lines + r
        m0, z0, o0 = part_of(parts_ptr, sums_ptr, line, lines, live, r, e, BLOCK_E)
        m1, z1, o1 = part_of(parts_ptr, sums_ptr, line + lines, lines, live & (offsets < last), r, e, BLOCK_E)  # fmt: skip
        m2, z2, o2 = part_of(parts_ptr, sums_ptr, line + 2 * lines, lines, live & (offsets + 1 < last), r, e, BLOCK_E)  # fmt: skip
        m3, z3, o3 = part_of(parts_ptr, sums_ptr, line + 3 * lines, lines, live & (offsets + 2 < last), r, e, BLOCK_E)  # fmt: skip
        top, total, acc = fold(top, total, acc, m0, z0, o0)
        top, total, acc = fold(top, total, acc, m1, z1, o1)
        top, total, acc = fold(top, total, acc, m2, z2, o2)
        top, total, acc = fold(top, total, acc, m3, z3, o3)
    finish(
        out_ptr, lse_ptr, top, total, acc, start + new, head, live, H, E, BLOCK_E, HAS_LSE,
    )  # fmt: skip
