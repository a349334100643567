"""The Triton kernels of :mod:`tiltsam.fused`. Importing this needs Triton.

A program processes a chunk of 4·LANES elements of one tensor, given by ``owners``, ``starts`` and ``lengths``. Vectors
are tables with one address per tensor. For a sum over all elements each program stores its part, and the last one to
finish adds the parts up, always in the same order.
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
    """Store this program's part of a sum; return whether all others have stored theirs. Resets the counter."""
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
    """Return a number in (0, 1), whose logarithm is finite."""
    return tl.maximum(tl.uint_to_uniform_float(i), 1.0e-7)


@triton.jit(do_not_specialize=["sample"])
def noise_scale(
    owners, starts, lengths, seed, sample, partial, counter, radius, std, max_norm, scale, distance, count, dim,
    BALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The factor of the noise z: ``R U^(1/d) / ‖z‖`` for the ball, ``min(std, max_norm / ‖z‖)`` else."""
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
            factor = tl.minimum(tl.load(std), tl.load(max_norm) / (norm + EPS))
        tl.store(scale, factor)
        tl.store(distance, factor * norm)


@triton.jit(do_not_specialize=["sample"])
def noise_move(owners, starts, lengths, point, center, seed, sample, scale, LANES: tl.constexpr):
    """``point <- center + scale z``."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    z0, z1, z2, z3 = normals(tl.load(seed), sample, chunk * LANES + lanes)
    s = tl.load(scale)
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    move(x, c, s * z0, lanes < length)
    move(x + LANES, c + LANES, s * z1, lanes + LANES < length)
    move(x + 2 * LANES, c + 2 * LANES, s * z2, lanes + 2 * LANES < length)
    move(x + 3 * LANES, c + 3 * LANES, s * z3, lanes + 3 * LANES < length)


@triton.jit
def move(x, c, step, here):
    """``x <- c + step``."""
    tl.store(x, tl.load(c, here) + step, here)


@triton.jit
def filter_norms(owners, starts, lengths, x, norms, BLOCK: tl.constexpr):
    """The norm of each filter; one program a filter."""
    index = tl.program_id(0)
    owner, start, length = tl.load(owners + index), tl.load(starts + index), tl.load(lengths + index)
    lanes = tl.arange(0, BLOCK)
    address = tl.load(x + owner).to(tl.pointer_type(tl.float32)) + start
    squares = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, length, BLOCK):
        a = tl.load(address + at + lanes, at + lanes < length, other=0.0)
        squares += a * a
    tl.store(norms + index, tl.sqrt(tl.sum(squares, 0)))


@triton.jit(do_not_specialize=["sample"])
def filter_noise_move(
    owners, starts, lengths, point, center, seed, sample, gamma, norms, first_filters, filter_sizes,
    LANES: tl.constexpr,
):  # fmt: skip
    """``point <- center + γ ‖filter‖ z``."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, LANES)
    z0, z1, z2, z3 = normals(tl.load(seed), sample, chunk * LANES + lanes)
    g = tl.load(gamma)
    first, size = norms + tl.load(first_filters + owner), tl.load(filter_sizes + owner)
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    move(x, c, g * z0 * filter_of(first, size, start + lanes, lanes < length), lanes < length)
    lanes += LANES
    move(x + LANES, c + LANES, g * z1 * filter_of(first, size, start + lanes, lanes < length), lanes < length)
    lanes += LANES
    move(x + 2 * LANES, c + 2 * LANES, g * z2 * filter_of(first, size, start + lanes, lanes < length), lanes < length)
    lanes += LANES
    move(x + 3 * LANES, c + 3 * LANES, g * z3 * filter_of(first, size, start + lanes, lanes < length), lanes < length)


@triton.jit
def filter_of(first, size, index, here):
    """The norm of the filter that an element belongs to."""
    return tl.load(first + index // size, here, other=0.0)


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
def ascend(
    owners, starts, lengths, point, center, gradient, rho, norm, finite, partial, counter, distance, count,
    LANES: tl.constexpr,
):  # fmt: skip
    """``point <- point + ρ n(g)`` where finite; ``distance`` becomes ‖point − center‖."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    x, c = row(point, owner, start, lanes), row(center, owner, start, lanes)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0, eviction_policy="evict_first")
    before = tl.load(x, here, other=0.0)
    theta = tl.load(c, here, other=0.0)
    after = before + tl.where(tl.load(finite) != 0, tl.load(rho) / (tl.load(norm) + EPS) * g, 0.0)
    tl.store(x, after, here)
    gap = after - theta
    if last_to_finish(partial, counter, chunk, tl.sum(gap * gap, 0), count):
        tl.store(distance, tl.sqrt(total(partial, count)))


@triton.jit
def adaptive_norm(owners, starts, lengths, center, gradient, eta, partial, counter, norm, count, LANES: tl.constexpr):
    """The norm of ``(|center| + η) g``."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0)
    scaled = (tl.abs(tl.load(row(center, owner, start, lanes), here, other=0.0)) + tl.load(eta)) * g
    if last_to_finish(partial, counter, chunk, tl.sum(scaled * scaled, 0), count):
        tl.store(norm, tl.sqrt(total(partial, count)))


@triton.jit
def adaptive_ascend(
    owners, starts, lengths, point, center, gradient, eta, rho, norm, finite, partial, counter, distance, count,
    LANES: tl.constexpr,
):  # fmt: skip
    """``point <- center + ρ T²g/‖Tg‖`` where finite, with ``T = |center| + η``; ``distance`` is that of the two."""
    chunk = tl.program_id(0)
    owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
    lanes = tl.arange(0, 4 * LANES)
    here = lanes < length
    theta = tl.load(row(center, owner, start, lanes), here, other=0.0)
    g = tl.load(row(gradient, owner, start, lanes), here, other=0.0, eviction_policy="evict_first")
    metric = tl.abs(theta) + tl.load(eta)
    step = metric * (metric * (tl.load(rho) / (tl.load(norm) + EPS) * g))
    step = tl.where(tl.load(finite) != 0, step, 0.0)
    tl.store(row(point, owner, start, lanes), theta + step, here)
    if last_to_finish(partial, counter, chunk, tl.sum(tl.where(here, step * step, 0.0), 0), count):
        tl.store(distance, tl.sqrt(total(partial, count)))


@triton.jit
def zero_unless(owners, starts, lengths, x, mask, LANES: tl.constexpr):
    """``x <- 0`` unless ``mask``; touches no memory otherwise."""
    chunk = tl.program_id(0)
    if tl.load(mask) == 0:
        owner, start, length = tl.load(owners + chunk), tl.load(starts + chunk), tl.load(lengths + chunk)
        lanes = tl.arange(0, 4 * LANES)
        tl.store(row(x, owner, start, lanes), tl.zeros((4 * LANES,), tl.float32), lanes < length)


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
    loss, valid, start, distance, norm, tilt, record, share, sample, count, LAST: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Add a sample to the record and compute its share of the weight; the last sample completes the record.

    The record: tilted loss, largest loss, total weight relative to it; then ``count`` numbers each of loss, weight,
    start loss, distance, gradient norm, validity.
    """
    value, ok, t = tl.load(loss), tl.load(valid) != 0, tl.load(tilt)
    top = tl.load(record + 1, sample > 0, other=float("-inf"))
    mass = tl.load(record + 2, sample > 0, other=0.0)
    new_top = tl.where(ok, tl.maximum(top, value), top)
    mine = tl.where(ok, tl.exp(t * (value - new_top)), 0.0)
    new_mass = mine + tl.where(mass > 0, mass * tl.exp(t * (top - new_top)), 0.0)
    tl.store(share, tl.where(new_mass > 0, mine / new_mass, 0.0))
    tl.store(record + 1, new_top)
    tl.store(record + 2, new_mass)
    column = record + 3 + sample
    tl.store(column, value)
    tl.store(column + 2 * count, tl.load(start))
    tl.store(column + 3 * count, tl.load(distance))
    tl.store(column + 4 * count, tl.load(norm))
    tl.store(column + 5 * count, tl.where(ok, 1.0, 0.0))
    if LAST:
        index = tl.arange(0, WIDTH)
        before = index < sample  # this program's own stores may not be visible yet
        losses = tl.where(index == sample, value, tl.load(record + 3 + index, before, other=0.0))
        counts = tl.load(record + 3 + 5 * count + index, before, other=0.0) > 0
        counts = tl.where(index == sample, ok, counts)
        argument = tl.where(counts, t * (losses - new_top), 0.0)
        weights = tl.where(counts, tl.exp(argument), 0.0)
        total_weight = tl.sum(weights, 0)
        number = tl.sum(tl.where(counts, 1.0, 0.0), 0)
        weights = weights / tl.maximum(total_weight, 1.0e-30)
        tl.store(record + 3 + count + index, weights, index < count)
        # (1/t) log of the mean weight, by log1p where t is small; the weighted mean where t is 0.
        mean = new_top + tl.sum(tl.where(counts, weights * (losses - new_top), 0.0), 0)
        excess = tl.sum(tl.where(counts, libdevice.expm1(argument), 0.0), 0) / number
        log_mean = tl.where(excess > -0.5, libdevice.log1p(tl.maximum(excess, -0.5)), tl.log(total_weight / number))
        tilted = tl.where(t == 0, mean, new_top + log_mean / tl.where(t == 0, 1.0, t))
        tl.store(record, tl.where(number > 0, tilted, float("nan")))
