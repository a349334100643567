"""The Triton kernels behind :mod:`tiltsam.fused`. Importing this needs Triton.

A program owns a chunk of 4·LANES elements of one tensor: ``owners``, ``starts`` and ``lengths`` say which. Vectors come
as tables of addresses, one per tensor. Triton compiles what stands here, so it is written in Triton's Python, untyped.
"""

import triton
import triton.language as tl


@triton.jit
def row(table, owner, start, lanes):
    """Addresses of a row of a chunk."""
    address = tl.load(table + owner).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16) + start + lanes


@triton.jit
def normals(seed, counters):
    """Four independent N(0, 1) numbers for each counter.

    Philox with 7 rounds, the fewest its authors found to pass all of TestU01 (Salmon et al. 2011), and Box–Muller with
    the hardware's sine and cosine, whose error of 2⁻²⁰ is far below what noise needs: libm's would cost more than all
    the rest.
    """
    i0, i1, i2, i3 = tl.randint4x(seed, counters, n_rounds=7)
    r0, c0, s0 = _polar(i0, i1)
    r1, c1, s1 = _polar(i2, i3)
    return r0 * c0, r0 * s0, r1 * c1, r1 * s1


@triton.jit
def _polar(i, j):
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.uint_to_uniform_float(i), 1.0e-7)))
    angle = 6.283185307179586 * (tl.uint_to_uniform_float(j) - 0.5)
    cosine = tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
    )
    sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    return radius, cosine, sine


@triton.jit
def noise_squares(owners, starts, lengths, seed, partial, LANES: tl.constexpr):
    """Partial sums of z²."""
    chunk = tl.program_id(0)
    length = tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    z0, z1, z2, z3 = normals(tl.load(seed), chunk * LANES + lanes)
    total = tl.where(lanes < length, z0 * z0, 0.0)
    total += tl.where(lanes + LANES < length, z1 * z1, 0.0)
    total += tl.where(lanes + 2 * LANES < length, z2 * z2, 0.0)
    total += tl.where(lanes + 3 * LANES < length, z3 * z3, 0.0)
    tl.store(partial + chunk, tl.sum(total, 0))


@triton.jit
def noise_move(owners, starts, lengths, point, center, seed, scale, LANES: tl.constexpr):
    """``point <- center + scale z``."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    z0, z1, z2, z3 = normals(tl.load(seed), chunk * LANES + lanes)
    s = tl.load(scale)
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    tl.store(x, tl.load(c, lanes < length) + s * z0, lanes < length)
    tl.store(x + LANES, tl.load(c + LANES, lanes + LANES < length) + s * z1, lanes + LANES < length)
    tl.store(x + 2 * LANES, tl.load(c + 2 * LANES, lanes + 2 * LANES < length) + s * z2, lanes + 2 * LANES < length)
    tl.store(x + 3 * LANES, tl.load(c + 3 * LANES, lanes + 3 * LANES < length) + s * z3, lanes + 3 * LANES < length)


@triton.jit
def squares(owners, starts, lengths, gradient, partial, LANES: tl.constexpr):
    """Partial sums of g²."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    g = tl.load(row(gradient, owner, start, lanes), lanes < length, other=0.0)
    tl.store(partial + chunk, tl.sum(g * g, 0))


@triton.jit
def judge(partial, loss, norm, finite, count, BLOCK: tl.constexpr):
    """One program: the norm from its partial sums, and whether it and the loss are finite."""
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, count, BLOCK):
        index = at + tl.arange(0, BLOCK)
        total += tl.load(partial + index, index < count, other=0.0)
    length = tl.sqrt(tl.sum(total, 0))
    value = tl.load(loss)
    ok = (length - length == 0) & (value - value == 0)  # x − x is 0 for a finite x alone
    tl.store(norm, tl.where(ok, length, 0.0))
    tl.store(finite, ok)


@triton.jit
def climb(owners, starts, lengths, point, center, gradient, scale, finite, partial, LANES: tl.constexpr):
    """``point <- point + scale g`` where finite; partial sums of (point − center)²."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    x = row(point, owner, start, lanes)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0)
    c = tl.load(row(center, owner, start, lanes), here, other=0.0)
    moved = tl.load(x, here, other=0.0) + tl.where(tl.load(finite) != 0, tl.load(scale) * g, 0.0)
    tl.store(x, moved, here)
    tl.store(partial + chunk, tl.sum((moved - c) * (moved - c), 0))


@triton.jit
def mix(owners, starts, lengths, mean, gradient, share, valid, LANES: tl.constexpr, FIRST: tl.constexpr):
    """``mean <- mean + share (g − mean)`` where valid."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    m = row(mean, owner, start, lanes)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0)
    g = tl.where(tl.load(valid) != 0, g, 0.0)
    if FIRST:
        tl.store(m, g, here)
    else:
        w = tl.load(share)
        tl.store(m, tl.load(m, here, other=0.0) * (1 - w) + g * w, here)


@triton.jit
def weigh(loss, valid, tilt, state, share, FIRST: tl.constexpr):
    """One program: a loss joins a running log-sum-exp, kept in ``state`` as (largest loss, weight relative to it)."""
    value, ok, t = tl.load(loss), tl.load(valid) != 0, tl.load(tilt)
    top, mass = float("-inf"), 0.0
    if not FIRST:
        top, mass = tl.load(state), tl.load(state + 1)
    new_top = tl.where(ok, tl.maximum(top, value), top)
    mine = tl.where(ok, tl.exp(t * (value - new_top)), 0.0)
    total = mine + tl.where(mass > 0, mass * tl.exp(t * (top - new_top)), 0.0)
    tl.store(share, tl.where(total > 0, mine / total, 0.0))
    tl.store(state, new_top)
    tl.store(state + 1, total)
