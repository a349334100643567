"""The Triton kernels behind :mod:`tiltsam.fused`. Importing this needs Triton.

A program owns a chunk of 4·LANES elements of one tensor: ``owners``, ``starts`` and ``lengths`` say which. Vectors come
as tables of addresses, one per tensor. Where a sum over all elements is wanted, each program stores its part, and the
last one to finish adds the parts up, always in the same order. Triton compiles what stands here, so it is written in
Triton's Python, untyped.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

EPS = tl.constexpr(1e-12)  # of n(v) = v / (‖v‖ + EPS)
SUM_BLOCK = tl.constexpr(4096)


@triton.jit
def row(table, owner, start, lanes):
    """Addresses of a row of a chunk."""
    address = tl.load(table + owner).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16) + start + lanes


@triton.jit
def last_to_finish(partial, counter, chunk, part, count):
    """Store this program's part of a sum; whether all others have stored theirs. The counter is left at 0."""
    tl.store(partial + chunk, part)
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def total(partial, count):
    """The sum of all parts."""
    sums = tl.zeros((SUM_BLOCK,), tl.float32)
    for at in range(0, count, SUM_BLOCK):
        index = at + tl.arange(0, SUM_BLOCK)
        sums += tl.load(partial + index, index < count, other=0.0, cache_modifier=".cg")  # written by other programs
    return tl.sum(sums, 0)


@triton.jit
def bits(seed, sample, purpose, counters):
    """Four words of random bits for each counter of a sample's stream.

    Philox with 7 rounds, the fewest its authors found to pass all of TestU01 (Salmon et al. 2011).
    """
    zero = counters * 0
    return tl.philox(seed, counters, zero + sample, zero + purpose, zero, n_rounds=7)


@triton.jit
def normals(seed, sample, counters):
    """Four independent N(0, 1) numbers for each counter.

    Box–Muller with the hardware's sine and cosine, whose error of 2⁻²⁰ is far below what noise needs: libm's would cost
    more than all the rest.
    """
    i0, i1, i2, i3 = bits(seed, sample, 0, counters)
    r0, c0, s0 = _polar(i0, i1)
    r1, c1, s1 = _polar(i2, i3)
    return r0 * c0, r0 * s0, r1 * c1, r1 * s1


@triton.jit
def _polar(i, j):
    radius = tl.sqrt(-2.0 * tl.log(_uniform(i)))
    angle = 6.283185307179586 * (tl.uint_to_uniform_float(j) - 0.5)
    cosine = tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
    )
    sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    return radius, cosine, sine


@triton.jit
def _uniform(i):
    """In (0, 1): a logarithm may be taken of it."""
    return tl.maximum(tl.uint_to_uniform_float(i), 1.0e-7)


@triton.jit(do_not_specialize=["sample"])
def noise_scale(
    owners, starts, lengths, seed, sample, partial, counter, radius, std, longest, scale, moved, count, dim,
    BALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What to multiply the noise z by: ``R U^(1/d) / ‖z‖`` for the ball, ``min(std, longest / ‖z‖)`` else."""
    chunk = tl.program_id(0)
    length = tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    if length == 4 * LANES:  # (r cos a)² + (r sin a)² = r², without the angle
        i0, _, i2, _ = bits(tl.load(seed), sample, 0, chunk * LANES + lanes)
        squares = -2.0 * (tl.log(_uniform(i0)) + tl.log(_uniform(i2)))
    else:
        z0, z1, z2, z3 = normals(tl.load(seed), sample, chunk * LANES + lanes)
        squares = tl.where(lanes < length, z0 * z0, 0.0)
        squares += tl.where(lanes + LANES < length, z1 * z1, 0.0)
        squares += tl.where(lanes + 2 * LANES < length, z2 * z2, 0.0)
        squares += tl.where(lanes + 3 * LANES < length, z3 * z3, 0.0)
    if last_to_finish(partial, counter, chunk, tl.sum(squares, 0), count):
        norm = tl.sqrt(total(partial, count))
        if BALL:
            i0, _, _, _ = bits(tl.load(seed), sample, 1, tl.zeros((1,), tl.int32))
            logarithm = tl.sum(tl.log(_uniform(i0)), 0)
            factor = tl.load(radius) * tl.exp(logarithm / dim) / (norm + EPS)
        else:
            factor = tl.minimum(tl.load(std), tl.load(longest) / (norm + EPS))
        tl.store(scale, factor)
        tl.store(moved, factor * norm)


@triton.jit
def shift(x, c, move, here, BACKUP: tl.constexpr):
    """``x <- c + move``; where ``x`` is still θ, ``c`` becomes a copy of it first."""
    if BACKUP:
        home = tl.load(x, here)
        tl.store(c, home, here)
    else:
        home = tl.load(c, here)
    tl.store(x, home + move, here)


@triton.jit(do_not_specialize=["sample"])
def noise_move(
    owners, starts, lengths, point, center, seed, sample, scale, BACKUP: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """``point <- center + scale z``."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    z0, z1, z2, z3 = normals(tl.load(seed), sample, chunk * LANES + lanes)
    s = tl.load(scale)
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    shift(x, c, s * z0, lanes < length, BACKUP)
    shift(x + LANES, c + LANES, s * z1, lanes + LANES < length, BACKUP)
    shift(x + 2 * LANES, c + 2 * LANES, s * z2, lanes + 2 * LANES < length, BACKUP)
    shift(x + 3 * LANES, c + 3 * LANES, s * z3, lanes + 3 * LANES < length, BACKUP)


@triton.jit
def gradient_norm(
    owners, starts, lengths, gradient, partial, counter, loss, before, norm, finite, count, LANES: tl.constexpr
):  # fmt: skip
    """The norm of a gradient, 0 unless it, the loss and what came before are finite; and whether they are."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    g = tl.load(row(gradient, owner, start, lanes), lanes < length, other=0.0)
    if last_to_finish(partial, counter, chunk, tl.sum(g * g, 0), count):
        found, value = tl.sqrt(total(partial, count)), tl.load(loss)
        ok = (found - found == 0) & (value - value == 0) & (tl.load(before) != 0)  # x − x is 0 for a finite x alone
        tl.store(norm, tl.where(ok, found, 0.0))
        tl.store(finite, ok)


@triton.jit
def climb(
    owners, starts, lengths, point, center, gradient, rho, norm, finite, partial, counter, moved, count,
    BACKUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """``point <- point + ρ n(g)`` where finite; ``moved`` becomes ‖point − center‖."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0, eviction_policy="evict_first")
    before = tl.load(x, here, other=0.0)
    if BACKUP:
        home = before
        tl.store(c, before, here)
    else:
        home = tl.load(c, here, other=0.0)
    after = before + tl.where(tl.load(finite) != 0, tl.load(rho) / (tl.load(norm) + EPS) * g, 0.0)
    tl.store(x, after, here)
    gap = after - home
    if last_to_finish(partial, counter, chunk, tl.sum(gap * gap, 0), count):
        tl.store(moved, tl.sqrt(total(partial, count)))


@triton.jit
def mix(owners, starts, lengths, mean, gradient, share, valid, FIRST: tl.constexpr, LANES: tl.constexpr):
    """``mean <- mean + share (g − mean)`` where valid."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    m = row(mean, owner, start, lanes)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0, eviction_policy="evict_first")
    g = tl.where(tl.load(valid) != 0, g, 0.0)
    if FIRST:
        tl.store(m, g, here)
    else:
        w = tl.load(share)
        tl.store(m, tl.load(m, here, other=0.0) * (1 - w) + g * w, here)


@triton.jit(do_not_specialize=["sample", "count"])
def weigh(
    loss, valid, start, distance, norm, tilt, board, share, sample, count, LAST: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One program: a sample joins the board, and gets its share of the weight; the last one sums the step up.

    The board: loss, effective sample size, how many are not finite, the largest loss and the weight relative to it;
    then ``count`` numbers each of loss, weight, start loss, distance, gradient norm, validity.
    """
    value, ok, t = tl.load(loss), tl.load(valid) != 0, tl.load(tilt)
    top = tl.load(board + 3, sample > 0, other=float("-inf"))
    mass = tl.load(board + 4, sample > 0, other=0.0)
    new_top = tl.where(ok, tl.maximum(top, value), top)
    mine = tl.where(ok, tl.exp(t * (value - new_top)), 0.0)
    new_mass = mine + tl.where(mass > 0, mass * tl.exp(t * (top - new_top)), 0.0)
    tl.store(share, tl.where(new_mass > 0, mine / new_mass, 0.0))
    tl.store(board + 3, new_top)
    tl.store(board + 4, new_mass)
    column = board + 5 + sample
    tl.store(column, value)
    tl.store(column + 2 * count, tl.load(start))
    tl.store(column + 3 * count, tl.load(distance))
    tl.store(column + 4 * count, tl.load(norm))
    tl.store(column + 5 * count, tl.where(ok, 1.0, 0.0))
    if LAST:
        index = tl.arange(0, WIDTH)
        before = index < sample  # the others are on the board, this one is not yet for everyone to see
        losses = tl.where(index == sample, value, tl.load(board + 5 + index, before, other=0.0))
        counts = tl.load(board + 5 + 5 * count + index, before, other=0.0) > 0
        counts = tl.where(index == sample, ok, counts)
        argument = tl.where(counts, t * (losses - new_top), 0.0)
        weights = tl.where(counts, tl.exp(argument), 0.0)
        total_weight = tl.sum(weights, 0)
        number = tl.sum(tl.where(counts, 1.0, 0.0), 0)
        weights = weights / tl.maximum(total_weight, 1.0e-30)
        tl.store(board + 5 + count + index, weights, index < count)
        squares = tl.sum(weights * weights, 0)
        tl.store(board + 1, tl.sum(weights, 0) * tl.sum(weights, 0) / tl.maximum(squares, 1.0e-30))
        tl.store(board + 2, count - number)
        # (1/t) log of the mean weight, by log1p where t is small; the weighted mean where t is 0.
        mean = new_top + tl.sum(tl.where(counts, weights * (losses - new_top), 0.0), 0)
        excess = tl.sum(tl.where(counts, libdevice.expm1(argument), 0.0), 0) / number
        log_mean = tl.where(excess > -0.5, libdevice.log1p(tl.maximum(excess, -0.5)), tl.log(total_weight / number))
        tilted = tl.where(t == 0, mean, new_top + log_mean / tl.where(t == 0, 1.0, t))
        tl.store(board, tl.where(number > 0, tilted, float("nan")))
