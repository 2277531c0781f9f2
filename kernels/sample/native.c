/* One token per row: the kept set, then Gumbel-max, with noise drawn only where it can matter.

   The definition is reference.py. What makes this fast without changing a token:
   - a token further than NOISE_SPAN below the largest z cannot win, and counts nothing towards top-p (its mass rounds to
     0 there), so only the others, the candidates, are looked at;
   - a kept set is a prefix of the order (value down, id up), found by selection, not by sorting;
   - Gumbel noise falls as its random word grows: a bound by the word's leading zeros spares nearly all logarithms. */
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../native.h"

#define NOISE_SPAN 26.01f
#define MASS_ONE 1073741824.0f /* 2^30 */
#define NOISE_VERSION 1

typedef struct {
  float z;
  int32_t id;
} Candidate;

/* Largest logit of a row; NaN if any is NaN. */
INLINE float row_maximum(const void *row, int64_t V, int dtype) {
  f32x16 best = splat(-INFINITY);
  i32x16 has_nan = {0};
  int64_t i = 0;
  for (; i + LANES <= V; i += LANES) {
    const f32x16 x = load16(row, i, dtype);
    has_nan |= x != x;
    best = select16(x > best, x, best);
  }
  float maximum = max16(best);
  for (int lane = 0; lane < LANES; lane++)
    if (has_nan[lane]) return NAN;
  for (; i < V; i++) {
    const float x = load1(row, i, dtype);
    if (x != x) return NAN;
    if (x > maximum) maximum = x;
  }
  return maximum;
}

INLINE int64_t first_equal(const void *row, int64_t V, float value, int dtype) {
  int64_t i = 0;
  for (; i + LANES <= V; i += LANES) {
    const i32x16 equal = load16(row, i, dtype) == value;
    int found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= equal[lane];
    if (found) break;
  }
  while (load1(row, i, dtype) != value) i++;
  return i;
}

/* Tokens with z = logit / temperature at least `bound`, in order of id; returns how many. */
INLINE int64_t collect(const void *row, int64_t V, float temperature, float bound, Candidate *candidates, int dtype) {
  int64_t count = 0, i = 0;
  for (; i + LANES <= V; i += LANES) {
    const f32x16 z = load16(row, i, dtype) / temperature;
    const i32x16 kept = z >= bound;
    for (int lane = 0; lane < LANES; lane++) {
      candidates[count] = (Candidate){z[lane], (int32_t)i + lane};
      count -= kept[lane];
    }
  }
  for (; i < V; i++) {
    const float z = load1(row, i, dtype) / temperature;
    candidates[count] = (Candidate){z, (int32_t)i};
    count += z >= bound;
  }
  return count;
}

INLINE int comes_before(Candidate a, Candidate b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

INLINE void swap(Candidate *a, Candidate *b) {
  const Candidate c = *a;
  *a = *b;
  *b = c;
}

/* The middle one of the first, the middle and the last, which makes sorted input the best case instead of the worst. */
INLINE Candidate pivot_of(const Candidate *c, int64_t low, int64_t high) {
  const Candidate a = c[low], b = c[low + (high - 1 - low) / 2], d = c[high - 1];
  if (comes_before(a, b)) return comes_before(b, d) ? b : comes_before(a, d) ? d : a;
  return comes_before(a, d) ? a : comes_before(b, d) ? d : b;
}

/* Move those of [low, high) that come before `pivot`, and it, to the front; returns how many come before it. */
static int64_t partition(Candidate *c, int64_t low, int64_t high, Candidate pivot) {
  int64_t end = low;
  for (int64_t i = low; i < high; i++)
    if (comes_before(c[i], pivot)) swap(&c[i], &c[end++]);
  for (int64_t i = end; i < high; i++)
    if (c[i].id == pivot.id) {
      swap(&c[i], &c[end]);
      break;
    }
  return end;
}

/* Put the first `k` in the order at the front, themselves in no order (Hoare's selection). */
static void select_first(Candidate *c, int64_t count, int64_t k) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = partition(c, low, high, pivot_of(c, low, high));
    if (middle == k || middle + 1 == k) return;
    if (middle < k)
      low = middle + 1;
    else
      high = middle;
  }
}

INLINE int64_t mass_of(float z, float z_max) { return (int64_t)floorf(expf(z - z_max) * MASS_ONE); }

/* Keep the shortest prefix in the order whose mass reaches `p` of all; returns its length. Selection again, on the half
   that the end of the prefix is in, by masses instead of counts. */
static int64_t select_mass(Candidate *c, int64_t count, float z_max, float p) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += mass_of(c[i].z, z_max);
  const double wanted = (double)p * (double)total;
  int64_t low = 0, high = count, before = 0; /* mass of [0, low) */
  while (high - low > 1) {
    const int64_t middle = partition(c, low, high, pivot_of(c, low, high));
    int64_t mass = before;
    for (int64_t i = low; i < middle; i++) mass += mass_of(c[i].z, z_max);
    if (middle > low && (double)mass >= wanted) {
      high = middle;
      continue;
    }
    mass += mass_of(c[middle].z, z_max);
    if ((double)mass >= wanted) return middle + 1;
    before = mass;
    low = middle + 1;
  }
  return high;
}

/* Philox4x32-10 (Salmon et al., 2011). */
INLINE void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c[3] = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

typedef struct {
  uint32_t k0, k1, position, counter_2;
} Key;

INLINE uint32_t word_of(int32_t id, Key key) {
  uint32_t c[4] = {(uint32_t)id >> 2, key.position, key.counter_2, NOISE_VERSION};
  philox(c, key.k0, key.k1);
  return c[id & 3];
}

static float gumbel(uint32_t word) {
  double v = ((double)word + 0.5) * 0x1p-32;
  if (v > 1.0 - 0x1p-24) v = 1.0 - 0x1p-24;
  return (float)-log(-log1p(-v));
}

/* At least the noise of `word`, to which it is close: v >= 2^-(zeros + 1), and noise is at most -log(v). */
INLINE float gumbel_bound(uint32_t word) {
  const int zeros = word ? __builtin_clz(word) : 32;
  return (float)(zeros + 1) * 0.6931472f + 1e-5f;
}

#define BATCH 256

static int64_t draw(const Candidate *candidates, int64_t count, Key key) {
  float best = -INFINITY;
  int64_t token = -1;
  uint32_t words[BATCH];
  for (int64_t start = 0; start < count; start += BATCH) {
    const int64_t size = count - start < BATCH ? count - start : BATCH;
    for (int64_t i = 0; i < size; i++) words[i] = word_of(candidates[start + i].id, key);
    for (int64_t i = 0; i < size; i++) {
      const Candidate c = candidates[start + i];
      if (c.z + gumbel_bound(words[i]) < best) continue;
      const float score = c.z + gumbel(words[i]);
      if (score > best || (score == best && c.id < token)) {
        best = score;
        token = c.id;
      }
    }
  }
  return token;
}

typedef struct {
  float temperature, top_p, min_p;
  int32_t top_k;
  Key key;
} Options;

INLINE int64_t sample_row(const void *row, int64_t V, const Options *options, Candidate *candidates, int dtype) {
  const float maximum = row_maximum(row, V, dtype);
  if (!(maximum > -INFINITY && maximum < INFINITY)) return -1;
  if (options->temperature == 0) return first_equal(row, V, maximum, dtype);
  const float z_max = maximum / options->temperature;
  if (!(z_max > -INFINITY && z_max < INFINITY)) return -1;
  float bound = z_max - NOISE_SPAN;
  if (options->min_p > 0) bound = fmaxf(bound, z_max + logf(options->min_p));
  int64_t count = collect(row, V, options->temperature, bound, candidates, dtype);
  if (options->top_k > 0 && options->top_k < count) {
    select_first(candidates, count, options->top_k);
    count = options->top_k;
  }
  if (options->top_p < 1) count = select_mass(candidates, count, z_max, options->top_p);
  return draw(candidates, count, options->key);
}

INLINE int thread_number(void) {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

/* logits: [S, V], `stride` elements between rows; temperature, top_p, min_p, top_k, seed, position, counter_2, out: [S],
   as kernels/sample/__init__.py says; scratch: [num_threads, V + 16] pairs of 8 bytes. */
EXPORT void sluice_sample(int dtype, const void *logits, int64_t stride, const float *temperature, const int32_t *top_k,
                          const float *top_p, const float *min_p, const int64_t *seed, const int32_t *position,
                          const int64_t *counter_2, int64_t *out, void *scratch, int64_t S, int64_t V,
                          int num_threads) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (S * V >= PARALLEL_ELEMENTS && S > 1)
  for (int64_t s = 0; s < S; s++) {
    const char *row = (const char *)logits + s * stride * size;
    const uint64_t bits = (uint64_t)seed[s];
    const Key key = {(uint32_t)bits, (uint32_t)(bits >> 32), (uint32_t)position[s], (uint32_t)counter_2[s]};
    const Options options = {temperature[s], top_p[s], min_p[s], top_k[s], key};
    Candidate *candidates = (Candidate *)scratch + thread_number() * (V + LANES);
    out[s] = dtype == BFLOAT16 ? sample_row(row, V, &options, candidates, BFLOAT16)
                               : sample_row(row, V, &options, candidates, FLOAT32);
  }
}
