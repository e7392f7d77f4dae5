// Draws cases and runs the kernels on them, for the sanitizers: every tensor and the scratch memory is an
// allocation of exactly its size, and all memory but the inputs is NaN before a call.
//
//   g++ -fsanitize=address,undefined -DBMFA_SOURCES='""' ... native_driver.cpp && ./a.out SEED CASES
#ifndef BMFA_SOURCES
#define BMFA_SOURCES ""
#endif
#include "tiles.cpp"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

static std::mt19937 generator;
static int draw(int least, int most) { return least + (int)(generator() % (unsigned)(most - least + 1)); }
static bool chance(double p) { return generator() < p * 4294967296.0; }
static float normal() { return std::normal_distribution<float>()(generator); }

struct Free {
  void operator()(void* memory) const { free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

static Memory allocate(int64_t bytes, int fill) {
  char* memory = (char*)aligned_alloc(64, (bytes + 63) / 64 * 64);
  memset(memory, fill, bytes);
  return Memory(memory);
}

// A tensor (B, heads, tokens, channels) whose last element is the last one of its allocation. Between its
// tokens are channels that no one may read, which are NaN.
struct Drawn {
  std::vector<uint16_t> half;
  std::vector<float> single;
  Tensor tensor;

  Drawn(int dtype, int batch, int heads, int tokens, int channels, float size, bool empty) {
    const int gap = draw(0, 3), lead = draw(0, 5);
    const bool tokens_first = chance(0.5);
    const int64_t row = channels + gap, matrix = row * (tokens_first ? heads : tokens);
    Tensor strides{nullptr, row * heads * tokens, tokens_first ? row : matrix, tokens_first ? matrix : row};
    const int64_t last = lead + (batch - 1) * strides.batch + (heads - 1) * strides.head +
                         (tokens - 1) * strides.token + channels;
    if (dtype == 0) single.assign(last, NAN), strides.data = (char*)(single.data() + lead);
    else half.assign(last, dtype == 1 ? 0x7fc0 : 0x7e00), strides.data = (char*)(half.data() + lead);
    tensor = strides;
    for (int b = 0; b < batch && !empty; b++)
      for (int h = 0; h < heads; h++)
        for (int t = 0; t < tokens; t++)
          for (int i = 0; i < channels; i++) {
            const int64_t at = lead + b * strides.batch + h * strides.head + t * strides.token + i;
            const float x = size * normal();
            if (dtype == 0) single[at] = x;
            else half[at] = dtype == 1 ? to_bfloat16(x) : to_float16(x);
          }
  }
};

// Tokens of each square of a grid after a prefix, -1 for the slots beyond its edges, in rows of `slots`.
static std::vector<int32_t> squares(int height, int width, int side, int columns, int prefix, int slots) {
  std::vector<int32_t> result;
  for (int top = 0; top < height; top += side)
    for (int left = 0; left < width; left += side * columns) {
      for (int y = top; y < top + side; y++)
        for (int x = left; x < left + side * columns; x++)
          result.push_back(y < height && x < width ? prefix + y * width + x : -1);
      while (result.size() % slots) result.push_back(-1);
    }
  return result;
}

static std::vector<int32_t> count_up(int count, int slots) {
  std::vector<int32_t> result(count);
  for (int i = 0; i < count; i++) result[i] = i;
  while (result.size() % slots) result.push_back(-1);
  return result;
}

// The tokens of each row that exist, first, for every image, and their numbers.
struct Listed {
  std::vector<int32_t> tokens, counts;

  Listed(const std::vector<int32_t>& rows, int slots, const std::vector<std::vector<bool>>& exist) {
    for (const std::vector<bool>& image : exist)
      for (size_t first = 0; first < rows.size(); first += slots) {
        std::vector<int32_t> row, missing;
        for (int i = 0; i < slots; i++) {
          const int token = rows[first + i];
          (token >= 0 && image[token] ? row : missing).push_back(token);
        }
        counts.push_back(row.size());
        tokens.insert(tokens.end(), row.begin(), row.end());
        tokens.insert(tokens.end(), missing.begin(), missing.end());
      }
  }
};

static void fail(const char* what, int number) {
  fprintf(stderr, "case %d: %s\n", number, what);
  exit(1);
}

static void check_output(const Call& c, int batch, const std::vector<std::vector<bool>>& exist, int number) {
  for (int b = 0; b < batch; b++)
    for (int h = 0; h < c.heads; h++)
      for (int t = 0; t < c.queries; t++)
        for (int i = 0; i < c.e; i++) {
          const char* token = token_address(c, c.output, b, h, t);
          const float x = c.dtype == 0   ? ((const float*)token)[i]
                          : c.dtype == 1 ? as_float((uint32_t)((const uint16_t*)token)[i] << 16)
                                         : widen_float16(((const uint16_t*)token)[i]);
          if (exist[exist.size() > 1 ? b : 0][t] != (fabsf(x) < 1e3f))
            fail("an output is not finite, or that of a missing query is written", number);
        }
}

static void run_case(int number) {
  const int dims[] = {1, 3, 16, 17, 24, 32, 33, 64, 72, 80, 96, 128, 160, 256};
  const int dtype = draw(0, 2), batch = draw(1, 2), share = draw(1, 2), key_heads = draw(1, 2);
  const int d = dims[draw(0, 13)], e = dims[draw(0, 13)], prefix = draw(0, 1) * draw(1, 70);
  const int height = draw(1, 30), width = draw(1, 30), side = chance(0.7) ? 8 : draw(2, 7);
  const bool own = chance(0.3);  // queries with a grid of their own
  const int query_height = own ? draw(1, 20) : height, query_width = own ? draw(1, 20) : width;
  const int query_prefix = own ? draw(0, 70) : prefix, heads = share * key_heads;
  const int keys = prefix + height * width, queries = query_prefix + query_height * query_width;
  const float size = chance(0.2) ? 30.0f : 1.0f;
  Drawn q(dtype, batch, heads, queries, d, 1.0f, false), k(dtype, batch, key_heads, keys, d, size, false);
  Drawn v(dtype, batch, key_heads, keys, e, 1.0f, false), out(dtype, batch, heads, queries, e, 0, true);

  // Queries have the mask of the keys, unless they have a grid of their own.
  const int images = chance(0.5) ? 1 : batch;
  const double present = chance(0.5) ? 1.0 : chance(0.2) ? 0.02 : 0.7;
  std::vector<std::vector<bool>> keys_exist(images), queries_exist(images);
  for (int b = 0; b < images; b++) {
    for (int t = 0; t < keys; t++) keys_exist[b].push_back(t < prefix || chance(present));
    keys_exist[b][prefix + draw(0, height * width - 1)] = true;
    queries_exist[b] = own ? std::vector<bool>(queries, true) : keys_exist[b];
  }
  const Listed key_list(count_up(keys, keys), keys, keys_exist);
  const Listed query_list(count_up(queries, queries), queries, queries_exist);

  Call c{};
  c.q = q.tensor, c.k = k.tensor, c.v = v.tensor, c.output = out.tensor;
  c.dtype = dtype, c.heads = heads, c.share = share, c.queries = queries, c.keys = keys;
  c.d = d, c.e = e, c.query_prefix = query_prefix, c.threads = draw(1, 4);
  c.factor = 1.0 / sqrt(d), c.images = images;
  c.key_tokens = key_list.tokens.data(), c.key_count = key_list.counts.data();
  c.query_tokens = query_list.tokens.data(), c.query_count = query_list.counts.data();
  if (chance(0.3)) {
    const Memory scratch = allocate(bmfa_scratch_bytes(&c), 0xff);
    c.scratch = scratch.get();
    for (int b = 0; b < batch; b++) bmfa_attend(&c, b, 0);
    check_output(c, batch, queries_exist, number);
    return;
  }

  const int columns = draw(1, 2), slots = side * side * columns;
  std::vector<int32_t> parts = squares(height, width, side, 1, prefix, LANES);
  c.tiles = parts.size() / LANES;
  const std::vector<int32_t> before = count_up(prefix, LANES);
  parts.insert(parts.end(), before.begin(), before.end());
  const Listed part_list(parts, LANES, keys_exist);
  const Listed members(squares(query_height, query_width, side, columns, query_prefix, slots), slots, queries_exist);
  c.part_tokens = part_list.tokens.data(), c.part_count = part_list.counts.data();
  c.member_tokens = members.tokens.data(), c.member_count = members.counts.data();
  c.parts = parts.size() / LANES, c.groups = members.counts.size() / images, c.group_slots = slots;
  std::vector<int32_t> order = count_up(c.groups, 1);
  std::shuffle(order.begin(), order.end(), generator);
  c.group_order = order.data();
  c.group_probes = draw(1, 3), c.probe_groups = c.groups < LANES ? c.groups : LANES, c.levels = 16;
  const int probes = c.probe_groups * c.group_probes;
  std::vector<double> quantiles(heads * probes), thresholds(c.levels), result(3 * batch * heads * probes, NAN);
  for (double& x : quantiles) x = (draw(0, 65535) + 0.5) / 65536;
  for (int j = 0; j < c.levels - 1; j++) thresholds[j] = pow(0.4, j);
  c.quantiles = quantiles.data(), c.thresholds = thresholds.data(), c.probes = result.data();
  c.uniform_share = 0.2;
  std::vector<double> found(heads * probes * 4 * c.levels, NAN), norm(heads * probes, NAN), weight(norm);
  c.found = found.data(), c.norm = norm.data(), c.weight = weight.data();
  std::vector<uint8_t> expanded(batch * heads * c.groups * c.tiles, 255), exact(heads);
  std::vector<int32_t> count(batch * heads * c.groups, -1);
  std::vector<double> threshold(2), shrinkage(2 * heads);
  c.expanded = expanded.data(), c.exact = exact.data(), c.expanded_count = count.data();
  c.threshold = threshold.data(), c.shrinkage = shrinkage.data();
  const Memory scratch = allocate(bmfa_scratch_bytes(&c), 0xff);
  c.scratch = scratch.get();
  for (int b = 0; b < batch; b++) {
    bmfa_attend(&c, b, 1);
    for (const std::vector<double>& values : {found, norm, weight})
      for (double x : values)
        if (!(fabs(x) < 1e9)) fail("what a probe finds is not finite", number);
    for (double& x : threshold) x = chance(0.1) ? INFINITY : thresholds[draw(0, c.levels - 1)];
    for (double& x : shrinkage) x = chance(0.3) ? 0.0 : draw(0, 12) / 10.0;
    for (uint8_t& x : exact) x = chance(0.2);
    bmfa_attend(&c, b, 2);
  }
  check_output(c, batch, queries_exist, number);
  for (size_t i = 0; i < expanded.size(); i++) {
    if (expanded[i] > 1) fail("an expanded tile is not written", number);
    count[i / c.tiles] -= expanded[i];
  }
  for (int32_t x : count)
    if (x != 0) fail("a number of expanded tiles is wrong", number);
  for (double x : result)
    if (!(x >= 0.0 && x < 1e6)) fail("an error of a probe is not finite", number);
}

int main(int count, char** arguments) {
  if (count != 3) return fprintf(stderr, "usage: %s SEED CASES\n", arguments[0]), 2;
  const int cases = atoi(arguments[2]);
  for (int number = 0; number < cases; number++) {
    generator.seed(atoi(arguments[1]) * 100003 + number);
    run_case(number);
  }
  printf("%d cases\n", cases);
}
