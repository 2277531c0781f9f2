/* Operations as parts run by a team of threads: each thread calls the same parts in the same order, and a part does its
   share of the work. So one parallel region can hold a whole step of a model (kernels/decoder_step). */
#ifndef SLUICE_PARTS_H
#define SLUICE_PARTS_H

#include "native.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

/* Tasks taken from a thread's own run, in this phase and in the next. One cache line each. */
typedef struct {
  int taken[2];
  char padding[56];
} Share;

#define MAX_THREADS 256

/* A number whose change threads wait for. One cache line each. */
typedef struct {
  int number, sleepers;
  char padding[56];
} Signal;

/* See kernels/team. */
void await_signal(Signal *signal, int seen);
void give_signal(Signal *signal);

INLINE int signal_number(const Signal *signal) { return __atomic_load_n(&signal->number, __ATOMIC_ACQUIRE); }

/* Barrier of a team's threads. */
typedef struct {
  Signal all_came;
  int num_came;
  char padding[60];
} Meeting;

/* One thread's view of its team. A phase ends with a barrier; at most one of its parts takes tasks. */
typedef struct {
  Share *shares;    /* [count] */
  Meeting *meeting; /* null with only one phase or one thread */
  int index, count, phase;
} Team;

/* Run work on the calling thread and others, up to num_threads; see kernels/team. */
void run_team(void (*work)(const void *argument, Team *team), const void *argument, int num_threads);

/* The next task of `num_tasks`: first the thread's own run in order, then other threads' remaining tasks; -1 when none
   is left. */
INLINE int next_task(const Team *team, int num_tasks) {
  for (int i = 0; i < team->count; i++) {
    const int owner = (team->index + i) % team->count;
    const int first = (int)((int64_t)num_tasks * owner / team->count);
    const int end = (int)((int64_t)num_tasks * (owner + 1) / team->count);
    const int task = first + __atomic_fetch_add(&team->shares[owner].taken[team->phase & 1], 1, __ATOMIC_RELAXED);
    if (task < end) return task;
  }
  return -1;
}

INLINE void meet(Meeting *meeting, int count) {
  const int seen = signal_number(&meeting->all_came);
  if (__atomic_add_fetch(&meeting->num_came, 1, __ATOMIC_ACQ_REL) < count) {
    await_signal(&meeting->all_came, seen);
    return;
  }
  __atomic_store_n(&meeting->num_came, 0, __ATOMIC_RELAXED);
  give_signal(&meeting->all_came);
}

/* Wait for the others. The counts of this phase are reused only after the next barrier. */
INLINE void end_phase(Team *team) {
  if (team->count > 1) meet(team->meeting, team->count);
  team->shares[team->index].taken[team->phase & 1] = 0;
  team->phase++;
}

#if defined(_OPENMP)
#define THREAD_INDEX omp_get_thread_num()
#define THREAD_COUNT omp_get_num_threads()
#define THREAD_LIMIT (omp_get_max_threads() < MAX_THREADS ? omp_get_max_threads() : MAX_THREADS)
#else
#define THREAD_INDEX 0
#define THREAD_COUNT 1
#endif

/* Run `call`, which sees its `team`, on every thread if `condition` holds, else on one. */
#define PRAGMA(text) _Pragma(#text)
#define RUN_PARTS(condition, call)                                          \
  do {                                                                      \
    Share shares[MAX_THREADS] __attribute__((aligned(64)));                 \
    memset(shares, 0, sizeof shares);                                       \
    PRAGMA(omp parallel if (condition) num_threads(THREAD_LIMIT))           \
    {                                                                       \
      Team team = {shares, NULL, THREAD_INDEX, THREAD_COUNT, 0};                \
      call;                                                                 \
    }                                                                       \
  } while (0)

/* A thread's share of `count` items of equal work. */
INLINE int64_t share_begin(const Team *team, int64_t count) { return count * team->index / team->count; }
INLINE int64_t share_end(const Team *team, int64_t count) { return count * (team->index + 1) / team->count; }

/* A packed weight, `[N, K]`: panels of 32 columns of the product, [N / 32, W / 16, 2, 16, 16] words of four bytes, W
   words per row: two bfloat16 or four int8 of K. N is padded to whole panels, W to whole steps of 16 words. */
typedef struct {
  const char *panels;
  const void *bias;    /* [N] bfloat16, or null */
  const float *scales; /* [N] for int8, null for bfloat16 */
  int64_t N, K;
} Weight;

enum { STORE = 0, ADD = 1, GATE_SILU = 2, GATE_GELU_TANH = 3 };

/* x times a weight, transposed, with an epilogue. */
typedef struct {
  const char *x; /* [T, K], rows `x_stride` bytes apart */
  int64_t x_stride;
  const float *x_scales; /* [T] for int8: the value of one step of a row */
  const Weight *weight;
  char *out; /* bfloat16, rows `out_stride` bytes apart: [T, N], added to for ADD; [T, N / 2] for gates, whose weight
                has 16 columns of the gate, then 16 of the up projection, in each panel */
  int64_t out_stride;
  int64_t T;
  int epilogue;
  int use_tiles;       /* result of sluice_allow_tiles */
  const Weight *after; /* weight whose beginning is prefetched; may be null */
} Product;

void product_part(const Product *a, const Team *team);

/* Rows of K bfloat16 as int8: x becomes round(x / scale), scale the largest of a row over 127. */
void quantize_row(const void *x, int8_t *out, float *scale, int64_t K);

/* Row by row; see sluice_rms_norm. */
void rms_norm_row(int dtype, const void *x, const void *weight, void *out, int64_t M, float eps, float offset);
void add_normed_row(int dtype, const void *x, const void *weight, void *residual, int64_t M, float eps, float offset);

/* Elements first to end; see sluice_soft_cap. */
void soft_cap_run(int dtype, void *x, int64_t first, int64_t end, float cap);

typedef struct {
  const char *qkv;
  int64_t qkv_stride; /* elements */
  const int64_t *positions, *slot_mapping;
  const float *cos_sin;
  const void *query_weight, *key_weight;
  char *keys, *values, *out;
  int64_t out_stride; /* elements between tokens */
  int64_t T, block_size;
  int H, G, D, R, P, DP;
  float eps, offset;
} WriteKV;

/* Tokens first to end; see sluice_write_kv. */
void write_kv_tokens(const WriteKV *a, int64_t first, int64_t end, int dtype);

typedef struct {
  const char *query;
  int64_t query_stride_token, query_stride_head; /* elements */
  const char *keys, *values;
  const int32_t *block_tables;
  int64_t table_stride;
  const int32_t *query_start_locs, *context_lens;
  char *out;
  int64_t out_stride_token; /* elements; heads lie D apart */
  int S, T, H, G, D, block_size, P, DP, window, use_tiles;
  float scale;
  float soft_cap;     /* 0: none */
  const float *sinks; /* [H], or null */
} Attention;

void attention_part(const Attention *a, const Team *team, int dtype);

#endif
