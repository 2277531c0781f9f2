/* Operations as parts run by a team of threads: each thread calls the same parts in the same order, and a part does its
   share of the work. So one parallel region can hold a whole step of a model (kernels/decoder_step). */
#ifndef SLUICE_PARTS_H
#define SLUICE_PARTS_H

#include "native.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

/* Tasks taken of a thread's own run: the phase in the upper half, their number in the lower. One cache line each. */
typedef struct {
  uint64_t taken;
  int working_in; /* the phase in which the thread holds a task, else NO_PHASE; written by the thread itself */
  int cpu;        /* where it was when it took the first task of the phase */
  int thread;     /* its id for the system; 0 without a team */
  char padding[44];
} Share;

#define MAX_THREADS 256
#define NO_PHASE (-1)

/* A number whose change threads wait for. One cache line each. */
typedef struct {
  int number, sleepers;
  char padding[56];
} Signal;

/* See kernels/team. */
int await_signal(Signal *signal, int seen);
void give_signal(Signal *signal);

INLINE int signal_number(const Signal *signal) { return __atomic_load_n(&signal->number, __ATOMIC_ACQUIRE); }

/* What the threads of a team have done in the current phase. */
typedef struct {
  Signal phase; /* grows from phase to phase, and from one run of the team to the next */
  int num_done; /* tasks */
  char padding[60];
} Progress;

/* One thread's view of its team.

   A phase has one part, and ends when the tasks of that part are done. It does not wait for threads: one that is
   descheduled holds up the task that it has taken, and nothing else. It then finds the phases that ended without it
   and passes through them. So outside of its tasks a part writes nothing that others read. */
typedef struct {
  Share *shares;      /* [count] */
  Progress *progress; /* null with only one phase or one thread */
  int index, count;
  int phase;
  int num_tasks, num_taken; /* of this phase; taken by this thread */
} Team;

void begin_work(const Team *team);
void await_phase(const Team *team);

/* Run work on the calling thread and others, up to num_threads; see kernels/team. */
void run_team(void (*work)(const void *argument, Team *team), const void *argument, int num_threads);

/* Take the next task of the run of `size` tasks; -1 if there is none, or the phase has ended. The first who comes in a
   phase begins the count. */
INLINE int take_from(Share *share, int phase, int size) {
  uint64_t seen = __atomic_load_n(&share->taken, __ATOMIC_RELAXED);
  for (;;) {
    const int ahead = (int)((uint32_t)(seen >> 32) - (uint32_t)phase), taken = ahead ? 0 : (int)(uint32_t)seen;
    if (ahead > 0 || taken >= size) return -1;
    const uint64_t now = (uint64_t)(uint32_t)phase << 32 | (uint32_t)(taken + 1);
    if (__atomic_compare_exchange_n(&share->taken, &seen, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return taken;
  }
}

/* The next task of `num_tasks`: first the thread's own run in order, then other threads' remaining tasks; -1 when none
   is left. */
INLINE int next_task(Team *team, int num_tasks) {
  team->num_tasks = num_tasks;
  for (int i = 0; i < team->count; i++) {
    const int owner = (team->index + i) % team->count;
    const int first = (int)((int64_t)num_tasks * owner / team->count);
    const int end = (int)((int64_t)num_tasks * (owner + 1) / team->count);
    const int task = take_from(team->shares + owner, team->phase, end - first);
    if (task < 0) continue;
    if (!team->num_taken++ && team->progress) begin_work(team);
    return first + task;
  }
  return -1;
}

/* End the phase for this thread: its tasks are done. Wait for those of others. */
INLINE void end_phase(Team *team) {
  Progress *progress = team->progress;
  if (progress && team->num_tasks) {
    const int num_taken = team->num_taken;
    __atomic_store_n(&team->shares[team->index].working_in, NO_PHASE, __ATOMIC_RELAXED);
    if (num_taken && __atomic_add_fetch(&progress->num_done, num_taken, __ATOMIC_ACQ_REL) == team->num_tasks) {
      __atomic_store_n(&progress->num_done, 0, __ATOMIC_RELAXED);
      give_signal(&progress->phase);
    } else if (signal_number(&progress->phase) == team->phase) {
      await_phase(team);
    }
  }
  team->phase += team->num_tasks != 0;
  team->num_tasks = team->num_taken = 0;
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
      Team team = {shares, NULL, THREAD_INDEX, THREAD_COUNT, 0, 0, 0};          \
      call;                                                                 \
    }                                                                       \
  } while (0)

/* A thread's share of `count` items of equal work. */
INLINE int64_t share_begin(const Team *team, int64_t count) { return count * team->index / team->count; }
INLINE int64_t share_end(const Team *team, int64_t count) { return count * (team->index + 1) / team->count; }

/* Consecutive items. */
typedef struct {
  int64_t first, end;
} Run;

#define RUNS_PER_THREAD 4

/* The next run of `count` items of equal work, as a task; an empty one when none is left. */
INLINE Run next_run(Team *team, int64_t count) {
  const int64_t most = (int64_t)team->count * RUNS_PER_THREAD, num_tasks = count < most ? count : most;
  const int64_t task = next_task(team, (int)num_tasks);
  return task < 0 ? (Run){0, 0} : (Run){count * task / num_tasks, count * (task + 1) / num_tasks};
}

#define FOR_RUNS(team, run, count) for (Run run; (run = next_run(team, count)).first < run.end;)

/* Kinds of weights: plain; int8 with a scale for each column of the product; 4 and 8 bits in groups of 32 of K;
   4 bits in such groups whose scales are in 8 bits, in units of 8 groups; 4 and 8 bits whose scales and zeros are those
   of a span of several groups. */
typedef enum { BF16 = 0, INT8 = 1, GROUPS4 = 2, GROUPS8 = 3, UNITS4 = 4, SPANS4 = 5, SPANS8 = 6 } Kind;

/* A packed weight, `[N, K]`: panels of 32 columns of the product. BF16, INT8: [N / 32, W / 16, 2, 16, 16] words of four
   bytes, W words per row: two bfloat16 or four int8 of K, which is padded to whole steps of 16 words. Others: groups as
   in linear/groups.h, [N / 32, K / 32]. N is padded to whole panels. */
typedef struct {
  const char *panels;
  const void *bias;    /* [N] bfloat16, or null */
  const float *scales; /* [N] for INT8 */
  int64_t N, K, kind;
  int64_t span;         /* of SPANS4 and SPANS8: groups that share a scale */
  const int32_t *order; /* [K], of SPANS4 and SPANS8: which element of x each element of a row multiplies; null: its own */
} Weight;

/* What an adapter adds to a product: x times `down`, transposed, times `up`. Sixteen columns of the product read `rank`
   of the R numbers between the two, from sources[column / 16] on. R is a multiple of 4, and `rank` of 2. */
typedef struct {
  const uint16_t *down;   /* [R, K] bfloat16; null: nothing is added */
  const uint32_t *up;     /* [N / 16, rank / 2, 16] pairs of bfloat16, zeros where N is padded to whole panels */
  const int32_t *sources; /* [N / 16] */
  int64_t R, K, rank;
} Adapter;

/* The adapters of rows, of which each has one or none. */
typedef struct {
  const Adapter *const *rows; /* [T]: the products of each row's adapter, or null; null if no row has one */
  float *shrunk;              /* [T, stride]: x times `down` of a row */
  int64_t index, stride;      /* index: which product of the adapter */
} Adapters;

/* What the adapter of row t adds to the product; null if it has none, or none for this product. */
INLINE const Adapter *adapter_of(const Adapters *a, int64_t t) {
  if (!a->rows || !a->rows[t]) return NULL;
  const Adapter *adapter = a->rows[t] + a->index;
  return adapter->down ? adapter : NULL;
}

/* Multiply a row x of K bfloat16 with `down` of its adapter, if it has one, to row t of `shrunk`. */
void shrink_row(const Adapters *a, const void *x, int64_t t);

enum { STORE = 0, ADD = 1, GATE_SILU = 2, GATE_GELU_TANH = 3, GATE_SWIGLU_CLAMPED = 4 };

/* x times a weight, transposed, with an epilogue. */
typedef struct {
  const char *x; /* [T, K], as quantize_row makes it unless the weight is BF16 */
  int64_t x_stride; /* bytes between rows of BF16 and INT8 */
  const float *x_scales; /* [T] for INT8: the value of one step of a row */
  const Weight *weight;
  char *out; /* bfloat16, rows `out_stride` bytes apart: [T, N], added to for ADD; [T, N / 2] for gates, whose weight
                has 16 columns of the gate, then 16 of the up projection, in each panel */
  int64_t out_stride;
  int64_t T;
  int epilogue;
  int use_tiles;       /* result of sluice_allow_tiles */
  const Weight *after; /* weight whose beginning is prefetched; may be null */
  Adapters adapters;   /* of rows that shrink_row has multiplied */
} Product;

void product_part(const Product *a, Team *team);

/* Rows that one expert computes: `count` from `first` on, which is a multiple of 8. */
typedef struct {
  int32_t expert, first, count;
} ExpertBlock;

/* Products of blocks of rows, each with the weight of its expert. */
typedef struct {
  Product product;       /* of all rows; its weight and T are not read */
  const Weight *weights; /* [E], of one size and kind */
  const ExpertBlock *blocks;
  const int64_t *num_blocks; /* at most max_blocks, which depends on the number of rows alone */
  int64_t max_blocks;
  const Weight *after; /* [E], as Product.after: of the next product of these blocks; may be null */
} GroupedProduct;

void grouped_product_part(const GroupedProduct *a, Team *team);

/* The most rows that a block should have for these weights. */
int64_t rows_of_block(const Weight *weight);

/* Row n of a weight as K bfloat16, dequantised in float32 and rounded once: of an embedding that stays packed. */
void weight_row(const Weight *weight, int64_t n, uint16_t *out);

/* Write a row of K bfloat16 as row t of x in 8 bits, for a weight that is not BF16. INT8: round(row / scale), scale the
   largest of the row over 127. Others: groups with scales of their own, 8 rows beside each other. */
void quantize_row(const Weight *weight, const void *row, char *x, int64_t x_stride, float *scales, int64_t t);

/* The router of a mixture; see sluice_route. */
typedef struct {
  const void *weight; /* [E, M], or [E + 1, M] with a shared expert, whose gate is the last */
  const float *bias;  /* [E], or null */
  int64_t E, M, num_chosen, is_normalised, has_shared;
} Router;

/* Scores of experts first to end for a row; then its experts, the best first, and their shares, with that of the shared
   one; the scores are changed. */
void score_experts(const Router *router, const void *x, int64_t first, int64_t end, float *scores, int dtype);
void choose_experts(const Router *router, float *scores, int32_t *experts, float *shares);

/* Where the outputs of rows are, by expert: places: [pairs] of a row and a rank each, whose experts are given; blocks of
   at most `most` rows; counts: room for [E]. Blocks of different experts begin at multiples of 8. */
void group_rows(const int32_t *experts, int64_t pairs, int64_t E, int64_t most, int32_t *places, ExpertBlock *blocks,
                int64_t *num_blocks, int32_t *counts);

/* The sum of k rows at `places`, `stride` elements apart, times their shares, in order; then that of `shared`. */
void combine_row(int dtype, const void *rows, int64_t stride, const int32_t *places, const float *shares,
                 const void *shared, void *out, int64_t M, int64_t k);

/* Row by row; see sluice_rms_norm. */
void rms_norm_row(int dtype, const void *x, const void *weight, void *out, int64_t M, float eps, float offset);
void layer_norm_row(int dtype, const void *x, const void *weight, void *out, int64_t M, float eps);
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
  float *key_scales, *value_scales; /* [blocks, G, P] of a cache in int8, or null */
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
  const float *key_scales, *value_scales; /* [blocks, G, P] of a cache in int8, or null */
} Attention;

void attention_part(const Attention *a, Team *team, int dtype);

#endif
