// Vectors of one instruction set, functions of them, and the one product that everything uses.
//
// The width of a vector is fixed when this file is compiled, once for each instruction set: a compiler
// lowers vectors that are wider than the machine's to scalars, which is 40 times slower.
#pragma once
#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;      // floats of a vector
constexpr int MOST_VECTORS = 4;  // vectors of a row of C in registers: with 6 rows, 24 of 32 registers
#elif defined(__AVX__)
constexpr int WIDTH = 8;
constexpr int MOST_VECTORS = 2;  // 12 of 16
#elif defined(__ARM_NEON)
constexpr int WIDTH = 4;
constexpr int MOST_VECTORS = 4;  // 24 of 32
#else
constexpr int WIDTH = 4;
constexpr int MOST_VECTORS = 2;  // 12 of 16
#endif
constexpr int MOST_ROWS = 6;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Half __attribute__((vector_size(2 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));

template <class To>
static inline To read(const void* x) {
  To result;
  memcpy(&result, x, sizeof result);
  return result;
}
static inline Unaligned& vec(float* x) { return *(Unaligned*)x; }  // WIDTH floats, to be read and written
static inline const Unaligned& vec(const float* x) { return *(const Unaligned*)x; }
static inline Vector splat(float x) { return x - Vector{}; }  // unlike x + 0, it is x itself
static inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }
static inline int blocks_of(int n, int size) { return (n + size - 1) / size; }
static inline int round_up(int n, int multiple) { return blocks_of(n, multiple) * multiple; }

#if defined(__clang__)
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, Integers{__VA_ARGS__})
#endif
using Indices = std::make_integer_sequence<int, WIDTH>;

template <int FIRST, int... I>
static inline Vector interleave(Vector x, Vector y, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, y, (FIRST + I / 2 + I % 2 * WIDTH)...);
}
template <int BY, int... I>
static inline Vector rotate(Vector x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, ((I + BY) % WIDTH)...);
}
template <int HALF = WIDTH / 2>
static inline float sum(Vector x) {
  x += rotate<HALF>(x, Indices());
  if constexpr (HALF > 1) return sum<HALF / 2>(x);
  return x[0];
}

// exp(x) for x <= 0, relative error 2e-7; 0 below -87, where the result is not a normal number. The
// exponent n of 2^n is rounded by the addition of a number whose last bit is 1; the rest is a polynomial.
static inline Vector exponential(Vector x) {
  const float round = 12582912.0f;
  const Vector least = splat(-87.0f), clamped = larger(x, least);
  const Vector n = (clamped * 1.442695041f + round) - round;
  const Vector r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = splat(1.0f / 720.0f);
  for (float a : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) y = y * r + a;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  return x < least ? Vector{} : y * read<Vector>(&power);
}

// Rows at equal distances; an array of pointers will do wherever this does.
struct Strided {
  const float* data;
  int64_t stride;
  const float* operator[](int row) const { return data + row * stride; }
};

// Transpose `count` rows of `columns` floats, a multiple of WIDTH: to[c * stride + r] = row[r][c]. The
// columns of `to` up to the next multiple of WIDTH become 0.
static inline void transpose(Strided row, int count, int columns, float* to, int stride) {
  for (int r = 0; r < count; r += WIDTH)
    for (int c = 0; c < columns; c += WIDTH) {
      Vector x[WIDTH], y[WIDTH];
      for (int i = 0; i < WIDTH; i++) x[i] = r + i < count ? (Vector)vec(row[r + i] + c) : Vector{};
      for (int step = 1; step < WIDTH; step *= 2) {  // a perfect shuffle of the rows in each step
        for (int i = 0; i < WIDTH / 2; i++) {
          y[2 * i] = interleave<0>(x[i], x[i + WIDTH / 2], Indices());
          y[2 * i + 1] = interleave<WIDTH / 2>(x[i], x[i + WIDTH / 2], Indices());
        }
        memcpy(x, y, sizeof x);
      }
      for (int i = 0; i < WIDTH; i++) vec(to + (c + i) * (int64_t)stride + r) = x[i];
    }
}

// The rows of `product` from `row` on, for VECTORS vectors of lanes: ROWS x VECTORS of C at a time stay in
// registers while k runs, so that each load of B serves ROWS; then the rest with fewer rows.
template <bool TRANSPOSED, int ROWS, int VECTORS, class A, class B>
static inline void product_rows(const A& a, const B& b, int row, int rows, int lane, int depth, float* c,
                                int64_t stride, bool accumulate) {
  for (; row + ROWS <= rows; row += ROWS) {
    float* to = c + row * stride + lane;
    Vector sum[ROWS][VECTORS] = {};
    for (int k = 0; k < depth; k++) {
      Vector y[VECTORS];
      for (int j = 0; j < VECTORS; j++) y[j] = vec(b[k] + lane + j * WIDTH);
      for (int i = 0; i < ROWS; i++) {
        const Vector x = splat(TRANSPOSED ? a[k][row + i] : a[row + i][k]);
        for (int j = 0; j < VECTORS; j++) sum[i][j] += x * y[j];
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < VECTORS; j++) {
        Unaligned& at = vec(to + i * stride + j * WIDTH);
        at = accumulate ? at + sum[i][j] : sum[i][j];  // a sum that is large already is added once, at last
      }
  }
  if constexpr (ROWS > 1)
    product_rows<TRANSPOSED, ROWS - 1, VECTORS>(a, b, row, rows, lane, depth, c, stride, accumulate);
}

// C = A B, or C += A B: (rows x lanes) from (rows x depth) and (depth x lanes). A is read as scalars, by
// a[row][k], or a[k][row] if it is TRANSPOSED; the lanes of B and C are contiguous, and their number is a
// multiple of WIDTH.
template <bool TRANSPOSED, int VECTORS = MOST_VECTORS, class A, class B>
static inline void product(const A& a, const B& b, int rows, int depth, int lanes, float* c,
                           int64_t stride, bool accumulate = false, int lane = 0) {
  for (; lane + VECTORS * WIDTH <= lanes; lane += VECTORS * WIDTH)
    product_rows<TRANSPOSED, MOST_ROWS, VECTORS>(a, b, 0, rows, lane, depth, c, stride, accumulate);
  if constexpr (VECTORS > 1)
    product<TRANSPOSED, VECTORS / 2>(a, b, rows, depth, lanes, c, stride, accumulate, lane);
}
