"""Models of unknown classes: named attention modules, grids, refusals, and registered classes."""

import copy
import pickle
import threading
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import bmfa
from bmfa.models import described as generic
from bmfa.models import patch, record, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import LayerInputs, observe, screened_layers
from models.host_models import CPU_BACKEND, in_threads

WIDTH, PATCH = 24, 4
COARSE = {"leaves": 2, "allow_dense": False, "layers": "all"}
EXACT = {"leaves": 1.0, "allow_dense": False, "layers": "all"}


class Attention(nn.Module):
    """Self-attention through SDPA, in one of several ways of calling it."""

    def __init__(self, way: str = "sdpa") -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "by hand":
            out = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v
        elif self.way == "folded":  # (B * heads, tokens, d)
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out = scaled_dot_product_attention(q, k, v).unflatten(0, (-1, 3))
        elif self.way == "twice":
            out = scaled_dot_product_attention(q, k, v)
            out = 0.5 * (out + scaled_dot_product_attention(query=k, key=q, value=v, scale=0.3))
        elif self.way == "fewer keys":
            k, v = k[:, :1], v[:, :1]
            out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        elif self.way == "cross":
            out = scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2])
        else:
            out = torch._C._nn.scaled_dot_product_attention(
                q, k, v
            )  # as `from ... import` gives it
        return self.proj(out.transpose(1, 2).flatten(2))


class UnknownViT(nn.Module):
    """A Vision Transformer with a class token and two tokens behind the grid."""

    def __init__(self, way: str = "sdpa", depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.extra = nn.Parameter(torch.randn(3, WIDTH))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "attn": Attention(way)})
            for _ in range(depth)
        )
        self.checkpointing = False
        self.idle = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).flatten(2).transpose(1, 2)
        extra = self.extra.expand(len(x), -1, -1)
        x = torch.cat((extra[:, :1], x, extra[:, 1:]), 1)
        for block in self.blocks:
            run = lambda x, block=block: x + 2 * block["attn"](block["norm"](x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)
        return x


def grid_of(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[-2] // PATCH, pixels.shape[-1] // PATCH


NAMED: dict[str, Any] = {"attention": "blocks.*.attn", "prefix": 1, "suffix": 2}


def make(way: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    return UnknownViT(way).eval()


def images(height: int = 64, width: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


def difference(mine: Tensor, full: Tensor) -> float:
    return float((mine - full).abs().max() / full.abs().max())


@torch.no_grad()
def test_named_modules_are_exact_coarse_and_restored() -> None:
    shown = ((None, (64, 64)), ((16, 24), (64, 96)), (grid_of, (96, 64)), (grid_of, (48, 80)))
    for way, (grid, size) in product(("sdpa", "folded", "twice", "fewer keys"), shown):
        check_named_modules(make(way), grid, images(*size), calls=2 if way == "twice" else 1)


def check_named_modules(model: nn.Module, grid: Any, pixels: Tensor, calls: int) -> None:
    full = model(pixels)
    classes = [type(module) for module in model.modules()]
    patch(model, grid=grid, **NAMED, **EXACT)
    assert difference(model(pixels), full) < 5e-6
    patch(model, grid=grid, **NAMED, **COARSE)
    assert difference(model(pixels), full) > 1e-3
    with record(model, trees=False) as recording:
        model(pixels)
    assert sorted(recording.layers) == [0, 1, 2]
    assert len(recording[0].stats) == calls
    patch(model, grid=grid, **NAMED, layers="all")  # exact at this size
    assert difference(model(pixels), full) < 5e-6
    unpatch(model)
    assert torch.equal(model(pixels), full)
    assert [type(module) for module in model.modules()] == classes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any("bmfa" in key for module in model.modules() for key in vars(module))


@torch.no_grad()
def test_dense_and_tiled_sizes_are_chosen_in_each_pass() -> None:
    model, small, large = make(), images(), images(256, 256)
    full = model(small)
    patch(model, grid=grid_of, **NAMED, leaves=0.05, layers="all")
    with record(model, trees=False) as recording:
        torch.testing.assert_close(model(small), full)
        model(large)
    assert [stats.form for stats in recording[1].stats] == ["dense", "tiled"]


@pytest.mark.parametrize("layers", ["all", [0]])
@torch.no_grad()
def test_the_summary_says_what_ran(layers: Any) -> None:
    model = patch(make(), grid=grid_of, **NAMED, **COARSE | {"layers": layers})
    for size in ((64, 96), (96, 64)):
        model(images(*size))
        lines = str(bmfa.summary(model)).splitlines()[2:]
        ran = [line.split()[1:3] for line in lines]
        patched = 3 if layers == "all" else 1
        assert ran == [["tiled", CPU_BACKEND]] * patched + [["dense", "host"]] * (3 - patched)
    patch(model, grid=grid_of, **NAMED, layers=layers)
    model(images())
    assert "dense attention is as fast below" in str(bmfa.summary(model))


@torch.no_grad()
def test_multihead_attention_of_torch() -> None:
    class Block(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(WIDTH, 3, batch_first=batch_first)
            self.weights = False

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mha(x, x, x, need_weights=self.weights)[0]

    for batch_first in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(batch_first), Block(batch_first)).eval()
        x = torch.randn(2, 256, WIDTH)
        x = 3 * (x if batch_first else x.transpose(0, 1))
        full = model(x)
        assert difference(patch(model, attention="*.mha", **EXACT)(x), full) < 5e-6
        assert difference(patch(model, attention="*.mha", **COARSE)(x), full) > 1e-3
        assert difference(patch(model, attention="*.mha", layers="all")(x), full) < 5e-6
        patch(model, attention="*.mha", **COARSE)
        model[1].weights = True
        with pytest.raises(RuntimeError, match="need_weights=False"):
            model(x)
        model[1].weights = False
        assert torch.equal(unpatch(model)(x), full)


class MultiView(nn.Module):
    """As in VGGT: special tokens before each frame, attention inside of frames and among all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.special = nn.Parameter(torch.randn(5, WIDTH))
        self.frame = nn.ModuleList(Attention() for _ in range(2))
        self.all = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, views: Tensor) -> Tensor:
        batch, frames = views.shape[:2]
        x = self.embed(views.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = torch.cat((self.special.expand(len(x), -1, -1), x), 1)
        for inside, among in zip(self.frame, self.all, strict=True):
            x = x + 2 * inside(x)
            x = (x + 2 * among(x.reshape(batch, -1, WIDTH)).view(x.shape)).view(x.shape)
        return x.view(batch, frames, -1, WIDTH)


@torch.no_grad()
def test_special_tokens_before_each_frame() -> None:
    def frames_of(views: Tensor) -> bmfa.Grid:
        return bmfa.Grid(*grid_of(views), frames=views.shape[1])

    torch.manual_seed(0)
    model, views = MultiView().eval(), torch.randn(2, 3, 3, 48, 80)
    full = model(views)
    described = {"attention": ["frame.*", "all.*"], "grid": frames_of, "prefix": 5}
    assert difference(patch(model, **described, **EXACT)(views), full) < 5e-6
    seen: list[LayerInputs] = []
    with observe(patch(model, **described, **COARSE), lambda layer, _: seen.append(layer)):
        assert difference(model(views), full) > 1e-3
    frame, among = bmfa.Grid(12, 20), bmfa.Grid(12, 20, frames=3)
    assert [(x.layer, x.grid, x.prefix) for x in seen] == [
        (0, frame, 5), (2, among, 15), (1, frame, 5), (3, among, 15)
    ]  # fmt: skip
    # The tokens of the frames follow the special ones of all frames, in the order of the frames.
    index = torch.arange(3 * 245).view(3, 245)
    order = torch.cat((index[:, :5].flatten(), index[:, 5:].flatten()))
    inputs: list[Tensor] = []
    model.all[0].qkv.register_forward_hook(lambda m, i, o: inputs.append(o))
    with observe(model, lambda layer, _: seen.append(layer)):
        model(views)
    v = inputs[0].unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)[2]
    assert torch.equal(seen[5].v, v[:, :, order])
    assert torch.equal(unpatch(model)(views), full)
    # With special tokens before all frames, as many tokens do not fit.
    with pytest.raises(ValueError, match="245 tokens, but 6 prefix tokens and a 3x12x20 grid"):
        patch(model, **described | {"prefix": 6}, **COARSE)(views)


def test_the_first_forward_pass_refuses() -> None:
    for way, options, error, text in (
        ("by hand", {}, RuntimeError, "computes the softmax itself"),
        ("cross", {}, ValueError, "do not name modules of cross-attention"),
        ("sdpa", {"prefix": 2}, ValueError, "not a square; pass grid="),
        ("sdpa", {"grid": (16, 15)}, ValueError, "16x15 grid"),
        ("sdpa", {"grid": lambda x: 256}, TypeError, "returned 256"),
        ("sdpa", {"attention": "blocks.*.norm"}, RuntimeError, "LayerNorm"),
        ("sdpa", {"attention": ["blocks.*.attn", "idle"]}, RuntimeError, "idle did not run"),
    ):
        model = patch(make(way), **NAMED | options, layers="all")
        with pytest.raises(error, match=text):
            model(images())
        assert torch.equal(unpatch(model)(images()), make(way)(images()))


def test_bad_descriptions_change_nothing() -> None:
    model, attention = make(), "blocks.*.attn"
    for options, error, text in (
        ({"attention": "layers.*"}, ValueError, r"may be meant are blocks\.0\.attn"),
        ({"attention": ["blocks.*", attention]}, ValueError, r"'blocks\.0\.attn' inside of it"),
        ({"attention": []}, TypeError, "pass the name"),
        ({"attention": 3}, TypeError, "attention is 3"),
        ({"grid": (16, 16)}, ValueError, "attention is not given"),
        ({"prefix": 1}, ValueError, "attention is not given"),
        ({"attention": attention, "prefix": -1}, ValueError, "prefix"),
        ({"attention": attention, "grid": (0, 4)}, ValueError, "height is 0"),
        ({"attention": attention, "plan": "plan.json"}, ValueError, "register_model"),
    ):
        with pytest.raises(error, match=text):
            patch(model, **options)
    assert not screened_layers(model)


@pytest.mark.parametrize("grid", [None, grid_of])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_compiled(grid: Any) -> None:
    model, pixels = make(), images()
    patch(model, grid=grid, **NAMED, **COARSE)
    expected = model(pixels)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(pixels), expected)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_attention_by_hand_is_refused_while_compiling() -> None:
    model = patch(make("by hand"), **NAMED, layers="all")
    torch.compiler.reset()
    with pytest.raises(Exception, match="computes the softmax itself"):
        torch.compile(model, fullgraph=True, backend="eager")(images())
    torch.compiler.reset()


def test_checkpointing_needs_a_grid_that_is_known_without_the_inputs() -> None:
    model: Any = patch(make(), grid=grid_of, **NAMED, **COARSE)
    model.checkpointing = True
    with pytest.raises(RuntimeError, match=r"only with grid=\(height, width\)"):
        model(images()).sum().backward()


@pytest.mark.parametrize("grid", [None, (16, 16)])
def test_gradient_checkpointing_and_autocast(grid: Any) -> None:
    gradients = []
    for checkpointing in (False, True):
        model: Any = patch(make(), grid=grid, **NAMED, **COARSE)
        model.checkpointing = checkpointing
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            model(images()).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    model = patch(make(), grid=grid, **NAMED, **EXACT)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine, full = model(images()), unpatch(model)(images())
    assert mine.dtype == full.dtype and difference(mine, full) < 24 * 2**-8


@torch.no_grad()
def test_threads_have_their_own_grid() -> None:
    model = patch(make(), grid=grid_of, **NAMED, **COARSE)
    shown = [images(64, 96), images(96, 64), images(48, 48)]
    expected = [model(pixels) for pixels in shown]

    def serve(index: int) -> bool:
        with torch.no_grad():
            outputs = [model(shown[index]) for _ in range(5)]
        return all(torch.equal(output, expected[index]) for output in outputs)

    assert all(in_threads([partial(serve, index) for index in range(3)]))


def test_another_thread_is_not_intercepted() -> None:
    """While a named module runs, SDPA in other threads is that of torch."""
    model, q = make(), torch.randn(1, 2, 10, 8)
    results: list[Tensor] = []

    def attend() -> None:
        results.append(scaled_dot_product_attention(q, q, q))

    def inside(*_: object) -> None:
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()

    patch(model, **NAMED, **COARSE)
    model.blocks[0]["attn"].qkv.register_forward_hook(inside)
    model(images())
    attend()
    assert torch.equal(results[0], results[1])


@torch.no_grad()
def test_copies() -> None:
    model, pixels = patch(make(), grid=grid_of, **NAMED, **COARSE), images(64, 96)
    expected, copies = model(pixels), (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    full = unpatch(model)(pixels)
    for other in copies:
        assert torch.equal(other(pixels), expected) and not torch.equal(full, expected)
        assert torch.equal(unpatch(other)(pixels), full)


def test_reducing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "_registered", {})
    generic.register_model(UnknownViT, attention="blocks.*.attn", prefix=1, suffix=2)
    with pytest.raises(TypeError, match="cannot be reduced"):
        bmfa.reduce(make(), "tome:2")


class DerivedViT(UnknownViT):
    """A model of a subclass of the class that is registered."""


@torch.no_grad()
def test_a_class_is_registered_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "_registered", {})
    torch.manual_seed(0)
    wrapped, pixels = nn.Sequential(nn.Identity(), DerivedViT()), images(64, 96)
    with pytest.raises(TypeError, match=r"register_model"):
        patch(wrapped)
    layout = {"grid": grid_of, "prefix": lambda vit: len(vit.extra) - 2, "suffix": 2}
    bmfa.models.register_model(f"{__name__}.UnknownViT", attention="blocks.*.attn", **layout)
    host = find_vision_transformer(wrapped)
    assert host.encoder is wrapped[1] and (host.prefix, len(host.attentions)) == (1, 3)
    full = wrapped(pixels)
    assert difference(patch(wrapped, **EXACT)(pixels), full) < 5e-6
    assert difference(patch(wrapped, **COARSE)(pixels), full) > 1e-4
    assert torch.equal(unpatch(wrapped)(pixels), full)


def test_a_registration_is_checked() -> None:
    before = dict(generic._registered)
    for kind in ("UnknownViT", 3, int):
        with pytest.raises(TypeError, match="model_class is"):
            bmfa.models.register_model(kind, attention="layers.*")
    with pytest.raises(TypeError, match="attention is"):
        bmfa.models.register_model(UnknownViT, attention=())
    assert generic._registered == before
