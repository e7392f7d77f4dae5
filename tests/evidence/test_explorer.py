"""The explorer: its data and page, and in a real Chromium its trees, numbers and controls."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bmfa
import cases
import chromium
from bmfa.cli import main
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence import report
from bmfa.evidence.explorer import run as explorer_run
from bmfa.evidence.explorer.packing import LARGEST, pack_head
from bmfa.evidence.explorer.page import RULES, build_explorer
from bmfa.evidence.explorer.run import Exploration, ExploredLayer, run
from bmfa.grid import Grid
from bmfa.models import embedded, load_model
from bmfa.records import Record

# Thresholds of every rule on the seeded fields: 0, where rounding decides, and ordinary ones.
THRESHOLDS = (0.0, 1e-4, 3e-3, 0.02, 0.15, 1.0)
browser = pytest.mark.skipif(chromium.find_chromium() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def exploration() -> Exploration:
    return run(load_model("embedded"), EmbeddedImages(1)[0], drawn=True)


@pytest.fixture(scope="module")
def page_file(exploration, tmp_path_factory):
    return write_page(exploration, tmp_path_factory.mktemp("explorer"))


def write_page(exploration, folder):
    path = folder / "explorer.html"
    path.write_text(build_explorer(exploration, report="index.html"), encoding="utf-8")
    return path


def write_photograph(path):
    Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(path)
    return str(path)


# ----------------------------------------------------------------------------- data and page


def test_packed_heads_give_the_scores_within_their_stated_rounding():
    generator = np.random.default_rng(5)
    q, k = generator.normal(size=(2, 30, 8)) * [[[1.0]], [[20.0]]]
    k[:, 3] *= 500  # a dimension of large keys, as Vision Transformers have
    q[:, 3] /= 500
    q[:, 5] = 0.0
    head = pack_head(q, k, 0.5)
    exact = q @ k.T * 0.5
    assert np.abs(head.q).max() == np.abs(head.k).max() == LARGEST
    assert np.abs(head.scores() - exact).max() == pytest.approx(head.rounding)
    # Each product of d = 8 is off by half a step of one factor times the largest entry of the other.
    assert head.rounding <= 8 * head.step * (LARGEST + 0.5)
    content = json.loads(json.dumps(head.to_json()))
    for name, values in (("q", head.q), ("k", head.k)):
        assert np.array_equal(np.frombuffer(base64.b64decode(content[name]), "<i2"), values.ravel())
    assert content["step"] == head.step
    assert np.array_equal(head.scores(slice(3, 5)), head.scores()[3:5])
    zero = pack_head(np.zeros((4, 2)), np.zeros((4, 2)), 1.0)
    assert zero.rounding == 0 and not zero.scores().any()


def test_layers_hold_the_queries_and_keys_of_the_unpatched_model(exploration):
    loaded = load_model("embedded")
    image = loaded.preprocess(EmbeddedImages(1)[0].pixels)[None]
    depth = len(exploration.layers)
    assert depth == exploration.depth
    bmfa.patch(loaded.model, rule=bmfa.rules.ExactGap(0.0), layers="all")
    with torch.inference_mode(), bmfa.record(loaded.model, attention=True) as recording:
        loaded.logits(image)
    for layer in exploration.layers:
        for head, packed in enumerate(layer.heads):
            expected = recording[layer.layer].full_attention[0][0, head].double()
            found = torch.from_numpy(packed.scores()).softmax(-1)
            # Two softmaxes whose scores differ by at most r: each weight is off by a factor of at
            # most exp(2 r). The float32 forward passes of dense and screened attention add 1e-3.
            change = (found.log() - expected.log()).abs().max()
            assert change <= 2 * packed.rounding + 1e-3


def test_the_record_has_a_row_for_each_head_of_the_chosen_layers(exploration):
    rows = exploration.record.rows
    heads = [(one.layer, head) for one in exploration.layers for head in range(len(one.heads))]
    assert [(row["layer"], row["head"]) for row in rows] == heads
    assert all(0 <= row["mean_gap"] <= row["max_gap"] and row["rounding"] < 0.01 for row in rows)
    assert Record.from_json(exploration.record.to_json()).rows == rows
    loaded = load_model("embedded")
    found = run(loaded, EmbeddedImages(1)[0], layers=[2, 5])
    assert [layer.layer for layer in found.layers] == [2, 5]
    assert found.start["layer"] in (2, 5)
    with pytest.raises(ValueError, match="layer"):
        run(loaded, EmbeddedImages(1)[0], layers=[99])


@pytest.mark.parametrize("index", range(4))
def test_the_page_opens_on_a_tree_that_splits_and_still_misses(index):
    found = run(load_model("embedded"), EmbeddedImages(4)[index])
    start = found.start
    (layer,) = [layer for layer in found.layers if layer.layer == start["layer"]]
    query = layer.prefix + start["query"]
    scores = torch.from_numpy(layer.heads[start["head"]].scores(slice(query, query + 1)))
    scores = scores[:, layer.prefix :]
    tree = bmfa.screen(scores, (layer.grid.height, layer.grid.width), explorer_run.START_RULE)
    low, high = explorer_run.START_LEAVES
    assert low <= float(tree.leaf_ratio) <= high
    assert float(tree.error(scores)) > 0.1  # nats: the tree and full attention look different


def test_a_tree_that_splits_opens_before_a_single_leaf_that_misses_more():
    keys = np.zeros((16, 16, 2))
    keys[7:9, 7:9, 0], keys[:8, :, 1] = 6.0, 1.0  # a minority in the centre, and a half
    centre, half, equal = (
        pack_head(np.tile(query, (256, 1)), keys.reshape(256, 2), 1.0)
        for query in ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    )
    trees = [
        bmfa.screen(torch.from_numpy(head.scores()), (16, 16), explorer_run.START_RULE)
        for head in (centre, half, equal)
    ]
    assert [int(tree.leaf_count[0]) for tree in trees] == [1, 4, 1]

    def opens_on(*heads):
        layers = [ExploredLayer(i, Grid(16, 16), 0, [head], None) for i, head in enumerate(heads)]
        return explorer_run._start(layers)["layer"]

    assert opens_on(centre, half, centre) == 1
    assert opens_on(equal, centre, equal) == 1
    assert opens_on(equal, equal) == 1  # the last layer


def test_without_a_choice_the_last_layers_that_fit_are_recorded(monkeypatch):
    loaded, image = load_model("embedded"), EmbeddedImages(1)[0]
    one = run(loaded, image, layers="last-1").layers[0]
    size = sum(len(text) for head in one.to_json()["heads"] for text in (head["q"], head["k"]))
    monkeypatch.setattr(explorer_run, "PAGE_BYTES", int(2.5 * size))
    found = run(loaded, image)
    assert [layer.layer for layer in found.layers] == [one.layer - 1, one.layer]
    monkeypatch.setattr(explorer_run, "PAGE_BYTES", 10)
    assert len(run(loaded, image).layers) == 1
    assert f"1 of {found.depth} layers" in build_explorer(run(loaded, image))


def test_the_report_explores_its_first_image_and_links_the_explorer_of_its_folder(tmp_path, capsys):
    found = report.explore(seed=3)
    assert found.toy and found.drawn and found.title == EmbeddedImages(1, seed=3)[0].name
    for name in ("first.png", "second.png"):
        write_photograph(tmp_path / name)
    own = report.load_own(str(embedded.WEIGHTS), str(tmp_path), "embedded")
    assert report.explore(own).title == "first.png"
    record, folder = tmp_path / "record.json", tmp_path / "report"
    record.write_text(Record("other", {}, [{"a": 1}], {}).to_json())
    arguments = ["report", "--records", str(record), "--output", str(folder)]
    main(arguments)
    assert "explorer.html" not in (folder / "index.html").read_text(encoding="utf-8")
    (folder / "explorer.html").write_text("")
    main(arguments)
    assert 'href="explorer.html"' in (folder / "index.html").read_text(encoding="utf-8")
    assert "explorer: " in capsys.readouterr().out


def test_layers_that_are_not_one_grid_are_left_out_and_named(monkeypatch):
    observe = explorer_run._observe_layer
    changes = {
        "attends inside of windows or over several grids": lambda call: [call, call],
        "attends over several images at once": lambda call: [
            replace(call, grid=Grid(8, 16, frames=2))
        ],
        "has fewer queries than keys": lambda call: [replace(call, q=call.q[:, :, :65])],
    }

    def observed(model, pixels, layer):
        (call,) = observe(model, pixels, layer)
        return list(changes.values())[layer](call) if layer < len(changes) else [call]

    monkeypatch.setattr(explorer_run, "_observe_layer", observed)
    found = run(load_model("embedded"), EmbeddedImages(1)[0], layers="all")
    left_out = [f"layer {index} {reason}" for index, reason in enumerate(changes)]
    assert found.record.settings["left_out"] == left_out[::-1]
    assert [layer.layer for layer in found.layers] == list(range(len(changes), found.depth))


def test_the_page_refers_to_no_other_host_and_names_the_toy_model(exploration, page_file):
    text = page_file.read_text(encoding="utf-8")
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,", "index.html"}
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    assert len(text) < 4_500_000
    assert "toy model" in text and "--weights" not in text
    assert f"labelled <b>{EmbeddedImages(1)[0].label_name}</b>" in text
    photograph = LabelledImage("photo.png", np.full((40, 60, 3), 90, np.uint8))
    other = build_explorer(run(load_model("embedded"), photograph, layers="last-1"))
    assert "drawn images only" in other and "--weights" in other


def test_rules_of_the_page_are_rules_of_the_library():
    for name, (_, least, most, first) in RULES.items():
        assert str(bmfa.rules.parse(f"{name}:{first}")).startswith(f"{name}:")
        assert 0 < least < first < most


def test_command_writes_the_page_and_the_record(tmp_path, capsys):
    output, record = tmp_path / "deep" / "page.html", tmp_path / "record.json"
    options = ["--layers", "last-1", "--output", str(output)]
    main(["explore", "embedded:2", *options, "--json", str(record)])
    printed = capsys.readouterr().out
    assert f"page: {output}" in printed and "mean_gap" in printed and "--layers all" in printed
    assert "toy model" not in printed
    assert Record.from_json(record.read_text()).experiment == "explore"
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    main(["explore", write_photograph(tmp_path / "photo.png"), *options])
    assert "toy model" in capsys.readouterr().out


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["missing.png"], ["missing.png", "embedded:N"]),
        (["embedded:two"], ["embedded:two"]),
        (["embedded:1", "--output", "page.png"], ["page.png", "FILE.html"]),
        (["embedded:1", "--layers", "99"], ["99", "layer"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["explore", *arguments])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        assert all(word in error for word in words), error
        assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------- trees in Chromium

HANDS = Path(__file__).with_name("explorer_hands.js").read_text("utf-8")


def look(page_file, script: str, **options):
    """What a script on the page returns; the page writes nothing to the console."""
    value, console = chromium.run(page_file, HANDS + script, **options)
    assert not console
    return value


def seeded_fields(count: int) -> list[dict]:
    """Fields on grids of all shapes, a third with padding, at three temperatures."""
    return [
        {
            "height": case.grid.height,
            "width": case.grid.width,
            "scores": case.scores.ravel().tolist(),
            "tau": case.tau,
            "valid": None if case.valid is None else case.valid.ravel().tolist(),
        }
        for case in map(cases.random_case, range(count))
    ]


def assert_same_trees(page_file, groups) -> None:
    """Compare leaves and E of every rule with Python's, on fields at thresholds."""
    script = "return args.groups.map(([fields, thresholds]) => trees(fields, thresholds));"
    answers = look(page_file, script, groups=groups)
    for (fields, thresholds), found in zip(groups, answers, strict=True):
        for field, by_rule in zip(fields, found, strict=True):
            scores = torch.tensor(field["scores"], dtype=torch.float64)
            valid = None if field["valid"] is None else torch.tensor(field["valid"])
            grid, tau = (field["height"], field["width"]), field["tau"]
            for name, by_threshold in zip(RULES, by_rule, strict=True):
                for threshold, (boxes, error) in zip(thresholds, by_threshold, strict=True):
                    rule = bmfa.rules.parse(f"{name}:{threshold}")
                    tree = bmfa.screen(scores, grid, rule, tau=tau, valid=valid)
                    assert boxes == tree.leaf_boxes.tolist(), (str(rule), field)
                    # E is a difference of energies: 1e-12 is some thousand roundings of the scores.
                    rounding = 1e-12 * (1 + float(scores.abs().max()))
                    assert error == pytest.approx(float(tree.error(scores)), rel=1e-9, abs=rounding)


@browser
def test_trees_on_seeded_fields_are_those_of_python_leaf_for_leaf(page_file):
    """Every rule on 100 fields, at one of the thresholds in turn; the long test has all of them."""
    fields, turns = seeded_fields(100), len(THRESHOLDS)
    groups = [(fields[turn::turns], [THRESHOLDS[turn]]) for turn in range(turns)]
    assert_same_trees(page_file, groups)


@browser
@pytest.mark.slow
def test_trees_on_many_fields_at_all_thresholds(page_file):
    assert_same_trees(page_file, [(seeded_fields(1000), THRESHOLDS)])


@browser
def test_scores_and_numbers_of_the_page_are_those_of_python(page_file, exploration):
    """The scores of the shipped image to the last bit."""
    generator = np.random.default_rng(0)
    chosen = [
        (position, head, int(query))
        for position, layer in enumerate(exploration.layers)
        for head, packed in enumerate(layer.heads)
        for query in generator.choice(len(packed.q), 2, replace=False)
    ]
    addresses = ("query=3,4&rule=gamma:0.05", "query=class&rule=optimal:0.01&layer=2&head=1")
    scores, shown = look(
        page_file,
        "return await numbersAt();",
        chosen=chosen,
        addresses=addresses,
    )
    for (position, head, query), row in zip(chosen, scores, strict=True):
        assert row == exploration.layers[position].heads[head].scores()[query].tolist()
    for address, found in zip(addresses, shown, strict=True):
        layer = exploration.layers[found["layer"]]
        scores = torch.from_numpy(layer.heads[found["head"]].scores())
        row = scores[0 if found["query"] < 0 else layer.prefix + found["query"]]
        before, spatial = row[: layer.prefix], row[layer.prefix :]
        tree = bmfa.screen(spatial, layer.grid, address.partition("rule=")[2].partition("&")[0])
        approximate = torch.cat((before, tree.reconstruct(spatial)))
        full, screened = row.softmax(-1), approximate.softmax(-1)
        assert found["leaves"] == int(tree.leaf_count) == int(found["shown"][0])
        error = row.logsumexp(-1) - approximate.logsumexp(-1)
        assert found["error"] == pytest.approx(float(error), abs=1e-12)
        assert found["moved"] == pytest.approx(float((full - screened).abs().sum() / 2), rel=1e-9)
        assert found["screened"] == pytest.approx(screened[layer.prefix :].tolist(), rel=1e-9)
        for leaf, (mass, gap) in enumerate(found["masses"]):
            tokens = tree.leaf_index.long() == leaf
            assert mass == pytest.approx(float(full[layer.prefix :][tokens].sum()), rel=1e-9)
            assert gap == pytest.approx(float(bmfa.gap(spatial[tokens])), rel=1e-6, abs=1e-12)
        assert float(found["shown"][1]) == pytest.approx(float(bmfa.gap(spatial)), rel=0.05)


# ----------------------------------------------------------------------------- controls in Chromium


@browser
def test_pointers_and_keys_choose_what_is_shown(page_file):
    found = look(
        page_file,
        "return await pointersAndKeys();",
        address="#query=5,5&layer=3&head=0&rule=gamma:0.05",
    )
    assert found["dragged"][0] == 37 and found["dragged"][1].startswith("row ")
    assert found["hover"] == [37, "Leaf under the pointer"]
    mass, text = found["mass"]
    assert float(text.split()[0].lstrip("<")) == pytest.approx(mass, abs=0.06)
    state, place = found["state"], 54 + found["width"]
    assert found["swept"] == 54 and (state["query"], state["leaf"]) == (place, place + 1)
    assert (state["layer"], state["head"], state["rules"][0]["name"]) == (4, 1, "optimal")
    assert (state["show"], state["mode"]) == ("difference", "leaf")
    assert found["threshold"] > state["rules"][0]["threshold"]
    assert found["token"] == -1 and found["leaf"] is None


@browser
def test_sliders_lists_and_curves_choose_the_rule(page_file):
    found = look(
        page_file,
        "return await slidersListsAndCurves();",
    )
    assert found["coarse"] == 1 and found["fine"][0] == found["fine"][1] > 1 < found["taken"]
    address, (leading, following) = found["equal"]
    assert "equal=1" in address
    # Optimal trees exist for some numbers of leaves only: no other threshold comes nearer.
    assert abs(following - leading) <= min(abs(one - leading) for one in found["optimal"])
    led = found["led"]
    assert led[1] != following and abs(led[0] - led[1]) < abs(leading - led[1])


@browser
def test_the_address_holds_the_state_and_restores_it(page_file, exploration):
    layer = exploration.layers[-2].layer
    given = f"#layer={layer}&head=1&query=2,9&show=difference&rule=mass:0.004"
    script = "return await addresses();"
    nonsense = (
        "#layer=99&head=-4&query=900,900&rule=nonsense:1&with=gamma:-1&show=x&leaf=1",
        "#rule=gamma:&query=%E0%A4%A&head=1.5&layer=__proto__",
        "#rule=constructor:1&with=toString:2&query=<img src=x onerror=alert(1)>",
    )
    address, state, seen = look(page_file, script, given=given, nonsense=nonsense)
    assert f"layer={layer}&head=1" in address
    assert "rule=mass:0.004" in address and "with=" in address
    assert min(seen) >= 1
    assert look(page_file, "return state;", address=address) == state


@browser
def test_markup_masks_and_long_grids_are_drawn(exploration, tmp_path):
    """A title with markup; a layer with padding, whose grid is neither square nor that of another."""
    name = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>&amp;"
    generator = np.random.default_rng(1)
    heads = [pack_head(*generator.normal(size=(2, 2 + 15, 4)), 2.0) for _ in range(2)]
    valid = np.arange(15) % 5 < 4
    layers = [ExploredLayer(0, Grid(3, 5), 2, heads, valid), exploration.layers[-1]]
    start = {"layer": 0, "head": 1, "query": 7}
    made = replace(exploration, layers=layers, start=start, title=name, model=name)
    script = "return await markupAndMasks();"
    *found, heading, title, images = look(write_page(made, tmp_path), script)
    assert found == [int(valid.sum()), -1, 7, 1]
    assert heading == name and title.startswith(name) and images == 0


@browser
def test_the_page_fits_the_screen_in_both_themes(page_file):
    script = "return await outsideOfTheScreen();"
    for width, dark in ((1280, False), (390, True)):
        found = look(page_file, script, width=width, height=844, dark=dark)
        assert found[0] <= width and found[1] == [[], []] and found[3]
        assert (max(map(int, re.findall(r"\d+", found[2]))) < 60) == dark
