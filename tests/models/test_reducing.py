"""Reduced models: hosts served and refused, restored bits, copies, static shapes, unmerging."""

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmfa
from bmfa import Grid, rules
from bmfa.merging import LayerState, ReducedTokens, ToMe
from bmfa.models import final_tokens, patch, record, reduce, unmerge, unpatch
from bmfa.models.token_reduction import ReductionState, find_reduction
from models.host_models import (
    MODELS,
    SIZED,
    hf_model,
    image_size,
    images,
    make_model,
    replacements_in,
    run,
    timm_model,
)

ROPE = ("eva", "dinov3", "hf-dinov3")
REDUCED = sorted(MODELS)
ACTING = [f"{policy}:3" for policy in ("tome", "diffrate", "random-pool", "free-energy")]
ACTING += [f"{policy}:0.9" for policy in ("pitome", "tofu", "crossget", "dct", "dct2")]
ACTING += ["evit:0.7", "fixed-pool:2"]
IDLE = [f"{policy}:0" for policy in ("tome", "tofu", "crossget", "random-pool", "free-energy")]
IDLE += [f"{policy}:1.0" for policy in ("pitome", "diffrate", "dct", "dct2", "evit")]
IDLE += ["fixed-pool:1"]


def shown(name: str) -> Tensor:
    return images(image_size(name), image_size(name))


def policies_of(name: str, policies: list[str]) -> list[str]:
    """The policies that a host takes: with rotary positions none that transform tokens."""
    return [one for one in policies if not (name in ROPE and one.startswith("dct"))]


@pytest.fixture(params=REDUCED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_policies_reduce_and_unpatch_restores_bits_and_state(name: str) -> None:
    model, pixels = make_model(name), shown(name)
    full = run(model, pixels)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for policy in policies_of(name, IDLE):
        assert reduce(model, policy) is model
        scale = 1e-4 * float(full.abs().max())
        torch.testing.assert_close(run(model, pixels), full, rtol=1e-4, atol=scale, msg=policy)
    tokens = MODELS[name][0] + (196 if name == "embedded" else 64)
    for policy in policies_of(name, ACTING):
        reduce(model, policy)
        once = run(model, pixels)
        assert final_tokens(model) < tokens and once.isfinite().all(), policy
        reduce(reduce(model, "tome:1"), policy)
        assert torch.equal(run(model, pixels), once), policy
        assert len(replacements_in(model)) == (8 if tokens > 190 else 3)
        assert list(model.state_dict()) == list(before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="was not called in this thread"):
            final_tokens(other)
        assert torch.equal(run(other, pixels), once)
        assert torch.equal(run(unpatch(other), pixels), full)
    assert torch.equal(run(model, pixels), once)
    unpatch(model)
    assert torch.equal(run(model, pixels), full)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert find_reduction(model) is None and not replacements_in(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_sizes_and_aspect_ratios() -> None:
    for name in SIZED:
        model = reduce(make_model(name), "tome:2")
        for height, width in ((24, 48), (40, 40), (32, 32)):
            run(model, images(height, width), **SIZED[name])
            assert final_tokens(model) == MODELS[name][0] + height * width // 16 - 6, name


def test_transforms_of_tokens_with_rotary_positions_are_refused() -> None:
    words = r"dct:0\.9 .*no position.*(EvaBlock|DINOv3ViTLayer) rotates"
    for name in ROPE:
        with pytest.raises(TypeError, match=words):
            reduce(make_model(name), "dct:0.9")


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)])
def test_keys_are_merged_after_rotation(shape: tuple[int, ...]) -> None:
    """A merged token has the mean of the rotated keys of tokens with its content."""
    reduction = find_reduction(reduce(make_model("eva"), "tome:0"))
    assert reduction is not None and reduction.passes.prefix == 1
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(*shape, 8, 6, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    # Of 8 tokens behind the class token, 0 and 3 merge, then they and 6 merge; 1 is pruned, then 7.
    first = torch.tensor([[0, 1, -1, 2, 1, 3, 4, 5, 6]]).expand(3, -1)
    second = torch.tensor([[0, 1, 2, 3, 4, 1, -1]]).expand(3, -1)
    state = ReductionState(Grid(2, 4), 5, False, assignments=(first, second))
    members = ((0, 3, 6), (2,), (4,), (5,))
    merged = reduction.merged_rotations(state, (cos, sin))
    key = torch.randn(6, generator=generator)
    rotated = key * cos + key.flip(-1) * sin  # of all tokens
    mine = key * merged[0] + key.flip(-1) * merged[1]  # (3, heads or 1, 4, 6)
    assert mine.shape == (3, shape[-1] if shape else 1, 4, 6)
    for token, group in enumerate(members):
        expected = rotated[..., group, :].mean(-2).expand_as(mine[:, :, token])
        torch.testing.assert_close(mine[:, :, token], expected)
    unchanged = ReductionState(Grid(2, 4), 9, False)
    assert reduction.merged_rotations(unchanged, cos) is cos


def test_other_blocks_are_refused() -> None:
    timm = bmfa.packages.load_package("timm")
    from timm.models.vision_transformer import ResPostBlock

    model = timm.create_model(
        "vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3, block_fn=ResPostBlock
    )
    with pytest.raises(TypeError, match="ResPostBlock in VisionTransformer cannot be reduced"):
        reduce(model, "tome:3")


class Spy(ToMe):
    """ToMe that remembers what it saw."""

    seen: list[LayerState] = []  # noqa: RUF012
    autocast: list[bool] = []  # noqa: RUF012

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        self.seen.append(state)
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return super().reduce(state)


def test_a_policy_acts_between_attention_and_perceptron() -> None:
    model, pixels = make_model("vit"), images()
    Spy.seen.clear()
    Spy.autocast.clear()
    entered: list[Tensor] = []
    attended: list[Tensor] = []
    keys: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda m, x: entered.append(x[0]))
    model.blocks[0].attn.register_forward_hook(lambda m, x, y: attended.append(y))
    model.blocks[0].attn.qkv.register_forward_hook(lambda m, x, y: keys.append(y))
    run(reduce(model, Spy(5)), pixels)
    state = Spy.seen[0]
    assert (state.layer, state.depth, state.grid, state.prefix) == (0, 3, Grid(8, 8), 1)
    torch.testing.assert_close(state.x, entered[0] + attended[0])
    torch.testing.assert_close(state.k, keys[0].view(2, 65, 3, 3, 8).permute(2, 0, 3, 1, 4)[1])
    assert [m.x.shape[1] for m in Spy.seen] == [65, 60, 55]


def test_merging_keeps_exact_multiplicities(name: str) -> None:
    prefix, tokens = MODELS[name][0], 196 if name == "embedded" else 64
    for policy in ("tome:5", "crossget:5", "random-pool:5"):
        model = reduce(make_model(name), policy, dense=False)
        run(model, shown(name))
        sizes, left = find_reduction(model).passes.thread.last_state.size, final_tokens(model)
        assert sizes.shape == (2, left) and sizes.dtype == torch.float32
        assert sizes[:, :prefix].eq(1).all()
        assert sizes[:, prefix:].sum(1).tolist() == [tokens, tokens], policy
        # The map of unmerge says the same: every token on the grid is counted once.
        numbers = torch.arange(float(left)).view(1, -1, 1).expand(2, -1, 1)
        source = unmerge(model, numbers)[..., 0].long()
        counts = torch.stack([row.bincount(minlength=left) for row in source])
        assert torch.equal(counts, sizes.long()), policy


COUNTS = {
    "tome:8": [197 - 8 * blocks for blocks in range(1, 13)],
    "free-energy:8": [197] * 3 + [173] * 2 + [149] * 2 + [125] * 2 + [101] * 3,
    "tome:16": [181, 165, 149, 133, 117, 101, 85, 69, 53, 37, 21, 11],
    "diffrate:0.8g": [197, 196, 190, 172, 154, 125, 107, 96, 84, 78, 70, 3],
    "diffrate:0.9g": [197, 196, 194, 188, 172, 147, 129, 115, 107, 103, 96, 3],
    "diffrate:8": [197, *(197 - 8 * blocks for blocks in range(1, 12))],
    "evit:0.7": [197] * 3 + [140] * 3 + [100] * 3 + [72] * 3,
    "pitome:0.95": [188, 179, 171, 163, 155, 148, 141, 134, 128, 122, 116, 111],
    "dct:0.95": [188, 179, 171, 163, 155, 148, 141, 134, 128, 122, 116, 111],
    "fixed-pool:2": [197] * 6 + [50] * 6,
}


def test_token_counts_after_every_block_of_a_deit() -> None:
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "num_heads": 2}
    model = timm_model("deit_tiny_patch16_224", **sizes).eval()
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, x, y: seen.append(y.shape[1]))
    for policy, counts in COUNTS.items():
        seen.clear()
        run(reduce(model, policy, dense=False), torch.randn(1, 3, 224, 224))
        assert seen == counts, policy
        assert final_tokens(model) == counts[-1]


def test_static_shapes_whatever_the_images() -> None:
    model = make_model("vit")
    for policy in ACTING:
        reduce(model, policy)
        counts = set()
        for seed in range(3):
            run(model, 10.0**seed * images(seed=seed))
            counts.add(final_tokens(model))
        assert len(counts) == 1


def test_dense_outputs_are_unmerged_ones() -> None:
    model, pixels = make_model("hf-vit").vit, images()
    for policy in ("tome:3", "tofu:3", "diffrate:3", "dct:0.9", "evit:0.7"):
        reduced = run(reduce(model, policy), pixels)
        assert reduced.shape[1] == final_tokens(model)
        restored = unmerge(model, reduced)
        dense = run(reduce(model, policy, dense=True), pixels)
        assert dense.shape == restored.shape == (2, 65, 24)
        if not policy.startswith("dct"):  # the last norm does not commute with an interpolation
            assert torch.equal(dense, restored)
        assert final_tokens(model) == reduced.shape[1]
        assert unmerge(model, dense) is dense  # the model returned the full grid
        with pytest.raises(ValueError, match=r"pass \(B, 65, C\) of the last pass"):
            unmerge(model, reduced)


def test_unmerging_follows_every_merge() -> None:
    model = reduce(make_model("vit"), "tome:20")
    run(model, images())
    numbers = torch.arange(float(final_tokens(model))).view(1, -1, 1).expand(2, -1, 1)
    source = unmerge(model, numbers)[..., 0]
    for image, token in product(range(2), range(65)):
        place = token
        for assignment in find_reduction(model).passes.thread.last_state.assignments:
            place = int(assignment[image, place])
        assert source[image, token] == place


def test_pruned_tokens_get_their_nearest_neighbour() -> None:
    model = reduce(make_model("vit"), "diffrate:0")
    run(model, images(12, 16))
    state = find_reduction(model).passes.thread.last_state
    assert state is not None and state.grid == Grid(3, 4)
    state.assignments = (torch.tensor([[0, -1, 1, -1, -1, -1, -1, -1, 2, -1, -1, -1, -1]]),)
    #   . a . .      a at (0, 1), b at (1, 3)
    #   . . . b      ties, as (0, 3) with 4 and 1, do not occur here but at (1, 2)
    #   . . . .
    state.tokens = 3
    restored = unmerge(model, torch.tensor([[[7.0], [1.0], [2.0]]]))
    assert restored[0, 1:, 0].view(3, 4).tolist() == [
        [1, 1, 1, 2],
        [1, 1, 2, 2],
        [1, 1, 2, 2],
    ]


def test_pooling_hosts_see_exact_multiplicities() -> None:
    for name in ("no-class-token", "hf-dinov2", "hf-siglip"):
        model, pixels = make_model(name), shown(name)
        automatic = run(reduce(model, "tome:6"), pixels)
        assert torch.equal(automatic, run(reduce(model, "tome:6", dense=True), pixels))
        assert not torch.equal(automatic, run(reduce(model, "tome:6", dense=False), pixels))


def test_a_mean_over_unmerged_tokens_is_weighted_by_size() -> None:
    model, pixels = make_model("no-class-token"), images()
    tokens: list[Tensor] = []
    model.norm = nn.Identity()
    model.fc_norm.register_forward_pre_hook(lambda m, x: tokens.append(x[0]))
    behind: list[Tensor] = []
    reduce(model, "tome:6", dense=False)
    model.blocks[-1].register_forward_hook(lambda m, x, y: behind.append(y))
    run(model, pixels)
    sizes = find_reduction(model).passes.thread.last_state.size
    weighted = (behind[0] * sizes.unsqueeze(-1)).sum(1) / sizes.sum(1, keepdim=True)
    run(reduce(model, "tome:6"), pixels)
    torch.testing.assert_close(tokens[1], weighted)


def test_hidden_states_of_transformers_are_on_the_grid_unless_declined() -> None:
    model = reduce(hf_model("ViTConfig", "ViTModel").eval(), "tome:4", dense=False)
    with torch.no_grad():
        merged = model(images(), output_hidden_states=True).hidden_states
        whole = reduce(model, "tome:4")(images(), output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in merged] == [65, 61, 57, 53]
    assert [state.shape[1] for state in whole] == [65, 65, 65, 65]


def test_half_types_follow_single_precision() -> None:
    pixels = shown("embedded")
    for policy in ACTING:
        full = run(reduce(make_model("embedded"), policy), pixels)
        for dtype in (torch.float16, torch.bfloat16):
            half = run(reduce(make_model("embedded").to(dtype), policy), pixels.to(dtype))
            assert half.dtype == dtype and half.isfinite().all(), policy
            # The others may choose other pairs after rounding.
            if policy.startswith(("dct", "random", "fixed")):
                tolerance = 64 * torch.finfo(dtype).eps * float(full.abs().max())
                torch.testing.assert_close(half.float(), full, rtol=0, atol=tolerance)


def test_autocast_leaves_the_choice_of_pairs_in_single_precision() -> None:
    model, pixels = make_model("vit"), images()
    for policy in ACTING:
        expected = run(reduce(model, policy), pixels)
        tokens = final_tokens(model)
        with torch.autocast("cpu", torch.bfloat16):
            output = run(model, pixels)
        assert final_tokens(model) == tokens, policy
        assert output.isfinite().all() and output.shape == expected.shape
    Spy.autocast.clear()
    with torch.autocast("cpu", torch.bfloat16):
        run(reduce(model, Spy(5)), pixels)
    assert Spy.autocast == [False] * 3


def test_gradients_and_inference_mode() -> None:
    for policy in ACTING:
        model = reduce(make_model("vit"), policy).train()
        model(images()).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        copy.deepcopy(model)
        expected = run(model.eval(), images())
        with torch.inference_mode():
            assert torch.equal(model(images()), expected), policy


def test_reduce_replaces_patch_and_patch_replaces_reduce() -> None:
    model, pixels = make_model("vit"), images()
    full = run(model, pixels)
    reduced = run(reduce(model, "tome:6"), pixels)
    screened = run(patch(model, rule=rules.GlobalMean(), layers="all"), pixels)
    with pytest.raises(ValueError, match="not reduced"):
        final_tokens(model)
    assert torch.equal(run(reduce(model, "tome:6"), pixels), reduced)
    with pytest.raises(ValueError, match="not patched"), record(model):
        pass
    assert torch.equal(run(patch(model, rule=rules.GlobalMean(), layers="all"), pixels), screened)
    assert torch.equal(run(unpatch(model), pixels), full)


def test_a_budget_beyond_the_tokens_is_refused_in_the_forward_pass() -> None:
    model = reduce(make_model("vit"), "tome:33")
    with pytest.raises(
        ValueError, match=r"tome:33 removes 33 .*8x8 grid at most 32 can be removed"
    ):
        run(model, images())
    run(reduce(model, "tome:32"), images())
    assert final_tokens(model) == 1 + 64 - 32 - 16 - 8
    reduce(model, "diffrate:0.8g")
    with pytest.raises(
        ValueError, match="197 tokens in 12 blocks, and the model has 65 tokens in 3"
    ):
        run(model, images())


def test_refusals_name_the_reason() -> None:
    blocks = torch.zeros(1, 65, 24)
    refusals: list[tuple[Callable[[Any], object], type[Exception], str]] = [
        (lambda m: reduce(m, 8), TypeError, "policy is 8; pass one of bmfa.merging"),
        (lambda m: reduce(m, "tome:x"), ValueError, "reduction 'tome:x'"),
        (lambda m: reduce(m, "tome:3", backend="cuda"), ValueError, "pass one of auto, eager"),
        (lambda m: reduce(None, "tome:3"), TypeError, "torch.nn.Module"),
        (lambda m: final_tokens(m), ValueError, "the model is not reduced"),
        (lambda m: reduce(m, "tome:3").blocks[0](blocks), RuntimeError, "no image"),
        (lambda m: _ran(m, "tome:3").blocks[2](blocks), RuntimeError, "did not return"),
        (lambda m: _ran(m, "tome:3", attn_mask=torch.eye(65) > 0), ValueError, "mask"),
        (lambda m: _ran(m, "tome:3", is_causal=True), ValueError, "causal attention"),
        (
            lambda m: reduce(_with_dropout(), "tome:3")(images()),
            ValueError,
            r"dropout of 0.1 is not supported.*call model.eval\(\)",
        ),
    ]
    for act, kind, message in refusals:
        with pytest.raises(kind, match=message):
            act(make_model("vit"))


def _with_dropout() -> nn.Module:
    return hf_model("ViTConfig", "ViTModel", attention_probs_dropout_prob=0.1).train()


def _ran(model: Any, policy: str, **options: Any) -> Any:
    run(reduce(model, policy), images(), **options)
    return model


@pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="needs Triton's interpreter"
)
@pytest.mark.parametrize("policy", ["tome:6", "free-energy:6", "evit:0.7"])
def test_triton_gives_the_models_output(policy: str) -> None:
    model, pixels = make_model("vit"), images()
    eager = run(reduce(model, policy, backend="eager"), pixels)
    fused = run(reduce(model, policy, backend="triton"), pixels)
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-4 * float(eager.abs().max()))
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: .*float64"):
        run(reduce(model.double(), policy, backend="triton"), pixels.double())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("policy", ["tome:6", "free-energy:6"])
def test_a_reduced_model_compiles_whole(policy: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, pixels = (
        reduce(make_model("vit").to(device), policy, backend="triton"),
        images().to(device),
    )
    with torch.no_grad():
        expected = model(pixels)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(pixels), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("policy", ["tome:8", "free-energy:8", "free-energy:12"])
def test_a_reduced_model_replays_as_a_graph(policy: str) -> None:
    timm = bmfa.packages.load_package("timm")
    model = timm.create_model("deit_tiny_patch16_224").cuda().half().eval()
    reduce(model, policy)
    shown = [torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.float16) for _ in range(2)]
    with torch.inference_mode():
        expected = [model(pixels) for pixels in shown]
        static = shown[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(static)
        for pixels, found in zip(reversed(shown), reversed(expected), strict=True):
            static.copy_(pixels)
            graph.replay()
            assert torch.equal(output, found)


def test_optional_parts_of_a_block_are_not_skipped() -> None:
    model, pixels = make_model("vit"), images()
    plain = run(reduce(model, "tome:0"), pixels)
    called: list[int] = []
    mlp = model.blocks[0].mlp
    for part in (model.blocks[0].ls1, mlp, mlp.drop1):
        part.register_forward_hook(lambda module, x, y: called.append(1))
    mlp.drop1.p = 0.9
    assert torch.equal(run(model, pixels), plain) and len(called) == 3
    assert not torch.equal(run(model.train(), pixels), plain)
    model.eval().blocks[0].attn.q_norm = nn.LayerNorm(8)
    assert not torch.allclose(run(model, pixels), plain)
