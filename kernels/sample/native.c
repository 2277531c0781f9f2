/* One token per row: the kept set, then Gumbel-max, with noise computed only where it can matter.

   The definition is reference.py. These shortcuts do not change a token:
   - a kept set is a prefix of the order (value descending, id ascending), so its last member, the cut, defines it;
   - the maxima of every 64 logits, computed once, show which blocks need a second look;
   - a token further than NOISE_SPAN below the largest z cannot win, and has no mass;
   - Gumbel noise falls as its random word grows: a bound by the smallest word of 64 avoids nearly all logarithms. */
#include "../candidates.h"

#define NOISE_SPAN 26.01f
#define MASS_SPAN 21.0f        /* further below the largest z, mass rounds to 0 */
#define MASS_ONE 1073741824.0f /* 2^30 */
#define NUM_BINS 336           /* of 1/16, over MASS_SPAN */
#define NOISE_VERSION 1

typedef struct {
  uint32_t k0, k1, position, counter_2;
} Key;

typedef struct {
  float temperature, top_p, min_p;
  int32_t top_k;
  Key key;
} Options;

INLINE int64_t first_equal(const Row *row, float value, int dtype) {
  int64_t block = 0;
  while (row->maxima[block] != value) block++;
  int64_t i = block * BLOCK;
  while (load1(row->logits, i, dtype) != value) i++;
  return i;
}

INLINE i32x16 mass16(f32x16 z, float z_max) {
  const f32x16 mass = exp16(z - z_max) * MASS_ONE;
  return __builtin_convertvector(select16(at_least16(z, splat(z_max - MASS_SPAN)), mass, splat(0)), i32x16);
}

INLINE int64_t mass_of(float z, float z_max) { return mass16(splat(z), z_max)[0]; }

/* Move the shortest prefix in the order whose mass, with `before`, reaches `wanted` to the front; return its length.
   Selection into the half that contains the end of the prefix, by masses instead of counts. */
static int64_t select_mass(Candidate *c, int64_t count, float z_max, int64_t before, double wanted) {
  int64_t low = 0, high = count;
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

/* The last in the order of some candidates. */
INLINE Candidate last_of(const Candidate *c, int64_t count) {
  Candidate last = c[0];
  for (int64_t i = 1; i < count; i++)
    if (comes_before(last, c[i])) last = c[i];
  return last;
}

INLINE int bin_of(float z, float z_max) { return (int)((z_max - z) * 16.0f); }

/* The cut of top-p over all tokens with z >= bound: masses by bins of z, then a selection within one bin. */
INLINE Candidate cut_by_mass(const Row *row, float z_max, float bound, float p, Candidate *candidates, int dtype) {
  int64_t masses[NUM_BINS + 1] = {0}, total = 0;
  const float low = fmaxf(bound, z_max - MASS_SPAN);
  for (int64_t i = 0; i < row->V; i += LANES) {
    if (row->maxima[i / BLOCK] / row->temperature < low) continue;
    const f32x16 z = load_logits(row->logits, row->V, i, dtype) / row->temperature;
    const i32x16 kept = at_least16(z, splat(low)), mass = mass16(z, z_max) & kept;
    const i32x16 bins = __builtin_convertvector(select16(kept, (z_max - z) * 16.0f, splat(0)), i32x16);
    for (int lane = 0; lane < LANES; lane++) masses[bins[lane]] += mass[lane];
  }
  for (int bin = 0; bin <= NUM_BINS; bin++) total += masses[bin];
  const double wanted = (double)p * (double)total;
  int64_t before = 0;
  int bin = 0;
  while (bin < NUM_BINS && (double)(before + masses[bin]) < wanted) before += masses[bin++];
  /* Collect a bin's tokens from a slightly wider range, then exactly by the arithmetic that filled it. */
  const float from = z_max - (bin + 1) / 16.0f - 1e-3f, to = z_max - bin / 16.0f + 1e-3f;
  const int64_t wide = collect(row, fmaxf(low, from), bin ? to : INFINITY, candidates, dtype);
  int64_t count = 0;
  for (int64_t i = 0; i < wide; i++)
    if (bin_of(candidates[i].z, z_max) == bin) candidates[count++] = candidates[i];
  return last_of(candidates, select_mass(candidates, count, z_max, before, wanted));
}

/* Low and high words of 32-bit by 32-bit products. */
INLINE void multiply(u32x16 x, uint32_t y, u32x16 *low, u32x16 *high) {
#if defined(__AVX512F__)
  const __m512i a = (__m512i)x, b = _mm512_set1_epi32((int)y);
  const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  *low = (u32x16)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = (u32x16)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
  for (int lane = 0; lane < LANES; lane++) {
    const uint64_t product = (uint64_t)x[lane] * y;
    (*low)[lane] = (uint32_t)product;
    (*high)[lane] = (uint32_t)(product >> 32);
  }
#endif
}

/* The smaller of two. */
INLINE u32x16 smaller_words(u32x16 a, u32x16 b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  u32x16 found;
  for (int i = 0; i < 2; i++)
    ((i32x8 *)&found)[i] = (i32x8)_mm256_min_epu32((__m256i)((const i32x8 *)&a)[i], (__m256i)((const i32x8 *)&b)[i]);
  return found;
#else
  return (u32x16)select16((i32x16)(a < b), (f32x16)a, (f32x16)b);
#endif
}

/* Philox4x32-10 (Salmon et al., 2011), sixteen counters at once. */
INLINE void philox16(u32x16 c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    u32x16 low_0, high_0, low_1, high_1;
    multiply(c[0], 0xD2511F53u, &low_0, &high_0);
    multiply(c[2], 0xCD9E8D57u, &low_1, &high_1);
    c[0] = high_1 ^ c[1] ^ k0;
    c[1] = low_1;
    c[2] = high_0 ^ c[3] ^ k1;
    c[3] = low_0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

static float gumbel(uint32_t word) {
  double v = ((double)word + 0.5) * 0x1p-32;
  if (v > 1.0 - 0x1p-24) v = 1.0 - 0x1p-24;
  return (float)-log(-log1p(-v));
}

/* An upper bound of the noise of `word` and of every larger one: v >= 2^-(zeros + 1), and noise is at most -log(v). */
INLINE float gumbel_bound(uint32_t word) {
  const int zeros = word ? __builtin_clz(word) : 32;
  return (float)(zeros + 1) * 0.6931472f + 1e-5f;
}

/* The best candidate so far. */
typedef struct {
  float score;
  int64_t token;
} Best;

INLINE void consider(Best *best, float z, int32_t id, uint32_t word) {
  if (z + gumbel_bound(word) < best->score) return;
  const float score = z + gumbel(word);
  if (score > best->score || (score == best->score && id < best->token)) *best = (Best){score, id};
}

/* Sample among `count` candidates. */
static int64_t draw_candidates(const Candidate *candidates, int64_t count, Key key) {
  Best best = {-INFINITY, -1};
  for (int64_t start = 0; start < count; start += LANES) {
    const int64_t size = count - start < LANES ? count - start : LANES;
    u32x16 c[4] = {{0}, {0}, {0}, {0}};
    for (int64_t lane = 0; lane < size; lane++) c[0][lane] = (uint32_t)candidates[start + lane].id >> 2;
    c[1] += key.position, c[2] += key.counter_2, c[3] += NOISE_VERSION;
    philox16(c, key.k0, key.k1);
    for (int64_t lane = 0; lane < size; lane++) {
      const Candidate candidate = candidates[start + lane];
      consider(&best, candidate.z, candidate.id, c[candidate.id & 3][lane]);
    }
  }
  return best.token;
}

/* Sample among all tokens from the first in the order to `cut`: the 64 of a block share sixteen counters. */
INLINE int64_t draw_until(const Row *row, Candidate cut, Key key, int dtype) {
  const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Best best = {-INFINITY, -1};
  for (int64_t start = 0; start < row->V; start += BLOCK) {
    const float z_best = row->maxima[start / BLOCK] / row->temperature;
    if (z_best < cut.z || z_best + NOISE_SPAN < best.score) continue;
    u32x16 c[4] = {lanes + (uint32_t)start / 4, {0}, {0}, {0}};
    c[1] += key.position, c[2] += key.counter_2, c[3] += NOISE_VERSION;
    philox16(c, key.k0, key.k1);
    u32x16 least = c[0];
    for (int j = 1; j < 4; j++) least = smaller_words(c[j], least);
    uint32_t smallest = least[0];
    for (int lane = 1; lane < LANES; lane++) smallest = least[lane] < smallest ? least[lane] : smallest;
    if (z_best + gumbel_bound(smallest) < best.score) continue;
    for (int i = 0; i < BLOCK && start + i < row->V; i++) {
      const Candidate x = {load1(row->logits, start + i, dtype) / row->temperature, (int32_t)start + i};
      if (!comes_before(cut, x)) consider(&best, x.z, x.id, c[i & 3][i >> 2]);
    }
  }
  return best.token;
}

INLINE int64_t sample_row(const Row *row, const Options *options, float *scratch, Candidate *candidates, int dtype) {
  const float maximum = find_maxima(row, dtype);
  if (!(maximum > -INFINITY && maximum < INFINITY)) return -1;
  if (row->temperature == 0) return first_equal(row, maximum, dtype);
  const float z_max = maximum / row->temperature;
  if (!(z_max > -INFINITY && z_max < INFINITY)) return -1;
  Candidate cut = {z_max - NOISE_SPAN, INT32_MAX};
  if (options->min_p > 0) cut.z = fmaxf(cut.z, z_max + logf(options->min_p));
  if (options->top_k > 0 && options->top_k < row->V) {
    int64_t count = collect_first(row, options->top_k, cut.z, scratch, candidates, dtype);
    if (options->top_p < 1) {
      int64_t total = 0;
      for (int64_t i = 0; i < count; i++) total += mass_of(candidates[i].z, z_max);
      count = select_mass(candidates, count, z_max, 0, (double)options->top_p * (double)total);
    }
    return draw_candidates(candidates, count, options->key);
  }
  if (options->top_p < 1) cut = cut_by_mass(row, z_max, cut.z, options->top_p, candidates, dtype);
  return draw_until(row, cut, options->key, dtype);
}

/* Rows and their sampling options, as passed to sluice_sample. */
typedef struct {
  const char *logits;
  int64_t stride;
  const float *temperature;
  const int32_t *top_k;
  const float *top_p, *min_p;
  const int64_t *seed;
  const int32_t *position;
  const int64_t *counter_2;
  int64_t *out;
  Candidate *scratch;
  int64_t S, V;
  int dtype;
} Batch;

INLINE Options options_of(const Batch *a, int64_t s) {
  const uint64_t bits = (uint64_t)a->seed[s];
  const Key key = {(uint32_t)bits, (uint32_t)(bits >> 32), (uint32_t)a->position[s], (uint32_t)a->counter_2[s]};
  return (Options){a->temperature[s], a->top_p[s], a->min_p[s], a->top_k[s], key};
}

static void sample_part(const void *argument, Team *team) {
  const Batch *a = argument;
  const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
  /* V + 16 candidates, then two lists of floats. */
  Candidate *candidates = a->scratch + team->index * 2 * (a->V + LANES);
  float *floats = (float *)(candidates + a->V + LANES), *more_floats = floats + a->V + LANES;
  for (int s; (s = next_task(team, (int)a->S)) >= 0;) {
    const Options options = options_of(a, s);
    const Row row = {a->logits + s * a->stride * size, a->V, floats, options.temperature};
    a->out[s] = a->dtype == BFLOAT16 ? sample_row(&row, &options, more_floats, candidates, BFLOAT16)
                                     : sample_row(&row, &options, more_floats, candidates, FLOAT32);
  }
}

/* logits: [S, V], `stride` elements between rows; temperature, top_p, min_p, top_k, seed, position, counter_2, out:
   [S], as in kernels/sample/__init__.py; scratch: [num_threads, 2 * (V + 16)] words of 8 bytes. */
EXPORT void sluice_sample(int dtype, const void *logits, int64_t stride, const float *temperature, const int32_t *top_k,
                          const float *top_p, const float *min_p, const int64_t *seed, const int32_t *position,
                          const int64_t *counter_2, int64_t *out, void *scratch, int64_t S, int64_t V,
                          int num_threads) {
  const Batch a = {logits, stride,    temperature, top_k,   top_p, min_p, seed,
                   position, counter_2, out,         scratch, S,     V,     dtype};
  run_team(sample_part, &a, S > 1 && S * V >= PARALLEL_ELEMENTS ? num_threads : 1);
}
