"""Lists of tensors as vectors, over devices, groups and missing tensors."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import reference
from tiltsam.distributed import Sharding
from tiltsam.space import tensor_lists
from tiltsam.space.tensor_lists import TensorLists, allocate, dealias, is_dense, is_expanded


def lists_over(tensors, groups=None):
    groups = [0] * len(tensors) if groups is None else groups
    dims = [x.dim() for x in tensors]
    return TensorLists(tensors, groups, dims, sharding=Sharding(tensors), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dot_of_half_precision_is_not_rounded(dtype):
    """1e-4 squared underflows in float16: HMC would see a norm of zero."""
    x = [torch.full((1000,), 1e-4, dtype=dtype), torch.linspace(-1, 1, 64, dtype=dtype)]
    exact = sum(a.double().square().sum() for a in x)
    torch.testing.assert_close(tensor_lists.dot(x[:1], x[:1], torch.float32), x[0][0].float().square() * 1000)
    torch.testing.assert_close(tensor_lists.dot(x, x, torch.float32).double(), exact, rtol=1e-6, atol=0)


def test_several_blocks_equal_one():
    """On several devices a vector is several blocks."""
    whole = [torch.randn(n, dtype=torch.float64) for n in (3, 4, 5)]
    other = [torch.randn(n, dtype=torch.float64) for n in (3, 4, 5)]
    one, many = lists_over(whole), lists_over(whole)
    many.blocks = many._group_blocks = [type(b)(b.device, (i,), 0) for b in one.blocks for i in b.indices]
    torch.testing.assert_close(one.norm(whole), many.norm(whole))
    torch.testing.assert_close(one.dot(whole, other), many.dot(whole, other))
    assert many.norm(whole) == pytest.approx(reference.norm(whole).item())
    copies = [[x.clone() for x in whole] for _ in range(2)]
    for lists, x in zip((one, many), copies, strict=True):
        lists.add_scaled_(x, [y.clone() for y in other], torch.tensor(0.3, dtype=torch.float64))
        lists.scale_by_abs_(x, other, torch.tensor(0.1, dtype=torch.float64))
        lists.select_(x, other, torch.tensor(False))
    torch.testing.assert_close(*copies)


def test_norm_and_dot_skip_missing_tensors():
    x, y = [torch.ones(3), None, torch.ones(4)], [None, torch.ones(2), torch.full((4,), 2.0)]
    lists = lists_over([torch.zeros(n) for n in (3, 2, 4)])
    assert lists.norm(x) == pytest.approx(7**0.5)
    assert lists.dot(x, y) == 8.0
    assert lists.dot(x[:1] + [None] * 2, y) == 0.0  # no tensor in both


def test_add_counts_missing_tensors_as_zero():
    lists = lists_over([torch.zeros(2) for _ in range(4)])
    x, y = [torch.ones(2), None, torch.ones(2), None], [None, torch.ones(2), torch.ones(2), None]
    lists.add_(x, y, alpha=2.0)
    lists.add_scaled_(x, y, torch.tensor(3.0))
    assert x[3] is None
    assert [a[0].item() for a in x[:3]] == [1.0, 5.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_any_layout(dtype):
    x = torch.randn(3, 4, 5, dtype=dtype)
    for a in (x, x.transpose(0, 2), x[:, ::2]):
        torch.testing.assert_close(tensor_lists.norms([a], dtype), a.norm()[None])


def test_scale_by_group():
    x = [torch.ones(2, dtype=torch.float64) for _ in range(3)]
    lists = lists_over(x, [0, 1, 0])
    lists.scale_(x, torch.tensor([2.0, 5.0], dtype=torch.float64))
    assert [a[0].item() for a in x] == [2.0, 5.0, 2.0]
    y = [torch.ones(2, dtype=torch.float64) for _ in range(3)]
    lists.add_scaled_(x, y, torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert [a[0].item() for a in x] == [3.0, 8.0, 3.0]


class CountKernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_scale_by_abs_takes_as_many_kernels_for_more_tensors():
    counts = []
    for number in (1, 20):
        w = [torch.full((2,), -3.0) for _ in range(number)]
        x = [torch.ones(2) for _ in range(number)]
        with CountKernels() as kernels:
            tensor_lists.scale_by_abs_(x, w, torch.tensor(0.5))
        assert torch.cat(x).eq(3.5).all()
        counts.append(kernels.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("chosen", [True, False])
def test_select_with_missing_tensors(chosen):
    """A tensor missing on one side is zero there; one missing on both stays missing."""
    lists = lists_over([torch.ones(2) for _ in range(4)])
    x = [torch.full((2,), 3.0), None, torch.full((2,), torch.nan), None]
    y = [torch.full((2,), 5.0), torch.full((2,), 7.0), None, None]
    lists.select_(x, y, torch.tensor(chosen))
    assert x[3] is None
    expected = [5.0, 7.0, 0.0] if chosen else [3.0, 0.0, torch.nan]
    for a, value in zip(x, expected, strict=False):
        torch.testing.assert_close(a, torch.full((2,), value), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_unless(device, dtype):
    """NaN and inf become exactly 0."""
    for mask in (False, True):
        x = torch.tensor([math.nan, math.inf, -math.inf, 2.0], dtype=dtype, device=device)
        before = x.clone()
        tensor_lists.zero_unless_([x], torch.tensor(mask, device=device))
        torch.testing.assert_close(x, before if mask else torch.zeros_like(x), rtol=0, atol=0, equal_nan=True)


def test_map_counts_missing_tensors_as_zero():
    lists = lists_over([torch.ones(2) for _ in range(3)])
    x = [torch.ones(2), None, torch.full((2,), 3.0)]
    lists.map_(x, lambda a, b, c: a + 2 * b + c, [None, torch.ones(2), torch.ones(2)], torch.tensor(10.0))
    assert x[1] is None
    assert [x[0].tolist(), x[2].tolist()] == [[11.0, 11.0], [15.0, 15.0]]


def test_copy_zeroes_where_the_source_is_missing():
    lists = lists_over([torch.ones(2) for _ in range(2)])
    copied = lists.copy_to("copy", [torch.full((2,), 4.0), torch.full((2,), 5.0)])
    assert [a[0].item() for a in copied] == [4.0, 5.0]
    copied = lists.copy_to("copy", [None, torch.full((2,), 6.0)])
    assert copied[0] is None
    assert [a[0].item() for a in lists.vector("copy")] == [0.0, 6.0]


def test_allocate_keeps_shapes_strides_and_alignment():
    like = [torch.ones(3, 4, 5, 5).to(memory_format=torch.channels_last), torch.ones(7), torch.ones(2, 3).t()]
    like += [torch.ones(5, dtype=torch.float64), torch.ones(4, 6)[:, ::2]]
    tensors, buffers = allocate(like)
    assert len(buffers) == 2  # by dtype
    for a, x in zip(tensors, like, strict=True):
        assert a.shape == x.shape
        assert a.stride() == x.stride() or not is_dense(x)
        assert a.data_ptr() % 16 == 0
        assert a.count_nonzero() == 0
        a.fill_(1)
    assert sum(buffer.sum() for buffer in buffers) == sum(x.numel() for x in like)  # they do not overlap


def test_dealias_clones_tensors_that_share_memory():
    buffer = torch.arange(6.0)
    expanded = torch.ones(1).expand(4)
    assert is_expanded(expanded)
    found = dealias([buffer, None, buffer.view(2, 3), expanded])
    assert found[1] is None
    addresses = [a.data_ptr() for a in found if a is not None]
    assert len(set(addresses)) == 3
    assert torch.equal(found[2], buffer.view(2, 3))
    assert not is_expanded(found[3])


def test_filter_norms_by_slice():
    x = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 3, 2)]
    matrix, vector, tensor = lists_over(x).filter_norms(x)
    torch.testing.assert_close(matrix, x[0].norm(dim=1, keepdim=True))
    torch.testing.assert_close(vector, x[1].norm())
    torch.testing.assert_close(tensor, x[2].flatten(1).norm(dim=1).view(2, 1, 1))
