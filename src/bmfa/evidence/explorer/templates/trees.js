// Quadtrees over one grid of scores, with the formulas of bmfa.trees in float64.
"use strict";
const bmfaTrees = (() => {
  const EPSILON = 2 ** -52; // of float64
  // Roundings, in units of EPSILON, up to which a difference counts as 0: bmfa.trees.pyramid.
  const ROUNDINGS = 8;
  const LARGEST_EXPONENT = 700; // exp overflows in float64 beyond 709.78

  const layouts = new Map();

  // Blocks with more than one token, level by level from the root. A child is the row of a block, or
  // ~token for a single token in raster order.
  function layout(height, width) {
    const key = `${height}x${width}`;
    if (!layouts.has(key)) layouts.set(key, makeLayout(height, width));
    return layouts.get(key);
  }

  function makeLayout(height, width) {
    const blocks = [];
    const add = (top, left, bottom, right, depth) => {
      if ((bottom - top) * (right - left) === 1) return ~(top * width + left);
      blocks.push({ top, left, bottom, right, depth, children: [] });
      return blocks.length - 1;
    };
    const root = add(0, 0, height, width, 0);
    for (let row = 0; row < blocks.length; row++) {
      const { top, left, bottom, right, depth, children } = blocks[row];
      const middle = top + ((bottom - top) >> 1), centre = left + ((right - left) >> 1);
      for (const [t, b] of [[top, middle], [middle, bottom]])
        for (const [l, r] of [[left, centre], [centre, right]])
          if (t < b && l < r) children.push(add(t, l, b, r, depth + 1));
    }
    // A level with blocks has a level below it, so that the last level consists of single tokens.
    const levels = blocks.length ? blocks[blocks.length - 1].depth + 1 : 0;
    return { height, width, size: height * width, blocks, root, levels };
  }

  const zeroBelow = (value, terms) => (value > terms * ROUNDINGS * EPSILON ? value : 0);

  function logSumExp(values) {
    let largest = -Infinity, total = 0;
    for (const value of values) if (value > largest) largest = value;
    for (const value of values) total += Math.exp(value - largest);
    return largest + Math.log(total);
  }

  // Statistics of every block of one row of scores: tokens in raster order; valid is null or one
  // boolean for each token. Offsets are child means relative to the largest child.
  class Pyramid {
    constructor(grid, tokens, { tau = 1, valid = null } = {}) {
      this.grid = grid;
      this.tokens = tokens;
      this.tau = tau;
      this.valid = valid;
      const n = grid.blocks.length;
      this.count = new Int32Array(n);
      this.branching = new Int32Array(n);
      this.mean = new Float64Array(n);
      this.largest = new Float64Array(n);
      this.shift = new Float64Array(n);
      this.expm1 = new Float64Array(n);
      this.gamma = new Float64Array(n);
      this.offsets = new Array(n);
      this.total = 0;
      this.bound = 0;
      for (let i = 0; i < grid.size; i++)
        if (this.exists(i)) {
          this.total += 1;
          this.bound = Math.max(this.bound, Math.abs(tokens[i]));
        }
      for (let row = n - 1; row >= 0; row--) this.measure(row);
    }

    exists(token) {
      return this.valid === null || Boolean(this.valid[token]);
    }

    countOf(child) {
      return child < 0 ? Number(this.exists(~child)) : this.count[child];
    }

    meanOf(child) {
      return child < 0 ? this.tokens[~child] : this.mean[child];
    }

    // Children with valid tokens.
    parts(row) {
      const { children } = this.grid.blocks[row];
      return this.valid === null ? children : children.filter((child) => this.countOf(child) > 0);
    }

    measure(row) {
      const parts = this.parts(row), { depth } = this.grid.blocks[row];
      let count = 0, largest = -Infinity, shift = 0;
      for (const child of parts) {
        count += this.countOf(child);
        largest = Math.max(largest, this.meanOf(child));
      }
      this.count[row] = count;
      this.branching[row] = parts.length;
      if (count === 0) return;
      const offsets = new Float64Array(parts.length);
      parts.forEach((child, i) => {
        offsets[i] = this.meanOf(child) - largest;
        shift += (this.countOf(child) / count) * offsets[i];
      });
      this.largest[row] = largest;
      this.mean[row] = largest + shift;
      // Means of blocks are rounded; means of single tokens are exact.
      const rounded = depth + 1 !== this.grid.levels;
      if (rounded && Math.abs(shift) <= this.bound * (ROUNDINGS * EPSILON)) {
        offsets.fill(0);
        shift = 0;
      }
      this.offsets[row] = offsets;
      this.shift[row] = shift;
      let excess = 0;
      parts.forEach((child, i) => {
        excess += (this.countOf(child) / count) * Math.expm1(offsets[i] / this.tau);
      });
      this.expm1[row] = excess;
      this.gamma[row] = zeroBelow(this.tau * Math.log1p(excess) - shift, Math.abs(shift));
    }

    // tau log sum_C w_C exp((M_C + g_C) / tau) - M_B from the gaps g of the children.
    gapFromChildren(row, gaps) {
      const parts = this.parts(row), offsets = this.offsets[row], shift = this.shift[row];
      let top = -Infinity, excess = 0;
      const raised = parts.map((child, i) => offsets[i] + (child < 0 ? 0 : gaps[child]));
      for (const value of raised) top = Math.max(top, value);
      parts.forEach((child, i) => {
        const weight = this.countOf(child) / this.count[row];
        excess += weight * Math.expm1((raised[i] - top) / this.tau);
      });
      const gap = top + this.tau * Math.log1p(excess) - shift;
      return zeroBelow(gap, Math.abs(top) + Math.abs(shift));
    }

    // Values of blocks by a recursion over `below`; the last level has Gamma.
    fromBelow(below) {
      const result = new Float64Array(this.gamma.length);
      for (let row = result.length - 1; row >= 0; row--) {
        if (this.count[row] === 0) continue;
        const last = this.grid.blocks[row].depth + 1 === this.grid.levels;
        result[row] = last ? this.gamma[row] : this.gapFromChildren(row, below ?? result);
      }
      return result;
    }

    // Exact G of every block.
    get gaps() {
      return (this._gaps ??= this.fromBelow(null));
    }

    // Gamma from the descendants two levels below.
    get gammaTwo() {
      return (this._gammaTwo ??= this.fromBelow(this.gamma));
    }

    get logPartition() {
      if (this._logPartition === undefined) {
        const scaled = [];
        for (let i = 0; i < this.grid.size; i++)
          if (this.exists(i)) scaled.push(this.tokens[i] / this.tau);
        this._logPartition = logSumExp(scaled);
      }
      return this._logPartition;
    }

    // Share of Z that splitting a block recovers: pi_B (exp(Gamma_B / tau) - 1).
    get gains() {
      if (!this._gains) {
        this._gains = new Float64Array(this.gamma.length);
        for (let row = 0; row < this._gains.length; row++) {
          if (this.count[row] === 0) continue;
          const mean = Math.expm1(this.shift[row] / this.tau);
          const excess = zeroBelow(this.expm1[row] - mean, Math.abs(mean));
          const scale = Math.exp(this.largest[row] / this.tau - this.logPartition);
          this._gains[row] = this.count[row] * scale * excess;
        }
      }
      return this._gains;
    }

    // Bottom-up pruning: split where gain - penalty (k - 1) + sum_C max(0, A_C) is positive.
    prune(penalty) {
      const split = new Uint8Array(this.gamma.length);
      const advantage = new Float64Array(this.gamma.length);
      for (let row = split.length - 1; row >= 0; row--) {
        let net = this.gains[row] - penalty * Math.max(this.branching[row] - 1, 0), below = 0;
        for (const child of this.grid.blocks[row].children) if (child >= 0) below += advantage[child];
        net += below;
        split[row] = Number(net > 0);
        advantage[row] = Math.max(net, 0);
      }
      return split;
    }
  }

  const RULES = {
    "gamma": (pyramid) => pyramid.gamma,
    "gamma-h2": (pyramid) => pyramid.gammaTwo,
    "exact-gap": (pyramid) => pyramid.gaps,
    "mass": (pyramid) => pyramid.gains,
    "optimal": null, // by pruning
  };

  // Leaves of a rule in depth-first order: children top left, top right, bottom left, bottom right.
  function screen(pyramid, rule, threshold) {
    const { blocks, width, root } = pyramid.grid;
    const score = RULES[rule]?.(pyramid);
    const pruned = score ? null : pyramid.prune(threshold);
    const leaves = [];
    const visit = (child) => {
      if (pyramid.countOf(child) === 0) return;
      if (child < 0) {
        const top = Math.floor(~child / width), left = ~child % width;
        const mean = pyramid.tokens[~child];
        leaves.push({ box: [top, left, top + 1, left + 1], count: 1, mean, gap: 0, row: child });
        return;
      }
      const { top, left, bottom, right, children } = blocks[child];
      const wanted = pruned ? pruned[child] === 1 : score[child] > threshold;
      if (wanted && pyramid.count[child] > 1) children.forEach(visit);
      else
        leaves.push({
          box: [top, left, bottom, right],
          count: pyramid.count[child],
          mean: pyramid.mean[child],
          gap: pyramid.gaps[child],
          row: child,
        });
    };
    visit(root);
    return leaves;
  }

  // E = tau log(1 + sum_L pi_L (exp(G_L / tau) - 1)), pi_L = n_L exp(M_L / tau) / Z~ over all keys;
  // prefix scores are exact leaves.
  function error(pyramid, leaves, prefix = []) {
    const tau = pyramid.tau;
    const logits = leaves.map((leaf) => Math.log(leaf.count) + leaf.mean / tau);
    const logZ = logSumExp([...logits, ...Array.from(prefix, (score) => score / tau)]);
    const withGaps = leaves.map((leaf, i) => logits[i] + leaf.gap / tau);
    if (leaves.some((leaf) => leaf.gap / tau > LARGEST_EXPONENT)) {
      const exact = logSumExp([...withGaps, ...Array.from(prefix, (score) => score / tau)]);
      return tau * (exact - logZ);
    }
    let total = 0;
    leaves.forEach((leaf, i) => {
      total += Math.exp(logits[i] - logZ) * Math.expm1(leaf.gap / tau);
    });
    return tau * Math.log1p(total);
  }

  // Row of the leaf of every token; -1 outside of the valid tokens.
  function leafIndex(pyramid, leaves) {
    const { size, width } = pyramid.grid, index = new Int32Array(size).fill(-1);
    leaves.forEach(({ box: [top, left, bottom, right] }, leaf) => {
      for (let y = top; y < bottom; y++)
        for (let x = left; x < right; x++) if (pyramid.exists(y * width + x)) index[y * width + x] = leaf;
    });
    return index;
  }

  return { RULES: Object.keys(RULES), Pyramid, layout, screen, error, leafIndex, logSumExp };
})();
