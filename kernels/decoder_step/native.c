/* One step of a whole decoder, run by one team of threads: embed, L blocks, norm, project.

   The definition is engine/models/decoder.py, operation by operation; this file calls the same parts. A phase begins
   when all tasks of the one before it are done; between phases there is no call, allocation or other thread.
   bfloat16; weights of any kind. */
#include "../parts.h"

#include <time.h>

/* Phases, named as in cpu.py. */
enum {
  START, EMBED, NORM, QKV, WRITE_KV, ATTENTION, KEEP, ATTENTION_OUTPUT, PREPARE, ROUTE, GATHER, GATED, DOWN, COMBINE,
  OUTPUT, NUM_PHASES
};

/* A router, and the experts that it chooses from. */
typedef struct {
  Router router;
  const Weight *gate_up, *down; /* [E] */
} Mixture;

typedef struct {
  Weight qkv, attention_output, gate_up, down; /* with a mixture the last two are those of its shared expert, or empty */
  const Mixture *mixture;                          /* or null */
  const void *attention_norm, *mlp_norm;           /* [M], or null: products read the residual */
  const void *attention_post_norm, *mlp_post_norm; /* [M], or null */
  const void *query_norm, *key_norm;               /* [D], or null */
  const void *query_row_norm, *key_row_norm;       /* [H * D] and [G * D], or null */
  const float *cos_sin;                            /* [., R] */
  const float *sinks;                              /* [H], or null */
  void *keys, *values;
  int64_t window, table, R; /* table: 0, or 1 and more for window groups */
  float head_eps, head_offset; /* of the norms of heads */
  float *key_scales, *value_scales; /* of a cache in int8, or null */
} Layer;

/* Sizes, weights, and buffers of a step: rows of residual [., M], normed [., M], qkv, query [., H * D], attended [., H
   * D], gated [., I], each `*_stride` elements apart; bytes and scales for rows in 8 bits. Of mixtures: scores [., E +
   1], chosen and places [., k], shares [., k + 1], blocks and counts of group_rows, shared [., M]; the rows of experts,
   rows [P, M] before and after them, inner [P, I] between. */
typedef struct {
  const Layer *layers;
  const void *embedding, *final_norm; /* embedding: null if it is packed */
  Weight packed_embedding, output;
  uint16_t *residual, *normed, *qkv, *query, *attended, *gated;
  int8_t *bytes;
  float *scales;
  float *shrunk; /* [., shrunk_stride]: x times the first matrix of a row's adapter */
  float *scores, *shares;
  int32_t *chosen, *places, *counts;
  ExpertBlock *blocks;
  int64_t *num_blocks;
  uint16_t *rows, *inner, *shared;
  int64_t hidden_stride, qkv_stride, heads_stride, gated_stride, bytes_stride, shrunk_stride, inner_stride;
  int64_t L, M, H, G, D, block_size, P, DP, activation, use_tiles, is_norm_centered, is_parallel;
  float norm_eps, norm_offset, scale, soft_cap, embedding_scale, logit_scale, final_cap;
} Model;

/* T tokens of S sequences; logits: [num_rows, V] of the tokens `rows`, in ascending order; or null, to leave these rows
   normed in the model's `normed`. */
typedef struct {
  const int64_t *input_ids, *positions, *slot_mapping;
  const int32_t *block_tables, *query_start_locs, *context_lens;
  const int64_t *window_slots;  /* [W, T], or null */
  const int32_t *window_tables; /* [W, S, max_blocks], or null */
  const int64_t *rows;
  const Adapter *const *adapters, *const *kept_adapters; /* of the T tokens, and of `rows`, as in Adapters: products
                                                            of each layer in the order of ADAPTED; null if none has one */
  uint16_t *logits;
  double *seconds; /* [NUM_PHASES + 1]: each phase's duration is added to its entry; the last entry is the time when a
                      phase last ended; or null */
  int64_t T, S, num_rows, table_stride, logits_stride;
  int64_t window_slots_stride, window_stride, window_table_stride; /* of window_slots' rows, and of tables and rows of
                                                                      window_tables */
} Step;

/* End a phase, and record its duration, as the caller's thread sees it. */
INLINE void lap(Team *team, const Step *s, int phase) {
  end_phase(team);
  if (!s->seconds || team->index != 0) return;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
  s->seconds[phase] += seconds - s->seconds[NUM_PHASES];
  s->seconds[NUM_PHASES] = seconds;
}

/* Products of a layer that adapters have. */
enum { ADAPTED_QKV, ADAPTED_OUTPUT, ADAPTED_GATED, ADAPTED_DOWN, NUM_ADAPTED };

static const Adapters NO_ADAPTERS = {NULL, NULL, 0, 0};

/* What adapters add to a product of layer l: of all tokens, or, in the last layer after attention, of the kept ones. */
INLINE Adapters adapters_of(const Model *m, const Step *s, int64_t l, int which) {
  const int is_kept = l + 1 == m->L && which != ADAPTED_QKV;
  return (Adapters){is_kept ? s->kept_adapters : s->adapters, m->shrunk, l * NUM_ADAPTED + which, m->shrunk_stride};
}

/* Whether rows of x are prepared for the product: in 8 bits, or with adapters. */
INLINE int needs_rows(const Weight *weight, const Adapters *adapters) { return weight->kind != BF16 || adapters->rows; }

/* Rows of x in 8 bits, if the weight's product takes them so, and times the first matrix of their adapters. */
INLINE void prepare_rows(const Model *m, const uint16_t *x, int64_t stride, const Weight *weight,
                         const Adapters *adapters, int64_t first, int64_t end) {
  if (adapters->rows)
    for (int64_t t = first; t < end; t++) shrink_row(adapters, x + t * stride, t);
  if (weight->kind == BF16) return;
  for (int64_t t = first; t < end; t++)
    quantize_row(weight, x + t * stride, (char *)m->bytes, m->bytes_stride, m->scales, t);
}

/* A product of rows that an earlier phase has prepared if necessary. */
INLINE void multiply(const Model *m, Team *team, const uint16_t *x, int64_t x_stride, const Weight *weight,
                     const Adapters *adapters, uint16_t *out, int64_t out_stride, int64_t T, int epilogue,
                     const Weight *after) {
  const int is_plain = weight->kind == BF16;
  const Product a = {is_plain ? (const char *)x : (const char *)m->bytes,
                     is_plain ? x_stride * 2 : m->bytes_stride,
                     m->scales, weight, (char *)out, out_stride * 2, T, epilogue, (int)m->use_tiles, after,
                     *adapters};
  product_part(&a, team);
}

/* Rows first to end of the residual, normalised. If the previous block left its output in `normed`, first add its norm
   to the residual; otherwise the block's last product has already been added. */
INLINE void rms_norm_rows(const Model *m, const void *post_norm, const void *norm, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; t++) {
    uint16_t *residual = m->residual + t * m->hidden_stride, *normed = m->normed + t * m->hidden_stride;
    if (post_norm) add_normed_row(BFLOAT16, normed, post_norm, residual, m->M, m->norm_eps, m->norm_offset);
    if (norm) rms_norm_row(BFLOAT16, residual, norm, normed, m->M, m->norm_eps, m->norm_offset);
  }
}

INLINE void layer_norm_rows(const Model *m, const void *norm, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; t++)
    layer_norm_row(BFLOAT16, m->residual + t * m->hidden_stride, norm, m->normed + t * m->hidden_stride, m->M,
                   m->norm_eps);
}

/* Make the rows x for the product with `weight`: `normed`, or the residual without a norm. */
INLINE void normalise_rows(const Model *m, Team *team, const void *post_norm, const void *norm, const uint16_t *x,
                           const Weight *weight, const Adapters *adapters, int64_t T) {
  FOR_RUNS(team, rows, T) {
    if (norm && m->is_norm_centered)
      layer_norm_rows(m, norm, rows.first, rows.end);
    else
      rms_norm_rows(m, post_norm, norm, rows.first, rows.end);
    prepare_rows(m, x, m->hidden_stride, weight, adapters, rows.first, rows.end);
  }
}

/* What a product reads that follows a norm. */
INLINE const uint16_t *after_norm(const Model *m, const void *norm) { return norm ? m->normed : m->residual; }

INLINE void scale_row(uint16_t *row, int64_t M, float factor) {
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) store16(row, i, load16(row, i, BFLOAT16) * factor, BFLOAT16);
  for (; i < M; i++) store1(row, i, load1(row, i, BFLOAT16) * factor, BFLOAT16);
}

/* row += added, rounded. */
INLINE void add_row(uint16_t *row, const uint16_t *added, int64_t M) {
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) store16(row, i, load16(row, i, BFLOAT16) + load16(added, i, BFLOAT16), BFLOAT16);
  for (; i < M; i++) store1(row, i, load1(row, i, BFLOAT16) + load1(added, i, BFLOAT16), BFLOAT16);
}

INLINE void embed(const Model *m, const Step *s, Team *team) {
  FOR_RUNS(team, rows, s->T) {
    for (int64_t t = rows.first; t < rows.end; t++) {
      uint16_t *row = m->residual + t * m->hidden_stride;
      if (m->embedding)
        memcpy(row, (const uint16_t *)m->embedding + s->input_ids[t] * m->M, m->M * 2);
      else
        weight_row(&m->packed_embedding, s->input_ids[t], row);
      if (m->embedding_scale != 1) scale_row(row, m->M, m->embedding_scale);
    }
  }
}

/* A block's last product: added to the residual, or left in `normed` if it is normalised before it is added. */
INLINE void multiply_last(const Model *m, Team *team, const uint16_t *x, int64_t x_stride, const Weight *weight,
                          const Adapters *adapters, int64_t T, const void *post_norm, const Weight *after) {
  multiply(m, team, x, x_stride, weight, adapters, post_norm ? m->normed : m->residual, m->hidden_stride, T,
           post_norm ? STORE : ADD, after);
}

/* Keep only the rows whose logits are needed, in one task: a row may move to where another was. */
INLINE void keep_rows(const Model *m, const Step *s, Team *team) {
  if (next_task(team, 1) < 0) return;
  for (int64_t i = 0; i < s->num_rows; i++) {
    const int64_t t = s->rows[i];
    if (t == i) continue;
    memcpy(m->residual + i * m->hidden_stride, m->residual + t * m->hidden_stride, m->M * 2);
    if (m->is_parallel) memcpy(m->normed + i * m->hidden_stride, m->normed + t * m->hidden_stride, m->M * 2);
    memcpy(m->attended + i * m->heads_stride, m->attended + t * m->heads_stride, m->H * m->D * 2);
  }
}

/* Normalise all query heads of a token together, and all key heads. */
INLINE void normalise_heads(const Model *m, const Layer *layer, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; t++) {
    uint16_t *query = m->qkv + t * m->qkv_stride, *key = query + m->H * m->D;
    rms_norm_row(BFLOAT16, query, layer->query_row_norm, query, m->H * m->D, layer->head_eps, layer->head_offset);
    rms_norm_row(BFLOAT16, key, layer->key_row_norm, key, m->G * m->D, layer->head_eps, layer->head_offset);
  }
}

/* Queries, keys and values of the rows; then attention. */
INLINE void attend(const Model *m, const Layer *layer, const Step *s, Team *team) {
  const Adapters adapters = adapters_of(m, s, layer - m->layers, ADAPTED_QKV);
  multiply(m, team, after_norm(m, layer->attention_norm), m->hidden_stride, &layer->qkv, &adapters, m->qkv,
           m->qkv_stride, s->T, STORE, &layer->attention_output);
  lap(team, s, QKV);
  const int64_t w = layer->table - 1; /* below 0: not in a window group */
  const int64_t *slots = w < 0 ? s->slot_mapping : s->window_slots + w * s->window_slots_stride;
  const int32_t *tables = w < 0 ? s->block_tables : s->window_tables + w * s->window_stride;
  const WriteKV write = {(const char *)m->qkv, m->qkv_stride, s->positions, slots, layer->cos_sin,
                         layer->query_norm, layer->key_norm, layer->keys, layer->values, (char *)m->query,
                         m->heads_stride, s->T, m->block_size, (int)m->H, (int)m->G, (int)m->D, (int)layer->R, (int)m->P,
                         (int)m->DP, layer->head_eps, layer->head_offset, layer->key_scales, layer->value_scales};
  FOR_RUNS(team, tokens, s->T) {
    if (layer->query_row_norm) normalise_heads(m, layer, tokens.first, tokens.end);
    write_kv_tokens(&write, tokens.first, tokens.end, BFLOAT16);
  }
  lap(team, s, WRITE_KV);
  const Attention attention = {(const char *)m->query, m->heads_stride, m->D, layer->keys, layer->values,
                               tables, w < 0 ? s->table_stride : s->window_table_stride, s->query_start_locs,
                               s->context_lens,
                               (char *)m->attended, m->heads_stride, (int)s->S, (int)s->T, (int)m->H, (int)m->G,
                               (int)m->D, (int)m->block_size, (int)m->P, (int)m->DP, (int)layer->window,
                               (int)m->use_tiles, m->scale, m->soft_cap, layer->sinks, layer->key_scales,
                               layer->value_scales};
  attention_part(&attention, team, BFLOAT16);
  lap(team, s, ATTENTION);
}

/* The gated product of rows x of a dense feed-forward, prepared for the next one. */
INLINE void gate(const Model *m, const Layer *layer, const Step *s, int64_t T, Team *team, const uint16_t *x) {
  const int64_t l = layer - m->layers;
  const Adapters of_gated = adapters_of(m, s, l, ADAPTED_GATED), of_down = adapters_of(m, s, l, ADAPTED_DOWN);
  multiply(m, team, x, m->hidden_stride, &layer->gate_up, &of_gated, m->gated, m->gated_stride, T,
           GATE_SILU + (int)m->activation, &layer->down);
  lap(team, s, GATED);
  if (needs_rows(&layer->down, &of_down)) {
    FOR_RUNS(team, rows, T) prepare_rows(m, m->gated, m->gated_stride, &layer->down, &of_down, rows.first, rows.end);
    lap(team, s, PREPARE);
  }
}

#define SCORED 16 /* experts that one task scores for a row */

/* The most rows of a block of an expert's. */
INLINE int64_t rows_together(const Mixture *mixture) {
  const int64_t up = rows_of_block(mixture->gate_up), down = rows_of_block(mixture->down);
  return up < down ? up : down;
}

/* Choose the experts of rows x, and lay out where each computes them: `places`, `blocks` and `shares`. */
INLINE void route(const Model *m, const Mixture *mixture, const Step *s, Team *team, const uint16_t *x, int64_t T) {
  const Router *r = &mixture->router;
  const int64_t width = r->E + r->has_shared, k = r->num_chosen, slices = (width + SCORED - 1) / SCORED;
  FOR_RUNS(team, run, T * slices) {
    for (int64_t i = run.first; i < run.end; i++) {
      const int64_t t = i / slices, first = i % slices * SCORED, end = first + SCORED < width ? first + SCORED : width;
      score_experts(r, x + t * m->hidden_stride, first, end, m->scores + t * width, BFLOAT16);
    }
  }
  lap(team, s, ROUTE);
  if (next_task(team, T > 0) >= 0) {
    for (int64_t t = 0; t < T; t++)
      choose_experts(r, m->scores + t * width, m->chosen + t * k, m->shares + t * (k + r->has_shared));
    group_rows(m->chosen, T * k, r->E, rows_together(mixture), m->places, m->blocks, m->num_blocks, m->counts);
  }
  lap(team, s, ROUTE);
}

/* A product of the rows of all experts, each by its own weight. */
INLINE void multiply_by_experts(const Model *m, Team *team, const Mixture *mixture, const uint16_t *x, int64_t x_stride,
                                const Weight *weights, uint16_t *out, int64_t out_stride, int64_t T, int epilogue,
                                const Weight *after) {
  const int is_plain = weights->kind == BF16;
  const int64_t pairs = T * mixture->router.num_chosen, E = mixture->router.E;
  const Product product = {is_plain ? (const char *)x : (const char *)m->bytes,
                           is_plain ? x_stride * 2 : m->bytes_stride,
                           m->scales, NULL, (char *)out, out_stride * 2, 0, epilogue, (int)m->use_tiles, NULL};
  /* A block is full, or an expert's last. */
  const GroupedProduct a = {product, weights, m->blocks, m->num_blocks,
                            (E < pairs ? E : pairs) + pairs / rows_together(mixture), after};
  grouped_product_part(&a, team);
}

/* The sum of a row's experts, and of the shared one, to the residual, or to `normed` if it is normalised first. */
INLINE void combine(const Model *m, const Router *r, Team *team, int64_t T, const void *post_norm) {
  const int64_t k = r->num_chosen;
  FOR_RUNS(team, rows, T) {
    for (int64_t t = rows.first; t < rows.end; t++) {
      uint16_t *normed = m->normed + t * m->hidden_stride, *residual = m->residual + t * m->hidden_stride;
      combine_row(BFLOAT16, m->rows, m->hidden_stride, m->places + t * k, m->shares + t * (k + r->has_shared),
                  r->has_shared ? m->shared + t * m->hidden_stride : NULL, normed, m->M, k);
      if (!post_norm) add_row(residual, normed, m->M);
    }
  }
}

/* The feed-forward of a layer with experts, of rows x. */
INLINE void mix(const Model *m, const Layer *layer, const Step *s, int64_t T, Team *team, const uint16_t *x) {
  const Mixture *mixture = layer->mixture;
  const Router *r = &mixture->router;
  const int64_t k = r->num_chosen;
  if (r->has_shared) {
    gate(m, layer, s, T, team, x);
    multiply(m, team, m->gated, m->gated_stride, &layer->down, &NO_ADAPTERS, m->shared, m->hidden_stride, T, STORE, NULL);
    lap(team, s, DOWN);
  }
  route(m, mixture, s, team, x, T);
  FOR_RUNS(team, pairs, T * k) {
    for (int64_t p = pairs.first; p < pairs.end; p++) {
      const uint16_t *row = x + p / k * m->hidden_stride;
      if (mixture->gate_up->kind == BF16)
        memcpy(m->rows + m->places[p] * m->hidden_stride, row, m->M * 2);
      else
        quantize_row(mixture->gate_up + m->chosen[p], row, (char *)m->bytes, m->bytes_stride, m->scales, m->places[p]);
    }
  }
  lap(team, s, GATHER);
  multiply_by_experts(m, team, mixture, m->rows, m->hidden_stride, mixture->gate_up, m->inner, m->inner_stride, T,
                      GATE_SILU + (int)m->activation, mixture->down);
  lap(team, s, GATED);
  if (mixture->down->kind != BF16) {
    FOR_RUNS(team, pairs, T * k) {
      for (int64_t p = pairs.first; p < pairs.end; p++)
        quantize_row(mixture->down + m->chosen[p], m->inner + m->places[p] * m->inner_stride, (char *)m->bytes,
                     m->bytes_stride, m->scales, m->places[p]);
    }
    lap(team, s, PREPARE);
  }
  multiply_by_experts(m, team, mixture, m->inner, m->inner_stride, mixture->down, m->rows, m->hidden_stride, T, STORE, NULL);
  lap(team, s, DOWN);
  combine(m, r, team, T, layer->mlp_post_norm);
  lap(team, s, COMBINE);
}

/* Add the attention's output, then the feed-forward of the sum, to the residual. */
INLINE void feed(const Model *m, const Layer *layer, const Step *s, int64_t T, Team *team, const Weight *after) {
  const Weight *output = &layer->attention_output;
  const uint16_t *x = m->is_parallel ? m->normed : after_norm(m, layer->mlp_norm);
  const int64_t l = layer - m->layers;
  const Adapters of_output = adapters_of(m, s, l, ADAPTED_OUTPUT), of_gated = adapters_of(m, s, l, ADAPTED_GATED);
  const Adapters of_down = adapters_of(m, s, l, ADAPTED_DOWN);
  if (needs_rows(output, &of_output)) {
    FOR_RUNS(team, rows, T) prepare_rows(m, m->attended, m->heads_stride, output, &of_output, rows.first, rows.end);
    lap(team, s, PREPARE);
  }
  multiply_last(m, team, m->attended, m->heads_stride, output, &of_output, T, layer->attention_post_norm,
                &layer->gate_up);
  lap(team, s, ATTENTION_OUTPUT);
  normalise_rows(m, team, layer->attention_post_norm, layer->mlp_norm, x, &layer->gate_up, &of_gated, T);
  lap(team, s, NORM);
  if (layer->mixture) {
    mix(m, layer, s, T, team, x);
    return;
  }
  gate(m, layer, s, T, team, x);
  multiply_last(m, team, m->gated, m->gated_stride, &layer->down, &of_down, T, layer->mlp_post_norm, after);
  lap(team, s, DOWN);
}

static void run(const Model *m, const Step *s, Team *team) {
  lap(team, s, START);
  embed(m, s, team);
  lap(team, s, EMBED);
  const void *first_norm = m->layers[0].attention_norm;
  const Adapters first = adapters_of(m, s, 0, ADAPTED_QKV);
  normalise_rows(m, team, NULL, first_norm, after_norm(m, first_norm), &m->layers[0].qkv, &first, s->T);
  lap(team, s, NORM);
  int64_t T = s->T;
  for (int64_t l = 0; l < m->L; l++) {
    const Layer *layer = m->layers + l;
    const int is_last = l + 1 == m->L;
    const Weight *after = is_last ? &m->output : &layer[1].qkv;
    attend(m, layer, s, team);
    if (is_last) {
      T = s->num_rows;
      keep_rows(m, s, team);
      lap(team, s, KEEP);
    }
    feed(m, layer, s, T, team, after);
    const void *norm = is_last ? m->final_norm : layer[1].attention_norm;
    const Adapters next = is_last ? NO_ADAPTERS : adapters_of(m, s, l + 1, ADAPTED_QKV);
    normalise_rows(m, team, layer->mlp_post_norm, norm, after_norm(m, norm), after, &next, T);
    lap(team, s, NORM);
  }
  if (!s->logits) return;
  multiply(m, team, m->normed, m->hidden_stride, &m->output, &NO_ADAPTERS, s->logits, s->logits_stride, T, STORE,
           &m->layers[0].qkv);
  if (m->logit_scale != 1) {
    end_phase(team);
    FOR_RUNS(team, rows, T) {
      for (int64_t t = rows.first; t < rows.end; t++)
        scale_row(s->logits + t * s->logits_stride, s->logits_stride, m->logit_scale);
    }
  }
  if (m->final_cap != 0) {
    end_phase(team);
    FOR_RUNS(team, part, T * s->logits_stride) soft_cap_run(BFLOAT16, s->logits, part.first, part.end, m->final_cap);
  }
  lap(team, s, OUTPUT);
}

/* Values that cpu.py must agree with: sizes: [5], the bytes of Layer, Model, Step and Mixture, and the number of
   phases. */
EXPORT void sluice_decoder_step_sizes(int64_t *sizes) {
  sizes[0] = sizeof(Layer);
  sizes[1] = sizeof(Model);
  sizes[2] = sizeof(Step);
  sizes[3] = sizeof(Mixture);
  sizes[4] = NUM_PHASES;
}

typedef struct {
  const Model *model;
  const Step *step;
} Call;

static void run_step(const void *argument, Team *team) {
  const Call *a = argument;
  run(a->model, a->step, team);
}

EXPORT void sluice_decoder_step(const Model *model, const Step *step, int num_threads) {
  const Call a = {model, step};
  run_team(run_step, &a, num_threads);
}
