// The page: state, drawing, controls. Trees are computed by trees.js.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const RULES = Object.fromEntries(data.rules.map((rule) => [rule.name, rule]));
  const VIEWS = ["image", "full", "screened", "difference"];
  const STEPS = 240; // positions of a slider; 0 is a threshold of 0
  const NO_TOKEN = -1; // as a query: the class token

  // ------------------------------------------------------------------ scores of a query

  const heads = new Map();

  function decode(text) {
    const bytes = atob(text), values = new Float64Array(bytes.length / 2);
    for (let i = 0; i < values.length; i++) {
      const word = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
      values[i] = word > 32767 ? word - 65536 : word;
    }
    return values;
  }

  function headOf(layer, head) {
    const key = `${layer}/${head}`;
    if (!heads.has(key)) {
      const { q, k, step } = data.layers[layer].heads[head];
      heads.set(key, { q: decode(q), k: decode(k), step });
    }
    return heads.get(key);
  }

  // Scores of all keys for one query, prefix tokens first. Products of integers are exact.
  function scoresOf(layer, head, query) {
    const { dim } = data.layers[layer], { q, k, step } = headOf(layer, head);
    const scores = new Float64Array(k.length / dim);
    for (let key = 0; key < scores.length; key++) {
      let product = 0;
      for (let i = 0; i < dim; i++) product += q[query * dim + i] * k[key * dim + i];
      scores[key] = product * step;
    }
    return scores;
  }

  let current = null; // what follows from layer, head and query

  function computeQuery() {
    const layer = data.layers[state.layer];
    const key = `${state.layer}/${state.head}/${state.query}`;
    if (current?.key === key) return;
    const index = state.query === NO_TOKEN ? 0 : layer.prefix + state.query;
    const scores = scoresOf(state.layer, state.head, index);
    const prefix = scores.subarray(0, layer.prefix), spatial = scores.subarray(layer.prefix);
    const grid = bmfaTrees.layout(layer.height, layer.width);
    const pyramid = new bmfaTrees.Pyramid(grid, spatial, { valid: layer.valid });
    const logZ = bmfaTrees.logSumExp([...prefix, ...tokensOf(pyramid, spatial)]);
    const full = spatial.map((score, i) => (pyramid.exists(i) ? Math.exp(score - logZ) : 0));
    const prefixFull = prefix.map((score) => Math.exp(score - logZ));
    const gap = grid.root < 0 ? 0 : pyramid.gaps[grid.root];
    current = { key, layer, grid, pyramid, prefix, full, prefixFull, gap };
    current.largest = full.reduce((most, weight) => Math.max(most, weight), 0);
  }

  const tokensOf = (pyramid, values) => values.filter((_, i) => pyramid.exists(i));

  // The tree of a rule, and the attention over it.
  function computeTree({ name, threshold }) {
    const { pyramid, prefix, full, prefixFull } = current;
    const leaves = bmfaTrees.screen(pyramid, name, threshold);
    const index = bmfaTrees.leafIndex(pyramid, leaves);
    const logits = leaves.map((leaf) => Math.log(leaf.count) + leaf.mean);
    const logZ = bmfaTrees.logSumExp([...logits, ...prefix]);
    const screened = Float64Array.from(index, (leaf) => (leaf < 0 ? 0 : Math.exp(leaves[leaf].mean - logZ)));
    let moved = 0;
    screened.forEach((weight, i) => (moved += Math.abs(weight - full[i])));
    prefix.forEach((score, i) => (moved += Math.abs(Math.exp(score - logZ) - prefixFull[i])));
    for (const leaf of leaves) leaf.full = leaf.screened = 0;
    index.forEach((leaf, i) => {
      if (leaf < 0) return;
      leaves[leaf].full += full[i];
      leaves[leaf].screened += screened[i];
    });
    const error = bmfaTrees.error(pyramid, leaves, prefix);
    return { leaves, index, screened, moved: moved / 2, error };
  }

  // ------------------------------------------------------------------ state and address

  const start = data.start;
  const state = {
    layer: Math.max(0, data.layers.findIndex((one) => one.layer === start.layer)),
    head: start.head,
    query: start.query,
    show: "screened",
    mode: "query",
    compare: false,
    equal: false,
    leaf: null, // token whose leaf is read
    rules: data.first_rules.map(parseRule),
  };
  let hover = null;

  function parseRule(text) {
    const [name, value] = String(text).split(":");
    const threshold = Number(value);
    if (!Object.hasOwn(RULES, name) || value === "" || !(threshold >= 0 && threshold < Infinity)) return null;
    return { name, threshold };
  }

  const ruleText = ({ name, threshold }) => `${name}:${threshold}`;

  function tokenText(token) {
    const { width } = data.layers[state.layer];
    return `${Math.floor(token / width)},${token % width}`;
  }

  function parseToken(text, layer) {
    const match = /^(\d+),(\d+)$/.exec(text ?? "");
    if (!match) return null;
    const { height, width } = data.layers[layer], row = Number(match[1]), column = Number(match[2]);
    return row < height && column < width ? row * width + column : null;
  }

  function address() {
    const parts = [
      `layer=${data.layers[state.layer].layer}`,
      `head=${state.head}`,
      `query=${state.query === NO_TOKEN ? "class" : tokenText(state.query)}`,
      `show=${state.show}`,
      `rule=${ruleText(state.rules[0])}`,
    ];
    if (state.compare) parts.push(`with=${ruleText(state.rules[1])}`);
    if (state.compare && state.equal) parts.push("equal=1");
    if (state.mode === "leaf") parts.push("mode=leaf");
    if (state.leaf !== null) parts.push(`leaf=${tokenText(state.leaf)}`);
    return `#${parts.join("&")}`;
  }

  // Values that do not exist are ignored.
  function readAddress() {
    let fields;
    try {
      fields = new URLSearchParams(location.hash.slice(1));
    } catch {
      return;
    }
    const layer = data.layers.findIndex((one) => String(one.layer) === fields.get("layer"));
    if (layer >= 0) state.layer = layer;
    const head = Number(fields.get("head") ?? NaN);
    if (Number.isInteger(head)) state.head = head;
    const query = fields.get("query");
    if (query === "class") state.query = NO_TOKEN;
    else state.query = parseToken(query, state.layer) ?? state.query;
    if (VIEWS.includes(fields.get("show"))) state.show = fields.get("show");
    const rule = parseRule(fields.get("rule")), other = parseRule(fields.get("with"));
    if (rule) state.rules[0] = rule;
    if (other) state.rules[1] = other;
    if (fields.has("rule") || fields.has("with")) state.compare = other !== null;
    state.equal = fields.get("equal") === "1";
    state.mode = fields.get("mode") === "leaf" ? "leaf" : "query";
    state.leaf = parseToken(fields.get("leaf"), state.layer);
    clamp();
  }

  // After a change of layer, head, query and leaf may not exist.
  function clamp() {
    const layer = data.layers[state.layer];
    state.head = Math.min(Math.max(state.head, 0), layer.heads.length - 1);
    if (state.query >= layer.height * layer.width || (state.query < 0 && layer.prefix === 0)) state.query = 0;
    if (state.leaf !== null && state.leaf >= layer.height * layer.width) state.leaf = null;
  }

  let pendingAddress = 0;
  function writeAddress() {
    clearTimeout(pendingAddress);
    // Browsers limit how often an address may change (Safari: 100 times in 30 s).
    pendingAddress = setTimeout(() => {
      const wanted = address();
      if (location.hash === wanted) return;
      try {
        history.replaceState(null, "", wanted);
      } catch {
        location.replace(wanted);
      }
    }, 120);
  }

  function change(values) {
    if (values.layer !== undefined && values.layer !== state.layer) values = { ...values, ...moved(values.layer) };
    Object.assign(state, values);
    clamp();
    writeAddress();
    schedule();
  }

  // The same places of the image in a layer with another grid.
  function moved(layer) {
    const from = data.layers[state.layer], to = data.layers[layer];
    const carry = (token) => {
      if (token === null || token < 0) return token;
      const row = Math.floor(token / from.width), column = token % from.width;
      const scaled = (value, old, size) => Math.min(Math.floor(((value + 0.5) / old) * size), size - 1);
      return scaled(row, from.height, to.height) * to.width + scaled(column, from.width, to.width);
    };
    return { query: carry(state.query), leaf: carry(state.leaf) };
  }

  // ------------------------------------------------------------------ thresholds

  function thresholdAt(name, position) {
    const { least, most } = RULES[name];
    if (position <= 0) return 0;
    return Number((least * (most / least) ** ((position - 1) / (STEPS - 1))).toPrecision(3));
  }

  function positionOf({ name, threshold }) {
    const { least, most } = RULES[name];
    if (threshold <= 0) return 0;
    const share = Math.log(threshold / least) / Math.log(most / least);
    return Math.round(Math.min(Math.max(1 + share * (STEPS - 1), 1), STEPS));
  }

  // The threshold whose tree has the number of leaves nearest to `wanted`: leaves fall as it grows.
  function matchLeaves(name, wanted) {
    const count = (threshold) => bmfaTrees.screen(current.pyramid, name, threshold).length;
    const { least, most } = RULES[name];
    let low = Math.log(least) - 12, high = Math.log(most) + 3;
    let best = { name, threshold: 0 }, distance = Math.abs(count(0) - wanted);
    for (let step = 0; step < 40 && distance > 0; step++) {
      const middle = (low + high) / 2, threshold = Number(Math.exp(middle).toPrecision(6));
      const leaves = count(threshold), away = Math.abs(leaves - wanted);
      if (away < distance) [best, distance] = [{ name, threshold }, away];
      if (leaves > wanted) low = middle;
      else high = middle;
    }
    return best;
  }

  // ------------------------------------------------------------------ drawing

  const image = new Image();
  // Stops of a dark-to-bright scale of even lightness.
  const HEAT = [[20, 11, 52], [64, 18, 90], [132, 38, 107], [196, 62, 90], [237, 105, 60], [251, 165, 40], [250, 224, 120], [255, 252, 214]];
  const GAIN = [92, 160, 255], LOSS = [255, 138, 60], MARK = "#19e3c2";

  function heat(share) {
    const place = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1), low = Math.min(Math.floor(place), HEAT.length - 2);
    return HEAT[low].map((value, i) => value + (HEAT[low + 1][i] - value) * (place - low));
  }

  // One pixel for each token, drawn without smoothing.
  function tokenImage(colour) {
    const { height, width } = current.layer, canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) pixels.data.set(colour(i), 4 * i);
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  function attentionImage(weights) {
    return tokenImage((i) => {
      const share = Math.sqrt(weights[i] / current.largest);
      return [...heat(share), 255 * Math.min(0.1 + 1.1 * share, 0.96)];
    });
  }

  function differenceImage(weights, largest) {
    return tokenImage((i) => {
      const change = weights[i] - current.full[i];
      return [...(change > 0 ? GAIN : LOSS), 255 * 0.96 * Math.sqrt(Math.abs(change) / largest)];
    });
  }

  // Both panels have one scale.
  function largestDifference() {
    let most = 1e-12; // without any difference nothing is coloured
    for (const { tree } of activePanels())
      tree.screened.forEach((weight, i) => (most = Math.max(most, Math.abs(weight - current.full[i]))));
    return most;
  }

  function fit(canvas, width) {
    const { height: h, width: w } = current.layer;
    const ratio = Math.min(window.devicePixelRatio || 1, 2), aspect = image.naturalHeight / image.naturalWidth || h / w;
    const pixels = [Math.round(width * ratio), Math.round(width * aspect * ratio)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
    return ratio;
  }

  function drawBackground(context, show) {
    const { width, height } = context.canvas;
    context.globalCompositeOperation = "source-over";
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, width, height);
    if (show === "image") return;
    context.globalCompositeOperation = "saturation"; // without colours
    context.fillStyle = "#777";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "source-over";
    context.fillStyle = "rgb(14 13 24 / 0.66)"; // and darker, so that colours are attention
    context.fillRect(0, 0, width, height);
  }

  function drawView(canvas, show, tree, width) {
    fit(canvas, width);
    const context = canvas.getContext("2d");
    drawBackground(context, show);
    if (show === "image") return context;
    const shown = show === "full" ? attentionImage(current.full)
      : show === "screened" ? attentionImage(tree.screened)
      : differenceImage(tree.screened, largestDifference());
    context.imageSmoothingEnabled = false;
    context.drawImage(shown, 0, 0, canvas.width, canvas.height);
    return context;
  }

  function boxOnCanvas(canvas, [top, left, bottom, right]) {
    const { height, width } = current.layer;
    const x = Math.round((left / width) * canvas.width), y = Math.round((top / height) * canvas.height);
    return [x, y, Math.round((right / width) * canvas.width) - x, Math.round((bottom / height) * canvas.height) - y];
  }

  function drawTree(context, tree, ratio) {
    const { canvas } = context, path = new Path2D();
    for (const leaf of tree.leaves) path.rect(...boxOnCanvas(canvas, leaf.box));
    // Lines around small patches are fainter, so that they do not cover them.
    const patch = canvas.width / ratio / current.layer.width, strength = Math.min(Math.max(patch / 20, 0.3), 1);
    context.lineJoin = "miter";
    if (strength > 0.5) {
      context.lineWidth = 2.5 * ratio;
      context.strokeStyle = "rgb(0 0 0 / 0.28)";
      context.stroke(path);
    }
    context.lineWidth = ratio * Math.max(strength, 0.5);
    context.strokeStyle = `rgb(255 255 255 / ${0.84 * strength})`;
    context.stroke(path);
  }

  function drawMark(context, box, colour, ratio) {
    const [x, y, width, height] = boxOnCanvas(context.canvas, box);
    context.lineWidth = 5 * ratio;
    context.strokeStyle = "rgb(0 0 0 / 0.55)";
    context.strokeRect(x, y, width, height);
    context.lineWidth = 2.5 * ratio;
    context.strokeStyle = colour;
    context.strokeRect(x, y, width, height);
  }

  const boxOf = (token) => {
    const { width } = current.layer, row = Math.floor(token / width), column = token % width;
    return [row, column, row + 1, column + 1];
  };

  // ------------------------------------------------------------------ panels

  function number(value) {
    if (!Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-4) return value.toExponential(1).replace("e-", "e−");
    return size < 0.1 ? value.toPrecision(2) : size < 10 ? value.toFixed(size < 1 ? 3 : 2) : value.toFixed(1);
  }

  const thresholdText = (value) =>
    value === 0 || value >= 1e-3 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace("e-", "e−");

  const percent = (share) => {
    const value = 100 * share;
    return `${value === 0 ? "0" : value < 0.01 ? "<0.01" : value < 10 ? value.toFixed(2) : value.toFixed(1)} %`;
  };

  class Panel {
    constructor(position) {
      this.position = position;
      this.element = byId("panel").content.firstElementChild.cloneNode(true);
      const find = (selector) => this.element.querySelector(selector);
      this.select = find("select");
      this.range = find("input[type=range]");
      this.canvas = find(".stage canvas");
      this.scale = find(".scale");
      this.tip = find(".tip");
      this.views = [...this.element.querySelectorAll(".views button")];
      this.values = Object.fromEntries([...this.element.querySelectorAll("[data-value]")].map((one) => [one.dataset.value, one]));
      for (const rule of data.rules) this.select.append(new Option(rule.title, rule.name));
      this.select.addEventListener("change", () => this.setRule(this.select.value));
      this.range.addEventListener("input", () => this.setThreshold(thresholdAt(this.rule.name, Number(this.range.value))));
      for (const button of this.views) button.addEventListener("click", () => change({ show: button.dataset.show }));
      this.listen();
      byId("panels").append(this.element);
      new ResizeObserver(schedule).observe(this.canvas.parentElement);
    }

    get rule() {
      return state.rules[this.position];
    }

    // Another rule begins with as many leaves as this one has.
    setRule(name) {
      if (name !== this.rule.name) this.replace(this.tree ? rounded(matchLeaves(name, this.tree.leaves.length)) : { name, threshold: RULES[name].first });
    }

    setThreshold(threshold) {
      this.replace({ name: this.rule.name, threshold });
    }

    replace(rule) {
      const rules = [...state.rules];
      rules[this.position] = rule;
      // The rule that is touched leads; with equal leaves the other one follows.
      leading = this.position;
      change({ rules });
    }

    listen() {
      const { canvas } = this;
      let pressed = null; // of a pointer: where it went down, and whether it acts yet
      const tokenAt = (event) => {
        const box = canvas.getBoundingClientRect(), { height, width } = current.layer;
        const row = Math.floor(((event.clientY - box.top) / box.height) * height);
        const column = Math.floor(((event.clientX - box.left) / box.width) * width);
        const within = (value, size) => Math.min(Math.max(value, 0), size - 1);
        return within(row, height) * width + within(column, width);
      };
      const choose = (event) => {
        const token = tokenAt(event);
        hover = event.pointerType === "mouse" ? token : null;
        if (state.mode === "leaf") change({ leaf: token });
        else if (current.pyramid.exists(token)) change({ query: token });
      };
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button !== 0 || !event.isPrimary) return;
        const mouse = event.pointerType === "mouse";
        pressed = { x: event.clientX, acts: mouse };
        if (mouse) {
          canvas.setPointerCapture(event.pointerId);
          choose(event);
        }
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!event.isPrimary) return;
        // A finger that moves up or down scrolls the page; one that moves sideways drags the query.
        if (pressed && Math.abs(event.clientX - pressed.x) > 8) pressed.acts = true;
        if (pressed?.acts) choose(event);
        else if (event.pointerType === "mouse") {
          hover = tokenAt(event);
          schedule();
        }
      });
      canvas.addEventListener("pointerup", (event) => {
        if (pressed && !pressed.acts) choose(event);
        pressed = null;
      });
      canvas.addEventListener("pointercancel", () => (pressed = null));
      canvas.addEventListener("pointerleave", () => {
        hover = null;
        schedule();
      });
      canvas.addEventListener("keydown", onArrow);
    }

    update() {
      const key = `${current.key} ${ruleText(this.rule)}`;
      if (this.key !== key) this.tree = computeTree(this.rule);
      this.key = key;
    }

    draw() {
      const rule = RULES[this.rule.name];
      this.element.style.setProperty("--accent", `var(--${rule.colour})`);
      this.select.value = rule.name;
      this.element.querySelector(".what").textContent = `${rule.description}.`;
      this.range.value = positionOf(this.rule);
      this.range.setAttribute("aria-valuetext", `${rule.symbol} ${this.rule.threshold}`);
      this.element.querySelector(".threshold").textContent = `${rule.symbol} = ${thresholdText(this.rule.threshold)}`;
      for (const button of this.views) button.setAttribute("aria-pressed", String(button.dataset.show === state.show));
      this.drawViews();
      this.drawStage();
      this.drawScale();
      this.write();
    }

    // The small images change with a tree or their size, not with the pointer.
    drawViews() {
      const width = this.views[0].clientWidth, key = `${treesKey()} ${width} ${window.devicePixelRatio}`;
      if (!width || this.viewsKey === key) return;
      this.viewsKey = key;
      for (const button of this.views) drawView(button.querySelector("canvas"), button.dataset.show, this.tree, width);
    }

    drawStage() {
      const { canvas, tree } = this, width = canvas.parentElement.clientWidth;
      if (!width) return;
      const context = drawView(canvas, state.show, tree, width), ratio = Math.min(window.devicePixelRatio || 1, 2);
      drawTree(context, tree, ratio);
      const token = readToken();
      const leaf = token === null ? -1 : tree.index[token];
      if (leaf >= 0) drawMark(context, tree.leaves[leaf].box, "#fff", ratio);
      if (state.query !== NO_TOKEN) drawMark(context, boxOf(state.query), MARK, ratio);
      this.drawTip(leaf >= 0 ? tree.leaves[leaf] : null);
      const where = state.query === NO_TOKEN ? "the class token" : placeOf(state.query);
      canvas.setAttribute("aria-label", `${tree.leaves.length} leaves; the query is ${where}; drawn: ${state.show}`);
    }

    // Beside the leaf under the pointer, in both panels.
    drawTip(leaf) {
      this.tip.hidden = hover === null || !leaf;
      if (this.tip.hidden) return;
      this.tip.textContent = `${sizeOf(leaf)}\nmass ${percent(leaf.full)}, screened ${percent(leaf.screened)}\ngap ${number(leaf.gap)}`;
      const { clientWidth: width, clientHeight: height } = this.canvas, { offsetWidth: wide, offsetHeight: high } = this.tip;
      const [top, left, bottom, right] = boxOf(hover), columns = current.layer.width, rows = current.layer.height;
      const beside = (right / columns) * width + 10, above = ((top + bottom) / 2 / rows) * height - high / 2;
      this.tip.style.left = `${beside + wide > width ? (left / columns) * width - wide - 10 : beside}px`;
      this.tip.style.top = `${Math.min(Math.max(above, 4), height - high - 4)}px`;
    }

    drawScale() {
      const bar = document.createElement("i"), { show } = state;
      const gradient = (stops) => `linear-gradient(90deg, ${stops.map((stop) => `rgb(${stop.join(" ")})`).join(", ")})`;
      if (show === "image") return this.scale.replaceChildren(`The query is outlined in green${readToken() === null ? "" : ", the leaf that is read in white"}.`);
      if (show === "difference") {
        bar.style.background = gradient([LOSS, [40, 40, 50], GAIN]);
        const most = percent(largestDifference());
        return this.scale.replaceChildren(`−${most}`, bar, `+${most} for one patch, screened less full`);
      }
      bar.style.background = gradient(HEAT);
      return this.scale.replaceChildren("0", bar, `${percent(current.largest)} of the attention on one patch`);
    }

    write() {
      const { tree, values } = this, { pyramid } = current;
      values.leaves.textContent = tree.leaves.length;
      values["leaves-of"].textContent = `of ${pyramid.total}, ${percent(tree.leaves.length / pyramid.total)}`;
      values.error.textContent = number(tree.error);
      values.moved.textContent = percent(tree.moved);
      values.gap.textContent = number(current.gap);
      const token = readToken();
      const best = tree.leaves.reduce((most, leaf) => (leaf.full > most.full ? leaf : most));
      const leaf = token === null ? best : tree.leaves[tree.index[token]];
      const heading = hover !== null ? "Leaf under the pointer" : token !== null ? "Leaf that is read" : "Leaf with most attention";
      this.element.querySelector(".leaf h3").textContent = heading;
      if (!leaf) return;
      values["leaf-size"].textContent = sizeOf(leaf);
      values["leaf-full"].textContent = percent(leaf.full);
      values["leaf-screened"].textContent = percent(leaf.screened);
      values["leaf-gap"].textContent = number(leaf.gap);
    }
  }

  const sizeOf = ({ count, box: [top, left, bottom, right] }) =>
    count === 1 ? "1 patch" : `${bottom - top}×${right - left} patches`;
  const rounded = ({ name, threshold }) => ({ name, threshold: Number(threshold.toPrecision(3)) });
  const readToken = () => hover ?? (state.mode === "leaf" ? (state.leaf ?? Math.max(state.query, 0)) : state.leaf);
  const placeOf = (token) => {
    const { width } = data.layers[state.layer];
    return `row ${Math.floor(token / width)}, column ${token % width}`;
  };

  // ------------------------------------------------------------------ curves

  const SVG = "http://www.w3.org/2000/svg";
  let points = [];
  let curvesKey = "";

  function svg(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Leaves and E of every rule over its thresholds, for this query.
  function computeCurves() {
    if (curvesKey === current.key) return;
    curvesKey = current.key;
    points = data.rules.map(({ name }) => {
      const curve = new Map();
      for (let position = STEPS; position >= 0; position -= 2) {
        const threshold = thresholdAt(name, position), leaves = bmfaTrees.screen(current.pyramid, name, threshold);
        if (!curve.has(leaves.length)) curve.set(leaves.length, { leaves: leaves.length, threshold, error: bmfaTrees.error(current.pyramid, leaves, current.prefix) });
      }
      return { name, points: [...curve.values()] };
    });
  }

  const PLOT = { left: 52, right: 10, top: 8, bottom: 36 };
  const LEAST_ERROR = 1e-4; // E below this is drawn here: it moves less than 1 % of the attention
  let place = null; // of a point on the chart

  function drawCurves() {
    const chart = byId("chart"), width = chart.clientWidth, height = state.compare ? 260 : 220;
    const key = `${treesKey()} ${width} ${height}`;
    if (!width || chart.dataset.key === key) return;
    chart.dataset.key = key;
    computeCurves();
    const errors = points.flatMap((curve) => curve.points.map((point) => point.error));
    const highest = Math.max(Math.ceil(Math.log10(Math.max(...errors, LEAST_ERROR))), -2), lowest = Math.log10(LEAST_ERROR);
    const { total } = current.pyramid, { left, right, top, bottom } = PLOT;
    const x = (leaves) => left + (Math.log(leaves) / Math.log(Math.max(total, 2))) * (width - left - right);
    const y = (error) => top + ((highest - Math.log10(Math.max(error, LEAST_ERROR))) / (highest - lowest)) * (height - top - bottom);
    place = { x, y };
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "E against the number of leaves, one curve for each rule" });
    for (let power = lowest; power <= highest; power++) {
      const line = y(10 ** power);
      root.append(svg("line", { class: power === lowest ? "axis" : "tick", x1: left, x2: width - right, y1: line, y2: line }));
      root.append(svg("text", { x: left - 8, y: line + 4, "text-anchor": "end" }, power === lowest ? `≤${10 ** power}` : String(10 ** power)));
    }
    const ticks = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536].filter((leaves) => leaves <= total);
    for (const leaves of ticks) root.append(svg("text", { x: x(leaves), y: height - bottom + 18, "text-anchor": "middle" }, leaves));
    root.append(svg("text", { x: width - right, y: height - 2, "text-anchor": "end" }, "leaves"));
    const active = activePanels().map((panel) => panel.rule.name);
    for (const { name, points: list } of [...points].sort((a, b) => active.includes(a.name) - active.includes(b.name))) {
      const shown = active.includes(name);
      // Steps: between two trees of a rule there is none, and the smaller one is the best that fits.
      const path = list.map((point, i) => `${i ? "H" : "M"}${x(point.leaves).toFixed(1)}${i ? "V" : " "}${y(point.error).toFixed(1)}`).join("");
      if (shown) for (const point of list) root.append(svg("circle", { cx: x(point.leaves), cy: y(point.error), r: 2, fill: `var(--${RULES[name].colour})` }));
      root.append(svg("path", { d: path, fill: "none", stroke: `var(--${RULES[name].colour})`, "stroke-width": shown ? 2.6 : 1.4, "stroke-linejoin": "round", opacity: shown ? 1 : 0.55 }));
    }
    for (const panel of activePanels()) {
      const { tree, rule } = panel;
      root.append(svg("circle", { cx: x(tree.leaves.length), cy: y(tree.error), r: 6, fill: `var(--${RULES[rule.name].colour})`, stroke: "var(--surface)", "stroke-width": 2.5 }));
    }
    chart.replaceChildren(root);
  }

  function takePoint(event) {
    const box = byId("chart").getBoundingClientRect();
    let best = null, distance = Infinity;
    for (const { name, points: list } of points)
      for (const point of list) {
        const away = Math.hypot(place.x(point.leaves) - (event.clientX - box.left), place.y(point.error) - (event.clientY - box.top));
        if (away < distance) [best, distance] = [{ name, threshold: point.threshold }, away];
      }
    if (best) panels[state.compare ? leading : 0].replace(best);
  }

  // ------------------------------------------------------------------ controls

  function chips(parent, group, labels, choose) {
    const box = parent.querySelector(".chips");
    box.replaceChildren(...labels.map((label, value) => {
      const chip = document.createElement("label"), input = document.createElement("input"), text = document.createElement("span");
      chip.className = "chip";
      Object.assign(input, { type: "radio", name: group, value: String(value) });
      input.addEventListener("change", () => choose(value));
      text.textContent = label;
      chip.append(input, text);
      return chip;
    }));
  }

  const checked = (parent, value) => {
    const input = parent.querySelector(`input[value="${value}"]`);
    if (!input || input.checked) return;
    input.checked = true;
    const box = input.closest(".chips"), chip = input.parentElement;
    // On a narrow screen chips scroll sideways; the chosen one is shown.
    box.scrollLeft = chip.offsetLeft - box.offsetLeft - (box.clientWidth - chip.offsetWidth) / 2;
  };

  function onArrow(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const { height, width } = data.layers[state.layer];
    const reading = state.mode === "leaf";
    const from = Math.max(reading ? (state.leaf ?? state.query) : state.query, 0);
    const row = Math.min(Math.max(Math.floor(from / width) + step[0], 0), height - 1);
    const column = Math.min(Math.max((from % width) + step[1], 0), width - 1);
    hover = null;
    change(reading ? { leaf: row * width + column } : { query: row * width + column });
  }

  const shift = (value, by, size) => Math.min(Math.max(value + by, 0), size - 1);

  const KEYS = {
    "[": () => change({ layer: shift(state.layer, -1, data.layers.length) }),
    "]": () => change({ layer: shift(state.layer, 1, data.layers.length) }),
    ",": () => change({ head: shift(state.head, -1, data.layers[state.layer].heads.length) }),
    ".": () => change({ head: shift(state.head, 1, data.layers[state.layer].heads.length) }),
    "-": () => stepThreshold(-4),
    "+": () => stepThreshold(4),
    "=": () => stepThreshold(4),
    "0": () => data.layers[state.layer].prefix > 0 && change({ query: NO_TOKEN }),
    "v": () => change({ show: VIEWS[(VIEWS.indexOf(state.show) + 1) % VIEWS.length] }),
    "c": () => change({ compare: !state.compare }),
    "e": () => change({ compare: true, equal: !(state.compare && state.equal) }),
    "m": () => change({ mode: state.mode === "leaf" ? "query" : "leaf" }),
    "Escape": () => change({ leaf: null, mode: "query" }),
  };
  data.rules.forEach(({ name }, i) => (KEYS[String(i + 1)] = () => panels[state.compare ? leading : 0].setRule(name)));

  function stepThreshold(by) {
    const panel = panels[state.compare ? leading : 0];
    panel.setThreshold(thresholdAt(panel.rule.name, shift(positionOf(panel.rule), by, STEPS + 1)));
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("select, textarea")) return;
    if (event.key.startsWith("Arrow")) {
      if (!event.target.matches?.("input")) onArrow(event);
      return;
    }
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // ------------------------------------------------------------------ updates

  const panels = [];
  let leading = 0;
  const activePanels = () => panels.slice(0, state.compare ? 2 : 1);

  const treesKey = () => activePanels().map((panel) => panel.key).join(" ");

  let followed = "";
  function follow() {
    if (!state.compare || !state.equal || followed === treesKey()) return;
    const wanted = panels[leading].tree.leaves.length, other = panels[1 - leading];
    if (other.tree.leaves.length !== wanted) {
      state.rules[other.position] = matchLeaves(other.rule.name, wanted);
      other.update();
      writeAddress();
    }
    followed = treesKey();
  }

  function drawControls() {
    const layer = data.layers[state.layer];
    if (byId("heads").dataset.count !== String(layer.heads.length)) {
      chips(byId("heads"), "head", layer.heads.map((_, i) => i), (head) => change({ head }));
      byId("heads").dataset.count = layer.heads.length;
    }
    checked(byId("layers"), state.layer);
    checked(byId("heads"), state.head);
    checked(byId("modes"), state.mode);
    byId("compare").checked = state.compare;
    byId("equal").checked = state.equal;
    byId("equal-label").hidden = !state.compare;
    byId("class-token").hidden = layer.prefix === 0;
    byId("class-token").setAttribute("aria-pressed", String(state.query === NO_TOKEN));
    byId("query").textContent = state.query === NO_TOKEN ? "class token" : placeOf(state.query);
    const prefix = current.prefixFull.reduce((sum, weight) => sum + weight, 0);
    const outside = layer.prefix ? `, ${percent(prefix)} of the attention on ${layer.prefix === 1 ? "the class token" : `${layer.prefix} class and register tokens`}` : "";
    byId("frame").textContent = `${layer.height}×${layer.width} patches${outside}`;
  }

  function arrange() {
    const curves = byId("curves"), box = byId("panels");
    box.classList.toggle("single", !state.compare);
    box.classList.toggle("pair", state.compare);
    panels[1].element.hidden = !state.compare;
    if (state.compare && curves.parentElement !== box.parentElement) box.after(curves);
    if (!state.compare && curves.parentElement !== panels[0].element) panels[0].element.append(curves);
  }

  let pendingCurves = 0, pendingStatus = 0;

  function render() {
    computeQuery();
    arrange();
    for (const panel of activePanels()) panel.update();
    follow();
    drawControls();
    for (const panel of activePanels()) panel.draw();
    const quick = current.grid.size <= 1024; // longer sequences wait until the query rests
    clearTimeout(pendingCurves);
    if (quick || curvesKey === current.key) drawCurves();
    else pendingCurves = setTimeout(drawCurves, 150);
    clearTimeout(pendingStatus);
    pendingStatus = setTimeout(() => {
      byId("status").textContent = activePanels().filter(({ tree }) => tree).map(({ rule, tree }) => `${RULES[rule.name].title}: ${tree.leaves.length} leaves, E ${number(tree.error)}`).join("; ");
    }, 600);
  }

  let frame = 0;
  function schedule() {
    if (!frame && image.complete) frame = requestAnimationFrame(() => {
      frame = 0;
      render();
    });
  }

  function begin() {
    readAddress();
    chips(byId("layers"), "layer", data.layers.map((one) => one.layer), (layer) => change({ layer }));
    panels.push(new Panel(0), new Panel(1));
    byId("bar").addEventListener("submit", (event) => event.preventDefault());
    byId("modes").addEventListener("change", (event) => change({ mode: event.target.value }));
    byId("compare").addEventListener("change", (event) => change({ compare: event.target.checked }));
    byId("equal").addEventListener("change", (event) => change({ equal: event.target.checked }));
    byId("class-token").addEventListener("click", () => change({ query: state.query === NO_TOKEN ? start.query : NO_TOKEN }));
    byId("chart").addEventListener("click", takePoint);
    new ResizeObserver(schedule).observe(byId("chart"));
    byId("legend").replaceChildren(...data.rules.map((rule) => {
      const item = document.createElement("li");
      item.textContent = rule.title;
      item.style.setProperty("--line", `var(--${rule.colour})`);
      return item;
    }));
    document.addEventListener("keydown", onKey);
    window.addEventListener("hashchange", () => {
      if (location.hash !== address()) {
        readAddress();
        schedule();
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
    image.addEventListener("load", schedule);
    image.src = data.image;
    schedule();
  }

  begin();
  // For tests and for curious people in the console.
  window.bmfa = { data, state, trees: bmfaTrees, scoresOf, address, panels, current: () => current };
})();
