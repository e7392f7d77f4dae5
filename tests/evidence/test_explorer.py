"""The explorer: its data and page, and in a real Chromium its trees, numbers and controls."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import bmfa
import cases
from bmfa.cli import main
from bmfa.data.classification import EmbeddedImages, LabelledImage
from bmfa.evidence import report
from bmfa.evidence.explorer.packing import LARGEST, PackedHead, pack_head
from bmfa.evidence.explorer.page import RULES, build_explorer
from bmfa.evidence.explorer.run import Exploration, ExploredLayer, run
from bmfa.grid import Grid
from bmfa.models import LoadedModel, embedded, load_model
from bmfa.models.preprocessing import Preprocessing
from bmfa.records import Record
from chromium import Page, find_chromium, open_browser
from models.packed_models import hiera
from tree_oracle import Oracle

FIELDS = 200
# Thresholds of every rule on the seeded fields: 0, where rounding decides, and ordinary ones.
THRESHOLDS = (0.0, 1e-4, 3e-3, 0.02, 0.15, 1.0)
SCREEN = """(fields, thresholds) => fields.map(({ height, width, scores, tau, valid }) => {
  const { layout, Pyramid, RULES, screen, error } = bmfa.trees;
  const pyramid = new Pyramid(layout(height, width), Float64Array.from(scores), { tau, valid });
  return RULES.map((rule) => thresholds.map((threshold) => {
    const leaves = screen(pyramid, rule, threshold);
    return [leaves.map((leaf) => leaf.box), error(pyramid, leaves)];
  }));
})"""


# True once the page has not scrolled for 10 frames: a finger leaves it in motion.
STILL = """new Promise((done) => {
  const step = (last, frames) => requestAnimationFrame(() =>
    frames === 10 ? done(true) : step(scrollY, scrollY === last ? frames + 1 : 0));
  step(scrollY, 0);
})"""


@pytest.fixture(scope="module")
def exploration() -> Exploration:
    return run(load_model("embedded"), EmbeddedImages(1)[0], drawn=True)


@pytest.fixture(scope="module")
def page_file(exploration, tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(build_explorer(exploration, report="index.html"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    if find_chromium() is None:
        pytest.skip("no Chromium is installed")
    with open_browser() as browser:
        yield browser


def open_page(browser, path, address: str = "", **device) -> Page:
    page = browser.open(path.as_uri() + address, **device)
    page.wait_for("!!window.bmfa && !!window.bmfa.panels[0].tree")
    page.settle()
    return page


@pytest.fixture(scope="module")
def shared_page(browser, page_file):
    """A page for tests that compute with its functions and leave its controls alone."""
    page = open_page(browser, page_file)
    yield page
    page.close()


@pytest.fixture
def page(browser, page_file):
    page = open_page(browser, page_file)
    yield page
    problems = page.problems()
    page.close()
    assert not problems


def patch_centre(page, token: int, panel: int = 1) -> tuple[float, float]:
    """The middle of a patch on the stage of a panel, in pixels of the window."""
    left, top, width, height = page.box(f".panel:nth-of-type({panel}) .stage canvas")
    rows, columns = page.evaluate(
        "(({ height, width }) => [height, width])(bmfa.data.layers[bmfa.state.layer])"
    )
    row, column = divmod(token, columns)
    return left + (column + 0.5) * width / columns, top + (row + 0.5) * height / rows


def shown(page, name: str, panel: int = 0) -> str:
    return page.evaluate(f"bmfa.panels[{panel}].values['{name}'].textContent")


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
    read = PackedHead.from_json(json.loads(json.dumps(head.to_json())), 8)
    assert np.array_equal(read.scores(), head.scores())
    assert np.array_equal(head.scores(slice(3, 5)), head.scores()[3:5])


def test_constant_queries_are_packed():
    head = pack_head(np.zeros((4, 2)), np.zeros((4, 2)), 1.0)
    assert head.rounding == 0 and not head.scores().any()


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


def test_the_record_has_a_row_for_each_head(exploration):
    rows = exploration.record.rows
    heads = [
        (layer.layer, head) for layer in exploration.layers for head in range(len(layer.heads))
    ]
    assert [(row["layer"], row["head"]) for row in rows] == heads
    assert all(0 <= row["mean_gap"] <= row["max_gap"] and row["rounding"] < 0.01 for row in rows)
    again = Record.from_json(exploration.record.to_json())
    assert again.rows == rows


def test_chosen_layers_alone_are_recorded():
    loaded = load_model("embedded")
    found = run(loaded, EmbeddedImages(1)[0], layers=[2, 5])
    assert [layer.layer for layer in found.layers] == [2, 5]
    assert found.start["layer"] == 5
    with pytest.raises(ValueError, match="layer"):
        run(loaded, EmbeddedImages(1)[0], layers=[99])


def test_without_a_choice_the_last_layers_that_fit_are_recorded(monkeypatch):
    from bmfa.evidence.explorer import run as module

    loaded, image = load_model("embedded"), EmbeddedImages(1)[0]
    one = run(loaded, image, layers="last-1").layers[0]
    size = sum(len(text) for head in one.to_json()["heads"] for text in (head["q"], head["k"]))
    monkeypatch.setattr(module, "PAGE_BYTES", int(2.5 * size))
    found = run(loaded, image)
    assert [layer.layer for layer in found.layers] == [one.layer - 1, one.layer]
    monkeypatch.setattr(module, "PAGE_BYTES", 10)
    assert len(run(loaded, image).layers) == 1
    assert f"1 of {found.depth} layers" in build_explorer(run(loaded, image))


def test_the_report_links_the_explorer_of_its_folder(tmp_path, capsys):
    record = tmp_path / "record.json"
    record.write_text(Record("other", {}, [{"a": 1}], {}).to_json())
    folder = tmp_path / "report"
    main(["report", "--records", str(record), "--output", str(folder)])
    assert "explorer.html" not in (folder / "index.html").read_text(encoding="utf-8")
    (folder / "explorer.html").write_text("")
    main(["report", "--records", str(record), "--output", str(folder)])
    assert "explorer.html" in Parsed((folder / "index.html").read_text(encoding="utf-8")).addresses
    assert "explorer: " in capsys.readouterr().out


def test_the_report_explores_the_first_image_of_its_run(tmp_path):
    found = report.explore(seed=3)
    assert found.toy and found.drawn and found.title == EmbeddedImages(1, seed=3)[0].name
    for name in ("first.png", "second.png"):
        Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(tmp_path / name)
    own = report.OwnModel(str(embedded.WEIGHTS), str(tmp_path), "embedded")
    assert report.explore(own).title == "first.png"


def test_layers_that_are_not_one_grid_are_left_out_and_named():
    model, size = hiera().eval(), (64, 128)
    image = LabelledImage("noise", np.zeros((*size, 3), np.uint8))
    found = run(LoadedModel("hiera", model, Preprocessing(size, 1.0)), image, layers="all")
    left_out = found.record.settings["left_out"]
    assert any("fewer queries than keys" in reason for reason in left_out), left_out
    shown = [layer.layer for layer in found.layers]
    assert shown and len(shown) + len(left_out) == found.depth
    assert all(f"layer {layer} " not in " ".join(left_out) for layer in shown)


class Parsed(HTMLParser):
    """Texts, addresses and ids of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]


def test_the_page_refers_to_no_other_host(page_file):
    text = page_file.read_text(encoding="utf-8")
    assert set(Parsed(text).addresses) == {"data:,", "index.html"}
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    assert len(text) < 4_500_000


def test_the_page_of_the_toy_model_says_so(exploration, page_file):
    text = page_file.read_text(encoding="utf-8")
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
    main(
        [
            "explore",
            "embedded:2",
            "--layers",
            "last-1",
            "--output",
            str(output),
            "--json",
            str(record),
        ]
    )
    printed = capsys.readouterr().out
    assert f"page: {output}" in printed and "mean_gap" in printed and "--layers all" in printed
    assert "toy model" not in printed
    assert Record.from_json(record.read_text()).experiment == "explore"
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_command_warns_if_the_toy_model_saw_a_image_of_the_user(tmp_path, capsys):
    image = tmp_path / "photo.png"
    Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(image)
    main(["explore", str(image), "--layers", "last-1", "--output", str(tmp_path / "page.html")])
    assert "toy model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.png"], ["missing.png", "embedded:N"]),
        (["embedded:two"], ["embedded:two"]),
        (["embedded:1", "--output", "page.png"], ["page.png", "FILE.html"]),
        (["embedded:1", "--layers", "99"], ["99", "layer"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["explore", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------- trees in Chromium


def seeded_fields(count: int) -> list[dict]:
    """Fields on grids of all shapes, a third with padding, at three temperatures."""
    fields = []
    for seed in range(count):
        case = cases.random_case(seed)
        fields.append(
            {
                "height": case.grid.height,
                "width": case.grid.width,
                "scores": case.scores.ravel().tolist(),
                "tau": case.tau,
                "valid": None if case.valid is None else case.valid.ravel().tolist(),
            }
        )
    return fields


def assert_same_trees(page: Page, fields: list[dict], thresholds: tuple[float, ...]) -> int:
    """Compare leaves and E of every rule with Python's; return the number of trees."""
    found, compared = page.call(SCREEN, fields, thresholds), 0
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
                compared += 1
    return compared


def test_trees_on_seeded_fields_are_those_of_python_leaf_for_leaf(shared_page):
    """Every rule on 200 fields, at one of the thresholds in turn; the long test has all of them."""
    compared = 0
    for turn, threshold in enumerate(THRESHOLDS):
        fields = seeded_fields(FIELDS)[turn :: len(THRESHOLDS)]
        compared += assert_same_trees(shared_page, fields, (threshold,))
    assert compared == FIELDS * len(RULES)


@pytest.mark.slow
def test_trees_on_many_fields_at_all_thresholds(shared_page):
    compared = assert_same_trees(shared_page, seeded_fields(1000), THRESHOLDS)
    assert compared == 1000 * len(RULES) * len(THRESHOLDS)


def test_the_specification_agrees_with_the_browser_on_ordinary_thresholds(shared_page):
    fields = seeded_fields(40)
    found = shared_page.call(SCREEN, fields, [0.02])
    for field, by_rule in zip(fields, found, strict=True):
        shape = field["height"], field["width"]
        scores = np.reshape(field["scores"], shape)
        valid = None if field["valid"] is None else np.reshape(field["valid"], shape)
        for name, ((boxes, error),) in zip(RULES, by_rule, strict=True):
            tree = Oracle(scores, valid, field["tau"]).tree(f"{name}:0.02")
            assert boxes == [list(box) for box in tree.leaves], name
            assert error == pytest.approx(tree.error(), rel=1e-8, abs=1e-8)


def test_scores_and_trees_of_the_shipped_image_are_those_of_python(shared_page, exploration):
    """Every layer and head, with some queries: scores to the last bit, trees leaf for leaf."""
    generator = np.random.default_rng(0)
    for position, layer in enumerate(exploration.layers):
        for head, packed in enumerate(layer.heads):
            queries = generator.choice(len(packed.q), 2, replace=False).tolist()
            found = shared_page.call(
                f"""(layer, head, queries, thresholds) => queries.map((query) => {{
                  const all = Array.from(bmfa.scoresOf(layer, head, query));
                  const {{ prefix, height, width, valid }} = bmfa.data.layers[layer];
                  const field = {{ height, width, scores: all.slice(prefix), tau: 1, valid }};
                  return [all, ({SCREEN})([field], thresholds)[0]];
                }})""",
                position, head, queries, THRESHOLDS[1:5],
            )  # fmt: skip
            for query, (scores, by_rule) in zip(queries, found, strict=True):
                assert scores == packed.scores()[query].tolist()
                spatial = torch.tensor(scores[layer.prefix :], dtype=torch.float64)
                for name, by_threshold in zip(RULES, by_rule, strict=True):
                    for threshold, (boxes, _) in zip(THRESHOLDS[1:5], by_threshold, strict=True):
                        tree = bmfa.screen(spatial, layer.grid, f"{name}:{threshold}")
                        assert boxes == tree.leaf_boxes.tolist(), (layer.layer, head, query, name)


def test_numbers_of_the_page_are_those_of_python(page, exploration):
    for address in ("query=3,4&rule=gamma:0.05", "query=class&rule=optimal:0.01&layer=2&head=1"):
        page.evaluate(f"location.hash = '#{address}'")
        page.settle()
        state = page.evaluate(
            "({ layer: bmfa.state.layer, head: bmfa.state.head, query: bmfa.state.query })"
        )
        layer = exploration.layers[state["layer"]]
        scores = torch.from_numpy(layer.heads[state["head"]].scores())
        row = scores[0 if state["query"] < 0 else layer.prefix + state["query"]]
        before, spatial = row[: layer.prefix], row[layer.prefix :]
        tree = bmfa.screen(spatial, layer.grid, address.partition("rule=")[2].partition("&")[0])
        screened = torch.cat((before, tree.reconstruct(spatial))).softmax(-1)
        full = row.softmax(-1)
        found = page.evaluate(
            """(({ tree }) => ({
              leaves: tree.leaves.length, error: tree.error, moved: tree.moved,
              screened: Array.from(tree.screened),
              masses: tree.leaves.map((leaf) => [leaf.full, leaf.gap]),
            }))(bmfa.panels[0])"""
        )
        assert found["leaves"] == int(tree.leaf_count)
        error = row.logsumexp(-1) - torch.cat((before, tree.reconstruct(spatial))).logsumexp(-1)
        assert found["error"] == pytest.approx(float(error), abs=1e-12)
        assert found["moved"] == pytest.approx(float((full - screened).abs().sum() / 2), rel=1e-9)
        assert found["screened"] == pytest.approx(screened[layer.prefix :].tolist(), rel=1e-9)
        index = tree.leaf_index.long()
        for leaf, (mass, gap) in enumerate(found["masses"]):
            tokens = index == leaf
            assert mass == pytest.approx(float(full[layer.prefix :][tokens].sum()), rel=1e-9)
            assert gap == pytest.approx(float(bmfa.gap(spatial[tokens])), rel=1e-6, abs=1e-12)
        assert shown(page, "leaves") == str(found["leaves"])
        assert float(shown(page, "gap")) == pytest.approx(float(bmfa.gap(spatial)), rel=0.05)


# ----------------------------------------------------------------------------- controls in Chromium


def test_a_click_and_a_drag_choose_the_query(page):
    page.click(*patch_centre(page, 33))
    assert page.evaluate("bmfa.state.query") == 33
    before = page.evaluate("bmfa.panels[0].tree.error")
    start, end = patch_centre(page, 33), patch_centre(page, 37)
    page.drag(start, end)
    assert page.evaluate("bmfa.state.query") == 37
    assert page.evaluate("bmfa.panels[0].tree.error") != before
    assert page.evaluate("document.getElementById('query').textContent").startswith("row ")


def test_dragging_the_slider_changes_the_tree(page):
    left, top, width, height = page.box(".panel input[type=range]")
    middle = top + height / 2
    share = page.evaluate("bmfa.panels[0].range.value / bmfa.panels[0].range.max")
    thumb = left + 8 + share * (width - 16)
    page.drag((thumb, middle), (left + width - 4, middle))
    coarse = page.evaluate("bmfa.panels[0].tree.leaves.length")
    page.drag((left + width - 8, middle), (left + 2, middle))
    fine = page.evaluate("bmfa.panels[0].tree.leaves.length")
    assert coarse == 1 and fine > coarse
    assert page.evaluate("bmfa.state.rules[0].threshold") == 0
    assert shown(page, "leaves") == str(fine)


def test_the_pointer_reads_the_leaf_below_it(page):
    page.mouse("Moved", *patch_centre(page, 20))
    page.settle()
    heading = page.evaluate("document.querySelector('.leaf h3').textContent")
    assert heading == "Leaf under the pointer"
    leaf = page.evaluate("(({ tree }) => tree.leaves[tree.index[20]])(bmfa.panels[0])")
    top, left, bottom, right = leaf["box"]
    size = "1 patch" if leaf["count"] == 1 else f"{bottom - top}×{right - left} patches"
    assert shown(page, "leaf-size") == size
    assert page.evaluate("bmfa.panels[0].tip.textContent").startswith(f"{size}\nmass ")
    assert float(shown(page, "leaf-full").split()[0].lstrip("<")) == pytest.approx(
        100 * leaf["full"], abs=0.06
    )


def test_keys_move_the_query_and_choose_everything_else(page):
    page.evaluate("location.hash = '#query=5,5&layer=3&head=0&rule=gamma:0.05'")
    page.settle()
    width = page.evaluate("bmfa.data.layers[bmfa.state.layer].width")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
        page.key(key)
    assert page.evaluate("bmfa.state.query") == 6 * width + 5
    for key in ("]", ".", "5", "v", "m", "ArrowRight"):
        page.key(key)
    state = page.evaluate("bmfa.state")
    assert page.evaluate("bmfa.data.layers[bmfa.state.layer].layer") == 4
    assert state["head"] == 1 and state["rules"][0]["name"] == "optimal"
    assert state["show"] == "difference" and state["mode"] == "leaf"
    assert state["leaf"] == 6 * width + 6 and state["query"] == 6 * width + 5
    threshold = state["rules"][0]["threshold"]
    page.key("+")
    assert page.evaluate("bmfa.state.rules[0].threshold") > threshold
    page.key("0")
    assert page.evaluate("bmfa.state.query") == -1
    page.key("Escape")
    assert page.evaluate("bmfa.state.leaf") is None
    page.evaluate("bmfa.panels[0].canvas.focus()")
    page.key("ArrowDown")
    assert page.evaluate("bmfa.state.query") == width


def test_another_rule_begins_with_as_many_leaves(page):
    page.evaluate("location.hash = '#rule=optimal:0.002'")
    page.settle()
    before = page.evaluate("bmfa.panels[0].tree.leaves.length")
    page.evaluate(
        """((select) => { select.value = "mass"; select.dispatchEvent(new Event("change")); }
        )(bmfa.panels[0].select)"""
    )
    page.settle()
    assert page.evaluate("bmfa.state.rules[0].name") == "mass"
    after = page.evaluate("bmfa.panels[0].tree.leaves.length")
    total = page.evaluate("bmfa.data.layers[bmfa.state.layer].height ** 2")
    assert abs(after - before) <= 0.1 * total


def test_a_point_of_the_curves_is_taken(page):
    page.evaluate("location.hash = '#rule=gamma:5'")
    page.settle()
    assert page.evaluate("bmfa.panels[0].tree.leaves.length") == 1
    left, top, width, height = page.box("#chart svg")
    page.click(left + 0.8 * width, top + 0.6 * height)
    assert page.evaluate("bmfa.panels[0].tree.leaves.length") > 1
    x, y, size, _ = page.box("#chart circle[r='6']")
    assert abs(x + size / 2 - (left + 0.8 * width)) < 0.2 * width
    assert abs(y + size / 2 - (top + 0.6 * height)) < 0.4 * height


def test_two_rules_side_by_side_with_equal_leaves(page):
    page.evaluate("location.hash = '#rule=exact-gap:0.3&with=optimal:0.3'")
    page.settle()
    boxes = [page.box(f".panel:nth-of-type({index}) .stage canvas") for index in (1, 2)]
    assert boxes[0][1] == boxes[1][1] and boxes[0][0] + boxes[0][2] <= boxes[1][0]
    page.key("e")
    page.wait_for("location.hash.includes('equal=1')")
    leading, following = page.evaluate("bmfa.panels.map((panel) => panel.tree.leaves.length)")
    # Optimal trees exist for some numbers of leaves only: no other threshold comes nearer.
    others = page.evaluate(
        """Array.from({ length: 300 }, (_, i) => {
          const { pyramid } = bmfa.current();
          return bmfa.trees.screen(pyramid, "optimal", 10 ** (-7 + i / 40)).length;
        })"""
    )
    assert abs(following - leading) <= min(abs(other - leading) for other in others)
    # The rule that is touched leads: now the other one follows.
    left, top, width, height = page.box(".panel:nth-of-type(2) input[type=range]")
    page.click(left + width / 3, top + height / 2)
    counts = page.evaluate("bmfa.panels.map((panel) => panel.tree.leaves.length)")
    assert counts[1] != following and abs(counts[0] - counts[1]) < abs(leading - counts[1])


def test_the_address_holds_the_state_and_restores_it(browser, page, page_file, exploration):
    layer = exploration.layers[-2].layer
    first = f"layer={layer}&head=1&query=2,9&show=difference&rule=mass:0.004"
    page.evaluate(f"location.hash = '#{first}'")
    page.settle()
    page.click(*patch_centre(page, 40))
    page.key("c")
    page.wait_for("location.hash === bmfa.address()")
    address, state = page.evaluate("location.hash"), page.evaluate("bmfa.state")
    assert (
        f"layer={layer}&head=1" in address and "rule=mass:0.004" in address and "with=" in address
    )
    other = open_page(browser, page_file, address)
    assert other.evaluate("bmfa.state") == state
    assert not other.problems()
    other.close()


@pytest.mark.parametrize(
    "address",
    [
        "#layer=99&head=-4&query=900,900&rule=nonsense:1&with=gamma:-1&show=x&leaf=1",
        "#rule=gamma:&query=%E0%A4%A&head=1.5&layer=__proto__",
        "#rule=constructor:1&with=toString:2&query=<img src=x onerror=alert(1)>",
    ],
)
def test_an_address_that_means_nothing_is_ignored(browser, page_file, address):
    page = open_page(browser, page_file, address)
    assert page.evaluate("bmfa.panels[0].tree.leaves.length") >= 1
    assert not page.problems()
    page.close()


def test_a_image_name_with_markup_is_shown_as_text(browser, exploration, tmp_path):
    name = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>&amp;"
    path = tmp_path / "named.html"
    path.write_text(build_explorer(replace(exploration, title=name, model=name)), encoding="utf-8")
    page = open_page(browser, path)
    assert page.evaluate("document.getElementById('title').textContent") == name
    assert page.evaluate("document.title").startswith(name)
    assert page.evaluate("document.images.length") == 0
    assert not page.problems()
    page.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_the_screen_in_both_themes(browser, page_file, width, dark):
    phone = width == 390
    address = "#rule=gamma:0.05&with=optimal:0.002"
    for part in ("", address):
        page = open_page(browser, page_file, part, width=width, height=844, dark=dark, touch=phone)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.evaluate(
            """[...document.querySelectorAll("main *")].filter((one) => {
              const { left, right, width } = one.getBoundingClientRect();
              const outside = width && (left < -1 || right > innerWidth + 1);
              return outside && !one.closest(".chips, .hidden, svg");
            }).map((one) => one.className || one.tagName)"""
        )
        assert not wide
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", background))) < 60) == dark
        assert not page.problems()
        page.close()


def test_fingers_choose_patches_and_scroll_the_page(browser, page_file):
    page = open_page(browser, page_file, width=390, height=844, touch=True)
    page.touch(patch_centre(page, 50))
    assert page.evaluate("bmfa.state.query") == 50
    start, end = patch_centre(page, 50), patch_centre(page, 54)
    path = [(start[0] + (end[0] - start[0]) * step / 6, start[1]) for step in range(7)]
    page.touch(*path)
    assert page.evaluate("bmfa.state.query") == 54
    x, y = patch_centre(page, 50)
    before = page.evaluate("scrollY")
    page.touch(*((x, y - 30 * step) for step in range(6)))
    page.wait_for(f"scrollY > {before}")
    page.wait_for(STILL)
    assert page.evaluate("bmfa.state.query") == 54
    page.evaluate("document.querySelector('#modes input[value=leaf]').click()")
    page.touch(patch_centre(page, 90))
    assert page.evaluate("bmfa.state.leaf") == 90 and page.evaluate("bmfa.state.query") == 54
    assert not page.problems()
    page.close()


def test_masked_layers_and_long_grids_are_drawn(browser, exploration, tmp_path):
    """A layer with padding, and one whose grid is neither square nor that of the other layers."""
    generator = np.random.default_rng(1)
    heads = [pack_head(*generator.normal(size=(2, 2 + 15, 4)), 2.0) for _ in range(2)]
    valid = np.arange(15) % 5 < 4
    padded = ExploredLayer(0, Grid(3, 5), 2, heads, valid)
    start = {"layer": 0, "head": 1, "query": 7}
    path = tmp_path / "masked.html"
    changed = replace(exploration, layers=[padded, exploration.layers[-1]], start=start)
    path.write_text(build_explorer(changed), encoding="utf-8")
    page = open_page(browser, path)
    leaves = page.evaluate("bmfa.panels[0].tree.leaves.reduce((sum, leaf) => sum + leaf.count, 0)")
    assert leaves == int(valid.sum()) and page.evaluate("bmfa.panels[0].tree.index[4]") == -1
    page.click(*patch_centre(page, 9))  # padding is no query
    assert page.evaluate("bmfa.state.query") == 7
    page.key("]")
    assert page.evaluate("bmfa.state.layer") == 1 and not page.problems()
    page.close()
