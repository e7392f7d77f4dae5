"""Hosts whose tokens are not one grid in raster order: packed images, and grids of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmfa
from bmfa import Grid, rules
from bmfa.evidence.bench.inputs import check_one_grid
from bmfa.models import patch, record, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.loading import check_img_size
from bmfa.models.measures import MEASURES
from bmfa.models.packing import pack, raster_order
from bmfa.models.screened_layer import LayerInputs, observe, screened_layers
from models.packed_models import PACKED, SEQUENCES, SIZES, Inputs
from models.supported_models import call, inputs_of, make_supported
from models.tuned_models import given_times

EXACT: tuple[dict[str, Any], ...] = (
    {"leaves": 1.0, "allow_dense": False},
    {"rule": rules.ExactGap(0.0)},
)
COARSE: dict[str, Any] = {"rule": rules.FixedDepth(1)}
TOLERANCE = 5e-6  # of the largest output, in float32


def features(model: nn.Module, inputs: Inputs) -> Tensor:
    return call(model, inputs)[0]


def change(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_every_image_is_attended_as_if_it_were_alone() -> None:
    """With trees, whose blocks depend on the grid, so that a wrong order or grid would change them."""
    for name in ("qwen2.5-vl", "qwen3.5"):
        model, inputs = make_supported(name), inputs_of(name)
        patch(model, layers="all", **COARSE)
        together, start = features(model, inputs), 0
        for frames, height, width in SIZES:
            for _ in range(frames):
                part = slice(start, start + height * width)
                patches = inputs["hidden_states"][part]
                sizes = torch.tensor([[1, height, width]])
                alone = features(model, {"hidden_states": patches, "grid_thw": sizes})
                assert change(together[part], alone) < TOLERANCE, name
                start = part.stop


@torch.no_grad()
def test_images_of_one_grid_share_a_call_and_frames_attend_to_each_other_where_they_should() -> (
    None
):
    for name in SEQUENCES:
        model, inputs = make_supported(name), inputs_of(name)
        patch(model, layers=[0], leaves=2, allow_dense=False)
        calls: list[tuple[Grid, int]] = []

        def keep(layer: LayerInputs, screened: bmfa.Screened, calls: Any = calls) -> None:
            calls.append((layer.grid, layer.q.shape[0]))

        with observe(model, keep):
            features(model, inputs)
        if name == "kimi":
            assert calls == [(Grid(12, 8, frames=2), 1), (Grid(6, 10, frames=2), 1)]
        else:
            frames = 1 if name in ("pixtral", "hunyuan", "glm4v", "glm4v-moe") else 2
            assert calls == [(Grid(12, 8), 1), (Grid(6, 10), frames)], name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_images_of_several_grids_break_the_graph_and_say_so() -> None:
    model, inputs = make_supported("pixtral"), inputs_of("pixtral")
    for options in ({"error": 0.1}, COARSE):  # dense, trees
        patch(model, layers="all", **options)
        expected = features(model, inputs)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert change(features(compiled, inputs), expected) < TOLERANCE
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile without fullgraph=True"):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    torch.compiler.reset()


@torch.no_grad()
def test_summaries_and_records() -> None:
    for name in sorted(PACKED):
        model, inputs = make_supported(name), inputs_of(name)
        patch(model, layers="all", leaves=2, allow_dense=False)
        host = find_vision_transformer(model)
        for _ in range(2):
            features(model, inputs)
            table = bmfa.summary(model)
            assert [row.form for row in table] == ["tiled"] * len(host.attentions)
            assert {len(row.calls) for row in table} == {2 if name in SEQUENCES else 1}
        assert len(host.attentions) + len(host.dense_blocks) == len(host.blocks)
        windows = name in ("qwen2.5-vl", "qwen2.5-omni", "exaone4.5", "sam2", "sam3")
        assert ("attention inside windows." in str(table)) == windows, name
    assert find_vision_transformer(make_supported("qwen2.5-vl")).dense_blocks.keys() == {1}
    model = patch(make_supported("pixtral"), layers="all", **COARSE)
    with record(model) as recording:
        features(model, inputs_of("pixtral"))
    assert [tree.grid for tree in recording[0].trees] == [Grid(12, 8), Grid(6, 10)]
    assert recording.leaf_ratio < 0.1


@torch.no_grad()
def test_the_hiera_of_a_whole_sam2_model() -> None:
    transformers = bmfa.packages.load_package("transformers")
    backbone = make_supported("sam2").config.to_dict() | {"image_size": [64, 64]}
    vision = transformers.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[384, 192, 96, 24],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )
    config = transformers.Sam2Config(
        vision_config=vision.to_dict(),
        prompt_encoder_config={"image_size": 64, "patch_size": 16},
    )
    torch.manual_seed(0)
    model = transformers.Sam2Model(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    inputs = {
        "pixel_values": torch.randn(1, 3, 64, 64),
        "input_points": torch.tensor([[[[10.0, 10.0]]]]),
        "input_labels": torch.tensor([[[1]]]),
    }
    full = model(**inputs).pred_masks
    patch(model, layers="all", **EXACT[0])
    assert len(screened_layers(model)) == 3
    assert change(model(**inputs).pred_masks, full) < TOLERANCE
    patch(model, layers="all", rule=rules.GlobalMean())
    assert change(model(**inputs).pred_masks, full) > 1e-3
    assert torch.equal(unpatch(model)(**inputs).pred_masks, full)

    # Tuned by its masks: the points are arguments of every call.
    prompts = {name: value for name, value in inputs.items() if name != "pixel_values"}
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(3)}
    with given_times(times):
        plan = bmfa.tune(
            model,
            torch.randn(2, 3, 64, 64),
            1.0,
            lambda reference, output: float((output.pred_masks - reference.pred_masks).abs().max()),
            options=prompts,
            errors=[0.3],
        )
    assert plan.grids == ((8, 8), (4, 4), (4, 4)) and set(plan.errors) == {0, 1, 2}


def test_refusals() -> None:
    for name in ("sam2", "qwen3-vl", "naflex"):
        model = make_supported(name)
        with pytest.raises(TypeError, match=r"cannot be reduced: .* over one grid"):
            bmfa.reduce(model, "tome:2")
        with pytest.raises(ValueError, match=r"not supported by bmfa bench, which needs one grid"):
            check_one_grid(find_vision_transformer(model))
        if name != "sam2":
            check_img_size(name, model, (32, 48))
            with pytest.raises(ValueError, match=f"{name} has patches of 4 pixels"):
                check_img_size(name, model, (32, 50))
    check_one_grid(find_vision_transformer(bmfa.load_model("embedded").model))
    for name, text in (("qwen3-vl", "patches of images and grid_thw"), ("vjepa2", "videos")):
        with pytest.raises(TypeError, match=f"it takes {text} instead of"):
            bmfa.tune(make_supported(name), smooth((48, 64)))
    model = patch(make_supported("qwen3-vl"), layers="all", **COARSE)
    with pytest.raises(RuntimeError, match="call the model itself"):
        model.blocks[0](
            torch.zeros(16, 32),
            cu_seqlens=torch.tensor([0, 16]),
            position_embeddings=(torch.ones(16, 16), torch.zeros(16, 16)),
        )
    with pytest.raises(ValueError, match="do not fill that grid"):
        raster_order(torch.tensor([[0, 0], [0, 1], [1, 1]]))
    packing = pack([(Grid(2, 2), torch.arange(4))], (1, 4), torch.device("cpu"))
    tokens = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"1 x 5 tokens.*make 1 x 4"):
        packing.attend(lambda q, k, v, grid: v, tokens, tokens, tokens, 1.0)
    model = patch(make_supported("naflex"), layers="all", **COARSE)
    coordinates = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
    patches = {"patches": torch.zeros(1, 16, 48), "patch_coord": coordinates}
    patches["patch_valid"] = torch.ones(1, 16, dtype=torch.bool)
    with pytest.raises(ValueError, match="images with patch_coord= are not supported"):
        model(patches)


# Pixels of images, and the grids of the keys in the layers.
TUNED = {
    "sam2": ((128, 256), [(16, 32), (8, 16), (8, 16)]),
    "naflex": ((48, 64), [(12, 16)] * 3),
    "pixtral": ((48, 64), [(12, 16)] * 3),
}


def tuned_plan(model: nn.Module, pixels: Tensor, layers: int) -> bmfa.Plan:
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(layers)}
    with given_times(times):
        return bmfa.tune(model, pixels, 1.0, errors=[0.3], progress=False)


def tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    (found,) = MEASURES["features"].outputs(model, pixels, {})
    return found


def smooth(size: tuple[int, int]) -> Tensor:
    noise = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return nn.functional.interpolate(noise, size=size, mode="bicubic")


@pytest.mark.filterwarnings("ignore:screened_attention measured")  # a target may be missed
@torch.no_grad()
def test_plans_have_a_grid_for_each_layer_and_other_sizes_run_dense(tmp_path: Path) -> None:
    for name, (size, grids) in TUNED.items():
        model, pixels = make_supported(name), smooth(size)
        full = tokens(model, pixels)
        plan = tuned_plan(model, pixels, len(grids))
        assert plan.grids == tuple(grids) and plan.errors == dict.fromkeys(range(len(grids)), 0.3)
        assert torch.equal(tokens(model, pixels), full)
        plan.save(tmp_path / "plan.json")
        planned = tokens(patch(model, plan=tmp_path / "plan.json"), pixels)
        expected = tokens(patch(model, error=0.3, allow_dense=False, layers="all"), pixels)
        assert torch.equal(planned, expected) and not torch.equal(planned, full), name
        assert torch.equal(tokens(unpatch(model), pixels), full)
        if name != "pixtral":
            other = smooth((64, 128))
            full = tokens(model, other)
            patch(model, plan=plan)
            with pytest.warns(UserWarning, match="grid of tokens, and there are"):
                assert change(tokens(model, other), full) < TOLERANCE
