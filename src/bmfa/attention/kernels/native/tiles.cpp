// Tiled attention and exact attention on a CPU: the steps of kernels/reference/tiles.py, in float32.
//
// Everything is `product` with queries in lanes: the queries of a group are the columns of a matrix
// (channels x 64), so that scores are rows of keys times columns of queries, a softmax runs down the rows
// as vector arithmetic, and no key or value is moved. Scores of 64 keys and 64 queries stay in the
// first-level cache; nothing of the size of tokens x tokens or groups x tokens is written.
//
// Work is divided into items that do not depend on the number of threads, and neither does any result.
#include <math.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "product.h"

constexpr int LANES = 64;  // queries that are computed together; keys of a block, at most
constexpr int GROUPS = 12;  // groups that share a product for their covariances
// Memory for the probes of some heads, and for the tangents of some bands of LANES groups, in bytes.
constexpr int64_t ROUND_BYTES = 6 << 20;
// The tangents of the groups with probes are kept for the attention of these groups if they are no larger.
constexpr int64_t KEPT_BYTES = 16 << 20;

// ---- Arguments: filled in by __init__.py, which has the same fields in the same order ----

struct Tensor {  // (B, heads, tokens, channels) with contiguous channels; strides in elements
  char* data;
  int64_t batch, head, token;
};

struct Call {
  Tensor q, k, v, output;
  int64_t dtype;  // of all tensors: 0 float32, 1 bfloat16, 2 float16
  int64_t batch, heads, share, queries, keys, d, e, query_prefix, prefix;
  int64_t threads, mask_stride, queries_masked;
  const uint8_t* valid;  // (B or 1, spatial keys), or null
  char* scratch;
  double factor;  // scale / tau
  uint32_t largest[2];  // bits of the largest |q| and |k|; above those of infinity for NaN
  // The rest is for tiles.
  int64_t tiles, tile_slots, groups, group_slots, probe_groups, group_probes, levels;
  const int32_t *tile_tokens, *group_tokens;  // (tiles or groups, slots), -1 for empty slots
  const int32_t* group_order;                 // (groups,)
  const double *quantiles, *thresholds;       // (heads, probes), (levels,)
  double uniform_share, error_aim, steep_fall, steep_rise, largest_shrinkage, smallest_correction;
  double error, expand, exact_above;  // error or expand, a share of the tiles, is negative
  uint8_t *expanded, *exact;          // (B, heads, groups, tiles), (B, heads)
  int32_t* expanded_count;            // (B, heads, groups)
  double* probes;                     // (B, heads, probes, 3)
};

// ---- Elements: half precision is widened when it is read and rounded when it is written ----

static inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static inline float widen_bfloat16(uint16_t x) { return as_float((uint32_t)x << 16); }
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

static const char* token_address(const Call& c, const Tensor& x, int b, int head, int token) {
  return x.data + (b * x.batch + head * x.head + token * x.token) * (c.dtype == 0 ? 4 : 2);
}

// Copy a token to `to` in float32, with zeros from `channels` to `padded`.
static void read_token(const Call& c, const Tensor& x, int b, int head, int token, int channels,
                       int padded, float* to) {
  const char* from = token_address(c, x, b, head, token);
  const uint16_t* half = (const uint16_t*)from;
  if (c.dtype == 0) {
    int i = 0;
    for (; i + WIDTH <= channels; i += WIDTH) store(to + i, load((const float*)from + i));
    for (; i < channels; i++) to[i] = ((const float*)from)[i];
  } else if (c.dtype == 1) for (int i = 0; i < channels; i++) to[i] = widen_bfloat16(half[i]);
  else for (int i = 0; i < channels; i++) to[i] = widen_float16(half[i]);
  for (int i = channels; i < padded; i++) to[i] = 0.0f;
}

static void write_token(const Call& c, int b, int head, int token, const float* from) {
  char* to = (char*)token_address(c, c.output, b, head, token);
  uint16_t* half = (uint16_t*)to;
  if (c.dtype == 0) memcpy(to, from, 4 * c.e);
  else if (c.dtype == 1) for (int i = 0; i < c.e; i++) half[i] = to_bfloat16(from[i]);
  else for (int i = 0; i < c.e; i++) half[i] = to_float16(from[i]);
}

// ---- Sums over the channels of one vector ----

static inline float sum(Vector x) {
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
static inline float dot(const float* x, const float* y, int n) {
  Vector total{};
  for (int i = 0; i < n; i += WIDTH) total += load(x + i) * load(y + i);
  return sum(total);
}
// Bits of the largest magnitude; those of NaN are above those of infinity, and these above all others.
static inline uint32_t largest_bits(const float* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; i++) {
    const uint32_t bits = as_bits(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
// Power of two near the largest magnitude, by which numbers are divided before they are squared.
static inline float magnitude(uint32_t largest) {
  const uint32_t exponent = largest & 0x7f800000;
  return as_float(exponent < 0x01000000 ? 0x01000000 : exponent > 0x7e000000 ? 0x7e000000 : exponent);
}
// x . y, of vectors that are divided by `unit` first.
static inline double scaled_dot(const float* x, const float* y, int n, float unit) {
  const Vector inverse = splat(1.0f / unit);
  Vector total{};
  for (int i = 0; i < n; i += WIDTH) total += (load(x + i) * inverse) * (load(y + i) * inverse);
  return (double)sum(total) * unit * unit;
}
static void add_scaled(float* to, const float* x, float factor, int n) {
  const Vector weight = splat(factor);
  for (int i = 0; i < n; i += WIDTH) store(to + i, load(to + i) + weight * load(x + i));
}

// ---- Threads ----

struct Team {
  std::atomic<int> size{0}, next{0}, waiting{0}, phase{0};
};

// Wait for the other threads; the last one to arrive runs `last` first.
template <class Last>
static void meet(Team& team, const Last& last) {
  const int phase = team.phase.load();
  if (team.waiting.fetch_add(1) + 1 == team.size.load()) {
    team.waiting = 0, team.next = 0;
    last();
    team.phase.fetch_add(1);
    return;
  }
  for (int turn = 0; team.phase.load() == phase; turn++)
    if (turn > 1000) sched_yield();
}

// Run `item` for 0 to `count` - 1, divided among the threads, then `last` once.
template <class Item, class Last>
static void share_items(Team& team, int count, const Item& item, const Last& last) {
  for (int i; (i = team.next.fetch_add(1)) < count;) item(i);
  meet(team, last);
}
template <class Item>
static void share_items(Team& team, int count, const Item& item) {
  share_items(team, count, item, [] {});
}

template <class Body>
struct Worker {
  Team* team;
  const Body* body;
  int number;
  static void* start(void* argument) {
    const Worker& worker = *(Worker*)argument;
    while (worker.team->size.load() == 0) sched_yield();
    (*worker.body)(*worker.team, worker.number);
    return nullptr;
  }
};

// Run body(team, number) in so many threads; in fewer if the system refuses to start them.
template <class Body>
static void run_team(int threads, const Body& body) {
  constexpr int MOST = 256;
  Team team;
  Worker<Body> workers[MOST];
  pthread_t handles[MOST];
  int started = 1;
  for (; started < threads && started < MOST; started++) {
    workers[started] = {&team, &body, started};
    if (pthread_create(&handles[started], nullptr, Worker<Body>::start, &workers[started])) break;
  }
  team.size = started;
  body(team, 0);
  for (int i = 1; i < started; i++) pthread_join(handles[i], nullptr);
}

// ---- Memory: one block from the caller, divided twice: once to measure, once for use ----

struct Arena {
  char* base;
  int64_t used;
  template <class T>
  T* take(int64_t count) {
    T* result = base ? (T*)(base + used) : nullptr;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return result;
  }
};

// What one thread needs.
struct Scratch {
  float *q, *deviation;       // (d, LANES) queries and their differences from the mean, in lanes
  float *scores, *output;     // (LANES, LANES), (e, LANES)
  float *maximum, *sum;       // (LANES,) of the softmax
  float *keys, *values;       // (LANES, padded d), (LANES, padded e)
  float *rows;                // (most queries, padded channels)
  float *differences;         // (LANES, padded e)
  float *cross, *weights;     // (GROUPS, d, padded e), (GROUPS, padded tiles)
  float *sums[3];             // (levels, padded e)
  float *logits;              // (padded tiles or prefix)
  int32_t *level;             // (tiles,)
  double *distances;          // (group_slots,)

  void divide(const Call& c, Arena& arena) {
    const int d = round_up(c.d, WIDTH), e = round_up(c.e, WIDTH);
    const int64_t most = c.group_slots > LANES ? c.group_slots : LANES;
    q = arena.take<float>(d * LANES), deviation = arena.take<float>(d * LANES);
    scores = arena.take<float>(LANES * LANES), output = arena.take<float>(e * LANES);
    maximum = arena.take<float>(LANES), sum = arena.take<float>(LANES);
    keys = arena.take<float>(LANES * d), values = arena.take<float>(LANES * e);
    rows = arena.take<float>(most * (d > e ? d : e)), differences = arena.take<float>(LANES * e);
    cross = arena.take<float>(c.tiles ? GROUPS * c.d * e : 0);
    weights = arena.take<float>(GROUPS * round_up(c.tiles, WIDTH));
    for (float*& x : sums) x = arena.take<float>(c.levels * e);
    logits = arena.take<float>(round_up(c.tiles + c.prefix, WIDTH));
    level = arena.take<int32_t>(c.tiles), distances = arena.take<double>(c.group_slots);
  }
};

// ---- Exact attention of queries in lanes: an online softmax over blocks of keys ----

// Write tokens of q, times the factor, into lanes; the lanes up to a multiple of WIDTH become 0.
static void load_queries(const Call& c, Scratch& s, int b, int head, const int32_t* tokens, int count) {
  const int d = round_up(c.d, WIDTH);
  const Vector factor = splat(c.factor);
  for (int i = 0; i < count; i++) {
    float* row = s.rows + i * d;
    read_token(c, c.q, b, head, tokens[i], c.d, d, row);
    for (int j = 0; j < d; j += WIDTH) store(row + j, load(row + j) * factor);
  }
  transpose(Strided{s.rows, d}, count, d, s.q, LANES);
}

static void start_softmax(const Call& c, Scratch& s, int lanes) {
  for (int i = 0; i < lanes; i++) s.maximum[i] = -INFINITY, s.sum[i] = 0.0f;
  for (int i = 0; i < c.e; i++) memset(s.output + i * LANES, 0, 4 * lanes);
}

// Include `count` rows of scores, plus a bias for each, in VECTORS vectors of lanes of the softmax.
// Returns the factor by which earlier weights are multiplied in `rescale`.
template <int VECTORS>
static inline void softmax_lanes(Scratch& s, int lane, int count, const float* bias, float* rescale) {
  Vector maximum[VECTORS], old[VECTORS], total[VECTORS];
  float* scores = s.scores + lane;
  for (int j = 0; j < VECTORS; j++) maximum[j] = old[j] = load(s.maximum + lane + j * WIDTH);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < VECTORS; j++) {
      Vector x = load(scores + i * LANES + j * WIDTH);
      if (bias) store(scores + i * LANES + j * WIDTH, x += splat(bias[i]));
      maximum[j] = larger(maximum[j], x);
    }
  for (int j = 0; j < VECTORS; j++) {
    const Vector factor = exponential(old[j] - maximum[j]);
    store(rescale + lane + j * WIDTH, factor);
    store(s.sum + lane + j * WIDTH, load(s.sum + lane + j * WIDTH) * factor);
    total[j] = Vector{};  // of the block: small weights are not added one by one to a large total
  }
  for (int i = 0; i < count; i++)
    for (int j = 0; j < VECTORS; j++) {
      const Vector p = exponential(load(scores + i * LANES + j * WIDTH) - maximum[j]);
      store(scores + i * LANES + j * WIDTH, p);
      total[j] += p;
    }
  for (int j = 0; j < VECTORS; j++) {
    store(s.maximum + lane + j * WIDTH, maximum[j]);
    store(s.sum + lane + j * WIDTH, load(s.sum + lane + j * WIDTH) + total[j]);
  }
}

// Attend to `count` keys and values, at most LANES, with the queries in lanes.
template <class Keys, class Values>
static void attend(const Call& c, Scratch& s, const float* queries, int lanes, int count,
                   const Keys& keys, const Values& values, const float* bias = nullptr) {
  alignas(64) float rescale[LANES];
  product<false>(keys, Strided{queries, LANES}, count, c.d, lanes, s.scores, LANES);
  int lane = 0;
  for (; lane + 4 * WIDTH <= lanes; lane += 4 * WIDTH) softmax_lanes<4>(s, lane, count, bias, rescale);
  for (; lane < lanes; lane += WIDTH) softmax_lanes<1>(s, lane, count, bias, rescale);
  bool moved = false;
  for (int i = 0; i < lanes; i++) moved |= rescale[i] != 1.0f;
  if (moved)
    for (int i = 0; i < c.e; i++)
      for (int j = 0; j < lanes; j += WIDTH) {
        float* x = s.output + i * LANES + j;
        store(x, load(x) * load(rescale + j));
      }
  product<true>(values, Strided{s.scores, LANES}, c.e, count, lanes, s.output, LANES, true);
}

// Attend to the keys and values of some tokens, at most LANES.
static void attend_tokens(const Call& c, Scratch& s, int b, int head, const int32_t* tokens, int count,
                          int lanes) {
  const int key_head = head / c.share, d = round_up(c.d, WIDTH), e = round_up(c.e, WIDTH);
  const float *keys[LANES], *values[LANES];
  for (int i = 0; i < count; i++) {
    if (c.dtype == 0) {
      keys[i] = (const float*)token_address(c, c.k, b, key_head, tokens[i]);
      values[i] = (const float*)token_address(c, c.v, b, key_head, tokens[i]);
    } else {
      read_token(c, c.k, b, key_head, tokens[i], c.d, d, s.keys + i * d);
      read_token(c, c.v, b, key_head, tokens[i], c.e, e, s.values + i * e);
      keys[i] = s.keys + i * d, values[i] = s.values + i * e;
    }
  }
  attend(c, s, s.q, lanes, count, keys, values);
}

// Write the outputs in lanes to their tokens, divided by the sums of the weights.
static void write_lanes(const Call& c, Scratch& s, int b, int head, const int32_t* tokens, int count) {
  const int e = round_up(c.e, WIDTH), lanes = round_up(count, WIDTH);
  for (int i = 0; i < c.e; i++)
    for (int j = 0; j < lanes; j += WIDTH) {
      float* x = s.output + i * LANES + j;
      store(x, load(x) / load(s.sum + j));
    }
  transpose(Strided{s.output, LANES}, c.e, lanes, s.rows, e);
  for (int i = 0; i < count; i++) write_token(c, b, head, tokens[i], s.rows + i * e);
}

// Exact attention of at most LANES queries to all keys that exist.
static void attend_exactly(const Call& c, Scratch& s, int b, int head, const int32_t* tokens, int count,
                           const int32_t* keys, int key_count) {
  const int lanes = round_up(count, WIDTH);
  load_queries(c, s, b, head, tokens, count);
  start_softmax(c, s, lanes);
  for (int i = 0; i < key_count; i += LANES)
    attend_tokens(c, s, b, head, keys + i, key_count - i < LANES ? key_count - i : LANES, lanes);
  write_lanes(c, s, b, head, tokens, count);
}

static bool key_exists(const Call& c, int b, int token) {
  return !c.valid || token < c.prefix || c.valid[b * c.mask_stride + token - c.prefix];
}
static bool query_exists(const Call& c, int b, int token) {
  return !c.queries_masked || key_exists(c, b, token);
}

// Keep the largest magnitudes of q and k, from which the caller learns of NaN, infinity and overflow.
static void keep_largest(const uint32_t* largest, uint32_t bits) {
  uint32_t* kept = (uint32_t*)largest;
  uint32_t known = __atomic_load_n(kept, __ATOMIC_RELAXED);
  while (bits > known && !__atomic_compare_exchange_n(kept, &known, bits, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}
static void measure_tokens(const Call& c, Scratch& s, const Tensor& x, int b, int head,
                           const int32_t* tokens, int count, const uint32_t* kept) {
  uint32_t largest = 0;
  for (int i = 0; i < count; i++) {
    read_token(c, x, b, head, tokens[i], c.d, c.d, s.rows);
    const uint32_t bits = largest_bits(s.rows, c.d);
    largest = bits > largest ? bits : largest;
  }
  keep_largest(kept, largest);
}

// The tokens of one image that exist.
struct Tokens {
  int32_t *keys, *queries;  // (keys,), (queries,)
  int key_count, query_count;

  void divide(const Call& c, Arena& arena) {
    keys = arena.take<int32_t>(c.keys), queries = arena.take<int32_t>(c.queries);
  }
  void find(const Call& c, int b) {
    key_count = query_count = 0;
    for (int i = 0; i < c.keys; i++)
      if (key_exists(c, b, i)) keys[key_count++] = i;
    for (int i = 0; i < c.queries; i++)
      if (query_exists(c, b, i)) queries[query_count++] = i;
  }
};

static void clear_missing_queries(const Call& c, Scratch& s, int b, int head) {
  memset(s.rows, 0, 4 * c.e);
  for (int i = 0; i < c.queries; i++)
    if (!query_exists(c, b, i)) write_token(c, b, head, i, s.rows);
}

// ---- Tiles ----

// Arrays of one image. R groups, in the order of their positions; T tiles; P probes of a head, those of a
// group one after the other; d and e padded.
struct Image {
  int d, e, probes, bands;
  int64_t stride;  // T', tiles of a row: one more than T, as rows at multiples of 4 KiB share cache lines
  int64_t round_heads, round_units, kept_units;
  Tokens tokens;
  int32_t *tile_tokens, *tile_count, *group_tokens, *group_count;  // (T, slots), (T,), (R, slots), (R,)
  int tiles_present;
  // Steps 1 and 2.
  float *q_mean, *q_lanes, *q_head;  // (H, R, d), (H, bands, d, LANES), (H, d)
  double *q_spread, *k_spread;       // rho (H, R), kappa (H, T)
  float *cross, *radius, *diameter;  // (H, T, true d, e), (H, T), (H,)
  // Step 3, for the groups of some bands of heads, which are called units.
  float *k_tangent, *v_tangent, *log_mass;  // (units, LANES, T', d), (.., e) and without
  // Step 5.
  int32_t* probe_token;                        // (H, P), -1 for a group without queries
  double* probe_weight;                        // (H, P)
  float *probe_lanes, *probe_rows;             // (H, blocks of LANES probes, d, LANES), (H, P, d)
  float *probe_mass, *probe_value, *first_order;  // (heads of a round, P, T'), (.., P, T', e) twice
  float* exact_output;                         // (H, P, e)
  double *error, *product, *correction, *share, *norm, *head_share;  // (H, P, levels), (H, P), (H,)
  double* level_sums;                          // (H, 4, levels)
  double *threshold, *shrinkage;               // (2,), (H, 2)

  int64_t blocks() const { return (probes + LANES - 1) / LANES; }

  void divide(const Call& c, Arena& arena) {
    const int64_t H = c.heads, R = c.groups, T = c.tiles, L = c.levels;
    d = round_up(c.d, WIDTH), e = round_up(c.e, WIDTH), stride = T + 1;
    probes = c.probe_groups * c.group_probes, bands = (R + LANES - 1) / LANES;
    tokens.divide(c, arena);
    tile_tokens = arena.take<int32_t>(T * c.tile_slots), tile_count = arena.take<int32_t>(T);
    group_tokens = arena.take<int32_t>(R * c.group_slots), group_count = arena.take<int32_t>(R);
    q_mean = arena.take<float>(H * R * d), q_lanes = arena.take<float>(H * bands * d * LANES);
    q_head = arena.take<float>(H * d);
    q_spread = arena.take<double>(H * R), k_spread = arena.take<double>(H * T);
    cross = arena.take<float>(H * T * c.d * e);
    radius = arena.take<float>(H * T), diameter = arena.take<float>(H);
    probe_token = arena.take<int32_t>(H * probes), probe_weight = arena.take<double>(H * probes);
    probe_lanes = arena.take<float>(H * blocks() * d * LANES);
    probe_rows = arena.take<float>(H * probes * d), exact_output = arena.take<float>(H * probes * e);
    error = arena.take<double>(H * probes * L), product = arena.take<double>(H * probes * L);
    correction = arena.take<double>(H * probes * L), share = arena.take<double>(H * probes * L);
    norm = arena.take<double>(H * probes), head_share = arena.take<double>(H);
    level_sums = arena.take<double>(H * 4 * L);
    threshold = arena.take<double>(2), shrinkage = arena.take<double>(2 * H);
    const int64_t probe_bytes = 4 * probes * stride * (1 + 2 * e) + 1;
    const int64_t unit_bytes = 4 * LANES * stride * (1 + d + e);
    round_heads = ROUND_BYTES / probe_bytes < 1 ? 1 : ROUND_BYTES / probe_bytes;
    round_heads = round_heads < H ? round_heads : H;
    round_units = ROUND_BYTES / unit_bytes < 1 ? 1 : ROUND_BYTES / unit_bytes;
    round_units = round_units < H * bands ? round_units : H * bands;
    kept_units = H * unit_bytes <= KEPT_BYTES ? H : 0;
    round_units = round_units > round_heads ? round_units : round_heads;
    probe_mass = arena.take<float>(round_heads * probes * stride);
    probe_value = arena.take<float>(round_heads * probes * stride * e);
    first_order = arena.take<float>(round_heads * probes * stride * e);
    const int64_t units = kept_units + (bands > 1 || !kept_units ? round_units : 0);
    k_tangent = arena.take<float>(units * LANES * stride * d);
    v_tangent = arena.take<float>(units * LANES * stride * e);
    log_mass = arena.take<float>(units * LANES * stride);
  }
};

// Tokens that exist in each tile or group, first; returns how many tiles or groups have one.
template <class Exists>
static int compact(const int32_t* from, int count, int slots, int first, const Exists& exists,
                   int32_t* to, int32_t* sizes) {
  int present = 0;
  for (int i = 0; i < count; i++) {
    sizes[i] = 0;
    for (int j = 0; j < slots; j++) {
      const int token = from[i * slots + j] + first;
      if (token >= first && exists(token)) to[i * slots + sizes[i]++] = token;
    }
    present += sizes[i] > 0;
  }
  return present;
}

static void find_tokens(const Call& c, Image& image, int b) {
  image.tokens.find(c, b);
  image.tiles_present =
      compact(c.tile_tokens, c.tiles, c.tile_slots, c.prefix,
              [&](int token) { return key_exists(c, b, token); }, image.tile_tokens, image.tile_count);
  for (int r = 0; r < c.groups; r++)
    compact(c.group_tokens + c.group_order[r] * c.group_slots, 1, c.group_slots, c.query_prefix,
            [&](int token) { return query_exists(c, b, token); },
            image.group_tokens + r * c.group_slots, image.group_count + r);
  memset(image.probe_lanes, 0, 4 * c.heads * image.blocks() * image.d * LANES);
}

// Step 5, one draw: the probe number `draw` of a group, whose queries are in `s.rows`.
static void draw_probe(const Call& c, const Image& image, Scratch& s, int head, int position, int draw) {
  const int d = image.d, index = position * c.group_probes + draw;
  const int64_t probe = (int64_t)head * image.probes + index;
  const int count = image.group_count[position];
  float *row = image.probe_rows + probe * d;
  image.probe_token[probe] = -1, image.probe_weight[probe] = 0.0;
  memset(row, 0, 4 * d);
  if (count == 0) return;
  double largest = 0.0, total = 0.0, below = 0.0;
  for (int i = 0; i < count; i++) largest = s.distances[i] > largest ? s.distances[i] : largest;
  for (int i = 0; i < count && largest > 0.0; i++)
    total += s.distances[i] / largest * (s.distances[i] / largest);
  int chosen = 0;
  double p = 0.0;
  for (int i = 0; i < count; i++) {
    const double relative = largest > 0.0 ? s.distances[i] / largest : 0.0;
    p = 1.0 / count;
    if (total > 0.0) p = c.uniform_share * p + (1.0 - c.uniform_share) * relative * relative / total;
    chosen = i, below += p;
    if (below > c.quantiles[probe]) break;
  }
  image.probe_token[probe] = image.group_tokens[position * c.group_slots + chosen];
  image.probe_weight[probe] = 1.0 / (p * c.group_probes);
  const float *q = s.rows + chosen * d, *mean = image.q_mean + ((int64_t)head * c.groups + position) * d;
  float* lanes = image.probe_lanes + ((head * image.blocks() + index / LANES) * d) * LANES + index % LANES;
  for (int i = 0; i < d; i++) row[i] = q[i] - mean[i], lanes[i * LANES] = q[i];
}

// Step 1: the mean query of a group, rho, and the probes. Queries are times scale / tau throughout.
static void summarise_group(const Call& c, const Image& image, Scratch& s, int b, int head, int position) {
  const int d = image.d, count = image.group_count[position];
  const int32_t* tokens = image.group_tokens + position * c.group_slots;
  float* mean = image.q_mean + ((int64_t)head * c.groups + position) * d;
  memset(mean, 0, 4 * d);
  uint32_t largest = 0;
  for (int i = 0; i < count; i++) {
    float* row = s.rows + i * d;
    read_token(c, c.q, b, head, tokens[i], c.d, d, row);
    const uint32_t bits = largest_bits(row, d);
    largest = bits > largest ? bits : largest;
    for (int j = 0; j < d; j += WIDTH) store(row + j, load(row + j) * splat(c.factor));
    add_scaled(mean, row, 1.0f, d);
  }
  keep_largest(c.largest, largest);
  for (int j = 0; j < d; j++) mean[j] /= count > 1 ? count : 1;
  const float unit = magnitude(as_bits((float)(fabs(c.factor) * as_float(largest))));
  double total = 0.0, most = 0.0;
  for (int i = 0; i < count; i++) {
    for (int j = 0; j < d; j += WIDTH)
      store(s.keys + j, load(s.rows + i * d + j) - load(mean + j));
    s.distances[i] = scaled_dot(s.keys, s.keys, d, unit);
    total += s.distances[i];
    most = s.distances[i] > most ? s.distances[i] : most;
  }
  image.q_spread[(int64_t)head * c.groups + position] = count ? sqrt(total / count) * sqrt(most) : 0.0;
  float* lanes = image.q_lanes + ((head * image.bands + position / LANES) * (int64_t)d) * LANES;
  for (int j = 0; j < d; j++) lanes[j * LANES + position % LANES] = mean[j];
  if (position < c.probe_groups)
    for (int j = 0; j < c.group_probes; j++) draw_probe(c, image, s, head, position, j);
}

// Step 1: qhat, the mean of the queries of the first LANES groups.
static void summarise_head(const Call& c, const Image& image, int head) {
  float* q_head = image.q_head + head * image.d;
  memset(q_head, 0, 4 * image.d);
  int count = 0;
  for (int r = 0; r < c.groups && r < LANES; r++) {
    add_scaled(q_head, image.q_mean + ((int64_t)head * c.groups + r) * image.d, image.group_count[r],
               image.d);
    count += image.group_count[r];
  }
  for (int j = 0; j < image.d; j++) q_head[j] /= count > 1 ? count : 1;
}

// Copy the keys and values of a tile to `s.keys` and `s.values`.
static void read_tile(const Call& c, const Image& image, Scratch& s, int b, int head, int tile) {
  const int32_t* tokens = image.tile_tokens + tile * c.tile_slots;
  for (int i = 0; i < image.tile_count[tile]; i++) {
    read_token(c, c.k, b, head / c.share, tokens[i], c.d, image.d, s.keys + i * image.d);
    read_token(c, c.v, b, head / c.share, tokens[i], c.e, image.e, s.values + i * image.e);
  }
}

// Subtract a weighted mean from rows; returns the largest and the mean square of what is left.
static void subtract_mean(const float* x, const float* weights, int count, int n, float* to,
                          double* largest, double* mean) {
  alignas(64) float center[256 + WIDTH];
  memset(center, 0, 4 * n);
  for (int i = 0; i < count; i++) add_scaled(center, x + i * n, weights[i], n);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < n; j += WIDTH) store(to + i * n + j, load(x + i * n + j) - load(center + j));
  const float unit = magnitude(largest_bits(to, count * n));
  *largest = *mean = 0.0;
  for (int i = 0; i < count; i++) {
    const double square = scaled_dot(to + i * n, to + i * n, n, unit);
    *mean += square / count;
    *largest = square > *largest ? square : *largest;
  }
}

// Step 2: the covariance of keys and values under qhat, kappa, and the largest distance of a value.
static void summarise_tile(const Call& c, const Image& image, Scratch& s, int head, int tile) {
  const int count = image.tile_count[tile], d = image.d, e = image.e;
  const int64_t index = (int64_t)head * c.tiles + tile;
  float* cross = image.cross + index * c.d * e;
  image.k_spread[index] = image.radius[index] = 0.0;
  if (count == 0) {
    memset(cross, 0, 4 * c.d * e);
    return;
  }
  keep_largest(c.largest + 1, largest_bits(s.keys, count * d));
  alignas(64) float p[LANES];
  float largest = -INFINITY, total = 0.0f;
  for (int i = 0; i < LANES; i++) {
    p[i] = i < count ? dot(image.q_head + head * d, s.keys + i * d, d) : -INFINITY;
    largest = p[i] > largest ? p[i] : largest;
  }
  for (int i = 0; i < LANES; i += WIDTH) store(p + i, exponential(load(p + i) - splat(largest)));
  for (int i = 0; i < count; i++) total += p[i];
  for (int i = 0; i < count; i++) p[i] /= total;
  double most, unused;
  subtract_mean(s.values, p, count, e, s.differences, &most, &unused);
  image.radius[index] = sqrt(most);
  subtract_mean(s.keys, p, count, d, s.rows, &unused, image.k_spread + index);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < d; j += WIDTH)
      store(s.rows + i * d + j, load(s.rows + i * d + j) * splat(p[i]));
  product<true>(Strided{s.rows, d}, Strided{s.differences, e}, c.d, count, e, cross, e);
}

// Steps 3 and 5: what queries in lanes see in the tile in `s.keys`. Their softmax over the tile is left in
// `s.scores`; the logarithm of their sums of exponentials goes to log_mass[lane * stride].
static void see_tile(const Call& c, const Image& image, Scratch& s, const float* queries, int members,
                     int count, float* log_mass, int64_t stride) {
  const int lanes = round_up(members, WIDTH);
  product<false>(Strided{s.keys, image.d}, Strided{queries, LANES}, count, c.d, lanes, s.scores, LANES);
  for (int i = 0; i < lanes; i++) s.maximum[i] = -INFINITY, s.sum[i] = 0.0f;
  alignas(64) float rescale[LANES];
  int lane = 0;
  for (; lane + 4 * WIDTH <= lanes; lane += 4 * WIDTH) softmax_lanes<4>(s, lane, count, nullptr, rescale);
  for (; lane < lanes; lane += WIDTH) softmax_lanes<1>(s, lane, count, nullptr, rescale);
  for (int j = 0; j < lanes; j += WIDTH) {
    const Vector inverse = splat(1.0f) / load(s.sum + j);
    for (int i = 0; i < count; i++) {
      float* x = s.scores + i * LANES + j;
      store(x, load(x) * inverse);
    }
    store(s.maximum + j, load(s.maximum + j) + logarithm(load(s.sum + j)));
  }
  for (int i = 0; i < members; i++) log_mass[i * stride] = s.maximum[i];
}

// Step 3: the tangents of a tile for the groups of a band of a head, at `unit` of the arrays.
static void represent_tile(const Call& c, const Image& image, Scratch& s, int head, int band, int tile,
                           int64_t unit) {
  const int64_t T = image.stride, first = unit * LANES * T + tile;
  const int count = image.tile_count[tile], groups = c.groups - band * LANES;
  const int members = groups < LANES ? groups : LANES;
  if (count == 0) {
    for (int i = 0; i < members; i++) image.log_mass[first + i * T] = -INFINITY;
    return;
  }
  const float* q = image.q_lanes + ((head * image.bands + band) * (int64_t)image.d) * LANES;
  see_tile(c, image, s, q, members, count, image.log_mass + first, T);
  const Strided p{s.scores, LANES};
  product<true>(p, Strided{s.keys, image.d}, members, count, image.d, image.k_tangent + first * image.d,
                T * image.d);
  product<true>(p, Strided{s.values, image.e}, members, count, image.e,
                image.v_tangent + first * image.e, T * image.e);
}

// Step 5: what the probes of a head see in a tile: mass, mean value, and their first-order term.
static void probe_tile(const Call& c, const Image& image, Scratch& s, int head, int tile, int64_t unit) {
  const int64_t T = image.stride, first = unit * image.probes * T + tile;
  const int count = image.tile_count[tile], d = image.d, e = image.e;
  if (count == 0) return;
  for (int block = 0; block < image.blocks(); block++) {
    const int start = block * LANES, rest = image.probes - start, members = rest < LANES ? rest : LANES;
    const float* q = image.probe_lanes + ((head * image.blocks() + block) * d) * LANES;
    see_tile(c, image, s, q, members, count, image.probe_mass + first + start * T, T);
    product<true>(Strided{s.scores, LANES}, Strided{s.values, e}, members, count, e,
                  image.probe_value + (first + start * T) * e, T * e);
  }
  product<false>(Strided{image.probe_rows + (int64_t)head * image.probes * d, d},
                 Strided{image.cross + ((int64_t)head * c.tiles + tile) * c.d * e, e}, image.probes, c.d, e,
                 image.first_order + first * e, T * e);
}

// Step 3: shares m of the tiles of a group, in `mass`, and their losses, in `s.logits`.
static void weigh_tiles(const Call& c, const Image& image, Scratch& s, int b, int head, int position,
                        int64_t unit, float* mass) {
  const int T = c.tiles, prefix = c.prefix, padded = round_up(T + prefix, WIDTH);
  const float* log_mass = image.log_mass + (unit * LANES + position % LANES) * image.stride;
  const float* mean = image.q_mean + ((int64_t)head * c.groups + position) * image.d;
  memcpy(s.logits, log_mass, 4 * T);
  for (int i = T; i < padded; i++) s.logits[i] = -INFINITY;
  for (int i = 0; i < prefix; i++) {
    read_token(c, c.k, b, head / c.share, i, c.d, image.d, s.keys);
    s.logits[T + i] = dot(mean, s.keys, image.d);
  }
  float largest = -INFINITY;
  for (int i = 0; i < T + prefix; i++) largest = s.logits[i] > largest ? s.logits[i] : largest;
  Vector total{};
  for (int i = 0; i < padded; i += WIDTH) {
    store(s.logits + i, exponential(load(s.logits + i) - splat(largest)));
    total += load(s.logits + i);
  }
  const float inverse = 1.0f / sum(total);
  const double spread = image.q_spread[(int64_t)head * c.groups + position] / (2.0 * c.d);
  for (int t = 0; t < T; t++) {
    mass[t] = s.logits[t] * inverse;
    const double loss = mass[t] * (spread * image.k_spread[(int64_t)head * T + t]);
    s.logits[t] = loss > 0.0 ? (loss < 1.0 ? loss : 1.0) : 0.0;
  }
}

// Step 5: the error and the correction of one probe at every level, by sums over the tiles that a level is
// the first to expand: of exact values, of tangents, and of first-order terms.
static void measure_probe(const Call& c, const Image& image, Scratch& s, int b, int head, int index,
                          int64_t head_unit, int64_t unit, const float* mass) {
  const int T = c.tiles, L = c.levels, e = image.e, d = image.d, position = index / c.group_probes;
  const int64_t probe = (int64_t)head * image.probes + index;
  const int64_t row = (unit * LANES + position % LANES) * image.stride;
  const int64_t first = (head_unit * image.probes + index) * image.stride;
  const float *exact_mass = image.probe_mass + first, *deviation = image.probe_rows + probe * d;
  const float* mean = image.q_mean + ((int64_t)head * c.groups + position) * d;
  float *tangent = s.weights + round_up(T, WIDTH), largest = -INFINITY;
  for (int t = 0; t < T; t++) {
    if (s.level[t] < 0) continue;
    tangent[t] = image.log_mass[row + t] + dot(deviation, image.k_tangent + (row + t) * d, d);
    largest = tangent[t] > largest ? tangent[t] : largest;
    largest = exact_mass[t] > largest ? exact_mass[t] : largest;
  }
  for (int i = 0; i < c.prefix; i++) {
    read_token(c, c.k, b, head / c.share, i, c.d, d, s.keys);
    s.logits[i] = dot(mean, s.keys, d) + dot(deviation, s.keys, d);
    largest = s.logits[i] > largest ? s.logits[i] : largest;
  }
  float *exact_sum = s.sums[0], *tangent_sum = s.sums[1], *term_sum = s.sums[2], *prefix_sum = s.output;
  double exact_total[32] = {}, tangent_total[32] = {}, mass_total[32] = {}, prefix_total = 0.0;
  int count[32] = {};
  for (float* x : s.sums) memset(x, 0, 4 * L * e);
  memset(prefix_sum, 0, 4 * e);
  for (int i = 0; i < c.prefix; i++) {
    const float weight = expf(s.logits[i] - largest);
    read_token(c, c.v, b, head / c.share, i, c.e, e, s.values);
    add_scaled(prefix_sum, s.values, weight, e);
    prefix_total += weight;
  }
  for (int t = 0; t < T; t++) {
    const int level = s.level[t];
    if (level < 0) continue;
    const float exact = expf(exact_mass[t] - largest), coarse = expf(tangent[t] - largest);
    add_scaled(exact_sum + level * e, image.probe_value + (first + t) * e, exact, e);
    add_scaled(tangent_sum + level * e, image.v_tangent + (row + t) * e, coarse, e);
    add_scaled(term_sum + level * e, image.first_order + (first + t) * e, mass[t], e);
    exact_total[level] += exact, tangent_total[level] += coarse, mass_total[level] += mass[t];
    count[level]++;
  }
  // Level j expands the tiles of levels up to j: exact sums from below, the others from above.
  for (int j = 1; j < L; j++) {
    add_scaled(exact_sum + j * e, exact_sum + (j - 1) * e, 1.0f, e);
    exact_total[j] += exact_total[j - 1], count[j] += count[j - 1];
  }
  for (int j = L - 2; j >= 0; j--) {
    add_scaled(tangent_sum + j * e, tangent_sum + (j + 1) * e, 1.0f, e);
    add_scaled(term_sum + j * e, term_sum + (j + 1) * e, 1.0f, e);
    tangent_total[j] += tangent_total[j + 1], mass_total[j] += mass_total[j + 1];
  }
  float* exact = image.exact_output + probe * e;
  const float inverse = 1.0 / (exact_total[L - 1] + prefix_total);
  for (int i = 0; i < e; i += WIDTH)
    store(exact + i, (load(exact_sum + (L - 1) * e + i) + load(prefix_sum + i)) * splat(inverse));
  const float unit_norm = magnitude(largest_bits(exact, e));
  image.norm[probe] = scaled_dot(exact, exact, e, unit_norm);
  for (int j = 0; j < L; j++) {
    const double above = j + 1 < L ? tangent_total[j + 1] : 0.0;
    const double masses = j + 1 < L ? mass_total[j + 1] : 0.0;
    const double total = exact_total[j] + prefix_total + above;
    const double scale = total > 1e-30 ? 1.0 / total : 0.0;  // 0 if all that this level sees underflows
    float *difference = s.values, *term = s.differences;
    for (int i = 0; i < e; i += WIDTH) {
      Vector x = load(exact_sum + j * e + i) + load(prefix_sum + i), y{};
      if (above > 0.0) x += load(tangent_sum + (j + 1) * e + i);
      if (masses > 1e-30) y = load(term_sum + (j + 1) * e + i) * splat(1.0 / masses);
      store(difference + i, load(exact + i) - x * splat(scale));
      store(term + i, y);
    }
    const float unit = magnitude(largest_bits(difference, e)), term_unit = magnitude(largest_bits(term, e));
    const double length = sqrt(scaled_dot(term, term, e, term_unit)), limit = image.diameter[head];
    const double factor = above * scale * (length > limit ? limit / length : 1.0);
    const int64_t at = probe * L + j;
    image.error[at] = scaled_dot(difference, difference, e, unit);
    image.correction[at] = factor * length * factor * length;
    const float common = unit > term_unit ? unit : term_unit;
    image.product[at] = factor * scaled_dot(difference, term, e, common);
    image.share[at] = (double)count[j] / image.tiles_present;
  }
}

// Step 5: the probes of a group. A tile has the first level that expands it.
static void measure_group(const Call& c, const Image& image, Scratch& s, int b, int head, int position,
                          int64_t head_unit, int64_t unit) {
  if (image.group_count[position] == 0) return;
  float* mass = s.weights;
  weigh_tiles(c, image, s, b, head, position, unit, mass);
  for (int t = 0; t < c.tiles; t++) {
    int level = 0;
    const double loss = s.logits[t];
    while (level < c.levels - 1 && !(loss > 0.0 && loss >= c.thresholds[level])) level++;
    s.level[t] = image.tile_count[t] ? level : -1;
  }
  for (int j = 0; j < c.group_probes; j++)
    measure_probe(c, image, s, b, head, position * c.group_probes + j, head_unit, unit, mass);
}

// Step 5: a level, and the part of the step to it, where falling errors reach the target.
static int interpolate_down(const Call& c, const double* errors, double target, double* part) {
  const int last = c.levels - 1;
  int level = 0;
  *part = 1.0;
  if (target <= 0.0) return last;
  while (level < last && !(errors[level] <= target)) level++;
  if (level == 0 || level == last || errors[level] < c.steep_fall * target) return level;
  const double ratio = log(errors[level - 1] / errors[level]);
  if (ratio != 0.0) *part = fmin(fmax(log(errors[level - 1] / target) / ratio, 0.0), 1.0);
  return level;
}

// Step 5: likewise where growing shares reach the target.
static int interpolate_up(const Call& c, const double* shares, double target, double* part) {
  const int last = c.levels - 1;
  int level = 0;
  *part = 1.0;
  if (target >= 1.0) return last;
  while (level < last && !(shares[level] > target)) level++;
  if (target <= 0.0 || level == 0) return 0;
  if (level == last || shares[level] > c.steep_rise * target) return level - 1;
  *part = (target - shares[level - 1]) / (shares[level] - shares[level - 1]);
  return level;
}

// Step 5: thresholds, shrinkage and exact heads. Half of the probes determines what the groups at
// positions of the other parity use.
static void choose(const Call& c, const Image& image, int b) {
  const int H = c.heads, L = c.levels, P = image.probes;
  double errors[32], shares[32];
  double* head_share = image.head_share;
  for (int h = 0; h < H; h++) head_share[h] = 0.0;
  for (int half = 0; half < 2; half++) {
    bool found = false;
    for (int64_t i = 0; i < (int64_t)H * P; i++)
      found |= image.probe_weight[i] > 0.0 && i % P / c.group_probes % 2 != half;
    double norm_total = 0.0, square_total[32] = {};
    for (int j = 0; j < L; j++) shares[j] = 0.0;
    for (int h = 0; h < H; h++) {
      double *square = image.level_sums + (int64_t)h * 4 * L, *dot = square + L, *length = dot + L;
      double *share = length + L, norm = 0.0, weights = 0.0;
      for (int j = 0; j < 4 * L; j++) square[j] = 0.0;
      for (int p = 0; p < P; p++) {
        const int64_t probe = (int64_t)h * P + p;
        const double weight = image.probe_weight[probe];
        if (weight == 0.0 || (found && p / c.group_probes % 2 == half)) continue;
        weights += weight, norm += weight * image.norm[probe];
        for (int j = 0; j < L; j++) {
          square[j] += weight * image.error[probe * L + j], dot[j] += weight * image.product[probe * L + j];
          length[j] += weight * image.correction[probe * L + j];
          share[j] += weight * image.share[probe * L + j];
        }
      }
      norm_total += norm;
      for (int j = 0; j < L; j++) {
        const bool known = length[j] > c.smallest_correction * c.smallest_correction * norm;
        double factor = known ? dot[j] / length[j] : 0.0;
        factor = fmin(fmax(factor, 0.0), c.largest_shrinkage);
        square_total[j] += square[j] - 2.0 * factor * dot[j] + factor * factor * length[j];
        dot[j] = factor;  // from here on the shrinkage
        share[j] = fmin(share[j] / fmax(weights, 1e-300), 1.0);
        shares[j] += share[j] / H;
      }
    }
    for (int j = 0; j < L; j++)
      errors[j] = sqrt(fmax(square_total[j], 0.0) / (norm_total > 0.0 ? norm_total : 1.0));
    double part;
    const int level = c.error >= 0.0 ? interpolate_down(c, errors, c.error_aim * c.error, &part)
                                     : interpolate_up(c, shares, c.expand, &part);
    double threshold = INFINITY;
    if (level > 0 && part == 1.0) threshold = c.thresholds[level];
    else if (level > 0)
      threshold = pow(c.thresholds[level - 1], 1.0 - part) * pow(c.thresholds[level], part);
    image.threshold[half] = threshold;
    for (int h = 0; h < H; h++) {
      const double* sums = image.level_sums + (int64_t)h * 4 * L;
      image.shrinkage[2 * h + half] = sums[L + level];
      head_share[h] += ((1.0 - part) * sums[3 * L + (level > 0 ? level - 1 : 0)] + part * sums[3 * L + level]) / 2;
    }
  }
  for (int h = 0; h < H; h++) c.exact[b * H + h] = head_share[h] > c.exact_above;
}

// Step 4 for one group, given the tiles that it expands and the mean covariance of the others (or null).
static void attend_group(const Call& c, const Image& image, Scratch& s, int b, int head, int position,
                         int64_t unit, const uint8_t* expanded, const float* cross) {
  const int T = c.tiles, d = image.d, e = image.e, count = image.group_count[position];
  const int64_t row = (unit * LANES + position % LANES) * image.stride;
  const float* mean = image.q_mean + ((int64_t)head * c.groups + position) * d;
  const float limit = image.diameter[head], shrinkage = image.shrinkage[2 * head + position % 2];
  alignas(64) float coarse_maximum[LANES], coarse_sum[LANES], bias[LANES];
  const float *keys[LANES], *values[LANES];
  for (int start = 0; start < count; start += LANES) {
    const int members = count - start < LANES ? count - start : LANES, lanes = round_up(members, WIDTH);
    const int32_t* tokens = image.group_tokens + position * c.group_slots + start;
    load_queries(c, s, b, head, tokens, members);
    for (int i = 0; i < c.d; i++)
      for (int j = 0; j < lanes; j += WIDTH)
        store(s.deviation + i * LANES + j, load(s.q + i * LANES + j) - splat(mean[i]));
    start_softmax(c, s, lanes);
    int rows = 0;
    for (int t = 0; t < T; t++) {
      if (image.tile_count[t] && !expanded[t]) {
        keys[rows] = image.k_tangent + (row + t) * d, values[rows] = image.v_tangent + (row + t) * e;
        bias[rows++] = image.log_mass[row + t];
      }
      if (rows == LANES || (rows && t == T - 1)) {
        attend(c, s, s.deviation, lanes, rows, keys, values, bias);
        rows = 0;
      }
    }
    memcpy(coarse_maximum, s.maximum, sizeof coarse_maximum), memcpy(coarse_sum, s.sum, sizeof coarse_sum);
    for (int i = 0; i < c.prefix; i += LANES)  // the first of all keys, which exist
      attend_tokens(c, s, b, head, image.tokens.keys + i, c.prefix - i < LANES ? c.prefix - i : LANES, lanes);
    for (int t = 0; t < T; t++)
      if (expanded[t])
        attend_tokens(c, s, b, head, image.tile_tokens + t * c.tile_slots, image.tile_count[t], lanes);
    if (cross && limit > 0.0f) {
      float* correction = s.rows;  // (e, LANES)
      product<true>(Strided{cross, e}, Strided{s.deviation, LANES}, c.e, c.d, lanes, correction, LANES);
      for (int j = 0; j < lanes; j += WIDTH) {
        Vector square{}, relative = splat(shrinkage / limit), weight;
        for (int i = 0; i < c.e; i++) {
          const Vector x = load(correction + i * LANES + j) * relative;
          square += x * x;
        }
        weight = exponential(load(coarse_maximum + j) - load(s.maximum + j)) * load(coarse_sum + j);
        weight *= splat(shrinkage);
        for (int i = 0; i < WIDTH; i++) weight[i] /= square[i] > 1.0f ? sqrtf(square[i]) : 1.0f;
        for (int i = 0; i < c.e; i++) {
          float* x = s.output + i * LANES + j;
          store(x, load(x) + weight * load(correction + i * LANES + j));
        }
      }
    }
    write_lanes(c, s, b, head, tokens, members);
  }
}

static bool reads_everything(const Call& c, const Image& image, int b, int head, int position) {
  return c.exact[b * c.heads + head] || image.threshold[position % 2] == 0.0;
}

// Steps 4 and 5: choose the tiles of at most GROUPS groups, which share a product for their covariances, and
// attend.
static void attend_block(const Call& c, const Image& image, Scratch& s, int b, int head, int first,
                         int last, int64_t unit) {
  const int T = c.tiles, e = image.e, padded = round_up(T, WIDTH);
  bool corrected = false;
  for (int r = first; r < last; r++) {
    const bool everything = reads_everything(c, image, b, head, r);
    const int64_t group = ((int64_t)b * c.heads + head) * c.groups + c.group_order[r];
    uint8_t* expanded = c.expanded + group * T;
    float *mass = s.weights + (r - first) * padded, total = 0.0f;
    memset(mass, 0, 4 * padded);
    if (!everything) weigh_tiles(c, image, s, b, head, r, unit, mass);
    int count = 0;
    for (int t = 0; t < T; t++) {
      const float loss = everything ? 1.0f : s.logits[t];
      const bool chosen = everything || (loss > 0.0f && loss >= image.threshold[r % 2]);
      expanded[t] = chosen && image.tile_count[t];
      if (expanded[t]) mass[t] = 0.0f;
      total += mass[t], count += expanded[t];
    }
    c.expanded_count[group] = count;
    for (int t = 0; t < T && total > 0.0f; t++) mass[t] /= total;
    corrected |= total > 0.0f && image.shrinkage[2 * head + r % 2] > 0.0;
  }
  if (corrected)
    product<false>(Strided{s.weights, padded}, Strided{image.cross + (int64_t)head * T * c.d * e, c.d * e},
                   last - first, T, c.d * e, s.cross, c.d * e);
  for (int r = first; r < last; r++) {
    const int64_t group = ((int64_t)b * c.heads + head) * c.groups + c.group_order[r];
    const int32_t* tokens = image.group_tokens + r * c.group_slots;
    const int count = image.group_count[r];
    if (!reads_everything(c, image, b, head, r)) {
      const bool moves = corrected && image.shrinkage[2 * head + r % 2] > 0.0;
      const float* cross = moves ? s.cross + (r - first) * c.d * e : nullptr;
      attend_group(c, image, s, b, head, r, unit, c.expanded + group * T, cross);
    } else {
      for (int i = 0; i < count; i += LANES)
        attend_exactly(c, s, b, head, tokens + i, count - i < LANES ? count - i : LANES,
                       image.tokens.keys, image.tokens.key_count);
    }
  }
}

// Errors of a probe: |output - exact|^2, |exact|^2 and its weight.
static void judge_probe(const Call& c, const Image& image, Scratch& s, int b, int head, int index) {
  const int64_t probe = (int64_t)head * image.probes + index;
  double* result = c.probes + ((int64_t)b * c.heads * image.probes + probe) * 3;
  result[0] = result[1] = 0.0, result[2] = image.probe_weight[probe];
  if (image.probe_token[probe] < 0) return;
  const float* exact = image.exact_output + probe * image.e;
  read_token(c, c.output, b, head, image.probe_token[probe], c.e, image.e, s.values);
  for (int i = 0; i < image.e; i++) s.values[i] -= exact[i];
  result[0] = scaled_dot(s.values, s.values, image.e, magnitude(largest_bits(s.values, image.e)));
  result[1] = image.norm[probe];
}

static void attend_to_tiles(const Call& c, Image& image, Scratch& s, Team& team, int b) {
  const int H = c.heads, R = c.groups, T = c.tiles;
  const int prefix_blocks = (c.query_prefix + LANES - 1) / LANES;
  meet(team, [&] { find_tokens(c, image, b); });
  for (int first = 0; first < H; first += image.round_heads) {
    const int heads = H - first < image.round_heads ? H - first : image.round_heads;
    share_items(team, heads * R, [&](int i) { summarise_group(c, image, s, b, first + i / R, i % R); },
                [&] { for (int h = first; h < first + heads; h++) summarise_head(c, image, h); });
    share_items(team, heads * (prefix_blocks + T), [&](int i) {
      if (i < heads * prefix_blocks) {
        const int head = first + i / prefix_blocks, start = i % prefix_blocks * LANES;
        const int rest = c.query_prefix - start, count = rest < LANES ? rest : LANES;
        measure_tokens(c, s, c.q, b, head, image.tokens.queries + start, count, c.largest);
        attend_exactly(c, s, b, head, image.tokens.queries + start, count, image.tokens.keys,
                       image.tokens.key_count);
        return;
      }
      const int unit = (i - heads * prefix_blocks) / T, tile = (i - heads * prefix_blocks) % T;
      const int head = first + unit;
      if (tile == 0) {
        measure_tokens(c, s, c.k, b, head / c.share, image.tokens.keys, c.prefix, c.largest + 1);
        if (c.queries_masked && c.valid) clear_missing_queries(c, s, b, head);
      }
      read_tile(c, image, s, b, head, tile);
      summarise_tile(c, image, s, head, tile);
      represent_tile(c, image, s, head, 0, tile, image.kept_units ? head : unit);
      probe_tile(c, image, s, head, tile, unit);
    }, [&] {
      for (int h = first; h < first + heads; h++) {
        float most = 0.0f;
        for (int t = 0; t < T; t++) most = fmaxf(most, image.radius[(int64_t)h * T + t]);
        image.diameter[h] = 2.0f * most;
      }
    });
    share_items(team, heads * (int)c.probe_groups, [&](int i) {
      const int unit = i / c.probe_groups, head = first + unit;
      measure_group(c, image, s, b, head, i % c.probe_groups, unit, image.kept_units ? head : unit);
    });
  }
  meet(team, [&] { choose(c, image, b); });
  // Bands of LANES groups: those whose tangents are kept, then the others, some at a time.
  const int kept = image.kept_units, units = H * image.bands;
  const auto attend_units = [&](int first, int count) {  // units are numbered band by band
    const int blocks = (LANES + GROUPS - 1) / GROUPS;
    share_items(team, count * blocks, [&](int i) {
      const int unit = first + i / blocks, head = unit % H, band = unit / H;
      const int start = band * LANES + i % blocks * GROUPS;
      int stop = start + GROUPS < (band + 1) * LANES ? start + GROUPS : (band + 1) * LANES;
      stop = stop < R ? stop : R;
      if (start < stop) attend_block(c, image, s, b, head, start, stop, unit < kept ? unit : kept + unit - first);
    });
  };
  if (kept) attend_units(0, kept);
  for (int first = kept; first < units; first += image.round_units) {
    const int count = units - first < image.round_units ? units - first : image.round_units;
    share_items(team, count * T, [&](int i) {
      const int unit = first + i / T, head = unit % H;
      if (reads_everything(c, image, b, head, 0) && reads_everything(c, image, b, head, 1)) return;
      read_tile(c, image, s, b, head, i % T);
      represent_tile(c, image, s, head, unit / H, i % T, kept + unit - first);
    });
    attend_units(first, count);
  }
  share_items(team, H * image.probes, [&](int i) { judge_probe(c, image, s, b, i / image.probes, i % image.probes); });
}

// ---- Functions for the caller ----

constexpr double LEAST_WORK = 1e6;  // multiplications of a thread: below, starting it takes longer

static int count_threads(const Call& c, double work) {
  const double most = work / LEAST_WORK;
  const int threads = c.threads < 256 ? c.threads : 256;
  return most < 1.0 ? 1 : most < threads ? (int)most : threads;
}

static int64_t divide(const Call& c, char* base, Image* image, Tokens* tokens, Scratch* scratches) {
  Arena arena{base, 0};
  if (image) image->divide(c, arena);
  else tokens->divide(c, arena);
  for (int i = 0; i < c.threads && i < 256; i++) scratches[i].divide(c, arena);
  return arena.used;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* bmfa_sources() { return BMFA_SOURCES; }
EXPORT int bmfa_vector_width() { return WIDTH; }

// Bytes of scratch memory of a call; a call without tiles is one of exact attention.
EXPORT int64_t bmfa_scratch_bytes(const Call* c) {
  Image image;
  Tokens tokens;
  Scratch scratches[256];
  return divide(*c, nullptr, c->tiles ? &image : nullptr, &tokens, scratches);
}

EXPORT void bmfa_tiled_attention(const Call* call) {
  const Call& c = *call;
  Image image;
  Scratch scratches[256];
  divide(c, c.scratch, &image, nullptr, scratches);
  const double work = (double)c.heads * c.groups * c.keys * (2 * c.d + c.e);
  run_team(count_threads(c, work), [&](Team& team, int number) {
    for (int b = 0; b < c.batch; b++) attend_to_tiles(c, image, scratches[number], team, b);
  });
}

EXPORT void bmfa_exact_attention(const Call* call) {
  const Call& c = *call;
  Tokens tokens;
  Scratch scratches[256];
  divide(c, c.scratch, nullptr, &tokens, scratches);
  const int images = c.valid ? 1 : c.batch;  // at once: those that have the same tokens
  const double work = (double)images * c.heads * c.queries * c.keys * (c.d + c.e);
  run_team(count_threads(c, work), [&](Team& team, int number) {
    Scratch& s = scratches[number];
    for (int first = 0; first < c.batch; first += images) {
      meet(team, [&] { tokens.find(c, first); });
      const int blocks = (tokens.query_count + LANES - 1) / LANES;
      share_items(team, images * c.heads * blocks, [&](int i) {
        const int b = first + i / (c.heads * blocks), head = i / blocks % c.heads, block = i % blocks;
        const int start = block * LANES, rest = tokens.query_count - start, count = rest < LANES ? rest : LANES;
        const int key = (int64_t)block * tokens.key_count / blocks;
        const int next = (int64_t)(block + 1) * tokens.key_count / blocks;
        measure_tokens(c, s, c.q, b, head, tokens.queries + start, count, c.largest);
        measure_tokens(c, s, c.k, b, head / c.share, tokens.keys + key, next - key, c.largest + 1);
        if (block == 0 && c.queries_masked && c.valid) clear_missing_queries(c, s, b, head);
        attend_exactly(c, s, b, head, tokens.queries + start, count, tokens.keys, tokens.key_count);
      });
    }
  });
}
