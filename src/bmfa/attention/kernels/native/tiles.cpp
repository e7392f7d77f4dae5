// Tiled attention and exact attention on a CPU: the steps of kernels/reference/tiles.py, in float32.
//
// Everything is `product` with queries in lanes: 64 queries are the columns of a matrix (channels x 64),
// so that scores are rows of keys times columns of queries, a softmax runs down the rows as vector
// arithmetic, and no key or value is moved. Scores of 64 keys and 64 queries stay in the first-level
// cache; nothing of the size of tokens x tokens or groups x tokens is written.
//
// Work is divided into items that do not depend on the number of threads, and neither does any result.
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "product.h"

constexpr int LANES = 64;     // queries that are computed together; keys of a block, at most
constexpr int BLOCKS = 4;     // blocks of LANES queries that read a block of keys one after the other
constexpr int GROUPS = 12;    // groups that share a product for their covariances
constexpr int THREADS = 256;  // at most; and of LEVELS, one more than there are
constexpr int LEVELS = 32;
constexpr int CHUNK = 8;  // parts that a probe takes one after the other, with its sums in the cache
constexpr int64_t TANGENT_BYTES = 112 << 20;  // of the tangents in memory at once, about
constexpr double SMALLEST = 1e-30;  // sum of weights; the attention of a probe to less than that is 0
constexpr double LEAST_WORK = 1e6;  // multiplications for which a second thread is worth its start

// ---- Arguments: filled in by __init__.py, which has the same fields in the same order ----

struct Tensor {  // (B, heads, tokens, channels) with contiguous channels; strides in elements
  char* data;
  int64_t batch, head, token;
};

struct Call {
  Tensor q, k, v, output;
  int64_t dtype;  // of all tensors: 0 float32, 1 bfloat16, 2 float16
  int64_t heads, share, queries, keys, d, e, query_prefix, threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of torch, or null
  char* scratch;
  double factor;        // scale / tau
  uint32_t largest[2];  // bits of the largest |q| and |k|; above those of infinity for NaN
  // Tokens that exist, first of each row, and their numbers; rows of one image or of all.
  int64_t images;
  const int32_t *key_tokens, *key_count, *query_tokens, *query_count;  // (images, keys or queries), (images,)
  // The rest is for tiles. Parts are the tiles, then the prefix in blocks of LANES keys, which are like tiles
  // that are always expanded. Groups are in the order of their positions, `group_order`.
  int64_t tiles, parts, groups, group_slots, probe_groups, group_probes, levels;
  const int32_t *part_tokens, *part_count;      // (images, parts, LANES), (images, parts)
  const int32_t *member_tokens, *member_count;  // (images, groups, group_slots), (images, groups)
  const int32_t* group_order;                   // (groups,)
  const double *quantiles, *thresholds;         // (heads, probes), (levels,)
  double uniform_share, farthest;
  // What the probes of an image find: error, product, correction and share; norm and weight.
  double *found, *norm, *weight;  // (heads, probes, 4, levels), (heads, probes)
  // What the caller chooses from that, for groups at even and odd positions.
  const double *threshold, *shrinkage;  // (2,), (heads, 2)
  const uint8_t* exact;                 // (heads,)
  uint8_t* expanded;                    // (B, heads, groups, tiles)
  int32_t* expanded_count;              // (B, heads, groups)
  double* probes;                       // (B, heads, probes, 3)
};

struct Arena {  // one block of memory from the caller, divided twice: once to measure, once for use
  char* base;
  int64_t used = 0;
  // Set each pointer to memory for as many elements as the number after it.
  template <class T, class... More>
  void take(T*& to, int64_t count, More&&... more) {
    to = base ? (T*)(base + used) : nullptr;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    if constexpr (sizeof...(more) > 0) take(more...);
  }
};

struct Head {  // one query head; groups are numbered by their positions
  float *q_mean, *q_lanes, *q_head;          // (R, d), (bands, d, LANES) likewise, (d,)
  double *q_spread, *k_spread, *k_farthest;  // rho (R,), kappa (T,), lambda (T,)
  float *cross, *radius;                     // (T, true d, e), (T,) of the values
  int32_t* probe_token;                      // (P,), -1 for a group without queries
  float* exact_output;                       // (P, e)
};

// A band is LANES groups, and a unit a band of a head: unit u is band u / heads of head u % heads.
struct Problem : Call {
  int image = 0, first_unit = 0;                // the first one whose tangents are in memory
  int pd, pe, padded, P, units, units_at_once;  // padded channels and parts; probes of a head
  int64_t stride;  // of parts: odd, because rows at multiples of 4 KiB share cache lines
  int64_t bytes, worker_bytes = 0;
  float *k_tangent, *v_tangent, *log_mass;  // (units at once, LANES, stride, d), (.., e) and without
  Head* head;                               // (H,)
  mutable std::atomic<uint32_t> most_bits[2] = {};  // see `keep_largest`

  Problem(const Call& call, char* base) : Call(call) {
    const int bands = blocks_of(groups, LANES);
    pd = round_up(d, WIDTH), pe = round_up(e, WIDTH), padded = round_up(parts, WIDTH);
    P = probe_groups * group_probes, units = heads * bands, stride = parts | 1;
    const int64_t most = TANGENT_BYTES / (4 * LANES * stride * (1 + pd + pe));
    units_at_once = std::max<int64_t>(1, std::min<int64_t>(most, units));
    const int64_t rows = tiles ? units_at_once * LANES * stride : 0;
    Arena arena{base};
    arena.take(k_tangent, rows * pd, v_tangent, rows * pe, log_mass, rows, head, heads);
    for (int i = 0; i < heads; i++) {
      Head measured, &h = base ? head[i] : measured;
      arena.take(h.q_mean, groups * pd, h.q_lanes, bands * pd * LANES, h.q_head, pd, h.q_spread, groups);
      arena.take(h.k_spread, tiles, h.k_farthest, tiles, h.cross, tiles * d * pe, h.radius, tiles);
      arena.take(h.probe_token, P, h.exact_output, P * pe);
    }
    bytes = arena.used;
  }

  // Turn to an image.
  void select(int b) {
    const int64_t i = images > 1 ? b : 0;
    image = b, key_tokens += i * keys, key_count += i, query_tokens += i * queries, query_count += i;
    part_tokens += i * parts * LANES, part_count += i * parts;
    member_tokens += i * groups * group_slots, member_count += i * groups;
  }
  bool keeps_tangents() const { return units_at_once == units; }  // they are made once then
  bool reads_everything(int h, int position) const { return exact[h] || threshold[position % 2] == 0.0; }
  int band_end(int band) const { return std::min<int>(groups, (band + 1) * LANES); }
};

// ---- Elements: half precision is widened when it is read and rounded when it is written ----

static inline float as_float(uint32_t bits) { return read<float>(&bits); }
static inline uint32_t as_bits(float x) { return read<uint32_t>(&x); }
static inline float widen_float16(uint16_t x) {
  const uint32_t magnitude = x & 0x7fff, sign = (uint32_t)(x & 0x8000) << 16;
  const float finite = as_float(magnitude << 13) * 0x1p112f;  // subnormal numbers, too
  const uint32_t bits = magnitude < 0x7c00 ? as_bits(finite) : magnitude << 13 | 0x7f800000;
  return as_float(bits | sign);
}
static inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = as_bits(x);
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline uint16_t to_float16(float x) {
  const uint32_t sign = as_bits(x) >> 16 & 0x8000, bits = as_bits(x) & 0x7fffffff;
  uint32_t result;
  if (bits > 0x7f800000) result = 0x7e00;              // NaN
  else if (bits >= 0x477ff000) result = 0x7c00;        // rounds to infinity
  else if (bits < 0x38800000) result = as_bits(as_float(bits) + 0.5f) - 0x3f000000;  // subnormal
  else result = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  return sign | result;
}

static char* token_address(const Call& c, const Tensor& x, int b, int head, int token) {
  return x.data + (b * x.batch + head * x.head + token * x.token) * (c.dtype == 0 ? 4 : 2);
}

// ---- Sums over the channels of one vector, whose number is a multiple of WIDTH ----

static inline float dot(const float* x, const float* y, int n) {
  Vector total{};
  for (int i = 0; i < n; i += WIDTH) total += vec(x + i) * vec(y + i);
  return sum(total);
}
static void add_scaled(float* to, const float* x, float factor, int n) {
  for (int i = 0; i < n; i += WIDTH) vec(to + i) += vec(x + i) * factor;
}
static void scale(float* x, float factor, int n) {
  for (int i = 0; i < n; i += WIDTH) vec(x + i) *= factor;
}
// x . y in double precision, in which no product of two floats overflows or underflows.
static inline double exact_dot(const float* x, const float* y, int n) {
  const auto widen = [](const float* x) { return __builtin_convertvector(read<Half>(x), Doubles); };
  Doubles total{};
  for (int i = 0; i < n; i += WIDTH / 2) total += widen(x + i) * widen(y + i);
  double result = 0.0;
  for (int i = 0; i < WIDTH / 2; i++) result += total[i];
  return result;
}
// Multiply rows of lanes by a factor for each lane.
static void scale_lanes(float* x, int rows, int width, const float* factor) {
  for (int i = 0; i < rows; i++, x += LANES)
    for (int j = 0; j < width; j += WIDTH) vec(x + j) *= vec(factor + j);
}
// The rows minus their mean with weights p.
static void subtract_mean(const float* const* x, const float* p, int count, int n, float* to) {
  alignas(64) float center[256 + WIDTH] = {};
  for (int i = 0; i < count; i++) add_scaled(center, x[i], p[i], n);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < n; j += WIDTH) vec(to + i * n + j) = vec(x[i] + j) - vec(center + j);
}

struct Softmax {
  float maximum[LANES], sum[LANES];
};
struct Lanes : Softmax {  // LANES queries, their running softmax and output
  int count, width;               // queries, and lanes in use: the next multiple of WIDTH
  const int32_t* tokens;          // (count,)
  float *q, *deviation, *output;  // (d, LANES) twice: q and its difference from the mean; (e, LANES)
  Softmax coarse;                 // when the tangents were included
};

enum Sum { EXACT, TANGENT, TERM };  // over the tiles of a level: of exact values, tangents, first-order terms

// One thread at work on a head: its scratch memory, and the steps of the specification.
struct Worker {
  const Problem& c;
  int head = 0;
  Head* h = nullptr;
  Integers largest[2] = {};
  const float *k[LANES], *v[LANES];     // rows of the keys and values of a part
  float *scores, *keys, *values;        // (LANES, LANES), (LANES, padded d), (LANES, padded e)
  float *rows, *differences;            // (most queries, padded channels), (LANES, padded e)
  float *cross, *mass, *loss, *far, *inverse;  // (GROUPS, d, padded e), (LANES, padded), (padded,) of parts
  float *sums[3], *value, *first_order; // (LANES, levels + 1, padded e), (CHUNK, LANES, padded e) twice
  double *totals[3], *distances;        // (LANES, levels + 1), (most queries,)
  int32_t* exact_queries;               // (GROUPS, most queries)
  uint8_t* level;                       // (LANES, parts) the first one that expands a tile; of the prefix 0
  Lanes lanes[BLOCKS];
  int tiles[LANES][LEVELS];                    // of each level, for the groups of the probes in lanes
  float offset[LANES], log_sum[CHUNK][LANES];  // of the probes in lanes
  int64_t bytes;

  Worker(const Problem& problem, char* base) : c(problem) {
    const int64_t probes = c.tiles ? LANES : 0, numbers = probes * (c.levels + 1);
    const int64_t slots = std::max<int>(c.group_slots, LANES);
    Arena arena{base};
    for (Lanes& l : lanes)
      arena.take(l.q, c.pd * LANES, l.deviation, c.pd * probes, l.output, c.pe * LANES);
    arena.take(scores, LANES * LANES, keys, LANES * c.pd, values, LANES * c.pe, differences, LANES * c.pe);
    arena.take(rows, slots * std::max(c.pd, c.pe), cross, c.tiles ? GROUPS * c.d * c.pe : 0);
    arena.take(mass, probes * c.padded, loss, c.padded, far, c.padded, inverse, c.padded);
    for (int i = 0; i < 3; i++) arena.take(sums[i], numbers * c.pe, totals[i], numbers);
    arena.take(value, CHUNK * probes * c.pe, first_order, CHUNK * probes * c.pe, distances, slots);
    arena.take(exact_queries, GROUPS * slots, level, probes * c.parts);
    bytes = arena.used;
  }

  // Copy a token to `to` in float32, with zeros from `channels` on to the next multiple of WIDTH.
  float* read_token(const Tensor& x, int number, int token, int channels, float* to) {
    const char* from = token_address(c, x, c.image, number, token);
    const uint16_t* half = (const uint16_t*)from;
    if (c.dtype == 0) memcpy(to, from, 4 * channels);
    for (int i = 0; c.dtype == 1 && i < channels; i++) to[i] = as_float((uint32_t)half[i] << 16);
    for (int i = 0; c.dtype == 2 && i < channels; i++) to[i] = widen_float16(half[i]);
    for (int i = channels; i % WIDTH; i++) to[i] = 0.0f;
    return to;
  }
  void write_token(int token, const float* from) {
    char* to = token_address(c, c.output, c.image, head, token);
    uint16_t* half = (uint16_t*)to;
    if (c.dtype == 0) memcpy(to, from, 4 * c.e);
    for (int i = 0; c.dtype == 1 && i < c.e; i++) half[i] = to_bfloat16(from[i]);
    for (int i = 0; c.dtype == 2 && i < c.e; i++) half[i] = to_float16(from[i]);
  }
  // Keep the largest magnitudes of q (0) and k (1), which show NaN, infinity and overflow.
  void keep_largest(int which, const float* x, int n) {
    for (int i = 0; i < n; i += WIDTH) {
      const Integers bits = read<Integers>(x + i) & 0x7fffffff;
      largest[which] = bits > largest[which] ? bits : largest[which];
    }
  }
  void report_largest() const {
    for (int i = 0; i < 2 * WIDTH; i++) {
      const uint32_t bits = largest[i / WIDTH][i % WIDTH];
      uint32_t most = c.most_bits[i / WIDTH];
      while (most < bits && !c.most_bits[i / WIDTH].compare_exchange_weak(most, bits)) {}
    }
  }

  // ---- Exact attention of queries in lanes: an online softmax over blocks of keys ----

  // Write at most LANES queries, times the factor, into lanes, and start their softmax. Queries with a number
  // below 0 are 0, as are the lanes after the last one. The queries also stay in `rows`.
  void load_queries(Lanes& l, const int32_t* tokens, int count) {
    l.count = std::min(count, LANES), l.width = round_up(l.count, WIDTH), l.tokens = tokens;
    for (int i = 0; i < l.count; i++) {
      float* row = rows + i * c.pd;
      if (tokens[i] < 0) memset(row, 0, 4 * c.pd);
      else read_token(c.q, head, tokens[i], c.d, row);
    }
    keep_largest(0, rows, l.count * c.pd);
    scale(rows, c.factor, l.count * c.pd);
    transpose(Strided{rows, c.pd}, l.count, c.pd, l.q, LANES);
    for (int i = 0; i < LANES; i++) l.maximum[i] = -INFINITY, l.sum[i] = 0.0f;
    memset(l.output, 0, 4 * LANES * c.e);
  }

  // Include `count` rows of scores, plus a bias for each, in VECTORS vectors of lanes of the softmax: scores
  // become weights. `rescale` is set to the factors of earlier weights.
  template <int VECTORS>
  void include(Lanes& l, int lane, int count, const float* bias, float* rescale) {
    Vector maximum[VECTORS], total[VECTORS] = {};
    for (int j = 0; j < VECTORS; j++) maximum[j] = vec(l.maximum + lane + j * WIDTH);
    for (int i = 0; i < count; i++)
      for (int j = 0; j < VECTORS; j++) {
        Unaligned& x = vec(scores + i * LANES + lane + j * WIDTH);
        if (bias) x += bias[i];
        maximum[j] = larger(maximum[j], x);
      }
    for (int j = 0; j < VECTORS; j++) {
      Unaligned& before = vec(l.maximum + lane + j * WIDTH);
      vec(rescale + lane + j * WIDTH) = exponential(before - maximum[j]);
      before = maximum[j];
    }
    for (int i = 0; i < count; i++)
      for (int j = 0; j < VECTORS; j++) {
        Unaligned& x = vec(scores + i * LANES + lane + j * WIDTH);
        total[j] += x = exponential(x - maximum[j]);
      }
    for (int j = 0; j < VECTORS; j++) {
      Unaligned& all = vec(l.sum + lane + j * WIDTH);
      all = all * vec(rescale + lane + j * WIDTH) + total[j];
    }
  }
  void softmax(Lanes& l, int count, const float* bias, float* rescale) {
    int lane = 0;
    for (; lane + 4 * WIDTH <= l.width; lane += 4 * WIDTH) include<4>(l, lane, count, bias, rescale);
    for (; lane < l.width; lane += WIDTH) include<1>(l, lane, count, bias, rescale);
  }

  // Attend to `count` keys and values, at most LANES, with q, or its difference from the mean, in lanes.
  template <class Rows>
  void attend(Lanes& l, const float* q, int count, const Rows& keys, const Rows& values, const float* bias) {
    alignas(64) float rescale[LANES];
    product<false>(keys, Strided{q, LANES}, count, c.d, l.width, scores, LANES);
    softmax(l, count, bias, rescale);
    if (std::any_of(rescale, rescale + l.width, [](float x) { return x != 1.0f; }))
      scale_lanes(l.output, c.e, l.width, rescale);
    product<true>(values, Strided{scores, LANES}, c.e, count, l.width, l.output, LANES, true);
  }

  // Find the rows of keys and values of at most LANES tokens. Half precision is copied to float32, and so are
  // rows of a width that `whole` products, of vectors of channels, exceed. Returns the number of tokens.
  int find_rows(const int32_t* tokens, int count, bool whole) {
    const int number = head / c.share;
    const bool copy_k = c.dtype || (whole && c.d < c.pd), copy_v = c.dtype || (whole && c.e < c.pe);
    for (int i = 0; i < count; i++) {
      k[i] = copy_k ? read_token(c.k, number, tokens[i], c.d, keys + i * c.pd)
                    : (const float*)token_address(c, c.k, c.image, number, tokens[i]);
      v[i] = copy_v ? read_token(c.v, number, tokens[i], c.e, values + i * c.pe)
                    : (const float*)token_address(c, c.v, c.image, number, tokens[i]);
    }
    return count;
  }

  // Attend to the keys and values of at most LANES tokens with all queries in the first blocks of lanes.
  void attend_tokens(const int32_t* tokens, int count, int blocks) {
    find_rows(tokens, count, false);
    for (int j = 0; j < blocks; j++) attend(lanes[j], lanes[j].q, count, k, v, nullptr);
  }

  // Write the outputs in lanes to their tokens, divided by the sums of the weights.
  void write_outputs(Lanes& l) {
    for (int i = 0; i < l.width; i++) l.sum[i] = 1.0f / l.sum[i];
    scale_lanes(l.output, c.e, l.width, l.sum);
    transpose(Strided{l.output, LANES}, c.e, l.width, rows, c.pe);
    for (int i = 0; i < l.count; i++) write_token(l.tokens[i], rows + i * c.pe);
  }

  // Exact attention, to all keys that exist, of any number of queries.
  void attend_exactly(const int32_t* tokens, int count) {
    for (; count > 0; tokens += BLOCKS * LANES, count -= BLOCKS * LANES) {
      const int blocks = std::min(BLOCKS, blocks_of(count, LANES));
      for (int j = 0; j < blocks; j++) load_queries(lanes[j], tokens + j * LANES, count - j * LANES);
      for (int i = 0; i < *c.key_count; i += LANES)
        attend_tokens(c.key_tokens + i, std::min(*c.key_count - i, LANES), blocks);
      for (int j = 0; j < blocks; j++) write_outputs(lanes[j]);
    }
  }

  // Step 1: the mean query of a group, rho, and the probes. Queries are times scale / tau throughout.
  void summarise_group(int position) {
    const int d = c.pd, count = c.member_count[position];
    const int32_t* tokens = c.member_tokens + position * c.group_slots;
    float* mean = h->q_mean + position * d;
    memset(mean, 0, 4 * d);
    for (int i = 0; i < count; i++) {
      float* row = read_token(c.q, head, tokens[i], c.d, rows + i * d);
      scale(row, c.factor, d), add_scaled(mean, row, 1.0f, d);
    }
    for (int j = 0; j < d; j++) mean[j] /= std::max(count, 1);
    double total = 0.0, most = 0.0;
    for (int i = 0; i < count; i++) {
      add_scaled(rows + i * d, mean, -1.0f, d);
      distances[i] = exact_dot(rows + i * d, rows + i * d, d);
      total += distances[i], most = std::max(most, distances[i]);
    }
    h->q_spread[position] = count ? sqrt(total / count) * sqrt(most) : 0.0;
    float* in_lanes = h->q_lanes + position / LANES * d * LANES + position % LANES;
    for (int j = 0; j < d; j++) in_lanes[j * LANES] = mean[j];
    if (position < c.probe_groups) draw_probes(position, most);
  }

  // Step 5: the probes of a group; `distances`, squared, become the probabilities of its queries.
  void draw_probes(int position, double largest) {
    const int count = c.member_count[position];
    double total = 0.0, *p = distances;
    for (int i = 0; i < count; i++) {
      p[i] = largest > 0.0 ? p[i] / largest : 1.0;
      total += p[i] *= p[i];
    }
    const double uniform = c.uniform_share / count, rest = (1.0 - c.uniform_share) / total;
    for (int i = 0; i < count; i++) p[i] = uniform + rest * p[i];
    for (int j = 0; j < c.group_probes; j++) {
      const int probe = position * c.group_probes + j;
      int chosen = 0;
      double below = count ? p[0] : 0.0;
      while (chosen + 1 < count && below <= c.quantiles[head * c.P + probe]) below += p[++chosen];
      h->probe_token[probe] = count ? c.member_tokens[position * c.group_slots + chosen] : -1;
      c.weight[head * c.P + probe] = count ? 1.0 / (p[chosen] * c.group_probes) : 0.0;
    }
  }

  // Step 1: qhat, the mean of the queries of the first LANES groups.
  void summarise_head() {
    int count = 0;
    memset(h->q_head, 0, 4 * c.pd);
    for (int r = 0; r < c.band_end(0); r++) {
      add_scaled(h->q_head, h->q_mean + r * c.pd, c.member_count[r], c.pd);
      count += c.member_count[r];
    }
    for (int j = 0; j < c.pd; j++) h->q_head[j] /= std::max(count, 1);
  }

  // Step 2: the covariance of keys and values under qhat, kappa, lambda, and the largest distance of a value.
  void summarise_tile(int tile) {
    const int count = c.part_count[tile], d = c.pd, e = c.pe;
    alignas(64) float p[LANES];
    float most = -INFINITY, total = 0.0f;
    for (int i = 0; i < LANES; i++) {
      p[i] = i < count ? dot(h->q_head, k[i], d) : -INFINITY;
      most = std::max(most, p[i]);
    }
    for (int i = 0; i < LANES && count; i += WIDTH) vec(p + i) = exponential(vec(p + i) - most);
    for (int i = 0; i < count; i++) total += p[i];
    for (int i = 0; i < count; i++) p[i] /= total;
    subtract_mean(v, p, count, e, differences);
    subtract_mean(k, p, count, d, rows);
    double radius = 0.0, farthest = 0.0, squares = 0.0;
    for (int i = 0; i < count; i++) {
      const double distance = exact_dot(rows + i * d, rows + i * d, d);
      farthest = std::max(farthest, distance), squares += distance;
      radius = std::max(radius, exact_dot(differences + i * e, differences + i * e, e));
      scale(rows + i * d, p[i], d);
    }
    h->radius[tile] = sqrt(radius), h->k_farthest[tile] = farthest;
    h->k_spread[tile] = squares / std::max(count, 1);
    product<true>(Strided{rows, d}, Strided{differences, e}, c.d, count, e, h->cross + tile * c.d * e, e);
  }

  float diameter() const { return c.tiles ? 2.0f * *std::max_element(h->radius, h->radius + c.tiles) : 0.0f; }

  // Steps 3 and 5: the softmax of queries in lanes over the part whose rows are found, in `scores`, and the
  // logarithm of their sums of exponentials, in `l.maximum`.
  void see_part(Lanes& l, const float* queries, int count) {
    alignas(64) float unused[LANES];
    product<false>(k, Strided{queries, LANES}, count, c.d, l.width, scores, LANES);
    for (int i = 0; i < l.width; i++) l.maximum[i] = -INFINITY, l.sum[i] = 0.0f;
    softmax(l, count, nullptr, unused);
    for (int i = 0; i < l.width; i++) l.maximum[i] += logf(l.sum[i]), l.sum[i] = 1.0f / l.sum[i];
    scale_lanes(scores, count, l.width, l.sum);
  }

  int64_t tangent_row(int position) const {
    const int unit = position / LANES * c.heads + head;
    return ((unit - c.first_unit) * LANES + position % LANES) * c.stride;
  }

  // Step 3: the tangents of a part for a band of groups.
  void represent_part(int band, int part) {
    Lanes& l = lanes[0];
    const int64_t first = tangent_row(band * LANES) + part;
    const int count = c.part_count[part];
    l.count = c.band_end(band) - band * LANES, l.width = round_up(l.count, WIDTH);
    if (count) see_part(l, h->q_lanes + band * c.pd * LANES, count);
    for (int i = 0; i < l.count; i++) c.log_mass[first + i * c.stride] = count ? l.maximum[i] : -INFINITY;
    if (!count || part >= c.tiles) return;
    const Strided p{scores, LANES};
    product<true>(p, k, l.count, count, c.pd, c.k_tangent + first * c.pd, c.stride * c.pd);
    product<true>(p, v, l.count, count, c.pe, c.v_tangent + first * c.pe, c.stride * c.pe);
  }

  // Step 3: shares m of the parts of a group, and in `loss` the losses of its tiles. Of tiles with a loss
  // below the limit, which may stay unexpanded, only ratios count: if all underflow, the largest share is 1.
  void weigh_tiles(int position, float limit, float* mass) {
    const float* log_mass = c.log_mass + tangent_row(position);
    const auto limited = [](double x) { return (float)(x < 1e30 ? x : 1e30); };  // NaN becomes the limit
    const float largest = *std::max_element(log_mass, log_mass + c.parts);
    std::fill(std::copy_n(log_mass, c.parts, mass), mass + c.padded, -INFINITY);
    Vector total{};
    for (int t = 0; t < c.padded; t += WIDTH) total += exponential(vec(mass + t) - largest);
    const float log_z = largest + logf(sum(total));
    const double spread = h->q_spread[position] / (2.0 * c.d);
    for (int t = 0; t < c.tiles; t++) {
      const double f = spread * h->k_farthest[t];
      loss[t] = limited(spread * h->k_spread[t]), inverse[t] = 1.0f / std::max(c.part_count[t], 1);
      far[t] = limited(std::min(f, c.farthest * sqrt(2.0 * f)));
    }
    for (int t = 0; t < c.padded; t += WIDTH) {
      const Vector log_share = vec(mass + t) - log_z, share = exponential(log_share), f = vec(far + t);
      const Vector exponent = log_share + f, one = splat(1.0f);
      // m expm1(f) / n, limited to 1 before it overflows
      Vector grown = exponential(exponent < 5.0f ? exponent : splat(5.0f)) * vec(inverse + t);
      grown = grown < one ? grown : one;
      grown *= f < 0.02f ? f * (one - f * (0.5f - f * (1.0f / 6.0f))) : one - exponential(-f);
      const Vector lost = share * vec(loss + t) + grown;
      vec(mass + t) = share, vec(loss + t) = lost < one ? lost : one;
    }
    float most = 0.0f, best = -INFINITY;
    for (int t = 0; t < c.tiles; t++)
      if (loss[t] < limit) most = std::max(most, mass[t]), best = std::max(best, log_mass[t]);
    for (int t = 0; t < c.tiles && most < 1e-20f; t++)
      mass[t] = loss[t] < limit && c.part_count[t] ? expf(log_mass[t] - best) : 0.0f;
  }

  // Step 5: what the probes of some groups, at most LANES in lanes, find at every level.
  void measure_probes(int first_group, int groups) {
    const int e = c.pe, first = first_group * c.group_probes, count = groups * c.group_probes;
    Lanes& l = lanes[0];
    for (int g = 0; g < groups; g++) rank_tiles(first_group + g, g);
    load_queries(l, h->probe_token + first, count);
    float* deviation = lanes[1].q;  // (probes, d), not in lanes
    for (int p = 0; p < count; p++) {
      memcpy(deviation + p * c.pd, rows + p * c.pd, 4 * c.pd);
      add_scaled(deviation + p * c.pd, h->q_mean + (first + p) / c.group_probes * c.pd, -1.0f, c.pd);
      offset[p] = -INFINITY;
      each_level(p, [&](int number) {
        for (int i = 0; i < 3; i++) memset(sums[i] + number * e, 0, 4 * e), totals[i][number] = 0.0;
      });
    }
    for (int start = 0; start < c.parts; start += CHUNK) {
      const int stop = std::min<int>(start + CHUNK, c.parts);
      for (int t = start; t < stop; t++) {
        const int keys = find_rows(c.part_tokens + t * LANES, c.part_count[t], true);
        const int at = (t - start) * LANES * e;
        if (keys) see_part(l, l.q, keys);
        for (int p = 0; p < LANES; p++) log_sum[t - start][p] = keys ? l.maximum[p] : -INFINITY;
        product<true>(Strided{scores, LANES}, v, count, keys, e, value + at, e);
        const Strided x{deviation, c.pd}, covariance{h->cross + t * c.d * e, e};
        if (t < c.tiles) product<false>(x, covariance, count, c.d, e, first_order + at, e);
      }
      for (int p = 0; p < count; p++) add_to_levels(p, first + p, deviation + p * c.pd, start, stop);
    }
    for (int p = 0; p < count; p++) judge_levels(p, first + p);
  }

  // The losses of a group rank its tiles: each belongs to the first level that expands it.
  void rank_tiles(int position, int g) {
    weigh_tiles(position, 1.0f, mass + g * c.padded);
    std::fill_n(tiles[g], LEVELS, 0);
    for (int t = 0; t < c.parts; t++) {
      int j = 0;
      while (t < c.tiles && j < c.levels - 1 && !(loss[t] > 0.0f && loss[t] >= c.thresholds[j])) j++;
      level[g * c.parts + t] = j;
      tiles[g][j] += t < c.tiles && c.part_count[t];
    }
  }

  // Call a function with the places of the sums of a probe: of level 0, of others with tiles, and of an empty
  // one after all levels.
  template <class Function>
  void each_level(int p, const Function& function) {
    for (int j = 0; j <= c.levels; j++)
      if (j % c.levels == 0 || tiles[p / c.group_probes][j]) function(p * (c.levels + 1) + j);
  }
  void add_to_level(Sum kind, int number, float weight, const float* x) {
    add_scaled(sums[kind] + number * c.pe, x, weight, c.pe);
    totals[kind][number] += weight;
  }

  // Add at most CHUNK parts to the sums of a probe, in units of the exponential of its largest logit so far.
  void add_to_levels(int p, int probe, const float* deviation, int start, int stop) {
    const int g = p / c.group_probes, d = c.pd, e = c.pe;
    const int64_t row = tangent_row(probe / c.group_probes);
    alignas(64) float logits[2][CHUNK] = {};  // of keys, and of tangents
    float most = offset[p];
    for (int i = 0; i < stop - start; i++) {
      const int64_t at = row + start + i;
      const bool tangent = start + i < c.tiles && c.part_count[start + i];
      logits[0][i] = log_sum[i][p];
      logits[1][i] = tangent ? c.log_mass[at] + dot(deviation, c.k_tangent + at * d, d) : -INFINITY;
      most = std::max(most, std::max(logits[0][i], logits[1][i]));
    }
    if (most > offset[p])
      each_level(p, [&, factor = expf(offset[p] - most)](int number) {
        for (Sum i : {EXACT, TANGENT}) scale(sums[i] + number * e, factor, e), totals[i][number] *= factor;
      });
    offset[p] = most;
    for (int i = 0; i < 2 * CHUNK; i += WIDTH) vec(logits[0] + i) = exponential(vec(logits[0] + i) - most);
    for (int t = start; t < stop; t++) {
      const int number = p * (c.levels + 1) + level[g * c.parts + t], i = t - start, at = (i * LANES + p) * e;
      if (!c.part_count[t]) continue;
      add_to_level(EXACT, number, logits[0][i], value + at);
      if (t >= c.tiles) continue;
      add_to_level(TANGENT, number, logits[1][i], c.v_tangent + (row + t) * e);
      add_to_level(TERM, number, mass[g * c.padded + t], first_order + at);
    }
  }

  // The error and the correction of a probe at every level, which expands the tiles of all levels up to it
  // and has the tangents and first-order terms of those above.
  void judge_levels(int p, int probe) {
    const int L = c.levels, e = c.pe, first = p * (L + 1);
    const double most = diameter();
    const int* count = tiles[p / c.group_probes];
    int used[LEVELS], n = -1, expanded = 0;
    each_level(p, [&](int number) { used[++n] = number; });
    const auto merge = [&](Sum kind, int to, int from) {
      add_scaled(sums[kind] + to * e, sums[kind] + from * e, 1.0f, e), totals[kind][to] += totals[kind][from];
    };
    for (int i = 1; i < n; i++) merge(EXACT, used[i], used[i - 1]);
    for (int i = n - 1; i >= 0; i--) merge(TANGENT, used[i], used[i + 1]), merge(TERM, used[i], used[i + 1]);
    float *exact = h->exact_output + probe * e, *difference = values, *term = differences;
    memcpy(exact, sums[EXACT] + used[n - 1] * e, 4 * e), scale(exact, 1.0 / totals[EXACT][used[n - 1]], e);
    c.norm[head * c.P + probe] = exact_dot(exact, exact, e);
    const double present = std::max<int>(1, c.tiles - std::count(c.part_count, c.part_count + c.tiles, 0));
    for (int i = 0; i < n; i++) {
      const int here = used[i], above = used[i + 1];
      const auto inverse = [](double x) { return (float)(x > SMALLEST ? 1.0 / x : 0.0); };
      const double coarse = totals[TANGENT][above], total = totals[EXACT][here] + coarse;
      const float per_total = inverse(total), per_mass = inverse(totals[TERM][above]);
      for (int m = 0; m < e; m += WIDTH) {
        const Vector weighted = vec(sums[EXACT] + here * e + m) + vec(sums[TANGENT] + above * e + m);
        vec(difference + m) = vec(exact + m) - weighted * per_total;
        vec(term + m) = vec(sums[TERM] + above * e + m) * per_mass;
      }
      const double length = sqrt(exact_dot(term, term, e)), error = exact_dot(difference, difference, e);
      const double u = coarse / std::max(total, SMALLEST) * (length > most ? most / length : 1.0);
      const double share = (expanded += count[here - first]) / present;
      const double results[4] = {error, u * exact_dot(difference, term, e), u * length * u * length, share};
      for (int level = here - first; level < above - first; level++)
        for (int m = 0; m < 4; m++) c.found[((head * c.P + probe) * 4 + m) * L + level] = results[m];
    }
  }

  // Step 4: the correction of the queries in lanes, given the mean covariance of the unexpanded tiles.
  void add_correction(Lanes& l, float shrinkage, const float* covariance) {
    float* correction = rows;  // (e, LANES)
    const Strided x{l.deviation, LANES};
    const float limit = shrinkage / diameter();
    product<true>(Strided{covariance, c.pe}, x, c.e, c.d, l.width, correction, LANES);
    for (int j = 0; j < l.width; j += WIDTH) {
      const Vector change = vec(l.coarse.maximum + j) - vec(l.maximum + j);
      Vector square{}, u = exponential(change) * vec(l.coarse.sum + j) * shrinkage;
      for (int i = 0; i < c.e; i++) {
        const Vector relative = vec(correction + i * LANES + j) * limit;
        square += relative * relative;
      }
      for (int i = 0; i < WIDTH; i++) u[i] /= square[i] > 1.0f ? sqrtf(square[i]) : 1.0f;
      for (int i = 0; i < c.e; i++) vec(l.output + i * LANES + j) += u * vec(correction + i * LANES + j);
    }
  }

  int64_t group_at(int r) const { return (c.image * c.heads + head) * c.groups + c.group_order[r]; }

  // Step 4: the attention of a group, given the mean covariance of its unexpanded tiles, or null.
  void attend_group(int position, const float* covariance) {
    const uint8_t* expanded = c.expanded + group_at(position) * c.tiles;
    const int count = c.member_count[position], blocks = blocks_of(count, LANES);
    const int64_t row = tangent_row(position);
    const float *mean = h->q_mean + position * c.pd, *k_rows[LANES], *v_rows[LANES];
    float bias[LANES];
    for (int j = 0; j < blocks; j++) {
      Lanes& l = lanes[j];
      load_queries(l, c.member_tokens + position * c.group_slots + j * LANES, count - j * LANES);
      for (int i = 0; i < c.d * LANES; i += WIDTH) vec(l.deviation + i) = vec(l.q + i) - mean[i / LANES];
    }
    int found = 0;
    for (int t = 0; t < c.tiles; t++) {
      if (c.part_count[t] && !expanded[t]) {
        k_rows[found] = c.k_tangent + (row + t) * c.pd, v_rows[found] = c.v_tangent + (row + t) * c.pe;
        bias[found++] = c.log_mass[row + t];
      }
      if (found < LANES && (found == 0 || t + 1 < c.tiles)) continue;
      for (int j = 0; j < blocks; j++) attend(lanes[j], lanes[j].deviation, found, k_rows, v_rows, bias);
      found = 0;
    }
    for (int j = 0; j < blocks; j++) lanes[j].coarse = lanes[j];
    for (int t = 0; t < c.parts; t++)
      if (t >= c.tiles || expanded[t]) attend_tokens(c.part_tokens + t * LANES, c.part_count[t], blocks);
    for (int j = 0; j < blocks; j++) {
      if (covariance) add_correction(lanes[j], c.shrinkage[2 * head + position % 2], covariance);
      write_outputs(lanes[j]);
    }
  }

  // Step 5: the tiles that a group expands; `mass` becomes the weights of the others in the mean covariance.
  // Returns true if these are corrected.
  bool choose_tiles(int position, float* mass) {
    const bool everything = c.reads_everything(head, position);
    const double threshold = c.threshold[position % 2];
    uint8_t* expanded = c.expanded + group_at(position) * c.tiles;
    float total = 0.0f;
    if (!everything) weigh_tiles(position, threshold, mass);
    for (int t = 0; t < c.tiles; t++) {
      const bool chosen = everything || (loss[t] > 0.0f && loss[t] >= threshold);
      expanded[t] = chosen && c.part_count[t];
      if (chosen) mass[t] = 0.0f;
      total += mass[t];
    }
    c.expanded_count[group_at(position)] = std::count(expanded, expanded + c.tiles, 1);
    for (int t = 0; t < c.tiles && total > 0.0f; t++) mass[t] /= total;
    return total > 0.0f && c.shrinkage[2 * head + position % 2] > 0.0 && diameter() > 0.0f;
  }

  // Choose the tiles of at most GROUPS groups, which share a product for their covariances, and attend.
  void attend_groups(int first, int last) {
    const int64_t size = c.d * c.pe;
    bool corrected[GROUPS], any = false;
    for (int i = 0; i < last - first; i++) any |= corrected[i] = choose_tiles(first + i, mass + i * c.padded);
    const Strided weights{mass, c.padded}, covariances{h->cross, size};
    if (any) product<false>(weights, covariances, last - first, c.tiles, size, cross, size);
    int32_t* end = exact_queries;
    for (int r = first; r < last; r++) {
      const int32_t* members = c.member_tokens + r * c.group_slots;
      if (c.reads_everything(head, r)) end = std::copy_n(members, c.member_count[r], end);
      else attend_group(r, corrected[r - first] ? cross + (r - first) * size : nullptr);
    }
    attend_exactly(exact_queries, end - exact_queries);
    for (int p = first * c.group_probes; p < std::min<int>(last * c.group_probes, c.P); p++) judge_probe(p);
  }

  // |output - exact|^2, |exact|^2 and the weight of a probe.
  void judge_probe(int probe) {
    double* result = c.probes + ((c.image * c.heads + head) * c.P + probe) * 3;
    result[0] = result[1] = 0.0, result[2] = c.weight[head * c.P + probe];
    if (h->probe_token[probe] < 0) return;
    read_token(c.output, head, h->probe_token[probe], c.e, values);
    add_scaled(values, h->exact_output + probe * c.pe, -1.0f, c.pe);
    result[0] = exact_dot(values, values, c.pe), result[1] = c.norm[head * c.P + probe];
  }
};

// ---- Work is divided among the threads of torch, which wait for it already, or else new ones ----

// Run item(worker, unit, i) for some units from the first one on and all i below `count`.
template <class Item>
static void share_items(const Problem& c, int units, int count, const Item& item) {
  std::atomic<int> next{0}, workers{0};
  auto work = [&] {
    const int number = workers++;
    Worker worker(c, c.scratch + c.bytes + number * c.worker_bytes);
    for (int i; (i = next++) < units * count;) {
      const int unit = c.first_unit + i / count;
      worker.head = unit % c.heads, worker.h = c.head + worker.head;
      item(worker, unit, i % count);
    }
    worker.report_largest();
  };
  using Work = decltype(work);
  if (c.parallel && c.threads > 1) return c.parallel([](void* x) { (*(Work*)x)(); }, &work, c.threads, 0);
  const auto run = [](void* x) -> void* { return (*(Work*)x)(), nullptr; };
  const int most = std::min<int>(c.threads, units * count);
  pthread_t threads[THREADS];
  int started = 1;  // fewer if the system refuses
  while (started < most && !pthread_create(threads + started, nullptr, run, &work)) started++;
  work();
  for (int i = 1; i < started; i++) pthread_join(threads[i], nullptr);
}

// ---- One image ----

static void attend_to_everything(const Problem& c) {
  const int queries = *c.query_count, most = c.heads * blocks_of(queries, LANES) / (2 * c.threads);
  const int together = LANES * std::max(1, std::min(most, BLOCKS));
  share_items(c, c.heads, blocks_of(queries, together), [&](Worker& w, int head, int i) {
    w.attend_exactly(c.query_tokens + i * together, std::min(together, queries - i * together));
    for (int j = 0; i == 0 && j < *c.key_count; j++)
      w.keep_largest(1, w.read_token(c.k, head / c.share, c.key_tokens[j], c.d, w.rows), c.pd);
  });
}

// The tangents of some units; and of the first band the tiles themselves, if they are to be summarised.
static void represent(const Problem& c, int units, bool summarise) {
  share_items(c, units, c.parts, [&](Worker& w, int unit, int part) {
    const bool first = summarise && unit < c.heads;
    if (!summarise && c.reads_everything(w.head, 0) && c.reads_everything(w.head, 1)) return;
    const int keys = w.find_rows(c.part_tokens + part * LANES, c.part_count[part], true);
    for (int j = 0; first && j < keys; j++) w.keep_largest(1, w.k[j], c.pd);
    if (first && part < c.tiles) w.summarise_tile(part);
    w.represent_part(unit / c.heads, part);
  });
}

static void measure_image(Problem& c) {
  share_items(c, c.heads, c.groups + blocks_of(c.query_prefix, LANES), [&](Worker& w, int, int i) {
    const int start = (i - c.groups) * LANES;
    if (start < 0) w.summarise_group(i);
    else w.attend_exactly(c.query_tokens + start, std::min<int>(LANES, c.query_prefix - start));
  });
  share_items(c, c.heads, 1, [](Worker& w, int, int) { w.summarise_head(); });
  const int together = LANES / c.group_probes;
  for (; c.first_unit < c.heads; c.first_unit += c.units_at_once) {
    const int heads = std::min<int>(c.heads - c.first_unit, c.units_at_once);
    represent(c, c.keeps_tangents() ? c.units : heads, true);
    share_items(c, heads, blocks_of(c.probe_groups, together), [&](Worker& w, int, int i) {
      w.measure_probes(i * together, std::min<int>(c.probe_groups - i * together, together));
    });
  }
}

static void attend_image(Problem& c) {
  for (; c.first_unit < c.units; c.first_unit += c.units_at_once) {
    const int units = std::min(c.units - c.first_unit, c.units_at_once);
    if (!c.keeps_tangents()) represent(c, units, false);
    share_items(c, units, blocks_of(LANES, GROUPS), [&](Worker& w, int unit, int i) {
      const int band = unit / c.heads, first = band * LANES + i * GROUPS;
      w.attend_groups(first, std::min(first + GROUPS, c.band_end(band)));
    });
  }
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* bmfa_sources() { return BMFA_SOURCES; }

// Bytes of scratch memory of a call; a call without tiles is one of exact attention.
EXPORT int64_t bmfa_scratch_bytes(const Call* call) {
  const Problem c(*call, nullptr);
  return c.bytes + c.threads * Worker(c, nullptr).bytes;
}

// One image: exact attention; or, for tiles, first what the probes find and then, with the choice, the rest.
EXPORT void bmfa_attend(Call* call, int image, int step) {
  Problem c(*call, call->scratch);
  c.worker_bytes = Worker(c, nullptr).bytes;
#ifdef MADV_HUGEPAGE  // rows of tangents are far apart: one page each would be too many
  madvise((char*)(((uintptr_t)call->scratch + 4095) / 4096 * 4096), c.bytes, MADV_HUGEPAGE);
#endif
  const double keys = c.tiles ? c.groups + c.keys / 8.0 : c.keys;  // of a query
  if (keys * c.queries * c.heads * (c.d + c.e) < 2 * LEAST_WORK) c.threads = 1;
  c.select(image);
  step == 0 ? attend_to_everything(c) : step == 1 ? measure_image(c) : attend_image(c);
  for (int i = 0; i < 2; i++) call->largest[i] = std::max<uint32_t>(call->largest[i], c.most_bits[i]);
}
