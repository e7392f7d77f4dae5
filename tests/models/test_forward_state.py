"""State belongs to one forward pass: threads, checkpointing, wrappers, replicas, block outputs."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmfa import rules
from bmfa.models import final_tokens, patch, reduce, unpatch
from bmfa.models.screened_layer import screened_layers
from bmfa.models.token_reduction import find_reduction
from bmfa.packages import load_package
from models.host_models import HF, VIT, images, in_threads, make_model, timm_model

COARSE = rules.Optimal(leaves=0.2)
WIDE, TALL = (16, 32), (32, 16)  # pixels: grids of 4x8 and 8x4 tokens, the same number of them


make_vit = partial(make_model, "vit")
HOSTS = ("vit", "hf-dinov2")
CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "patch": lambda model: patch(model, rule=COARSE, layers="all"),
    "reduce": lambda model: reduce(model, "tome:4"),
    "tiles": lambda model: patch(model, leaves=0.05, layers="all"),
}
# Pixels of images that a changed model is shown in turn: "tiles" runs the small ones dense.
SIZES = {"patch": (WIDE, TALL), "reduce": (WIDE, TALL), "tiles": ((32, 32), (256, 256))}


def logits(model: nn.Module, pixels: Tensor) -> Tensor:
    output = model(pixels)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", HOSTS)
def test_threads_with_different_grids_do_not_interfere(host: str, change: str) -> None:
    model = CHANGES[change](make_model(host))
    shown = {size: images(*size) for size in {*SIZES[change], (32, 32)}}
    with torch.no_grad():
        alone = {size: logits(model, pixels) for size, pixels in shown.items()}

    def serve(size: tuple[int, int]) -> bool:
        with torch.no_grad():
            outputs = [logits(model, shown[size]) for _ in range(10)]
        return all(torch.equal(output, alone[size]) for output in outputs)

    assert all(in_threads([partial(serve, size) for size in shown]))


def gradients(model: nn.Module, change: str) -> list[Tensor]:
    """Of two forward passes with different grids, before one backward pass."""
    model.zero_grad()
    first, second = (logits(model, images(*size)).square().sum() for size in SIZES[change])
    (first + 1e-2 * second).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("Block", "Dinov2Layer")]


def checkpointed(model: nn.Module, every: int, reentrant: bool) -> Callable[[Tensor], Tensor]:
    """Apply gradient checkpointing to runs of `every` blocks of a timm model."""

    def forward(pixels: Tensor) -> Tensor:
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(pixels))))
        blocks = list(model.blocks)
        for start in range(0, len(blocks), every):
            run = nn.Sequential(*blocks[start : start + every])
            x = checkpoint(run, x, use_reentrant=reentrant)
        return model.forward_head(model.norm(x))

    return forward


class Checkpointed(nn.Module):
    """A model, with another forward."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, pixels: Tensor) -> Tensor:
        return self.run(pixels)


def check_gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], change: str) -> None:
    """They are those of the model without checkpointing."""
    found, expected = gradients(Checkpointed(model, forward), change), gradients(model, change)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_with_the_grid_of_its_own_pass(
    reentrant: bool, change: str
) -> None:
    model = CHANGES[change](make_vit())
    for every in (1, 2):
        check_gradients(model, checkpointed(model, every, reentrant), change)
    inner = checkpointed(model, 1, reentrant)
    whole = partial(checkpoint, inner, use_reentrant=reentrant)  # blocks inside of the model
    check_gradients(model, lambda pixels: whole(pixels.requires_grad_()), change)
    if change == "reduce":  # a hook reads the tokens between blocks
        model.blocks[0].register_forward_hook(lambda m, i, o: None)
        check_gradients(model, checkpointed(model, 1, reentrant), change)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", HOSTS)
def test_the_checkpointing_of_the_hosts_recomputes_with_the_grid_of_its_own_pass(
    host: str, change: str
) -> None:
    model = CHANGES[change](make_model(host)).train()
    expected = gradients(model, change)
    if host == "vit":
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    for mine, theirs in zip(gradients(model, change), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_checkpointing_inside_a_block_is_refused() -> None:
    model = patch(make_vit(), rule=COARSE, layers="all")
    for block in model.blocks:

        def forward(x: Tensor, block: Any = block) -> Tensor:
            x = x + checkpoint(lambda y: block.attn(block.norm1(y)), x, use_reentrant=False)
            return x + block.mlp(block.norm2(x))

        block.forward = forward
    with pytest.raises(RuntimeError, match="apply gradient checkpointing to whole blocks"):
        gradients(model, "patch")


def test_no_state_outlives_its_tokens() -> None:
    model = patch(make_vit(), rule=COARSE, layers="all")
    logits(model, images(*WIDE)).sum().backward()
    passes = screened_layers(model)[0].passes
    logits(model, images(*TALL)).sum().backward()
    gc.collect()
    assert list(passes.thread.entered) == [passes.thread.finished]


@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_of_the_instance_and_hooks_run_and_survive(change: str) -> None:
    model, calls = make_vit(), []
    shown = [images(*size) for size in SIZES[change]]
    layer = model.blocks[1].attn
    before = type(layer).forward.__get__(layer)

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("wrapper")
        return 2 * before(*args, **kwargs)

    expected = CHANGES[change](copy.deepcopy(model))
    layer.forward = wrapper
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.proj.register_forward_hook(lambda *_: calls.append("projection"))
    with torch.no_grad():
        expected.blocks[1].attn.proj.weight.mul_(2), expected.blocks[1].attn.proj.bias.mul_(2)
        full = [logits(model, pixels) for pixels in shown]
        CHANGES[change](model)
        for pixels in shown:
            calls.clear()
            torch.testing.assert_close(logits(model, pixels), logits(expected, pixels))
            assert calls == ["before", "wrapper", "projection"]
        unpatch(model)
        assert layer.__dict__["forward"] is wrapper
        for pixels, output in zip(shown, full, strict=True):
            assert torch.equal(logits(model, pixels), output)


def test_reducing_a_block_with_a_forward_of_its_own_is_refused() -> None:
    model = make_vit()
    block = model.blocks[2]
    block.forward = lambda x, run=block.forward: run(x)
    with pytest.raises(TypeError, match=r"block 2 .* has a forward of its own"):
        reduce(model, "tome:4")
    assert "forward" in vars(block)


def replicas(model: nn.Module, factor: float) -> nn.Module:
    """One replica as nn.DataParallel makes it, its parameters being `factor` times the model's."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            value = None if parameter is None else parameter.detach() * factor
            setattr(replica, name, value)
        for name, buffer in module._buffers.items():
            replica._buffers[name] = buffer
    return copies[model]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", HOSTS)
def test_replicas_compute_with_their_own_weights(host: str, change: str) -> None:
    model, pixels = make_model(host), images(*WIDE)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(0.5)
        replica = replicas(CHANGES[change](model), 0.5)
        assert torch.equal(logits(replica, pixels), logits(CHANGES[change](expected), pixels))


def depth_anything() -> nn.Module:
    transformers = load_package("transformers")
    backbone = transformers.Dinov2Config(**HF, out_indices=[1, 2, 3], reshape_hidden_states=False)
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=24,
        patch_size=4,
        reassemble_factors=[2, 1, 0.5],
        neck_hidden_sizes=[8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=4,
    )
    return transformers.DepthAnythingForDepthEstimation(config)


def llava() -> nn.Module:
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50, "max_position_embeddings": 128, "num_key_value_heads": 3}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**HF),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=49,
        image_seq_length=64,
        vision_feature_layer=-2,
    )
    return transformers.LlavaForConditionalGeneration(config)


def features_only() -> nn.Module:
    return load_package("timm").create_model(
        "vit_tiny_patch16_224", features_only=True, **VIT, num_classes=0
    )


DENSE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any]]] = {
    "depth-anything": (depth_anything, lambda m, x: [m(x).predicted_depth]),
    "features-only": (features_only, lambda m, x: m(x)),
    "forward-intermediates": (
        partial(make_model, "vit"),
        lambda m, x: m.forward_intermediates(x)[1],
    ),
    "llava": (
        llava,
        lambda m, x: [
            m(
                input_ids=torch.cat((torch.full((2, 64), 49), torch.ones(2, 4).long()), 1),
                pixel_values=x,
            ).logits
        ],
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_models_that_read_block_outputs(name: str) -> None:
    make, read = DENSE[name]
    torch.manual_seed(0)
    model, pixels = make().eval(), images()
    with torch.no_grad():
        full = read(model, pixels)
        exact = read(patch(model, rule=rules.ExactGap(0.0), layers="all"), pixels)
        torch.testing.assert_close(exact, full, rtol=1e-4, atol=1e-5)
        tiles = read(patch(model, error=0.0, allow_dense=False, layers="all"), pixels)
        torch.testing.assert_close(tiles, full, rtol=1e-4, atol=1e-5)
        none = read(reduce(model, "tome:0"), pixels)
        torch.testing.assert_close(none, full, rtol=1e-4, atol=1e-5)
        merged = read(reduce(model, "tome:6"), pixels)
        assert [x.shape for x in merged] == [x.shape for x in full]
        assert all(torch.isfinite(x).all() for x in merged)
        assert final_tokens(model) < 64
        assert not all(torch.equal(x, y) for x, y in zip(merged, full, strict=True))


def test_what_is_read_between_blocks_is_the_unmerged_tokens() -> None:
    model, pixels = make_vit(), images()
    with torch.no_grad():
        for policy, depth in product(("tome:6", "evit:0.7", "dct:0.9", "fixed-pool:2"), (1, 2, 3)):
            short = copy.deepcopy(model)
            reduce(short, policy, dense=False)
            # The reference: stop behind that block, and unmerge what is there by hand.
            x = short.norm_pre(short._pos_embed(short.patch_embed(pixels)))
            for block in short.blocks[:depth]:
                x = block(x)
            reduction = find_reduction(short)
            states = reduction.passes.thread.current.states
            expected = reduction.unmerge(states[depth], x)
            whole = reduce(copy.deepcopy(model), policy)
            seen: list[Tensor] = []
            whole.blocks[depth - 1].register_forward_hook(lambda m, i, o, to=seen: to.append(o))
            read = whole(pixels)
            torch.testing.assert_close(seen[0], expected)
            torch.testing.assert_close(read, reduce(copy.deepcopy(model), policy)(pixels))


def test_a_hook_may_replace_the_tokens_between_merged_blocks() -> None:
    """A merged token continues with the value of one of the tokens that it stands for."""
    model, seen = reduce(make_vit(), "tome:4"), []
    model.blocks[0].register_forward_hook(lambda m, i, o: o + 1)
    model.blocks[1].norm1.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    plain = reduce(make_vit(), "tome:4", dense=False)
    plain.blocks[1].norm1.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    with torch.no_grad():
        model(images()), plain(images())
    assert torch.equal(seen[0], seen[1] + 1)


def test_attention_weights_of_a_patched_model_are_refused() -> None:
    transformers = load_package("transformers")
    config = transformers.ViTConfig(**HF)
    config._attn_implementation = "eager"
    model = transformers.ViTModel(config).eval()
    pixels = images()
    assert len(model(pixels, output_attentions=True).attentions) == 3
    patch(model, rule=COARSE, layers="last-1")
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model(pixels, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"bmfa\.record"):
        model(pixels)
    unpatch(model)
    assert len(model(pixels).attentions) == 3
    reduce(model, "tome:4")
    with pytest.raises(ValueError, match="patched or reduced"):
        model(pixels)


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", ["vit", pytest.param("hf-dinov2", marks=pytest.mark.slow)])
def test_reduced_models_compile_for_grids_of_one_size(host: str, whole: bool) -> None:
    model = reduce(make_model(host), "tome:4")
    shown = [images(*size) for size in (WIDE, TALL, WIDE)]
    with torch.no_grad():
        expected = [logits(model, pixels) for pixels in shown]
        torch.compiler.reset()
        options = {"backend": "aot_eager", "fullgraph": True}
        if whole:
            model.compile(**options)
        else:
            for block in blocks_of(model):
                block.compile(**options)
        for pixels, output in zip(shown, expected, strict=True):
            torch.testing.assert_close(logits(model, pixels), output)
    torch.compiler.reset()


def tokens_of(model: nn.Module, pixels: Tensor) -> Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(pixels)))


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_interleaved_and_nested_passes_keep_their_grids(change: str) -> None:
    model = CHANGES[change](make_vit())
    for first, second in permutations((*SIZES[change], (48, 48)), 2):
        shown = {"first": images(*first), "second": images(*second, seed=2)}
        alone = {name: model.blocks(tokens_of(model, x)) for name, x in shown.items()}
        # In turns, block by block.
        now = {}
        for name, pixels in shown.items():
            now[name] = model.blocks[0](tokens_of(model, pixels))
        for block in model.blocks[1:]:
            now = {name: block(x) for name, x in now.items()}
        for name in shown:
            assert torch.equal(now[name], alone[name])
        # One inside a block of the other, between two of its blocks, or before the first.
        whole, block = logits(model, shown["first"]), model.blocks[1]
        modules = [model.blocks[0], block, block.norm1, block.mlp]
        if first != second[::-1]:  # ambiguous, see below
            modules.append(model.patch_embed.proj)
        for module in modules:
            entered: list[bool] = []

            def run_another(*_: object, entered: list[bool] = entered) -> None:
                if not entered:
                    entered.append(True)
                    logits(model, shown["second"])

            handle = module.register_forward_hook(run_another)
            assert torch.equal(logits(model, shown["first"]), whole) and entered
            handle.remove()


def test_ambiguous_pending_grids_are_refused() -> None:
    model = patch(make_vit(), rule=COARSE, layers="last-1")
    first, second = tokens_of(model, images(*WIDE)), tokens_of(model, images(*TALL))
    model.blocks(first)  # the latest image may be the only one that goes on
    with pytest.raises(RuntimeError, match="the grid of these tokens is ambiguous"):
        model.blocks(second)
    assert second.shape == first.shape
    model(images(*TALL))  # nothing is left of it


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["attn", "block"])
def test_a_model_that_was_wrapped_between_two_patches_runs(change: str, part: str) -> None:
    model, pixels = CHANGES[change](make_vit()), images(*WIDE)
    expected = patch(make_vit(), rule=COARSE, layers="all")
    with torch.no_grad():
        changed = logits(model, pixels)
    for block in model.blocks:
        module = block.attn if part == "attn" else block
        module.forward = lambda *a, run=module.forward, **k: run(*a, **k)
    with torch.no_grad():
        assert torch.equal(logits(model, pixels), changed)
        patch(model, rule=COARSE, layers="all")
        assert torch.equal(logits(model, pixels), logits(expected, pixels))
        assert torch.equal(logits(unpatch(model), pixels), logits(unpatch(expected), pixels))


def test_reduced_models_return_shapes_on_the_meta_device() -> None:
    for policy in ("tome:4", "evit:0.7", "dct:0.9"):
        model = reduce(timm_model("vit_tiny_patch16_224", **VIT), policy).to("meta")
        assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 5)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_is_refused() -> None:
    for change in (patch, *CHANGES.values()):
        with pytest.raises(RuntimeError, match=r"torch\.compile or torch\.export"):
            torch.jit.trace(change(make_vit()), images(), check_trace=False)
