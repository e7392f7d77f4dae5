"""Fused attention and merging against float64 written from the formulas, on a GPU or interpreted."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from bmfa.merging.kernels import eager
from bmfa.merging.kernels.triton import launch as merging

Array = NDArray[np.float64]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device")
# Every shape is compiled anew on a GPU.
SWEEP = range(6 if GPU else 18)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["plain", "poisoned"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """New buffers hold NaN or a wild number, so an element that is never written shows."""
    if request.param:
        empty = torch.empty

        def poisoned(*args: object, **options: object) -> Tensor:
            buffer: Tensor = empty(*args, **options)  # type: ignore[call-overload]
            return buffer.fill_(math.nan if buffer.is_floating_point() else -(2**30))

        monkeypatch.setattr(torch, "empty", poisoned)
    return bool(request.param)


def array(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def attention(q: Tensor, k: Tensor, size: Tensor, scale: float) -> Array:
    """softmax(q k^T scale + log size) in float64, (B, heads, T, T)."""
    logits = np.einsum("bhid,bhjd->bhij", array(q), array(k)) * scale
    logits += np.log(array(size))[:, None, None]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def masses(weights: Array, prefix: int) -> Array:
    """(B, 2, T) sums over heads of the mean attention of the prefix queries and of the others."""
    rest = weights[:, :, prefix:].mean(2).sum(1)
    first = weights[:, :, :prefix].mean(2).sum(1) if prefix else rest
    return np.stack((first, rest), 1)


def heads_of(seed: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v as the strided views that timm makes."""
    batch, heads, tokens, dim = shape
    draw = torch.Generator().manual_seed(seed)
    joint = torch.randn(batch, tokens, 3, heads, dim, generator=draw) * 1.5
    return list(joint.to(DEVICE, dtype).permute(2, 0, 3, 1, 4).unbind(0))


def sizes_of(seed: int, batch: int, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9, (batch, tokens), generator=draw).float().to(DEVICE)


def check_attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, prefix: int, *, mass: bool = True
) -> None:
    scale = q.shape[-1] ** -0.5
    output, received = merging.attend(q, k, v, size, scale=scale, prefix=prefix, mass=mass)
    weights = attention(q, k, size, scale)
    exact = np.einsum("bhij,bhjd->bhid", weights, array(v))
    plain, _ = eager.attend(q, k, v, size, scale=scale, prefix=prefix, mass=True)
    # Twice the error of the eager path, and one rounding of the largest value.
    unit = torch.finfo(v.dtype).eps * np.abs(exact).max()
    assert np.abs(array(output) - exact).max() <= 2 * np.abs(array(plain) - exact).max() + unit
    assert output.dtype == q.dtype
    assert output.transpose(1, 2).is_contiguous()
    if not mass:
        assert received is None
        return
    assert received is not None
    # Logits carry the rounding of float32 products of d terms and are exponentiated.
    logit = np.abs(np.einsum("bhid,bhjd->bhij", np.abs(array(q)), np.abs(array(k)))).max() * scale
    rounding = (q.shape[-1] + 8) * 2.0**-24 * max(1.0, logit)
    expected = masses(weights, prefix)
    assert received.shape[::2] == (len(q), 2) and received.shape[3] == q.shape[2]
    # The weights are rounded once to a half type, whose least numbers are this far apart.
    half, least = 0.0, 1e-12
    if q.dtype != torch.float32:
        half = torch.finfo(q.dtype).eps / 2
        least = q.shape[1] * torch.finfo(q.dtype).smallest_normal * torch.finfo(q.dtype).eps
    rtol = 2 * rounding + half
    np.testing.assert_allclose(array(received).sum(1), expected, rtol=rtol, atol=least)
    _, first = merging.attend(q, k, v, size, scale=scale, prefix=prefix, mass=True, others=False)
    assert first is not None and first.shape[2] == 1
    np.testing.assert_allclose(array(first).sum(1), expected[:, :1], rtol=rtol, atol=least)


@pytest.mark.parametrize("seed", SWEEP)
def test_attend_is_the_formula(seed: int, poison: bool) -> None:
    draw = np.random.default_rng(seed)
    tokens = int(draw.choice([draw.integers(2, 40), draw.integers(60, 150), 16, 17, 64, 129]))
    heads = int(draw.integers(1, 4 if tokens < 40 else 2))
    shape = (int(draw.integers(1, 3)), heads, tokens, int(draw.choice([16, 24, 64])))
    dtype = (torch.float32, torch.float16)[seed % 2]
    q, k, v = heads_of(seed, shape, dtype)
    prefix = int(draw.integers(0, min(3, tokens)))
    check_attend(q, k, v, sizes_of(seed, shape[0], tokens), prefix, mass=bool(seed % 3))


@pytest.mark.parametrize(("tokens", "prefix"), [(70, 66), (130, 65), (150, 5)])
def test_a_prefix_may_cross_tiles_and_parts(tokens: int, prefix: int) -> None:
    q, k, v = heads_of(3, (1, 2, tokens, 16), torch.float16)
    check_attend(q, k, v, sizes_of(3, 1, tokens), prefix)


@pytest.mark.parametrize("tokens", [1, 15, 16, 31, 133, 189, 197, 256, 257, 300, 512])
def test_the_two_parts_hold_all_keys_with_little_padding(tokens: int) -> None:
    from bmfa.merging.kernels.triton.proportional import key_parts

    first, second = key_parts(tokens)
    assert first + second >= tokens
    assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (first, second))
    assert first + second <= max(16, 4 * tokens // 3 + 16)


def test_several_tiles_a_program_give_the_same() -> None:
    from bmfa.merging.kernels.triton.proportional import launch_attend

    q, k, v = heads_of(5, (1, 2, 75, 16), torch.float16)
    size = sizes_of(5, 1, 75)
    one = launch_attend(q, k, v, size, 0.25, 1, True, True, (16, 1, 4, 1))
    for loop in (2, 9):
        several = launch_attend(q, k, v, size, 0.25, 1, True, True, (16, loop, 4, 1))
        torch.testing.assert_close(several[0], one[0], rtol=0, atol=0)
        torch.testing.assert_close(several[1].sum(1), one[1].sum(1), rtol=1e-6, atol=0)


def test_a_token_of_size_n_is_n_equal_tokens() -> None:
    q, k, v = heads_of(11, (1, 2, 20, 16), torch.float32)
    size = torch.ones(1, 20, device=DEVICE)
    size[0, 5], size[0, 19] = 3, 2
    repeats = size[0].long()
    wide = [tensor.repeat_interleave(repeats, 2) for tensor in (k, v)]
    grouped, mass = merging.attend(q, k, v, size, scale=0.25, prefix=1, mass=True)
    scores = (q @ wide[0].transpose(2, 3) * 0.25).softmax(-1)
    torch.testing.assert_close(grouped, scores @ wide[1], rtol=1e-5, atol=1e-6)
    assert mass is not None
    whole = torch.full((1, 2), 2.0, device=DEVICE)  # one for each head
    torch.testing.assert_close(mass.sum((1, 3)), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attend_is_finite_on_constant_and_huge_inputs(dtype: torch.dtype) -> None:
    size = torch.full((1, 21), 1e6, device=DEVICE)
    for value in (0.0, 1.0, 2.0**15):  # products and sums of powers of two are exact
        tokens = torch.full((1, 2, 21, 16), value, dtype=dtype, device=DEVICE)
        output, mass = merging.attend(tokens, tokens, tokens, size, scale=1.0, mass=True)
        torch.testing.assert_close(output, tokens, rtol=2e-3, atol=0)
        assert mass is not None
        received = mass.sum(1)
        torch.testing.assert_close(received, torch.full_like(received, 2 / 21), rtol=1e-6, atol=0)


def pair_weights(a: Array, b: Array, pair: str) -> Array:
    both = a[:, None] + b[None, :]
    if pair == "none":
        return np.ones_like(both)
    if pair == "sum":
        return both
    return np.asarray(a[:, None] * b[None, :] / np.where(both > 0, both, 1))


def merged(
    x: Array, size: Array, features: Array, weight: Array, r: int, prefix: int, pair: str
) -> tuple[Array, Array, NDArray[np.int64]]:
    """One sequence, token by token, from the definition."""
    tokens = len(x)
    even = [i for i in range(tokens) if i % 2 == 0 and i >= prefix]
    odd = [i for i in range(tokens) if i % 2 == 1 and i >= prefix]
    distance = ((features[:, None] - features[None, :]) ** 2).sum(-1)
    edges = []
    for a in even if odd else []:
        costs = distance[a, odd] * pair_weights(weight[[a]], weight[odd], pair)[0]
        edges.append((costs.min(), a, odd[int(costs.argmin())]))
    goes = {a: b for _, a, b in sorted(edges)[:r]}
    order = list(range(prefix)) + [a for a in even if a not in goes] + odd
    place = {token: position for position, token in enumerate(order)}
    target = np.array([place[goes.get(token, token)] for token in range(tokens)])
    new_size = np.zeros(len(order))
    new_x = np.zeros((len(order), x.shape[1]))
    for token, position in enumerate(target):
        new_size[position] += size[token]
        new_x[position] += size[token] * x[token]
    return new_x / new_size[:, None], new_size, target


def check_merge(
    x: Tensor, size: Tensor, features: Tensor, weight: Tensor | None, r: int, prefix: int, pair: str
) -> None:
    x_new, size_new, target = merging.merge(x, size, features, weight, r, prefix=prefix, pair=pair)
    batch, tokens, channels = x.shape
    assert x_new.shape == (batch, tokens - r, channels)
    assert (x_new.dtype, size_new.dtype, target.dtype) == (x.dtype, torch.float32, torch.int32)
    plain = array(torch.ones_like(size) if weight is None else weight)
    for row in range(batch):
        x_exact, size_exact, target_exact = merged(
            array(x[row]), array(size[row]), array(features[row]), plain[row], r, prefix, pair
        )
        np.testing.assert_array_equal(target[row].cpu().numpy(), target_exact)
        np.testing.assert_array_equal(array(size_new[row]), size_exact)
        # Up to T terms in float32 before one rounding to the dtype of x.
        scale = float(x.abs().max())
        bound = torch.finfo(x.dtype).eps / 2 + (tokens + 4) * 2.0**-23
        np.testing.assert_allclose(array(x_new[row]), x_exact, rtol=0, atol=bound * scale)


def merge_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Small whole numbers: every cost is exact in every dtype, and many are equal."""
    draw = np.random.default_rng(seed)
    tokens = int(draw.choice([draw.integers(2, 12), draw.integers(12, 34), draw.integers(34, 70)]))
    prefix = int(draw.integers(0, min(3, tokens)))
    batch = int(draw.integers(1, 4))
    channels = int(draw.choice([1, 5, 20, 65]))
    width = int(draw.choice([3, 16, 24, 70]))
    most = (tokens - prefix) // 2
    r = [0, most, int(draw.integers(0, most + 1))][seed % 3]
    dtype = (torch.float32, torch.float16)[seed % 2]
    x = torch.from_numpy(draw.normal(size=(batch, channels, tokens))).to(DEVICE, dtype)
    features = torch.from_numpy(draw.integers(-2, 3, (batch, tokens, width))).to(DEVICE, dtype)
    # Weights 0, 2 and 6: harmonic means of pairs are exact too.
    weight = torch.from_numpy(draw.choice([0.0, 2.0, 6.0], (batch, tokens))).float().to(DEVICE)
    return x.transpose(1, 2), sizes_of(seed, batch, tokens), features, weight, r, prefix


@pytest.mark.parametrize("pair", merging.PAIRS)
@pytest.mark.parametrize("seed", SWEEP)
def test_merge_is_the_definition(seed: int, pair: str, poison: bool) -> None:
    x, size, features, weight, r, prefix = merge_case(seed)
    check_merge(x, size, features, weight, r, prefix, pair)
    if pair == "none":
        check_merge(x, size, features, None, r, prefix, pair)


@pytest.mark.parametrize("seed", range(6))
def test_features_may_be_made_on_the_way(seed: int, poison: bool) -> None:
    """Keys give their unit means over heads, no features the layer norm; weights come in parts."""
    draw = torch.Generator().manual_seed(seed)
    tokens, channels, heads, dim = (23, 40, 3, 24) if seed % 2 else (37, 70, 2, 80)
    x = (3 * torch.randn(2, tokens, channels, generator=draw) + 1).to(DEVICE)
    k = heads_of(seed, (2, heads, tokens, dim), torch.float32)[1]
    size, parts = sizes_of(seed, 2, tokens), torch.rand(2, 3, 2, tokens, generator=draw).to(DEVICE)
    centred = array(x) - array(x).mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    keys = array(k).mean(1)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    for features, exact in ((None, normal), (k, keys)):
        new = merging.merge(x, size, features, parts, 6, prefix=1, pair="sum")
        again = merging.merge(x.half(), size, None if features is None else k.half(), parts, 6)
        assert again[0].isfinite().all()
        for row in range(2):
            weight = array(parts[row]).sum((0, 1))
            expected = merged(array(x[row]), array(size[row]), exact[row], weight, 6, 1, "sum")
            np.testing.assert_array_equal(new[2][row].cpu().numpy(), expected[2])
            np.testing.assert_allclose(array(new[0][row]), expected[0], rtol=0, atol=1e-4)


def test_merge_in_steps_is_the_same() -> None:
    from bmfa.merging.kernels.triton.bipartite import launch_merge

    x, size = torch.randn(2, 70, 20, device=DEVICE), sizes_of(0, 2, 70)
    features = torch.randint(-2, 3, (2, 70, 16), device=DEVICE).half()
    weight = torch.randint(1, 4, (2, 70), device=DEVICE).float()
    whole = launch_merge(x, size, features, weight, 20, 1, "sum", (64, 64, 4, 1, 128))
    steps = launch_merge(x, size, features, weight, 20, 1, "sum", (16, 16, 4, 1, 128))
    torch.testing.assert_close(steps[0], whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(steps[1:], whole[1:], rtol=0, atol=0)


def test_ties_go_to_the_lowest_positions() -> None:
    features = torch.ones(1, 23, 8, device=DEVICE)
    x, size = torch.randn(1, 23, 4, device=DEVICE), torch.ones(1, 23, device=DEVICE)
    _, size_new, target = merging.merge(x, size, features, None, 4, prefix=1)
    # Positions 2, 4, 6 and 8 join position 1, which follows the class token and 7 that stay.
    assert [target[0, i].item() for i in (1, 2, 4, 6, 8)] == [8] * 5
    assert size_new[0, 8].item() == 5
    assert target[0, 10].item() == 1


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("value", [0.0, 1e4, 1e30])
def test_merge_is_finite_and_whole_where_costs_overflow(value: float) -> None:
    draw = torch.Generator().manual_seed(1)
    features = (torch.randn(2, 31, 24, generator=draw) * value).to(DEVICE)
    x = (torch.randn(2, 31, 12, generator=draw) * value).to(DEVICE)
    size = sizes_of(1, 2, 31)
    weight = torch.full((2, 31), 1e9, device=DEVICE)
    for pair in merging.PAIRS:
        x_new, size_new, target = merging.merge(x, size, features, weight, 7, prefix=1, pair=pair)
        assert x_new.isfinite().all()
        torch.testing.assert_close(size_new.sum(1), size.sum(1), rtol=0, atol=0)
        assert sorted(set(target[0].tolist())) == list(range(24))


def test_the_mean_of_all_is_kept() -> None:
    x, size, features, _, _, _ = merge_case(8)
    r = (x.shape[1] - 1) // 2
    x_new, size_new, _ = merging.merge(x, size, features, None, r)
    before = np.einsum("btc,bt->bc", array(x), array(size))
    after = np.einsum("btc,bt->bc", array(x_new), array(size_new))
    bound = torch.finfo(x.dtype).eps * array(size).sum() * float(x.abs().max())
    np.testing.assert_allclose(after, before, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 37, 24), (1, 1, 5, 64), (3, 2, 33, 16)])
def test_tome_features_are_the_unit_mean_key(
    shape: tuple[int, int, int, int], dtype: torch.dtype, poison: bool
) -> None:
    _, k, _ = heads_of(2, shape, dtype)
    mean = array(k).mean(1)
    exact = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    features = merging.tome_features(k)
    assert features.dtype == dtype
    atol = torch.finfo(dtype).eps / 2 + 8 * 2.0**-23
    np.testing.assert_allclose(array(features), exact, rtol=0, atol=atol)
    assert merging.tome_features(torch.zeros_like(k)).isfinite().all()


def test_an_empty_batch_stays_empty() -> None:
    q, k, v = (tensor[:0] for tensor in heads_of(0, (1, 2, 9, 16), torch.float16))
    size = torch.ones(0, 9, device=DEVICE)
    output, mass = merging.attend(q, k, v, size, scale=1.0, mass=True)
    assert output.shape == (0, 2, 9, 16) and mass is not None and mass.shape[::2] == (0, 2)
    features = merging.tome_features(k)
    assert merging.merge(features, size, features, None, 2)[0].shape == (0, 7, 16)


def test_operators_work_with_fake_tensors_compilers_and_flop_counters() -> None:
    q, k, v = heads_of(4, (2, 3, 21, 16), torch.float16)
    size = sizes_of(4, 2, 21)
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(2, 21, 20, device=DEVICE)
    arguments = (q, k, v, size, 0.25, 1, True, True)
    torch.library.opcheck(torch.ops.bmfa.attend.default, arguments, test_utils=checks)
    arguments = (x, size, merging.tome_features(k), size, 5, 1, "sum")
    torch.library.opcheck(torch.ops.bmfa.merge.default, arguments, test_utils=checks)
    torch.library.opcheck(torch.ops.bmfa.tome_features.default, (k,), test_utils=checks)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, mass = merging.attend(q, k, v, size, scale=0.25, mass=True)
        assert mass is not None
        tokens = output.transpose(1, 2).reshape(2, 21, 48)
        new = merging.merge(tokens, size, merging.tome_features(k), mass, 5, pair="sum")
        return new[0]

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        direct = block(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 3 * 21 * 21 * 16 + 2 * 2 * 11 * 10 * 16
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), direct, rtol=0, atol=0)


def test_the_predicate_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 9, 8, device=DEVICE)
    assert merging.unsupported(tokens, None) is None
    assert "float64" in (merging.unsupported(tokens.double()) or "")
    assert "at most 512" in (merging.unsupported(torch.zeros(1, 513, 8, device=DEVICE)) or "")
    wide = torch.zeros(1, 1, 200, 128, device=DEVICE)
    assert "do not fit" in (merging.unsupported(wide) or "")
    assert merging.unsupported(wide.half()) is None
    trained = torch.zeros(1, 9, 8, device=DEVICE, requires_grad=True)
    assert "gradients" in (merging.unsupported(trained) or "")
    with torch.no_grad():
        assert merging.unsupported(trained) is None
    monkeypatch.setattr(merging, "_INTERPRETED", False)
    assert "CUDA" in (merging.unsupported(torch.zeros(1)) or "")
    monkeypatch.setattr(merging, "_ABSENT", "Triton is not installed")
    assert merging.unsupported(tokens) == "Triton is not installed"


class Compiled:
    """What compiling gives, as far as a plan looks at it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.runs.append(arguments)


def test_a_plan_launches_directly_only_what_was_compiled_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from bmfa.attention.kernels.triton import launch as launcher

    compiled, searched = Compiled(), []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *a, **options: searched.append((grid, a, options)) or compiled

    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=hooks, launch_exit_hook=hooks)
    monkeypatch.setattr(launcher, "driver", stream)
    monkeypatch.setattr(launcher.triton, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(launcher, "_DIRECT", True)
    x = torch.zeros(64)
    current = x.get_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    plan = launcher.CachedLaunch(Kernel(), 5, (3, "constant"), num_warps=4)
    plan(x[1:])  # unaligned: what is compiled for it serves no other
    plan(x)
    assert [entry[2] for entry in searched] == [{"num_warps": 4}] * 2 and not compiled.runs
    plan(x)
    assert len(searched) == 2
    expected = (5, 1, 1, 7, "function", "metadata", None, None, None, x.data_ptr(), 3, "constant")
    assert compiled.runs == [expected]
    plan(x[1:])
    hooks.calls.append(print)
    plan(x)
    hooks.calls.clear()
    current = 1
    plan(x)
    assert len(searched) == 5 and len(compiled.runs) == 1


def test_an_old_or_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "3.1.0"

    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(merging, "import_module", lambda name: Old)
    assert "3.1.0" in (merging._look_for_triton() or "")
    monkeypatch.setattr(merging, "import_module", missing)
    assert "pip install triton" in (merging._look_for_triton() or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 5}, "r is 5; of 10 tokens, 1 of them prefix, merge from 0 to 4"),
        ({"r": -1}, "r is -1"),
        ({"prefix": 11}, "prefix is 11"),
        ({"pair": "product"}, "pair is 'product'; pass one of 'none', 'sum', 'harmonic'"),
        ({"pair": "sum"}, "weight is None"),
        ({"size": torch.ones(1, 9)}, r"size is \(1, 9\); pass \(1, 10\)"),
        ({"weight": torch.ones(10)}, r"weight is \(10,\)"),
        ({"features": torch.ones(1, 9, 4)}, r"features is \(1, 9, 4\)"),
        ({"x": torch.ones(10, 4)}, r"x is \(10, 4\)"),
        ({"x": torch.ones(1, 10, 4, dtype=torch.float64)}, "float64.*or use the eager backend"),
    ],
)
def test_merge_refuses_what_it_cannot_do(change: dict[str, object], message: str) -> None:
    good = {
        "x": torch.ones(1, 10, 4, device=DEVICE),
        "size": torch.ones(1, 10, device=DEVICE),
        "features": torch.ones(1, 10, 4, device=DEVICE),
        "weight": None,
        "r": 2,
    }
    options = {
        key: value.to(DEVICE) if isinstance(value, Tensor) else value
        for key, value in (good | change).items()
    }
    with pytest.raises(ValueError, match=message):
        merging.merge(**options)  # type: ignore[arg-type]


def test_attend_refuses_what_it_cannot_do() -> None:
    q, k, v = heads_of(0, (1, 2, 9, 16), torch.float16)
    size = torch.ones(1, 9, device=DEVICE)
    with pytest.raises(ValueError, match=r"k is \(1, 2, 8, 16\)"):
        merging.attend(q, k[:, :, 1:], v, size, scale=1.0)
    with pytest.raises(TypeError, match="pass one dtype"):
        merging.attend(q, k, v.float(), size, scale=1.0)
    with pytest.raises(ValueError, match=r"size is \(1, 8\)"):
        merging.attend(q, k, v, size[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="prefix is 10"):
        merging.attend(q, k, v, size, scale=1.0, prefix=10)
    with pytest.raises(ValueError, match=r"q is \(2, 9, 16\)"):
        merging.attend(q[0], k, v, size, scale=1.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [197, 189, 149, 101, 257])
def test_attend_at_full_size(tokens: int, dtype: torch.dtype) -> None:
    q, k, v = heads_of(0, (256, 3, tokens, 64), dtype)
    size = sizes_of(0, 256, tokens)
    check_attend(q, k, v, size, 1)
    check_attend(q, k, v, size, 1, mass=False)
    one = merging.attend(q, k, v, size, scale=0.125, mass=True)
    two = merging.attend(q, k, v, size, scale=0.125, mass=True)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)


def check_edges(features: Tensor, weight: Tensor, target: Tensor, r: int, pair: str) -> None:
    """The edges that merged are the cheapest, up to rounding, and each source's cheapest."""
    for row in range(len(features)):
        f, w = array(features[row]), array(weight[row])
        places = target[row].cpu().numpy()
        even, odd = np.arange(2, len(f), 2), np.arange(1, len(f), 2)
        distance = ((f[even][:, None] - f[odd][None]) ** 2).sum(-1)
        cost = distance * pair_weights(w[even], w[odd], pair)
        scale = (f**2).sum(-1).max() * max(1.0, pair_weights(w, w, pair).max())
        rounding = (f.shape[1] + 8) * 2.0**-23 * scale
        went = (places[even][:, None] == places[odd][None]).argmax(1)
        goes = (places[even][:, None] == places[odd][None]).any(1)
        assert goes.sum() == r
        chosen = cost[np.arange(len(even)), went]
        assert (chosen[goes] <= cost[goes].min(1) + rounding).all()
        if not goes.all():
            assert chosen[goes].max() <= cost[~goes].min() + 2 * rounding


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "r"), [(197, 8), (149, 12), (101, 8), (197, 98), (261, 16)])
def test_merge_at_full_size(tokens: int, r: int, dtype: torch.dtype) -> None:
    draw = torch.Generator(device=DEVICE).manual_seed(tokens)
    x = torch.randn(256, tokens, 192, device=DEVICE, generator=draw).to(dtype)
    features = torch.randn(256, tokens, 192, device=DEVICE, generator=draw).to(dtype)
    weight = torch.rand(256, tokens, device=DEVICE, generator=draw)
    size = sizes_of(1, 256, tokens)
    for pair in merging.PAIRS:
        x_new, size_new, target = merging.merge(x, size, features, weight, r, pair=pair)
        pooled, sizes = eager.pool(x, size, target, tokens - r)
        torch.testing.assert_close(size_new, sizes, rtol=0, atol=0)
        # One rounding to the dtype of x apart, at most.
        torch.testing.assert_close(x_new, pooled, rtol=torch.finfo(dtype).eps, atol=1e-6)
        check_edges(features[:8], weight[:8], target[:8], r, pair)
        again = merging.merge(x, size, features, weight, r, pair=pair)
        assert torch.equal(again[0], x_new) and torch.equal(again[2], target)
