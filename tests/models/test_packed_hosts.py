"""Hosts whose tokens are not one grid in raster order: packed images, padding, Hiera."""

import copy
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

import bmfa
from bmfa import Grid, rules
from bmfa.evidence.bench.inputs import check_one_grid
from bmfa.models import patch, record, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.loading import check_img_size
from bmfa.models.measures import MEASURES
from bmfa.models.packing import pack, raster_order
from bmfa.models.relative import with_relative_positions
from bmfa.models.replacement import replacements_in
from bmfa.models.screened_layer import LayerInputs, observe, screened_layers
from models.packed_models import PACKED, SEQUENCES, SIZES, Inputs, make_packed

EXACT: tuple[dict[str, Any], ...] = (
    {"leaves": 1.0, "allow_dense": False},
    {"rule": rules.ExactGap(0.0)},
)
COARSE: dict[str, Any] = {"rule": rules.FixedDepth(1)}
TOLERANCE = 5e-6  # of the largest output, in float32


@pytest.fixture(params=sorted(PACKED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs_of(name: str, seed: int = 1) -> Inputs:
    return PACKED[name][1](seed)


def features(model: nn.Module, inputs: Inputs) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def change(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_exact_settings_equal_the_original_and_unpatch_restores_its_bits(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    full = features(model, inputs)
    for options in EXACT:
        patch(model, layers="all", **options)
        assert change(features(model, inputs), full) < TOLERANCE
    patch(model, layers="all", **COARSE)
    assert change(features(model, inputs), full) > 1e-3
    assert len(screened_layers(model)) == len(find_vision_transformer(model).attentions) > 1
    patch(model, layers="all", error=0.1)  # tiles do not pay at these sizes
    assert change(features(model, inputs), full) < TOLERANCE
    unpatch(model)
    assert torch.equal(features(model, inputs), full)
    assert not any("bmfa" in key for module in model.modules() for key in vars(module))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", sorted(name for name in PACKED if name.startswith("qwen")))
@torch.no_grad()
def test_every_image_is_attended_as_if_it_were_alone(name: str) -> None:
    """With trees, whose blocks depend on the grid, so that a wrong order or grid would change them."""
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers="all", **COARSE)
    together = features(model, inputs)
    start = 0
    for frames, height, width in SIZES:
        for _ in range(frames):
            end = start + height * width
            alone = {
                "hidden_states": inputs["hidden_states"][start:end],
                "grid_thw": torch.tensor([[1, height, width]]),
            }
            assert change(together[start:end], features(model, alone)) < TOLERANCE
            start = end


def places(name: str, height: int, width: int) -> list[tuple[int, int]]:
    """Row and column of the tokens of an image in the order of the model, from its definition."""
    tokens = [(row, column) for row in range(height) for column in range(width)]
    if name == "pixtral":
        return tokens
    # Blocks of 2x2 patches in raster order; in windows of 2x2 blocks (16 pixels) first, if it has some.
    window = 4 if name == "qwen2.5-vl" else max(height, width)

    def key(place: tuple[int, int]) -> tuple[int, ...]:
        row, column = place
        blocks = (row // 2, column // 2, row % 2, column % 2)
        return (row // window, column // window, *blocks)

    return sorted(tokens, key=key)


@pytest.mark.parametrize("name", SEQUENCES)
@torch.no_grad()
def test_the_tokens_of_each_image_are_in_raster_order(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers=[0], **COARSE)
    with record(model, trees=False):
        features(model, inputs)
    packing = screened_layers(model)[0].passes.images
    sizes = [(h, w) for frames, h, w in SIZES for _ in range(frames)]
    sizes = [(12, 8), (6, 10)] if name == "pixtral" else sizes
    start, seen = 0, dict.fromkeys({Grid(*size) for size in sizes}, 0)
    for height, width in sizes:
        grid = Grid(height, width)
        group = next(group for group in packing.groups if group.grid == grid)
        index = group.index[seen[grid]].tolist()
        order = places(name, height, width)
        assert [order[i - start] for i in index] == sorted(order)
        seen[grid] += 1
        start += grid.size
    assert sum(group.index.numel() for group in packing.groups) == start


@pytest.mark.parametrize("name", SEQUENCES)
@torch.no_grad()
def test_images_of_one_grid_share_a_call(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers=[0], **COARSE)
    calls: list[tuple[Grid, int]] = []

    def keep(layer: LayerInputs, screened: bmfa.Screened) -> None:
        calls.append((layer.grid, layer.q.shape[0]))

    with observe(model, keep):
        features(model, inputs)
    frames = 1 if name == "pixtral" else 2
    assert calls == [(Grid(12, 8), 1), (Grid(6, 10), frames)]


@torch.no_grad()
def test_copies_and_pickles_are_patched_on_their_own(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    full = features(model, inputs)
    patch(model, layers="all", **COARSE)
    coarse = features(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        unpatch(model)
        assert torch.equal(features(other, inputs), coarse)
        assert torch.equal(features(unpatch(other), inputs), full)
        assert not any(m._forward_pre_hooks for m in other.modules())
        patch(model, layers="all", **COARSE)


@torch.no_grad()
def test_padding_of_naflex_is_what_the_original_makes_of_it() -> None:
    model, inputs = make_packed("naflex"), inputs_of("naflex")["x"]
    full = model.forward_features(**_by_name(inputs))
    patch(model, layers="all", **EXACT[0])
    mine = model.forward_features(**_by_name(inputs))
    assert change(mine["patches"], full["patches"]) < TOLERANCE


def _by_name(inputs: Inputs) -> Inputs:
    return {"patches": inputs["patches"]} | {k: v for k, v in inputs.items() if k != "patches"}


@torch.no_grad()
def test_naflex_finds_the_grids_of_padded_images_and_of_images() -> None:
    model, inputs = make_packed("naflex"), inputs_of("naflex")
    patch(model, layers=[0], **COARSE)
    calls: list[tuple[Grid, tuple[int, ...]]] = []

    def keep(layer: LayerInputs, screened: bmfa.Screened) -> None:
        calls.append((layer.grid, tuple(layer.k.shape[:3])))

    with observe(model, keep):
        padded = model(**inputs)
        model(torch.zeros(2, 3, 24, 40))
    prefix = 3
    assert calls == [
        (Grid(12, 8), (1, 3, prefix + 96)),
        (Grid(6, 10), (1, 3, prefix + 60)),
        (Grid(6, 10), (2, 3, prefix + 60)),
    ]
    # The order in which an image's patches are passed is of no importance.
    ordered = copy.deepcopy(inputs)["x"]
    places = ordered["patch_coord"][1, :60]
    order = (places[:, 0] * 10 + places[:, 1]).argsort()
    ordered["patch_coord"][1, :60] = places[order]
    ordered["patches"][1, :60] = ordered["patches"][1, :60][order]
    assert change(model(ordered), padded) < TOLERANCE


@torch.no_grad()
def test_naflex_refuses_masks_and_incomplete_images() -> None:
    model, inputs = make_packed("naflex"), inputs_of("naflex")["x"]
    patch(model, layers="all", **COARSE)
    with pytest.raises(ValueError, match="attention mask is not supported"):
        model(inputs | {"attn_mask": torch.zeros(2, 1, 103, 103)})
    hole = inputs | {"patch_valid": inputs["patch_valid"].clone()}
    hole["patch_valid"][0, 5] = False
    with pytest.raises(ValueError, match="do not fill that grid"):
        model(hole)
    with pytest.raises(TypeError, match="cannot be reduced: its images may have different grids"):
        bmfa.reduce(model, "tome:2")


def test_hiera_orders_tokens_as_the_host_does() -> None:
    model: Any = make_packed("hiera")
    patch(model, layers="all", **COARSE)
    replacements = [replacement for _, replacement in replacements_in(model)]
    # Blocks 2 to 6 attend over the grid; 3 and 6 pool the queries.
    assert sorted(find_vision_transformer(model).dense_blocks) == [0, 1]
    assert [replacement.queries is None for replacement in replacements] == [1, 0, 1, 1, 0]
    assert [replacement.keys.grid.height for replacement in replacements] == [8, 8, 4, 4, 4]
    layouts = [replacement.queries or replacement.keys for replacement in replacements]
    assert [layout.grid.width for layout in layouts] == [16, 8, 8, 8, 4]
    layouts += [replacement.keys for replacement in replacements]
    blocks = [2, 3, 4, 5, 6, 2, 2, 4, 5, 5]  # whose outputs have that order
    for index, layout in zip(blocks, layouts, strict=True):
        tokens = torch.arange(layout.grid.size).view(1, -1, 1)
        raster = model.reroll(tokens, index).flatten()
        heads = tokens.view(1, 1, -1, 1).expand(2, 3, -1, 5)
        assert torch.equal(layout.to_raster(heads)[1, 2, :, 4], raster)
        assert torch.equal(layout.from_raster(layout.to_raster(heads)), heads)


# Inputs whose grids follow from shapes and integers.
STATIC: dict[str, tuple[str, Inputs]] = {
    "pixtral": ("pixtral", {"pixel_values": torch.randn(2, 3, 32, 48)}),
    "pixtral-sizes": (
        "pixtral",
        {"pixel_values": torch.randn(2, 3, 48, 40), "image_sizes": [(48, 32), (24, 40)]},
    ),
    "naflex": ("naflex", {"x": torch.randn(2, 3, 32, 48)}),
}


def break_graph(*args: Any) -> None:
    torch._dynamo.graph_break()


@pytest.mark.parametrize("case", sorted(STATIC))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_images_whose_grids_need_no_values_compile_as_one_graph(case: str) -> None:
    name, inputs = STATIC[case]
    model = make_packed(name)
    for options in ({"error": 0.1}, {"leaves": 2, "allow_dense": False}):  # dense, tiles
        patch(model, layers="all", **options)
        expected = features(model, inputs)
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert change(features(compiled, inputs), expected) < TOLERANCE
        assert change(features(model, inputs), expected) == 0
    hook = find_vision_transformer(model).blocks[1].register_forward_pre_hook(break_graph)
    torch.compiler.reset()
    assert change(features(torch.compile(model, backend="eager"), inputs), expected) < TOLERANCE
    hook.remove()
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["pixtral", "naflex"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_images_whose_grids_are_values_break_the_graph_and_say_so(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers="all", **COARSE)
    expected = features(model, inputs)
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported,
        match=r"are values of a tensor(.|\n)*compile without fullgraph=True",
    ):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    assert change(features(compiled, inputs), expected) < TOLERANCE
    if name == "naflex":  # one model takes both
        images = STATIC["naflex"][1]
        assert change(features(compiled, images), features(model, images)) < TOLERANCE
        assert change(features(compiled, inputs), expected) < TOLERANCE
    torch.compiler.reset()


@torch.no_grad()
def test_summaries(name: str) -> None:
    model, inputs = patch(make_packed(name), layers="all", **COARSE), inputs_of(name)
    for _ in range(2):
        features(model, inputs)
        table = bmfa.summary(model)
        assert [row.form for row in table] == ["tree"] * len(
            find_vision_transformer(model).attentions
        )
        groups = 2 if name in SEQUENCES or name.startswith("naflex") else 1
        assert {len(row._calls) for row in table} == {groups}
    windows = name in ("qwen2.5-vl", "sam", "timm-sam", "vitdet", "sam2")
    assert ("attention inside windows." in str(table)) == windows
    if name == "hiera":
        assert table.notes == (
            "Blocks 0, 1 are not in this table, and run as before: attention inside mask units.",
        )


@torch.no_grad()
def test_records_of_packed_images_and_pooled_queries() -> None:
    model = patch(make_packed("hiera"), layers="all", **COARSE)
    with record(model) as recording:
        features(model, inputs_of("hiera"))
    assert [recording[layer].trees[0].shape[2] for layer in range(5)] == [128, 32, 32, 32, 8]
    patch(model, layers="all", error=0.1)  # runs dense
    with record(model, trees=False) as recording:
        features(model, inputs_of("hiera"))
    assert [recording[layer].stats[0].form for layer in range(5)] == ["dense"] * 5
    model = patch(make_packed("pixtral"), layers="all", **COARSE)
    with record(model) as recording:
        features(model, inputs_of("pixtral"))
    assert [tree.grid for tree in recording[0].trees] == [Grid(12, 8), Grid(6, 10)]
    assert recording.leaf_ratio < 0.1


@torch.no_grad()
def test_the_hiera_of_a_whole_sam2_model() -> None:
    transformers = bmfa.packages.load_package("transformers")
    backbone = make_packed("sam2").config.to_dict() | {"image_size": [64, 64]}
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
    plan = bmfa.tune(
        model,
        torch.randn(2, 3, 64, 64),
        1.0,
        lambda reference, output: float((output.pred_masks - reference.pred_masks).abs().max()),
        options=prompts,
        errors=[0.3],
        times=times,
        repeats=1,
    )
    assert plan.grids == ((8, 8), (4, 4), (4, 4)) and set(plan.errors) == {0, 1, 2}


def test_blocks_of_hiera_that_stay_as_they_are_have_a_reason() -> None:
    for name in ("hiera", "sam2"):
        host = find_vision_transformer(make_packed(name))
        assert len(host.attentions) + len(host.dense_blocks) == len(host.blocks)
        assert {type(reason) for reason in host.dense_blocks.values()} == {str}
    assert "mask units" in find_vision_transformer(make_packed("hiera")).dense_blocks[0]
    assert "windows" in host.dense_blocks[0]
    model = patch(make_packed("hiera"), layers="all", **COARSE)
    with pytest.raises(ValueError, match=r"64 tokens, but .* 8x16 grid make 128"):
        model(torch.zeros(1, 3, 64, 128), mask=torch.arange(8).view(1, 8) < 4)
    with pytest.raises(TypeError, match="cannot be reduced: its blocks pool"):
        bmfa.reduce(model, "tome:2")


def test_relative_positions_are_products_of_queries_and_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    height, width, scale = 3, 5, 0.5
    q, k = torch.randn(2, 2, 4, height * width, 6, generator=generator, dtype=torch.float64)
    rows = torch.randn(2 * height - 1, 6, generator=generator, dtype=torch.float64)
    columns = torch.randn(2 * width - 1, 6, generator=generator, dtype=torch.float64)
    by_row, by_column = (
        table[torch.arange(size)[:, None] - torch.arange(size) + size - 1]
        for table, size in ((rows, height), (columns, width))
    )
    longer, keys = with_relative_positions(q, k, by_row, by_column, scale)
    assert longer.shape[-1] == keys.shape[-1] == 6 + height + width
    scores = scale * longer @ keys.mT
    for i, j in ((0, 0), (1, 13), (7, 2), (14, 0)):
        (y, x), (v, u) = divmod(i, width), divmod(j, width)
        vector = scale * k[:, :, j] + rows[y - v + height - 1] + columns[x - u + width - 1]
        torch.testing.assert_close(scores[:, :, i, j], (q[:, :, i] * vector).sum(-1))


def test_windows_of_sam_stay_as_they_are() -> None:
    for name in ("sam", "timm-sam", "vitdet"):
        host = find_vision_transformer(make_packed(name))
        assert host.dense_blocks == {1: "attention inside windows"}
    with pytest.raises(TypeError, match="cannot be reduced: its blocks work on maps"):
        bmfa.reduce(make_packed("sam"), "tome:2")


def test_sizes_of_images_and_benchmarks_of_other_layouts() -> None:
    naflex, sam = make_packed("naflex"), make_packed("sam")
    for name, model in (("naflex", naflex), ("sam", sam), ("qwen3-vl", make_packed("qwen3-vl"))):
        check_img_size(name, model, (32, 48))
        with pytest.raises(ValueError, match=f"{name} has patches of 4 pixels"):
            check_img_size(name, model, (32, 50))
        with pytest.raises(ValueError, match=r"not supported by bmfa bench, which needs one grid"):
            check_one_grid(find_vision_transformer(model))
    check_one_grid(find_vision_transformer(bmfa.load_model("embedded").model))


def test_an_architecture_of_one_image_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timm:hiera_tiny_224 takes images of one size; leave"):
        bmfa.load_model("timm:hiera_tiny_224", tmp_path / "weights.safetensors", img_size=448)


def test_windows_of_qwen_2_5_stay_as_they_are() -> None:
    host = find_vision_transformer(make_packed("qwen2.5-vl"))
    assert len(host.attentions) == 2 and len(host.blocks) == 3
    assert "windows" in host.dense_blocks[1]


def test_a_block_alone_and_positions_that_fill_no_grid_are_refused() -> None:
    model = patch(make_packed("qwen3-vl"), layers="all", **COARSE)
    with pytest.raises(RuntimeError, match="call the model itself"):
        model.blocks[0](
            torch.zeros(16, 32),
            cu_seqlens=torch.tensor([0, 16]),
            position_embeddings=(torch.ones(16, 16), torch.zeros(16, 16)),
        )
    with pytest.raises(ValueError, match="do not fill that grid"):
        raster_order(torch.tensor([[0, 0], [0, 1], [1, 1]]))
    with pytest.raises(TypeError, match="cannot be reduced: its images share"):
        bmfa.reduce(model, "tome:2")


def test_attention_over_other_tokens_than_the_images_have_is_refused() -> None:
    packing = pack([(Grid(2, 2), torch.arange(4))], (1, 4), torch.device("cpu"))
    tokens = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"1 x 5 tokens.*make 1 x 4"):
        packing.attend(lambda grid, q, k, v: v, tokens, tokens, tokens)


def test_tokens_of_no_image_get_the_mean_of_their_sequence() -> None:
    index = torch.tensor([0, 1, 3, 2])  # the last two tokens in the other order; token 4 is padding
    packing = pack([(Grid(2, 2), index)], (1, 5), torch.device("cpu"))
    v = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    output = packing.attend(lambda grid, q, k, v: v, v, v, v)
    torch.testing.assert_close(output[:, :, :4], v[:, :, :4])
    torch.testing.assert_close(output[:, :, 4], v.mean(2))


# Pixels of images, and the grids of the keys in the layers.
TUNED = {
    "hiera": ((64, 128), [(8, 16), (8, 16), (4, 8), (4, 8), (4, 8)]),
    "sam2": ((128, 256), [(16, 32), (8, 16), (8, 16)]),
    "naflex": ((48, 64), [(12, 16)] * 3),
    "naflex-rope": ((48, 64), [(12, 16)] * 3),
    "pixtral": ((48, 64), [(12, 16)] * 3),
    "sam": ((32, 32), [(8, 8)] * 2),
    "timm-sam": ((32, 32), [(8, 8)] * 2),
    "vitdet": ((32, 48), [(8, 12)] * 2),
}


def tuned_plan(model: nn.Module, pixels: Tensor, layers: int) -> bmfa.Plan:
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(layers)}
    options: dict[str, Any] = {"errors": [0.3], "repeats": 1, "progress": False}
    return bmfa.tune(model, pixels, 1.0, times=times, **options)


def tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    (found,) = MEASURES["features"].outputs(model, pixels, {})
    return found


def smooth(size: tuple[int, int]) -> Tensor:
    noise = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return nn.functional.interpolate(noise, size=size, mode="bicubic")


@pytest.mark.filterwarnings("ignore:screened_attention measured")  # a target may be missed
@pytest.mark.parametrize("tuned", TUNED)
@torch.no_grad()
def test_plans_have_a_grid_for_each_layer(tuned: str, tmp_path: Path) -> None:
    size, grids = TUNED[tuned]
    model, pixels = make_packed(tuned), smooth(size)
    full = tokens(model, pixels)
    plan = tuned_plan(model, pixels, len(grids))
    assert plan.grids == tuple(grids) and plan.errors == dict.fromkeys(range(len(grids)), 0.3)
    assert plan.grid == (grids[0] if len(set(grids)) == 1 else None)
    assert torch.equal(tokens(model, pixels), full)
    plan.save(tmp_path / "plan.json")
    planned = tokens(patch(model, plan=tmp_path / "plan.json"), pixels)
    expected = tokens(patch(model, error=0.3, allow_dense=False, layers="all"), pixels)
    assert torch.equal(planned, expected)
    if tuned in ("hiera", "sam2", "naflex", "pixtral"):  # the others have few tokens
        assert not torch.equal(planned, full)
    assert torch.equal(tokens(unpatch(model), pixels), full)


@pytest.mark.filterwarnings("ignore:screened_attention measured")
@pytest.mark.parametrize("tuned", ["sam2", "naflex"])
@torch.no_grad()
def test_other_sizes_than_planned_run_dense(tuned: str) -> None:
    size, grids = TUNED[tuned]
    model, other = make_packed(tuned), smooth((64, 128))
    full = tokens(model, other)
    patch(model, plan=tuned_plan(model, smooth(size), len(grids)))
    with pytest.warns(UserWarning, match="grid of tokens, and there are"):
        assert change(tokens(model, other), full) < TOLERANCE


@pytest.mark.filterwarnings("ignore:screened_attention measured")
@torch.no_grad()
def test_times_of_pooled_queries_are_measured() -> None:
    model = make_packed("hiera")
    plan = bmfa.tune(model, smooth((64, 128)), 1.0, errors=[0.3], repeats=1, progress=False)
    assert all(set(plan.times[layer]) == {None, 0.3} for layer in range(5))
    assert all(setting.milliseconds > 0 for setting in plan.candidates)


@pytest.mark.parametrize("untuned", ["qwen2.5-vl", "qwen3-vl"])
def test_models_that_take_patches_are_not_tuned(untuned: str) -> None:
    with pytest.raises(TypeError, match="it takes patches of images and grid_thw instead of"):
        bmfa.tune(make_packed(untuned), smooth((48, 64)))
