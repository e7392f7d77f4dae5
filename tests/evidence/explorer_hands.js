// What the tests of the explorer do on its page: trees of fields, a pointer over the middle of a patch, keys,
// sliders and addresses. Each script of a test runs after this one, in the same function.
const [panel, other] = bmfa.panels, { state } = bmfa;
page.HTMLCanvasElement.prototype.setPointerCapture = () => {}; // needs a pointer of flesh and blood
const trees = (fields, thresholds) => fields.map(({ height, width, scores, tau, valid }) => {
  const { layout, Pyramid, RULES, screen, error } = bmfa.trees;
  const pyramid = new Pyramid(layout(height, width), Float64Array.from(scores), { tau, valid });
  return RULES.map((rule) => thresholds.map((threshold) => {
    const leaves = screen(pyramid, rule, threshold);
    return [leaves.map((leaf) => leaf.box), error(pyramid, leaves)];
  }));
});
const point = async (type, token, pointerType = "mouse") => {
  const box = panel.canvas.getBoundingClientRect(), { height, width } = bmfa.data.layers[state.layer];
  const clientX = box.left + (token % width + 0.5) * box.width / width;
  const clientY = box.top + (Math.floor(token / width) + 0.5) * box.height / height;
  const event = { clientX, clientY, pointerType, pointerId: 1, isPrimary: true, bubbles: true };
  panel.canvas.dispatchEvent(new page.PointerEvent(`pointer${type}`, event));
  await settle();
};
const press = async (...keys) => {
  for (const key of keys) {
    document.dispatchEvent(new page.KeyboardEvent("keydown", { key, bubbles: true }));
    await settle();
  }
};
const slide = async (one, position) => {
  one.range.value = position;
  one.range.dispatchEvent(new page.Event("input", { bubbles: true }));
  await settle();
};
const go = async (address) => {
  page.location.hash = address;
  await settle();
};
const leaves = () => bmfa.panels.map((one) => one.tree?.leaves.length);

const pointersAndKeys = async () => {
  const seen = {}, { width } = bmfa.data.layers[state.layer];
  await point("down", 33);
  await point("move", 37);
  seen.dragged = [state.query, document.getElementById("query").textContent];
  await point("up", 37);
  await point("move", 20);
  const leaf = panel.tree.leaves[panel.tree.index[20]];
  seen.hover = [state.query, document.querySelector(".leaf h3").textContent];
  seen.mass = [100 * leaf.full, panel.values["leaf-full"].textContent];
  await point("down", 50, "touch");
  for (let token = 51; token <= 54; token++) await point("move", token, "touch");
  await point("up", 54, "touch");
  await point("down", 60, "touch");
  await point("move", 76, "touch"); // downwards: the page scrolls
  await point("cancel", 76, "touch");
  seen.swept = state.query;
  await press("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp");
  await press("]", ".", "5", "v", "m", "ArrowRight");
  seen.state = structuredClone(state);
  await press("+");
  seen.threshold = state.rules[0].threshold;
  await press("0", "Escape");
  return { ...seen, width, token: state.query, leaf: state.leaf };
};

const slidersListsAndCurves = async () => {
  const seen = {};
  await slide(panel, panel.range.max);
  seen.coarse = leaves()[0];
  await slide(panel, 0);
  seen.fine = [leaves()[0], Number(panel.values.leaves.textContent)];
  panel.select.value = "mass";
  panel.select.dispatchEvent(new page.Event("change"));
  await go("#rule=gamma:5");
  const box = document.querySelector("#chart svg").getBoundingClientRect();
  const clientX = box.left + 0.8 * box.width, clientY = box.top + 0.6 * box.height;
  const click = new page.MouseEvent("click", { clientX, clientY, bubbles: true });
  document.getElementById("chart").dispatchEvent(click);
  await settle();
  seen.taken = leaves()[0];
  await go("#rule=exact-gap:0.3&with=optimal:0.3");
  await press("e");
  seen.equal = [page.location.hash, leaves()];
  seen.optimal = Array.from({ length: 300 }, (_, i) =>
    bmfa.trees.screen(bmfa.current().pyramid, "optimal", 10 ** (-7 + i / 40)).length);
  // The rule that is touched leads: now the other one follows.
  await slide(other, other.range.max / 3);
  return { ...seen, led: leaves() };
};

const addresses = async () => {
  const seen = [];
  for (const address of args.nonsense) {
    await go(address);
    seen.push(leaves()[0]);
  }
  await go(args.given);
  await point("down", 40);
  await press("c");
  return [page.location.hash, state, seen];
};

const markupAndMasks = async () => {
  const tokens = panel.tree.leaves.reduce((sum, leaf) => sum + leaf.count, 0);
  const outside = panel.tree.index[4];
  await point("down", 9); // padding is no query
  await point("up", 9);
  const query = state.query;
  await press("]");
  const heading = document.getElementById("title").textContent;
  return [tokens, outside, query, state.layer, heading, document.title, document.images.length];
};

const outsideOfTheScreen = async () => {
  const seen = [];
  for (const address of ["#", "#rule=gamma:0.05&with=optimal:0.002"]) {
    await go(address);
    seen.push([...document.querySelectorAll("main *")].filter((one) => {
      const { left, right, width } = one.getBoundingClientRect();
      const outside = width && (left < -1 || right > page.innerWidth + 1);
      return outside && !one.closest(".chips, .hidden, svg");
    }).map((one) => one.className || one.tagName));
  }
  const background = page.getComputedStyle(document.body).backgroundColor;
  const first = document.querySelector("#layers .chip").getBoundingClientRect();
  const layerZero = first.left >= 0 && first.right <= page.innerWidth;
  return [document.documentElement.scrollWidth, seen, background, layerZero];
};

const numbersAt = async () => {
  const shown = [];
  for (const address of args.addresses) {
    await go(`#${address}`);
    const { tree, values } = panel;
    shown.push({ ...state, leaves: tree.leaves.length, error: tree.error, moved: tree.moved,
      screened: Array.from(tree.screened),
      masses: tree.leaves.map((leaf) => [leaf.full, leaf.gap]),
      shown: [values.leaves.textContent, values.gap.textContent] });
  }
  return [args.chosen.map((place) => Array.from(bmfa.scoresOf(...place))), shown];
};
