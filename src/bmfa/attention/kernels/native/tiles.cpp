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

#include <atomic>

#include "product.h"

constexpr int LANES = 64;   // queries that are computed together; keys of a block, at most
constexpr int BLOCKS = 4;   // blocks of LANES queries that read a block of keys one after the other
constexpr int GROUPS = 12;  // groups that share a product for their covariances
constexpr int THREADS = 256;  // at most, as are the levels
constexpr int LEVELS = 32;
constexpr int CHUNK = 8;    // parts that a probe takes one after the other, with its sums in the cache
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
  int64_t batch, heads, share, queries, keys, d, e, query_prefix, prefix, threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of torch, or null
  char* scratch;
  double factor;        // scale / tau
  uint32_t largest[2];  // bits of the largest |q| and |k|; above those of infinity for NaN
  // Tokens that exist, first of each row, and their numbers; rows of one image or of all.
  int64_t images;
  const int32_t *key_tokens, *key_count, *query_tokens, *query_count;  // (images, keys or queries), (images,)
  // The rest is for tiles.
  int64_t tiles, parts, groups, group_slots, probe_groups, group_probes, levels;
  // Parts are the tiles, then the prefix in blocks of LANES keys, which are like tiles that are always expanded.
  const int32_t *part_tokens, *part_count;    // (images, parts, LANES), (images, parts)
  const int32_t *member_tokens, *members;     // (images, groups, group_slots), (images, groups), in group_order
  const int32_t* group_order;                 // (groups,)
  const double *quantiles, *thresholds;       // (heads, probes), (levels,)
  double uniform_share, farthest;
  // What the probes of an image find: error, product, correction and share; norm and weight.
  double *found, *norm, *weight;  // (heads, probes, 4, levels), (heads, probes)
  // What the caller chooses from that: thresholds of groups at even and odd positions, shrinkage, exact heads.
  const double *threshold, *shrinkage;  // (2,), (heads, 2)
  const uint8_t* exact;                 // (heads,)
  uint8_t* expanded;                    // (B, heads, groups, tiles)
  int32_t* expanded_count;              // (B, heads, groups)
  double* probes;                       // (B, heads, probes, 3)
};

// ---- Memory: one block from the caller, divided twice: once to measure, once for use ----

struct Arena {
  char* base;
  int64_t used;
  // Set each pointer to memory for as many elements as the number after it.
  template <class T, class... More>
  void take(T*& to, int64_t count, More&&... more) {
    to = base ? (T*)(base + used) : nullptr;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    if constexpr (sizeof...(more) > 0) take(more...);
  }
};

struct Lanes {  // LANES queries, their running softmax and output
  int count, width;        // queries, and lanes in use: the next multiple of WIDTH
  const int32_t* tokens;   // (count,)
  float *q, *deviation, *output;  // (d, LANES) twice: q and its difference from the mean; (e, LANES)
  float *maximum, *sum, *coarse_maximum, *coarse_sum;  // (LANES,)
};

struct Scratch {  // of one thread
  Lanes lanes[BLOCKS];
  const float *k[LANES], *v[LANES];  // rows of the keys and values of a part
  float *scores, *keys, *values;  // (LANES, LANES), (LANES, padded d), (LANES, padded e)
  float *rows, *differences;      // (most queries, padded channels), (LANES, padded e)
  float *cross, *mass, *loss, *far;  // (GROUPS, d, padded e), (LANES, padded parts), (padded parts,) twice
  uint8_t* level;                 // (LANES, parts)
  float *exact_sum, *tangent_sum, *term_sum;  // (LANES, levels, padded e)
  float *value, *first_order;                 // (CHUNK, LANES, padded e)
  double *totals, *distances;                 // (LANES, 3, levels), (most queries,)
  Integers largest[2];                        // see `keep_largest`
};

struct Head {  // one query head of one image; groups are numbered by their positions in group_order
  int batch, number, first_row;  // of its tangents
  float *q_mean, *q_lanes, *q_head;  // (R, d), (bands, d, LANES) likewise, (d,)
  double *q_spread, *k_spread, *k_farthest;  // rho (R,), kappa (T,), lambda (T,)
  float *cross, *radius, diameter;   // (T, true d, e), (T,)
  int32_t* probe_token;              // (P,), -1 for a group without queries
  float* exact_output;               // (P, e)
};

// Heads and bands of LANES groups whose tangents are in memory at once.
struct Round {
  int head, heads, band, bands;
};

struct Problem : Call {
  int pd, pe, P, bands, tiles_present;  // padded channels, probes of a head, bands of LANES groups
  int64_t stride;  // of parts: odd, because rows at multiples of 4 KiB share cache lines
  int heads_at_once, bands_at_once;  // of a round, at most
  bool kept;  // the tangents of all groups are in memory at once, and made once; otherwise first those of band 0
  float* inverse_count;  // (padded parts,)
  float *k_tangent, *v_tangent, *log_mass;  // (slots, LANES, stride, d), (.., e) and without
  Head* head;           // (H,)
  Scratch* scratches;   // (threads,)
  int64_t bytes;        // of all this

  explicit Problem(const Call& call, char* base) : Call(call) {
    const int64_t R = groups, T = tiles, L = levels;
    pd = round_up(d, WIDTH), pe = round_up(e, WIDTH), P = probe_groups * group_probes;
    bands = (R + LANES - 1) / LANES, stride = parts | 1;
    const int64_t most = TANGENT_BYTES / (4 * LANES * stride * (1 + pd + pe));  // bands of a head
    heads_at_once = most < 1 ? 1 : most < heads ? most : heads;
    bands_at_once = most < heads_at_once ? 1 : most / heads_at_once < bands ? most / heads_at_once : bands;
    kept = heads_at_once == heads && bands_at_once == bands;
    Arena arena{base, 0};
    const int64_t tangents = T ? heads_at_once * bands_at_once * LANES * stride : 0;
    arena.take(k_tangent, tangents * pd, v_tangent, tangents * pe, log_mass, tangents, head, heads);
    arena.take(inverse_count, round_up(parts, WIDTH));
    for (int i = 0; i < heads; i++) {
      Head measured, &h = base ? head[i] : measured;
      h.number = i;
      arena.take(h.q_mean, R * pd, h.q_lanes, bands * pd * LANES, h.q_head, pd, h.q_spread, R);
      arena.take(h.k_spread, T, h.k_farthest, T, h.cross, T * d * pe, h.radius, T, h.probe_token, P);
      arena.take(h.exact_output, P * pe);
    }
    arena.take(scratches, threads);
    for (int i = 0; i < threads; i++) {
      Scratch measured, &s = base ? scratches[i] : measured;
      const int64_t rows = group_slots > LANES ? group_slots : LANES, probe_rows = T ? LANES : 0;
      const int64_t sums = probe_rows * L * pe, values = CHUNK * probe_rows * pe, padded = round_up(parts, WIDTH);
      for (Lanes& l : s.lanes) {
        arena.take(l.q, pd * LANES, l.deviation, T ? pd * LANES : 0, l.output, pe * LANES);
        arena.take(l.maximum, LANES, l.sum, LANES, l.coarse_maximum, LANES, l.coarse_sum, LANES);
      }
      arena.take(s.scores, LANES * LANES, s.keys, LANES * pd, s.values, LANES * pe, s.differences, LANES * pe);
      arena.take(s.rows, rows * (pd > pe ? pd : pe), s.cross, T ? GROUPS * d * pe : 0, s.loss, padded, s.far, padded);
      arena.take(s.mass, probe_rows * padded, s.level, probe_rows * parts, s.exact_sum, sums);
      arena.take(s.tangent_sum, sums, s.term_sum, sums, s.value, values, s.first_order, values);
      arena.take(s.totals, probe_rows * 3 * L, s.distances, rows);
      s.largest[0] = s.largest[1] = Integers{};
    }
    bytes = arena.used;
  }
  Round round(int first, int band, int most) const {
    const int h = heads - first < heads_at_once ? heads - first : heads_at_once;
    return {first, h, band, bands - band < most ? bands - band : most};
  }
};

// ---- Threads: those of torch, which wait for work already, or else new ones ----

// Run item(scratch, i) for i from 0 to `count` - 1, divided among the threads.
template <class Item>
static void share_items(const Problem& c, int count, const Item& item) {
  struct Share {
    const Problem& c;
    const Item& item;
    int count;
    std::atomic<int> next, workers;
    static void run(void* argument) {
      Share& share = *(Share*)argument;
      Scratch& s = share.c.scratches[share.workers.fetch_add(1)];
      for (int i; (i = share.next.fetch_add(1)) < share.count;) share.item(s, i);
    }
    static void* run_thread(void* argument) { return run(argument), nullptr; }
  } share{c, item, count, {0}, {0}};
  if (c.parallel && c.threads > 1) return c.parallel(Share::run, &share, c.threads, 0);
  pthread_t threads[THREADS];
  int started = 1;  // fewer if the system refuses
  while (started < c.threads && started < count && !pthread_create(threads + started, nullptr, Share::run_thread, &share))
    started++;
  Share::run(&share);
  for (int i = 1; i < started; i++) pthread_join(threads[i], nullptr);
}

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

// Copy a token to `to` in float32, with zeros from `channels` on to the next multiple of WIDTH.
static float* read_token(const Call& c, const Tensor& x, int b, int head, int token, int channels, float* to) {
  const char* from = token_address(c, x, b, head, token);
  const uint16_t* half = (const uint16_t*)from;
  int copied = 0;
  for (; c.dtype == 0 && copied + WIDTH <= channels; copied += WIDTH) store(to + copied, load((const float*)from + copied));
  for (int i = copied; c.dtype == 0 && i < channels; i++) to[i] = ((const float*)from)[i];
  for (int i = 0; c.dtype == 1 && i < channels; i++) to[i] = as_float((uint32_t)half[i] << 16);
  for (int i = 0; c.dtype == 2 && i < channels; i++) to[i] = widen_float16(half[i]);
  for (int i = channels; i % WIDTH; i++) to[i] = 0.0f;
  return to;
}
static void write_token(const Call& c, int b, int head, int token, const float* from) {
  char* to = token_address(c, c.output, b, head, token);
  uint16_t* half = (uint16_t*)to;
  if (c.dtype == 0) memcpy(to, from, 4 * c.e);
  for (int i = 0; c.dtype == 1 && i < c.e; i++) half[i] = to_bfloat16(from[i]);
  for (int i = 0; c.dtype == 2 && i < c.e; i++) half[i] = to_float16(from[i]);
}

// ---- Sums over the channels of one vector, whose number is a multiple of WIDTH ----

static inline float dot(const float* x, const float* y, int n) {
  Vector total{};
  for (int i = 0; i < n; i += WIDTH) total += load(x + i) * load(y + i);
  return sum(total);
}
static void add_scaled(float* to, const float* x, float factor, int n) {
  const Vector weight = splat(factor);
  for (int i = 0; i < n; i += WIDTH) store(to + i, load(to + i) + weight * load(x + i));
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
  for (int i = 0; i < rows; i++)
    for (int j = i * LANES; j < i * LANES + width; j += WIDTH) store(x + j, load(x + j) * load(factor + j % LANES));
}
// Keep the largest magnitudes of q (0) and k (1), from which the caller learns of NaN, infinity and overflow:
// bits of NaN are above those of infinity.
static void keep_largest(Scratch& s, int which, const float* x, int n) {
  Integers& most = s.largest[which];
  for (int i = 0; i < n; i += WIDTH) {
    const Integers bits = read<Integers>(x + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
}

// ---- Exact attention of queries in lanes: an online softmax over blocks of keys ----

// Write at most LANES queries of a head, times the factor, into lanes, and start their softmax. The other
// lanes up to a multiple of WIDTH become 0, as do queries with a negative number. The queries also stay in
// `s.rows`.
static void load_queries(const Problem& c, Scratch& s, const Head& h, Lanes& l, const int32_t* tokens, int count) {
  l.count = count < LANES ? count : LANES, l.width = round_up(l.count, WIDTH), l.tokens = tokens;
  for (int i = 0; i < l.count; i++) {
    float* row = s.rows + i * c.pd;
    if (tokens[i] < 0) memset(row, 0, 4 * c.pd);
    else read_token(c, c.q, h.batch, h.number, tokens[i], c.d, row);
  }
  keep_largest(s, 0, s.rows, l.count * c.pd);
  for (int j = 0; j < l.count * c.pd; j += WIDTH) store(s.rows + j, load(s.rows + j) * splat(c.factor));
  transpose(Strided{s.rows, c.pd}, l.count, c.pd, l.q, LANES);
  for (int i = 0; i < LANES; i++) l.maximum[i] = -INFINITY, l.sum[i] = 0.0f;
  memset(l.output, 0, 4 * LANES * c.e);
}

// Include `count` rows of scores, plus a bias for each, in VECTORS vectors of lanes of the softmax: scores
// become weights. Returns true if the maximum moved; `rescale` has the factors of earlier weights.
template <int VECTORS>
static inline bool softmax_lanes(Scratch& s, Lanes& l, int lane, int count, const float* bias, float* rescale) {
  Vector maximum[VECTORS], old[VECTORS], total[VECTORS];
  Integers moved{};
  float* scores = s.scores + lane;
  for (int j = 0; j < VECTORS; j++) maximum[j] = old[j] = load(l.maximum + lane + j * WIDTH);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < VECTORS; j++) {
      Vector x = load(scores + i * LANES + j * WIDTH);
      if (bias) store(scores + i * LANES + j * WIDTH, x += splat(bias[i]));
      maximum[j] = larger(maximum[j], x);
    }
  for (int j = 0; j < VECTORS; j++) {
    const Vector factor = exponential(old[j] - maximum[j]);
    store(rescale + lane + j * WIDTH, factor);
    moved |= maximum[j] != old[j];
    total[j] = Vector{};
    store(l.sum + lane + j * WIDTH, load(l.sum + lane + j * WIDTH) * factor);
  }
  for (int i = 0; i < count; i++)
    for (int j = 0; j < VECTORS; j++) {
      const Vector p = exponential(load(scores + i * LANES + j * WIDTH) - maximum[j]);
      store(scores + i * LANES + j * WIDTH, p);
      total[j] += p;
    }
  for (int j = 0; j < VECTORS; j++) {
    store(l.maximum + lane + j * WIDTH, maximum[j]);
    store(l.sum + lane + j * WIDTH, load(l.sum + lane + j * WIDTH) + total[j]);
  }
  bool any = false;
  for (int i = 0; i < WIDTH; i++) any |= moved[i] != 0;
  return any;
}

static bool softmax(Scratch& s, Lanes& l, int count, const float* bias, float* rescale) {
  bool moved = false;
  int lane = 0;
  for (; lane + 4 * WIDTH <= l.width; lane += 4 * WIDTH) moved |= softmax_lanes<4>(s, l, lane, count, bias, rescale);
  for (; lane < l.width; lane += WIDTH) moved |= softmax_lanes<1>(s, l, lane, count, bias, rescale);
  return moved;
}

// Attend to `count` keys and values, at most LANES, with q, or its difference from the mean, in lanes.
static void attend(const Problem& c, Scratch& s, Lanes& l, const float* q, int count, const float* const* keys,
                   const float* const* values, const float* bias = nullptr) {
  alignas(64) float rescale[LANES];
  product<false>(keys, Strided{q, LANES}, count, c.d, l.width, s.scores, LANES);
  if (softmax(s, l, count, bias, rescale)) scale_lanes(l.output, c.e, l.width, rescale);
  product<true>(values, Strided{s.scores, LANES}, c.e, count, l.width, l.output, LANES, true);
}

// Find the rows of keys and values of at most LANES tokens. Half precision is copied to float32, and so are
// rows of a width that `padded` products exceed.
static void find_rows(const Problem& c, Scratch& s, const Head& h, const int32_t* tokens, int count, bool padded) {
  const int head = h.number / c.share;
  const bool copy_k = c.dtype || (padded && c.d < c.pd), copy_v = c.dtype || (padded && c.e < c.pe);
  for (int i = 0; i < count; i++) {
    s.k[i] = copy_k ? read_token(c, c.k, h.batch, head, tokens[i], c.d, s.keys + i * c.pd)
                    : (const float*)token_address(c, c.k, h.batch, head, tokens[i]);
    s.v[i] = copy_v ? read_token(c, c.v, h.batch, head, tokens[i], c.e, s.values + i * c.pe)
                    : (const float*)token_address(c, c.v, h.batch, head, tokens[i]);
  }
}

// Attend to the keys and values of some tokens, at most LANES, with all queries in the first blocks of lanes.
static void attend_tokens(const Problem& c, Scratch& s, const Head& h, const int32_t* tokens, int count, int blocks) {
  find_rows(c, s, h, tokens, count, false);
  for (int j = 0; j < blocks; j++) attend(c, s, s.lanes[j], s.lanes[j].q, count, s.k, s.v);
}

// Write the outputs in lanes to their tokens, divided by the sums of the weights.
static void write_outputs(const Problem& c, Scratch& s, const Head& h, Lanes& l) {
  for (int i = 0; i < l.width; i++) l.sum[i] = 1.0f / l.sum[i];
  scale_lanes(l.output, c.e, l.width, l.sum);
  transpose(Strided{l.output, LANES}, c.e, l.width, s.rows, c.pe);
  for (int i = 0; i < l.count; i++) write_token(c, h.batch, h.number, l.tokens[i], s.rows + i * c.pe);
}

// Exact attention, to all keys that exist, of the queries in the first blocks of lanes.
static void attend_exactly(const Problem& c, Scratch& s, const Head& h, int blocks) {
  const int keys = *c.key_count;
  for (int i = 0; i < keys; i += LANES)
    attend_tokens(c, s, h, c.key_tokens + i, keys - i < LANES ? keys - i : LANES, blocks);
  for (int j = 0; j < blocks; j++) write_outputs(c, s, h, s.lanes[j]);
}

// Turn to an image.
static void select_image(Problem& c, const Call& call, int b) {
  const int64_t i = c.images > 1 ? b : 0;
  c.key_tokens = call.key_tokens + i * c.keys, c.key_count = call.key_count + i;
  c.query_tokens = call.query_tokens + i * c.queries, c.query_count = call.query_count + i;
  c.part_tokens = call.part_tokens + i * c.parts * LANES, c.part_count = call.part_count + i * c.parts;
  c.member_tokens = call.member_tokens + i * c.groups * c.group_slots, c.members = call.members + i * c.groups;
  for (int h = 0; h < c.heads; h++) c.head[h].batch = b;
  c.tiles_present = 0;
  for (int t = 0; t < c.parts; t++) {
    c.tiles_present += t < c.tiles && c.part_count[t];
    c.inverse_count[t] = 1.0f / (c.part_count[t] > 1 ? c.part_count[t] : 1);
  }
}

// ---- Tiles: steps 1 to 3 ----

// Step 5: the probes of a group, whose squared distances from the mean become their probabilities.
static void draw_probes(const Problem& c, const Head& h, double* squares, double largest, int position) {
  const int count = c.members[position];
  double total = 0.0;
  for (int i = 0; i < count; i++) {
    squares[i] = largest > 0.0 ? squares[i] / largest : 0.0;
    total += squares[i] *= squares[i];
  }
  const double uniform = (total > 0.0 ? c.uniform_share : 1.0) / count;
  const double rest = total > 0.0 ? (1.0 - c.uniform_share) / total : 0.0;
  for (int i = 0; i < count; i++) squares[i] = uniform + rest * squares[i];
  for (int j = 0; j < c.group_probes; j++) {
    const int probe = position * c.group_probes + j;
    int chosen = 0;
    double below = count ? squares[0] : 0.0;
    while (chosen + 1 < count && below <= c.quantiles[h.number * c.P + probe]) below += squares[++chosen];
    h.probe_token[probe] = count ? c.member_tokens[position * c.group_slots + chosen] : -1;
    c.weight[h.number * c.P + probe] = count ? 1.0 / (squares[chosen] * c.group_probes) : 0.0;
  }
}

// Step 1: the mean query of a group, rho, and the probes. Queries are times scale / tau throughout.
static void summarise_group(const Problem& c, Scratch& s, const Head& h, int position) {
  const int d = c.pd, count = c.members[position];
  const int32_t* tokens = c.member_tokens + position * c.group_slots;
  float* mean = h.q_mean + position * d;
  memset(mean, 0, 4 * d);
  for (int i = 0; i < count; i++) {
    float* row = s.rows + i * d;
    read_token(c, c.q, h.batch, h.number, tokens[i], c.d, row);
    for (int j = 0; j < d; j += WIDTH) store(row + j, load(row + j) * splat(c.factor));
    add_scaled(mean, row, 1.0f, d);
  }
  for (int j = 0; j < d; j++) mean[j] /= count > 1 ? count : 1;
  double total = 0.0, most = 0.0;
  for (int i = 0; i < count; i++) {
    add_scaled(s.rows + i * d, mean, -1.0f, d);
    s.distances[i] = exact_dot(s.rows + i * d, s.rows + i * d, d);
    total += s.distances[i], most = s.distances[i] > most ? s.distances[i] : most;
  }
  h.q_spread[position] = count ? sqrt(total / count) * sqrt(most) : 0.0;
  float* lanes = h.q_lanes + position / LANES * d * LANES;
  for (int j = 0; j < d; j++) lanes[j * LANES + position % LANES] = mean[j];
  if (position < c.probe_groups) draw_probes(c, h, s.distances, most, position);
}

// Step 1: qhat, the mean of the queries of the first LANES groups.
static void summarise_head(const Problem& c, const Head& h) {
  memset(h.q_head, 0, 4 * c.pd);
  int count = 0;
  for (int r = 0; r < c.groups && r < LANES; r++) {
    add_scaled(h.q_head, h.q_mean + r * c.pd, c.members[r], c.pd);
    count += c.members[r];
  }
  for (int j = 0; j < c.pd; j++) h.q_head[j] /= count > 1 ? count : 1;
}

// Find the rows of a part; returns their number.
static int find_part(const Problem& c, Scratch& s, const Head& h, int part) {
  find_rows(c, s, h, c.part_tokens + part * LANES, c.part_count[part], true);
  return c.part_count[part];
}

// Subtract the mean of rows with weights p from them.
static void subtract_mean(const float* const* x, const float* p, int count, int n, float* to) {
  alignas(64) float center[256 + WIDTH] = {};
  for (int i = 0; i < count; i++) add_scaled(center, x[i], p[i], n);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < n; j += WIDTH) store(to + i * n + j, load(x[i] + j) - load(center + j));
}

// Step 2: the covariance of keys and values under qhat, kappa, lambda, and the largest distance of a value.
static void summarise_tile(const Problem& c, Scratch& s, const Head& h, int tile) {
  const int count = c.part_count[tile], d = c.pd, e = c.pe;
  float* cross = h.cross + tile * c.d * e;
  alignas(64) float p[LANES];
  float largest = -INFINITY, total = 0.0f;
  for (int i = 0; i < LANES; i++) {
    p[i] = i < count ? dot(h.q_head, s.k[i], d) : -INFINITY;
    largest = p[i] > largest ? p[i] : largest;
  }
  for (int i = 0; i < LANES && count; i += WIDTH) store(p + i, exponential(load(p + i) - splat(largest)));
  for (int i = 0; i < count; i++) total += p[i];
  for (int i = 0; i < count; i++) p[i] /= total;
  subtract_mean(s.v, p, count, e, s.differences);
  subtract_mean(s.k, p, count, d, s.rows);
  double most = 0.0, farthest = 0.0, squares = 0.0;
  for (int i = 0; i < count; i++) {
    const double distance = exact_dot(s.rows + i * d, s.rows + i * d, d);
    farthest = fmax(farthest, distance), squares += distance;
    most = fmax(most, exact_dot(s.differences + i * e, s.differences + i * e, e));
  }
  h.radius[tile] = sqrt(most), h.k_farthest[tile] = farthest, h.k_spread[tile] = squares / (count > 1 ? count : 1);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < d; j += WIDTH) store(s.rows + i * d + j, load(s.rows + i * d + j) * splat(p[i]));
  product<true>(Strided{s.rows, d}, Strided{s.differences, e}, c.d, count, e, cross, e);
}

// Steps 3 and 5: what queries in lanes see in the part in `s.k`: their softmax over it is left in
// `s.scores`, and the logarithm of their sums of exponentials in `l.maximum`.
static void see_part(const Problem& c, Scratch& s, Lanes& l, const float* queries, int count) {
  alignas(64) float unused[LANES];
  product<false>(s.k, Strided{queries, LANES}, count, c.d, l.width, s.scores, LANES);
  for (int i = 0; i < l.width; i++) l.maximum[i] = -INFINITY, l.sum[i] = 0.0f;
  softmax(s, l, count, nullptr, unused);
  for (int i = 0; i < l.width; i++) l.maximum[i] += logf(l.sum[i]), l.sum[i] = 1.0f / l.sum[i];
  scale_lanes(s.scores, count, l.width, l.sum);
}

// Where the tangents of a group are.
static int64_t tangent_row(const Problem& c, const Head& h, int position) {
  return (h.first_row + position) * c.stride;
}

// Step 3: the tangents of a part for a band of groups of a head.
static void represent_part(const Problem& c, Scratch& s, const Head& h, int band, int part) {
  Lanes& l = s.lanes[0];
  const int64_t first = tangent_row(c, h, band * LANES) + part;
  const int count = c.part_count[part], groups = c.groups - band * LANES;
  l.count = groups < LANES ? groups : LANES, l.width = round_up(l.count, WIDTH);
  if (count) see_part(c, s, l, h.q_lanes + band * c.pd * LANES, count);
  for (int i = 0; i < l.count; i++) c.log_mass[first + i * c.stride] = count ? l.maximum[i] : -INFINITY;
  if (!count || part >= c.tiles) return;
  const Strided p{s.scores, LANES};
  product<true>(p, s.k, l.count, count, c.pd, c.k_tangent + first * c.pd, c.stride * c.pd);
  product<true>(p, s.v, l.count, count, c.pe, c.v_tangent + first * c.pe, c.stride * c.pe);
}

// Step 3: shares m of the parts of a group, and in `s.loss` the losses of its tiles.
static void weigh_tiles(const Problem& c, Scratch& s, const Head& h, int position, float* mass) {
  const float *log_mass = c.log_mass + tangent_row(c, h, position), limit = 1e30f;
  const int padded = round_up(c.parts, WIDTH);
  float largest = -INFINITY;
  for (int t = 0; t < padded; t++) {
    mass[t] = t < c.parts ? log_mass[t] : -INFINITY;
    largest = mass[t] > largest ? mass[t] : largest;
  }
  Vector total{};
  for (int t = 0; t < padded; t += WIDTH) total += exponential(load(mass + t) - splat(largest));
  const Vector log_z = splat(largest + logf(sum(total)));
  const double spread = h.q_spread[position] / (2.0 * c.d);
  for (int t = 0; t < c.tiles; t++) {  // NaN becomes the limit
    s.loss[t] = spread * h.k_spread[t] < limit ? spread * h.k_spread[t] : limit;
    s.far[t] = spread * h.k_farthest[t] < limit ? spread * h.k_farthest[t] : limit;
  }
  for (int t = 0; t < padded; t += WIDTH) {
    const Vector log_share = load(mass + t) - log_z, share = exponential(log_share), far = load(s.far + t);
    Vector deviations, one = splat(1.0f);
    for (int i = 0; i < WIDTH; i++) deviations[i] = (float)c.farthest * sqrtf(2.0f * far[i]);
    const Vector f = far < deviations ? far : deviations, exponent = log_share + f;
    // m expm1(f) / n, limited to 1 before it overflows
    Vector grown = exponential(exponent < 5.0f ? exponent : splat(5.0f)) * load(c.inverse_count + t);
    grown = grown < one ? grown : one;
    grown *= f < 0.02f ? f * (one - f * (splat(0.5f) - f * splat(1.0f / 6.0f))) : one - exponential(-f);
    const Vector loss = share * load(s.loss + t) + grown;
    store(mass + t, share), store(s.loss + t, loss < one ? loss : one);
  }
  // Only ratios count of the shares of tiles that may stay unexpanded: for a target, those with a loss below 1.
  float most = 0.0f, best = -INFINITY;
  for (int t = 0; t < c.tiles; t++)
    if (s.loss[t] < 1.0f) most = fmaxf(most, mass[t]), best = fmaxf(best, log_mass[t]);
  for (int t = 0; t < c.tiles && c.farthest > 0.0 && most < 1e-20f; t++)
    mass[t] = s.loss[t] < 1.0f && c.part_count[t] ? expf(log_mass[t] - best) : 0.0f;
}

// ---- Tiles: step 5, what the probes determine ----

// The error and the correction of a probe at every level, from sums over the tiles that each level is the
// first to expand: of exact values, of tangents, and of first-order terms. `tiles` has the number of these.
static void judge_levels(const Problem& c, Scratch& s, const Head& h, int probe, int index, const int* tiles) {
  const int L = c.levels, e = c.pe;
  float *exact_sum = s.exact_sum + index * L * e, *tangent_sum = s.tangent_sum + index * L * e;
  float *term_sum = s.term_sum + index * L * e, *exact = h.exact_output + probe * e;
  double *exact_total = s.totals + index * 3 * L, *tangent_total = exact_total + L, *mass_total = tangent_total + L;
  // Level j expands the tiles of levels up to j: exact sums from below, the others from above.
  for (int j = 1; j < L; j++) {
    add_scaled(exact_sum + j * e, exact_sum + (j - 1) * e, 1.0f, e);
    exact_total[j] += exact_total[j - 1];
  }
  for (int j = L - 2; j >= 0; j--) {
    add_scaled(tangent_sum + j * e, tangent_sum + (j + 1) * e, 1.0f, e);
    add_scaled(term_sum + j * e, term_sum + (j + 1) * e, 1.0f, e);
    tangent_total[j] += tangent_total[j + 1], mass_total[j] += mass_total[j + 1];
  }
  for (int i = 0; i < e; i += WIDTH)
    store(exact + i, load(exact_sum + (L - 1) * e + i) * splat(1.0 / exact_total[L - 1]));
  c.norm[h.number * c.P + probe] = exact_dot(exact, exact, e);
  double* found = c.found + (h.number * c.P + probe) * 4 * L;
  int expanded = 0;
  for (int j = 0; j < L; j++) {
    const bool last = j + 1 == L;
    const double above = last ? 0.0 : tangent_total[j + 1], masses = last ? 0.0 : mass_total[j + 1];
    const double total = exact_total[j] + above;
    float *difference = s.values, *term = s.differences;
    for (int i = 0; i < e; i += WIDTH) {
      Vector x = load(exact_sum + j * e + i), y{};
      if (above > 0.0) x += load(tangent_sum + (j + 1) * e + i);
      if (masses > SMALLEST) y = load(term_sum + (j + 1) * e + i) * splat(1.0 / masses);
      store(difference + i, load(exact + i) - (total > SMALLEST ? x * splat(1.0 / total) : Vector{}));
      store(term + i, y);
    }
    const double length = sqrt(exact_dot(term, term, e));
    const double factor = above / fmax(total, SMALLEST) * (length > h.diameter ? h.diameter / length : 1.0);
    found[j] = exact_dot(difference, difference, e), found[L + j] = factor * exact_dot(difference, term, e);
    found[2 * L + j] = factor * length * factor * length;
    expanded += tiles[j];
    found[3 * L + j] = expanded / fmax(c.tiles_present, 1.0);
  }
}

// The probes of some groups of a head, at most LANES in lanes: sums over all parts, in units of the
// exponential of the largest logit so far, and what follows from them.
static void measure_probes(const Problem& c, Scratch& s, const Head& h, int first_group, int groups) {
  const int L = c.levels, d = c.pd, e = c.pe, padded = round_up(c.parts, WIDTH);
  const int first = first_group * c.group_probes, count = groups * c.group_probes;
  Lanes& l = s.lanes[0];
  int tiles[LANES][LEVELS] = {};
  float offset[LANES], exact[CHUNK * LANES];
  for (int g = 0; g < groups; g++) {  // a tile has the first level that expands it; the prefix has level 0
    weigh_tiles(c, s, h, first_group + g, s.mass + g * padded);
    for (int t = 0; t < c.parts; t++) {
      int level = 0;
      if (t < c.tiles)
        while (level < L - 1 && !(s.loss[t] > 0.0f && s.loss[t] >= c.thresholds[level])) level++;
      s.level[g * c.parts + t] = level;
      tiles[g][level] += t < c.tiles && c.part_count[t];
    }
  }
  load_queries(c, s, h, l, h.probe_token + first, count);
  float* deviation = s.lanes[1].q;  // (probes, d), not in lanes
  for (int p = 0; p < count; p++) {
    memcpy(deviation + p * d, s.rows + p * d, 4 * d);
    add_scaled(deviation + p * d, h.q_mean + (first + p) / c.group_probes * d, -1.0f, d);
  }
  for (int p = 0; p < LANES; p++) offset[p] = -INFINITY;
  for (float* x : {s.exact_sum, s.tangent_sum, s.term_sum}) memset(x, 0, 4 * count * L * e);
  memset(s.totals, 0, 8 * 3 * count * L);
  for (int start = 0; start < c.parts; start += CHUNK) {
    const int stop = start + CHUNK < c.parts ? start + CHUNK : c.parts;
    for (int t = start; t < stop; t++) {
      const int keys = find_part(c, s, h, t), at = (t - start) * LANES;
      if (keys) see_part(c, s, l, l.q, keys);
      for (int p = 0; p < LANES; p++) exact[at + p] = keys ? l.maximum[p] : -INFINITY;
      product<true>(Strided{s.scores, LANES}, s.v, count, keys, e, s.value + at * e, e);
      if (t < c.tiles)
        product<false>(Strided{deviation, d}, Strided{h.cross + t * c.d * e, e}, count, c.d, e, s.first_order + at * e, e);
    }
    for (int p = 0; p < count; p++) {
      const int g = p / c.group_probes;
      const int64_t row = tangent_row(c, h, first_group + g);
      float *sums[3] = {s.exact_sum + p * L * e, s.tangent_sum + p * L * e, s.term_sum + p * L * e}, most = offset[p];
      alignas(64) float logits[2 * CHUNK] = {};  // of keys, and of tangents
      for (int t = start; t < stop; t++) {
        float *of_keys = logits + t - start, *of_tangents = of_keys + CHUNK;
        *of_keys = exact[(t - start) * LANES + p];
        *of_tangents = c.part_count[t] && t < c.tiles ? c.log_mass[row + t] + dot(deviation + p * d, c.k_tangent + (row + t) * d, d) : -INFINITY;
        most = *of_keys > most ? *of_keys : most, most = *of_tangents > most ? *of_tangents : most;
      }

      if (most > offset[p]) {
        const float factor = expf(offset[p] - most);
        for (int i = 0; i < L * e; i += WIDTH)
          for (int j = 0; j < 2; j++) store(sums[j] + i, load(sums[j] + i) * splat(factor));
        for (int i = 0; i < 2 * L; i++) s.totals[p * 3 * L + i] *= factor;
        offset[p] = most;
      }
      for (int i = 0; i < 2 * CHUNK; i += WIDTH) store(logits + i, exponential(load(logits + i) - splat(most)));
      for (int t = start; t < stop; t++) {
        if (!c.part_count[t]) continue;
        const int level = s.level[g * c.parts + t], at = level * e, i = (t - start) * LANES + p;
        double* totals = s.totals + p * 3 * L + level;
        const float weight = logits[t - start];
        add_scaled(sums[0] + at, s.value + i * e, weight, e);
        totals[0] += weight;
        if (t >= c.tiles) continue;
        const float coarse = logits[CHUNK + t - start], mass = s.mass[g * padded + t];
        add_scaled(sums[1] + at, c.v_tangent + (row + t) * e, coarse, e);
        add_scaled(sums[2] + at, s.first_order + i * e, mass, e);
        totals[L] += coarse, totals[2 * L] += mass;
      }
    }
  }
  for (int p = 0; p < count; p++) judge_levels(c, s, h, first + p, p, tiles[p / c.group_probes]);
}

// ---- Tiles: step 4 ----

// The correction of the queries in lanes, given the mean covariance of the tiles that are not expanded.
static void add_correction(const Problem& c, Scratch& s, const Head& h, Lanes& l, float shrinkage, const float* cross) {
  float* correction = s.rows;  // (e, LANES)
  product<true>(Strided{cross, c.pe}, Strided{l.deviation, LANES}, c.e, c.d, l.width, correction, LANES);
  for (int j = 0; j < l.width; j += WIDTH) {
    const Vector relative = splat(shrinkage / h.diameter);
    Vector square{}, weight = exponential(load(l.coarse_maximum + j) - load(l.maximum + j)) * load(l.coarse_sum + j);
    for (int i = 0; i < c.e; i++) {
      const Vector x = load(correction + i * LANES + j) * relative;
      square += x * x;
    }
    weight *= splat(shrinkage);
    for (int i = 0; i < WIDTH; i++) weight[i] /= square[i] > 1.0f ? sqrtf(square[i]) : 1.0f;
    for (int i = 0; i < c.e; i++) {
      float* x = l.output + i * LANES + j;
      store(x, load(x) + weight * load(correction + i * LANES + j));
    }
  }
}

// Attention of a group, given the tiles that it expands and the mean covariance of the others, or null.
static void attend_group(const Problem& c, Scratch& s, const Head& h, int position, const uint8_t* expanded,
                         const float* cross) {
  const int count = c.members[position], blocks = (count + LANES - 1) / LANES;
  const int64_t row = tangent_row(c, h, position);
  const float* mean = h.q_mean + position * c.pd;
  alignas(64) float bias[LANES];
  const float *keys[LANES], *values[LANES];
  for (int j = 0; j < blocks; j++) {
    Lanes& l = s.lanes[j];
    load_queries(c, s, h, l, c.member_tokens + position * c.group_slots + j * LANES, count - j * LANES);
    for (int i = 0; i < c.d; i++)
      for (int k = 0; k < l.width; k += WIDTH)
        store(l.deviation + i * LANES + k, load(l.q + i * LANES + k) - splat(mean[i]));
  }
  int rows = 0;
  for (int t = 0; t < c.tiles; t++) {
    if (c.part_count[t] && !expanded[t]) {
      keys[rows] = c.k_tangent + (row + t) * c.pd, values[rows] = c.v_tangent + (row + t) * c.pe;
      bias[rows++] = c.log_mass[row + t];
    }
    if (rows < LANES && (rows == 0 || t + 1 < c.tiles)) continue;
    for (int j = 0; j < blocks; j++) attend(c, s, s.lanes[j], s.lanes[j].deviation, rows, keys, values, bias);
    rows = 0;
  }
  for (int j = 0; j < blocks; j++) {
    memcpy(s.lanes[j].coarse_maximum, s.lanes[j].maximum, 4 * LANES);
    memcpy(s.lanes[j].coarse_sum, s.lanes[j].sum, 4 * LANES);
  }
  for (int t = 0; t < c.parts; t++)
    if (t >= c.tiles || expanded[t]) attend_tokens(c, s, h, c.part_tokens + t * LANES, c.part_count[t], blocks);
  for (int j = 0; j < blocks; j++) {
    if (cross && h.diameter > 0.0f) add_correction(c, s, h, s.lanes[j], c.shrinkage[2 * h.number + position % 2], cross);
    write_outputs(c, s, h, s.lanes[j]);
  }
}

static bool reads_everything(const Problem& c, const Head& h, int position) {
  return c.exact[h.number] || c.threshold[position % 2] == 0.0;
}

// Errors of the probes of a group: |output - exact|^2, |exact|^2 and the weight.
static void judge_probes(const Problem& c, Scratch& s, const Head& h, int position) {
  for (int i = 0; i < c.group_probes; i++) {
    const int probe = position * c.group_probes + i;
    double* result = c.probes + ((h.batch * c.heads + h.number) * c.P + probe) * 3;
    result[0] = result[1] = 0.0, result[2] = c.weight[h.number * c.P + probe];
    if (h.probe_token[probe] < 0) continue;
    read_token(c, c.output, h.batch, h.number, h.probe_token[probe], c.e, s.values);
    add_scaled(s.values, h.exact_output + probe * c.pe, -1.0f, c.pe);
    result[0] = exact_dot(s.values, s.values, c.pe), result[1] = c.norm[h.number * c.P + probe];
  }
}

// Choose the tiles of at most GROUPS groups, which share a product for their covariances, and attend.
static void attend_groups(const Problem& c, Scratch& s, const Head& h, int first, int last) {
  const int T = c.tiles, padded = round_up(c.parts, WIDTH);
  const int64_t size = c.d * c.pe;
  bool corrected[GROUPS] = {}, any = false;
  int blocks = 0;
  for (int r = first; r < last; r++) {
    const bool everything = reads_everything(c, h, r);
    const int64_t group = (h.batch * c.heads + h.number) * c.groups + c.group_order[r];
    uint8_t* expanded = c.expanded + group * T;
    float *mass = s.mass + (r - first) * padded, total = 0.0f;
    if (!everything) weigh_tiles(c, s, h, r, mass);
    int count = 0;
    for (int t = 0; t < T; t++) {
      const bool chosen = everything || (s.loss[t] > 0.0f && s.loss[t] >= c.threshold[r % 2]);
      expanded[t] = chosen && c.part_count[t];
      if (chosen) mass[t] = 0.0f;
      total += mass[t], count += expanded[t];
    }
    c.expanded_count[group] = count;
    any |= corrected[r - first] = total > 0.0f && c.shrinkage[2 * h.number + r % 2] > 0.0;
    for (int t = 0; t < T && total > 0.0f; t++) mass[t] /= total;
  }
  if (any)
    product<false>(Strided{s.mass, padded}, Strided{h.cross, size}, last - first, T, size, s.cross, size);
  for (int r = first; r < last; r++) {
    const int64_t group = (h.batch * c.heads + h.number) * c.groups + c.group_order[r];
    const float* cross = corrected[r - first] ? s.cross + (r - first) * size : nullptr;
    if (!reads_everything(c, h, r)) attend_group(c, s, h, r, c.expanded + group * T, cross);
  }
  for (int r = first; r < last; r++)  // exact groups, as many blocks of queries as possible at a time
    for (int i = 0; i < c.members[r] && reads_everything(c, h, r); i += LANES) {
      load_queries(c, s, h, s.lanes[blocks++], c.member_tokens + r * c.group_slots + i, c.members[r] - i);
      if (blocks == BLOCKS) attend_exactly(c, s, h, BLOCKS), blocks = 0;
    }
  attend_exactly(c, s, h, blocks);
  for (int r = first; r < last && r < c.probe_groups; r++) judge_probes(c, s, h, r);
}

// The tangents of a round; and of the tiles themselves, if `summarise`.
static void represent(Problem& c, const Round& round, bool summarise) {
  for (int i = 0; i < round.heads; i++) c.head[round.head + i].first_row = (i * round.bands - round.band) * LANES;
  share_items(c, round.heads * c.parts, [&](Scratch& s, int i) {
    const Head& h = c.head[round.head + i / c.parts];
    const int part = i % c.parts;
    if (!summarise && reads_everything(c, h, 0) && reads_everything(c, h, 1)) return;
    const int count = find_part(c, s, h, part);
    for (int j = 0; summarise && j < count; j++) keep_largest(s, 1, s.k[j], c.pd);
    if (summarise && part < c.tiles) summarise_tile(c, s, h, part);
    for (int j = 0; j < round.bands; j++) represent_part(c, s, h, round.band + j, part);
  });
  for (int i = 0; summarise && i < round.heads; i++) {
    Head& h = c.head[round.head + i];
    h.diameter = 0.0f;
    for (int t = 0; t < c.tiles; t++) h.diameter = fmaxf(h.diameter, 2.0f * h.radius[t]);
  }
}

static void measure(Problem& c, const Round& round) {
  const int most = LANES / c.group_probes, blocks = (c.probe_groups + most - 1) / most;
  share_items(c, round.heads * blocks, [&](Scratch& s, int i) {
    const int first = i % blocks * most, rest = c.probe_groups - first;
    measure_probes(c, s, c.head[round.head + i / blocks], first, rest < most ? rest : most);
  });
}

static void attend_round(Problem& c, const Round& round) {
  const int first = round.band * LANES, rest = c.groups - first;
  const int groups = rest < round.bands * LANES ? rest : round.bands * LANES, blocks = (groups + GROUPS - 1) / GROUPS;
  share_items(c, round.heads * blocks, [&](Scratch& s, int i) {
    const int start = i % blocks * GROUPS, stop = start + GROUPS < groups ? start + GROUPS : groups;
    attend_groups(c, s, c.head[round.head + i / blocks], first + start, first + stop);
  });
}

static void measure_image(Problem& c) {
  const int prefix_blocks = (c.query_prefix + LANES - 1) / LANES, items = c.groups + prefix_blocks;
  share_items(c, c.heads * items, [&](Scratch& s, int i) {
    const Head& h = c.head[i / items];
    const int start = (i % items - c.groups) * LANES;
    if (start < 0) return summarise_group(c, s, h, i % items);
    load_queries(c, s, h, s.lanes[0], c.query_tokens + start, c.query_prefix - start);
    attend_exactly(c, s, h, 1);
  });
  for (int h = 0; h < c.heads; h++) summarise_head(c, c.head[h]);
  for (int h = 0; h < c.heads; h += c.heads_at_once) {
    const Round round = c.round(h, 0, c.kept ? c.bands : 1);
    represent(c, round, true);
    measure(c, round);
  }
}

static void attend_image(Problem& c) {
  for (int band = 0; band < c.bands; band += c.bands_at_once)
    for (int h = 0; h < c.heads; h += c.heads_at_once) {
      const Round round = c.round(h, band, c.bands_at_once);
      if (!c.kept) represent(c, round, false);
      attend_round(c, round);
    }
}

static void attend_to_everything(Problem& c) {
  const int queries = *c.query_count, blocks = (queries + LANES - 1) / LANES, most = c.heads * blocks / (2 * c.threads);
  const int together = most < 1 ? 1 : most < BLOCKS ? most : BLOCKS, items = (blocks + together - 1) / together;
  share_items(c, c.heads * items, [&](Scratch& s, int i) {
    const Head& h = c.head[i / items];
    const int first = i % items * together, rest = blocks - first, count = rest < together ? rest : together;
    for (int j = 0; j < count; j++) {
      const int start = (first + j) * LANES;
      load_queries(c, s, h, s.lanes[j], c.query_tokens + start, queries - start);
    }
    attend_exactly(c, s, h, count);
    for (int j = 0; first == 0 && j < *c.key_count; j++) {
      read_token(c, c.k, h.batch, h.number / c.share, c.key_tokens[j], c.d, s.rows);
      keep_largest(s, 1, s.rows, c.pd);
    }
  });
}

// ---- Functions for the caller ----

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* bmfa_sources() { return BMFA_SOURCES; }

// Bytes of scratch memory of a call; a call without tiles is one of exact attention.
EXPORT int64_t bmfa_scratch_bytes(const Call* call) { return Problem(*call, nullptr).bytes; }

// One image: exact attention; or, for tiles, first what the probes find and then, with the choice, the rest.
EXPORT void bmfa_attend(Call* call, int image, int step) {
  Problem c(*call, call->scratch);
#ifdef MADV_HUGEPAGE  // rows of tangents are far apart: one page each would be too many
  madvise((char*)(((uintptr_t)call->scratch + 4095) / 4096 * 4096), c.bytes, MADV_HUGEPAGE);
#endif
  const double keys = c.tiles ? c.groups + c.keys / 8.0 : c.keys;  // of a query
  if (keys * c.queries * c.heads * (c.d + c.e) < 2 * LEAST_WORK) c.threads = 1;
  select_image(c, *call, image);
  step == 0 ? attend_to_everything(c) : step == 1 ? measure_image(c) : attend_image(c);
  for (int i = 0; i < c.threads * WIDTH; i++)
    for (int j = 0; j < 2; j++) {
      const uint32_t bits = c.scratches[i / WIDTH].largest[j][i % WIDTH];
      call->largest[j] = bits > call->largest[j] ? bits : call->largest[j];
    }
}
