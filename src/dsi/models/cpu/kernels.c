/* Forwards of decoder-only transformers on CPUs, for few tokens at a time, of one text or of several.
 *
 * Every weight is read once for all tokens of a forward, in the row-major layout of torch, so that there is one copy.
 *
 * Row invariance: each output is one dot product, summed lane by lane in the order of k and reduced in one fixed tree,
 * by the same instructions whatever the number of tokens beside it and of threads. A token's logits are therefore the
 * same to the bit however the text was cut into forwards. Keep it so: never split a sum by rows or by threads.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define DOT_BF16 1 /* products of bfloat16 pairs in one instruction */
#else
#define DOT_BF16 0
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define COLUMNS 4        /* outputs of a tile */
#define ROWS 6           /* tokens of a tile: ROWS * COLUMNS accumulators fit into 32 registers */
#define BLOCK_BYTES (256 << 10) /* of inputs that stay in the L2 cache while all weights pass */
#define CHUNK_BYTES (96 << 10)  /* of weights that stay there while all inputs pass */
#define FETCHED_BYTES (32 << 10) /* of keys and values on their way from memory while attention computes */
#define MAX_STREAMED 24  /* tokens up to which weights come from memory no faster than they are needed */
#define SPINS 4000       /* of a waiting thread before it yields its core: some 50 microseconds */
#define IDLE_SPINS 100000 /* of an idle thread before it sleeps: waking it can take longer than a small forward */
#define CANCEL_EVERY(layers) (((layers) + 7) / 8) /* layers between two looks at whether the forward was cancelled */
#define MAX_THREADS 256
#define LINE 64          /* bytes of a cache line */

#define INLINE static inline __attribute__((always_inline))

/* Have a vector in a register, or each product that uses it may load it again. */
#if defined(__x86_64__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loaded_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias)); /* a row of a tile's outputs */

INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

enum { FLOAT32, BFLOAT16, INT8 };
enum { SILU, GELU_TANH };

/* A linear layer: `out_features` rows of `in_features` weights; with INT8, one scale for each row. */
struct matrix {
    const void *weight;
    const float *bias, *scale;
    int64_t out_features, in_features, stride;
    int32_t type;
};

struct layer {
    struct matrix q, k, v, o, gate, up, down;
    const float *input_norm, *attention_norm, *mlp_norm, *output_norm; /* NULL: there is none */
    const float *q_norm, *k_norm;
    const float *cos, *sin; /* [position][rotary_dim] */
    int64_t window;         /* of sliding attention; 0: all tokens */
};

struct model {
    struct layer *layers;
    struct matrix head;
    const float *norm;
    const void *embedding;
    int64_t embedding_stride;
    int64_t hidden_size, intermediate_size, heads, kv_heads, head_dim, rotary_dim;
    float epsilon, embedding_scale, attention_scale, attention_softcap, logit_softcap;
    int32_t embedding_type, activation;
    float *scratch; /* of `scratch_size` floats at least */
};

/* The new tokens of one text in a forward, and behind them nodes of a tree of draft tokens after the text. The keys and
 * values of node i are in slot i behind the text's, those of parents before those of their children. */
struct sequence {
    int64_t rows, length, capacity; /* new tokens, cached tokens, and for how many there is room */
    int64_t num_positions;          /* the last new tokens whose logits are wanted */
    float *const *kv;               /* keys and values of each layer: [kv_heads][capacity][head_dim] */
    int64_t num_nodes, num_slots;   /* nodes to compute, and slots up to the last of them */
    int64_t num_asked;              /* nodes whose logits are wanted, behind those of the text */
    const int64_t *nodes, *parents; /* nodes to compute; the parent of each slot's, -1: the end of the text */
    const int64_t *asked;           /* indices into `nodes` */
};

/* ---- Vectors ---- */

INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec load(const float *from) { return *(const loaded_vec *)from; }

INLINE void store(float *to, vec value) { *(loaded_vec *)to = value; }

INLINE vec load_part(const float *from, int64_t count) {
    vec value = {0};
    memcpy(&value, from, count * sizeof(float));
    return value;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if LANES == 16
#define UNPACK_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define UNPACK_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define PAIRS_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define PAIRS_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif LANES == 8
#define UNPACK_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define UNPACK_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define PAIRS_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define PAIRS_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#else
#define UNPACK_LOW 0, 4, 1, 5
#define UNPACK_HIGH 2, 6, 3, 7
#define PAIRS_LOW 0, 1, 4, 5
#define PAIRS_HIGH 2, 3, 6, 7
#endif

/* The sums over the lanes of four vectors. */
INLINE void sum_lanes_of_4(const vec *a, float *sums) {
    vec ab = SHUFFLE(a[0], a[1], UNPACK_LOW) + SHUFFLE(a[0], a[1], UNPACK_HIGH);
    vec cd = SHUFFLE(a[2], a[3], UNPACK_LOW) + SHUFFLE(a[2], a[3], UNPACK_HIGH);
    vec all = SHUFFLE(ab, cd, PAIRS_LOW) + SHUFFLE(ab, cd, PAIRS_HIGH);
#if LANES == 16
    all += SHUFFLE(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    all += SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif LANES == 8
    all += SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
    memcpy(sums, &all, 4 * sizeof(float));
}

INLINE float sum_lanes(vec a) {
    float sums[4];
    sum_lanes_of_4((vec[4]){a, a, a, a}, sums);
    return sums[0];
}

INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* exp with a relative error of about 1e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
INLINE vec exp_vec(vec x) {
    const vec low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f); /* 1.5 * 2^23 rounds */
    ivec underflow = x < low;
    x = select_vec(underflow, low, x);
    x = select_vec(x > high, high, x);
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return select_vec(underflow, (vec){0}, p * (vec)power);
}

INLINE vec tanh_vec(vec x) {
    vec e = exp_vec(x + x);
    return 1.0f - 2.0f / (e + 1.0f);
}

INLINE vec activate(vec x, int32_t activation) {
    if (activation == SILU) return x / (1.0f + exp_vec(-x));
    vec inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh_vec(inner));
}

/* ---- Products ---- */

INLINE int64_t size_of(int32_t type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

/* The type of the inputs that weights of a type are multiplied with. */
INLINE int32_t input_type(int32_t type) { return DOT_BF16 && type != FLOAT32 ? BFLOAT16 : FLOAT32; }

/* Some compilers convert vectors of small integers element by element. */
INLINE ivec widen_16(const char *from) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const half_vec *)from, ivec);
#endif
}

INLINE ivec widen_8(const char *from) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(*(const byte_vec *)from, ivec);
#endif
}

INLINE vec load_weights(const char *from, const int32_t type) {
    if (type == FLOAT32) return *(const loaded_vec *)from;
    return type == BFLOAT16 ? (vec)(widen_16(from) << 16) : __builtin_convertvector(widen_8(from), vec);
}

#if DOT_BF16
/* 32 weights; those of int8 are exact in bfloat16 */
INLINE __m512bh load_bf16(const char *from, const int32_t type) {
    if (type == BFLOAT16) return (__m512bh)_mm512_loadu_si512(from);
    return _mm512_cvtne2ps_pbh((__m512)load_weights(from + LANES, type), (__m512)load_weights(from, type));
}
#endif

INLINE uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* acc[r][c] += x[r][k:] . w[c][k:], over one vector of k; weights that are `near` are loaded once for all rows */
INLINE void multiply_add(
    const int rows, const int32_t type, const int near, const char *const *x, const char *const *w, int64_t k,
    vec acc[ROWS][COLUMNS]) {
#if DOT_BF16
    if (type != FLOAT32) {
        __m512bh weights[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
            weights[c] = load_bf16(w[c] + size_of(type) * k, type);
            if (near) KEEP(weights[c]);
        }
        for (int r = 0; r < rows; r++) {
            __m512bh inputs = (__m512bh)_mm512_loadu_si512(x[r] + 2 * k);
            KEEP(inputs);
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = (vec)_mm512_dpbf16_ps((__m512)acc[r][c], inputs, weights[c]);
        }
        return;
    }
#endif
    vec weights[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        weights[c] = load_weights(w[c] + size_of(type) * k, type);
        if (near) KEEP(weights[c]);
    }
    for (int r = 0; r < rows; r++) {
        vec inputs = load((const float *)x[r] + k);
        KEEP(inputs);
        for (int c = 0; c < COLUMNS; c++) acc[r][c] += inputs * weights[c];
    }
}

/* How far ahead weights are prefetched, in bytes, 0: not at all, and whether into the L1 cache or only into the L2. With
 * one or two rows the processor's own prefetching may keep up; while it computes more, weights are best fetched early. */
static struct {
    int64_t few, many;
    int32_t into_l1;
} prefetching = {64, 4096, 0};

void set_prefetching(int64_t few, int64_t many, int32_t into_l1) {
    prefetching.few = few, prefetching.many = many, prefetching.into_l1 = into_l1;
}

INLINE void prefetch(const char *weights, const int rows) {
    int64_t ahead = rows <= 2 ? prefetching.few : prefetching.many;
    if (!ahead) return;
    if (rows <= 2 || prefetching.into_l1) __builtin_prefetch(weights + ahead, 0, 3);
    else __builtin_prefetch(weights + ahead, 0, 2);
}

/* What a tile fetches into the L2 cache for later ones: lines so far behind its own weights from `begin` to `end`. */
struct fetch {
    int64_t ahead, begin, end;
};

/* The dot products of `rows` inputs with COLUMNS rows of weights, which come from memory or, with `fetch`, are near. */
INLINE void multiply_tile(
    const int rows, const int32_t type, const char *const *x, const char *const *w, int64_t size,
    const struct fetch *fetch, float sums[ROWS][COLUMNS]) {
    const int64_t step = input_type(type) == BFLOAT16 ? 2 * LANES : LANES;
    vec acc[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) acc[r][c] = (vec){0};
    int64_t k = 0;
    if (fetch) {
        for (int c = 0; c < COLUMNS; c++)
            for (int64_t i = fetch->begin; i < fetch->end; i += LINE) __builtin_prefetch(w[c] + fetch->ahead + i, 0, 2);
        for (; k + step <= size; k += step) multiply_add(rows, type, 1, x, w, k, acc);
    }
    for (; k + step <= size; k += step) {
        for (int c = 0; c < COLUMNS; c++) prefetch(w[c] + size_of(type) * k, rows);
        multiply_add(rows, type, 0, x, w, k, acc);
    }
    if (k < size) { /* the rest, padded with zeros */
        char inputs[ROWS][4 * LANES] = {{0}}, weights[COLUMNS][4 * LANES] = {{0}};
        const char *padded_x[ROWS], *padded_w[COLUMNS];
        int64_t input_size = size_of(input_type(type));
        for (int r = 0; r < rows; r++)
            padded_x[r] = memcpy(inputs[r], x[r] + input_size * k, input_size * (size - k));
        for (int c = 0; c < COLUMNS; c++)
            padded_w[c] = memcpy(weights[c], w[c] + size_of(type) * k, size_of(type) * (size - k));
        multiply_add(rows, type, 0, padded_x, padded_w, 0, acc);
    }
    for (int r = 0; r < rows; r++) sum_lanes_of_4(acc[r], sums[r]);
}

#define TILE(rows, type) \
    static void multiply_##rows##_##type( \
        const char *const *x, const char *const *w, int64_t size, const struct fetch *fetch, \
        float sums[ROWS][COLUMNS]) { \
        multiply_tile(rows, type, x, w, size, fetch, sums); \
    }
#define TILES(type) TILE(1, type) TILE(2, type) TILE(3, type) TILE(4, type) TILE(5, type) TILE(6, type)
#define NAMES(type) \
    {multiply_1_##type, multiply_2_##type, multiply_3_##type, multiply_4_##type, multiply_5_##type, multiply_6_##type}
TILES(FLOAT32)
TILES(BFLOAT16)
TILES(INT8)
static void (*const multiply[3][ROWS])(
    const char *const *, const char *const *, int64_t, const struct fetch *, float[ROWS][COLUMNS]) = {
    NAMES(FLOAT32), NAMES(BFLOAT16), NAMES(INT8)};

/* Divide rows evenly into tiles of at most ROWS: 9 are 5 and 4, not 6 and 3. */
INLINE int tile_rows(int64_t left) {
    int64_t tiles = (left + ROWS - 1) / ROWS;
    return (int)((left + tiles - 1) / tiles);
}

/* A linear layer over outputs `first` to `last`: out[r][n] = x[r] . weight[n], added to what is there with `add`. */
struct product {
    const struct matrix *m;
    const char *x;
    int64_t x_stride, rows;
    float *out;
    int64_t out_stride, first, last;
    int add;
};

/* The rows of weights of COLUMNS outputs, of which `count` are wanted. */
INLINE void rows_of_weights(const struct matrix *m, const int64_t *n, int count, const char **w) {
    for (int c = 0; c < COLUMNS; c++)
        w[c] = (const char *)m->weight + size_of(m->type) * m->stride * n[c < count ? c : count - 1];
}

/* These outputs of up to ROWS tokens from `row` on. */
INLINE void compute_tile(
    const struct product *p, const char *const *w, const int64_t *n, int count, int64_t row, int rows,
    const struct fetch *fetch) {
    const struct matrix *m = p->m;
    const char *x[ROWS];
    float sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) x[r] = p->x + p->x_stride * (row + r);
    multiply[m->type][rows - 1](x, w, m->in_features, fetch, sums);
    if (fetch && count == COLUMNS) { /* one behind the other */
        quad one = {1.0f, 1.0f, 1.0f, 1.0f}, zero = {0};
        quad scales = m->scale ? *(const quad *)(m->scale + n[0]) : one;
        quad biases = m->bias ? *(const quad *)(m->bias + n[0]) : zero;
        for (int r = 0; r < rows; r++) {
            quad *to = (quad *)(p->out + p->out_stride * (row + r) + n[0]);
            *to = (p->add ? *to : zero) + (*(const quad *)sums[r] * scales + biases);
        }
        return;
    }
    for (int c = 0; c < count; c++) {
        float scale = m->scale ? m->scale[n[c]] : 1.0f, bias = m->bias ? m->bias[n[c]] : 0.0f;
        float *to = p->out + p->out_stride * row + n[c];
        for (int r = 0; r < rows; r++, to += p->out_stride) *to = (p->add ? *to : 0.0f) + (sums[r][c] * scale + bias);
    }
}

/* Every weight is read from memory for a few tokens. The outputs of a tile are a quarter of the range apart: the
 * processor reads ahead in each of four long streams, which is faster than in one. */
INLINE void multiply_streamed(const struct product *p) {
    int64_t apart = (p->last - p->first + COLUMNS - 1) / COLUMNS;
    for (int64_t i = p->first; i < p->first + apart; i++) {
        int64_t n[COLUMNS];
        int count = 1; /* the last stream may be shorter */
        for (int c = 0; c < COLUMNS; c++) {
            n[c] = i + apart * c;
            if (n[c] < p->last) count = c + 1;
        }
        const char *w[COLUMNS];
        rows_of_weights(p->m, n, count, w);
        for (int64_t r = 0, some; r < p->rows; r += some) {
            some = tile_rows(p->rows - r);
            compute_tile(p, w, n, count, r, (int)some, NULL);
        }
    }
}

/* Every weight is computed with many tokens: those of a chunk with all of them while they are in the L2 cache, and with
 * the inputs of a tile in the L1 cache. Meanwhile the next chunk is fetched, an equal part of it beside each tile. */
INLINE void multiply_near(const struct product *p) {
    const struct matrix *m = p->m;
    int64_t bytes = size_of(m->type) * m->stride, used = size_of(m->type) * m->in_features;
    int64_t chunk = max_of(CHUNK_BYTES / bytes / COLUMNS, 1) * COLUMNS, tiles = (p->rows + ROWS - 1) / ROWS;
    int64_t part = (used / tiles + LINE) / LINE * LINE;
    for (int64_t begin = p->first; begin < p->last; begin += chunk) {
        struct fetch fetch = {bytes * chunk, 0, 0};
        for (int64_t r = 0, some; r < p->rows; r += some) {
            some = tile_rows(p->rows - r);
            fetch.begin = fetch.end, fetch.end = min_of(fetch.end + part, used);
            for (int64_t i = begin; i < min_of(begin + chunk, p->last); i += COLUMNS) {
                int64_t n[COLUMNS] = {i, i + 1, i + 2, i + 3};
                int count = (int)min_of(p->last - i, COLUMNS);
                const char *w[COLUMNS];
                rows_of_weights(m, n, count, w);
                compute_tile(p, w, n, count, r, (int)some, &fetch);
            }
        }
    }
}

static void linear_share(
    const struct matrix *m, const void *x, int64_t rows, float *out, int64_t out_stride, int add, int64_t first,
    int64_t last) {
    int64_t x_stride = size_of(input_type(m->type)) * m->in_features, block = BLOCK_BYTES / x_stride / ROWS * ROWS;
    for (int64_t r = 0, some; r < rows; r += some) {
        some = min_of(rows - r, max_of(block, ROWS));
        struct product p = {
            m, (const char *)x + x_stride * r, x_stride, some, out + out_stride * r, out_stride, first, last, add};
        if (some > MAX_STREAMED) multiply_near(&p);
        else multiply_streamed(&p);
    }
}

/* ---- Threads ---- */

struct member { /* a thread at work on a job */
    int rank, size;
    long phase;      /* barriers it has passed */
    int64_t waited;  /* nanoseconds in long waits */
};

typedef void (*job)(void *argument, struct member *member);

/* Threads that compute one job together. A thread runs a job when its counter changes. */
static struct {
    pthread_mutex_t busy, mutex;
    pthread_cond_t wake;
    atomic_long arrived, finished, sleeping;
    struct {
        atomic_long jobs;
        char padding[LINE - sizeof(atomic_long)];
    } threads[MAX_THREADS];
    int created, size;
    int alone, backoff; /* jobs that are to run on one thread because the cores are busy, and how many were last time */
    pid_t pid;
    job run;
    void *argument;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Wait until a counter has reached a number; a long wait is measured, and leaves the core to others. */
static void wait_until(atomic_long *counter, long goal, struct member *member) {
    for (long spins = 0; spins < SPINS; spins++) {
        if (atomic_load(counter) >= goal) return;
        pause_core();
    }
    int64_t began = nanoseconds();
    while (atomic_load(counter) < goal) sched_yield();
    member->waited += nanoseconds() - began;
}

/* Wait until all threads of the job have come here. */
static void barrier(struct member *member) {
    if (member->size == 1) return;
    atomic_fetch_add(&team.arrived, 1);
    wait_until(&team.arrived, ++member->phase * member->size, member);
}

static void wait_for_job(int rank, long seen) {
    for (long spins = 0; spins < IDLE_SPINS; spins++) {
        if (atomic_load(&team.threads[rank].jobs) != seen) return;
        pause_core();
    }
    pthread_mutex_lock(&team.mutex);
    atomic_fetch_add(&team.sleeping, 1);
    while (atomic_load(&team.threads[rank].jobs) == seen) pthread_cond_wait(&team.wake, &team.mutex);
    atomic_fetch_sub(&team.sleeping, 1);
    pthread_mutex_unlock(&team.mutex);
}

static void *run_thread(void *argument) {
    int rank = (int)(intptr_t)argument;
    for (long seen = 0;; seen++) {
        wait_for_job(rank, seen);
        struct member member = {rank, team.size, 0, 0};
        team.run(team.argument, &member);
        atomic_fetch_add(&team.finished, 1);
    }
    return NULL;
}

/* Have `size` threads, this one among them; return how many there are. */
static int create_threads(int size) {
    if (team.pid != getpid()) { /* threads do not survive a fork */
        memset(team.threads, 0, sizeof team.threads);
        pthread_mutex_init(&team.mutex, NULL);
        pthread_cond_init(&team.wake, NULL);
        team.created = 1, team.pid = getpid();
        atomic_store(&team.sleeping, 0);
    }
    if (size > MAX_THREADS) size = MAX_THREADS;
    for (pthread_t thread; team.created < size; team.created++) {
        if (pthread_create(&thread, NULL, run_thread, (void *)(intptr_t)team.created)) return team.created;
        pthread_detach(thread);
    }
    return size;
}

static void run_alone(job run, void *argument) {
    struct member member = {0, 1, 0, 0};
    run(argument, &member);
}

/* Returns whether the cores seem to be busy with other work: half of the time was spent waiting for threads, and not
 * because they had to be woken first. */
static int run_together(job run, void *argument, struct member *member) {
    int64_t began = nanoseconds();
    int asleep = atomic_load(&team.sleeping) > 0;
    team.run = run, team.argument = argument, team.size = member->size;
    atomic_store(&team.arrived, 0), atomic_store(&team.finished, 0);
    for (int rank = 1; rank < member->size; rank++) atomic_fetch_add(&team.threads[rank].jobs, 1);
    if (atomic_load(&team.sleeping)) {
        pthread_mutex_lock(&team.mutex);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.mutex);
    }
    run(argument, member);
    wait_until(&team.finished, member->size - 1, member);
    return !asleep && 2 * member->waited > nanoseconds() - began;
}

/* Results do not depend on the number of threads: a job runs on one where another thread of this process is using the
 * team, and for some time after one that found the cores busy. */
static void run_on_threads(job run, void *argument, int threads) {
    if (threads < 2 || pthread_mutex_trylock(&team.busy)) {
        run_alone(run, argument);
        return;
    }
    if (team.alone > 0) {
        team.alone--;
        run_alone(run, argument);
    } else {
        struct member member = {0, create_threads(threads), 0, 0};
        int crowded = run_together(run, argument, &member);
        team.backoff = !crowded ? team.backoff / 2 : team.backoff < 4 ? 8 : team.backoff < 256 ? 2 * team.backoff : 256;
        team.alone = crowded ? team.backoff : 0;
    }
    pthread_mutex_unlock(&team.busy);
}

/* This thread's share of `count` things, in units that are not divided. */
INLINE void share(int64_t count, int64_t unit, const struct member *member, int64_t *first, int64_t *last) {
    int64_t units = (count + unit - 1) / unit, begin = units * member->rank / member->size * unit;
    int64_t end = units * (member->rank + 1) / member->size * unit;
    *first = begin < count ? begin : count, *last = end < count ? end : count;
}

/* ---- Norms, rotary embedding, attention ---- */

static void rms_norm(const float *x, const float *weight, int64_t size, float epsilon, float *out) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    if (i < size) {
        vec part = load_part(x + i, size - i);
        squares += part * part;
    }
    float factor = 1.0f / sqrtf(sum_lanes(squares) / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

/* The first half of the rotated elements is paired with the second. */
static void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

/* Turn the scores of keys first..last into weights, zero elsewhere below `end`; return their sum. */
static float softmax(float *scores, int64_t first, int64_t last, int64_t end, float scale, float softcap) {
    float highest = -INFINITY;
    for (int64_t i = 0; i < end; i += LANES) {
        vec score = load(scores + i) * scale;
        if (softcap) score = tanh_vec(score / softcap) * softcap;
        store(scores + i, score);
    }
    for (int64_t i = first; i < last; i++) highest = scores[i] > highest ? scores[i] : highest;
    for (int64_t i = 0; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = last; i < (end + LANES - 1) / LANES * LANES; i++) scores[i] = -INFINITY;
    vec sum = {0};
    for (int64_t i = 0; i < end; i += LANES) {
        vec weight = exp_vec(load(scores + i) - highest);
        store(scores + i, weight);
        sum += weight;
    }
    return sum_lanes(sum);
}

/* What to fetch while row i of rows first..last is used: a later one, or one of those that are read `next`. Texts are
 * too short for the processor to find out what comes next by itself. */
INLINE const float *row_to_fetch(
    const float *rows, const float *next, int64_t stride, int64_t i, int64_t first, int64_t last) {
    int64_t later = i + min_of(FETCHED_BYTES / (int64_t)sizeof(float) / stride, last - first);
    return later < last ? rows + stride * later : next + stride * (first + later - last);
}

/* out[r][d:] = the sum of weights[r][j] * values[j][d:], over `count` vectors of d and keys first..last */
INLINE void weigh_values(
    const int rows, const int count, const float *weights, int64_t weights_stride, const float *values,
    const float *next, int64_t stride, int64_t first, int64_t last, vec acc[ROWS][4]) {
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < count; d++) acc[r][d] = (vec){0};
    for (int64_t j = first; j < last; j++) {
        vec value[4];
        const float *later = row_to_fetch(values, next, stride, j, first, last);
        for (int d = 0; d < count; d++) {
            __builtin_prefetch(later + LANES * d, 0, 2);
            value[d] = load(values + stride * j + LANES * d);
        }
        for (int r = 0; r < rows; r++)
            for (int d = 0; d < count; d++) acc[r][d] += weights[weights_stride * r + j] * value[d];
    }
}

#define WEIGH(rows) \
    static void weigh_##rows( \
        const float *weights, int64_t weights_stride, const float *values, const float *next, int64_t stride, \
        int64_t first, int64_t last, int64_t count, vec acc[ROWS][4]) { \
        if (count == 4) weigh_values(rows, 4, weights, weights_stride, values, next, stride, first, last, acc); \
        else weigh_values(rows, 1, weights, weights_stride, values, next, stride, first, last, acc); \
    }
WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5) WEIGH(6)
static void (*const weigh[ROWS])(
    const float *, int64_t, const float *, const float *, int64_t, int64_t, int64_t, int64_t, vec[ROWS][4]) = {
    weigh_1, weigh_2, weigh_3, weigh_4, weigh_5, weigh_6};

struct attention { /* of one query head */
    const float *queries, *keys, *values, *next; /* the keys that are read next */
    float *out, *scores;
    int64_t query_stride, out_stride, scores_stride, head_dim, window;
    float scale, softcap;
};

/* The same for a last vector that is not full. */
static void weigh_part(int rows, const struct attention *a, int64_t d, int64_t first, int64_t last, vec acc[ROWS][4]) {
    int64_t dim = a->head_dim;
    for (int r = 0; r < rows; r++) {
        const float *weights = a->scores + a->scores_stride * r;
        acc[r][0] = (vec){0};
        for (int64_t j = first; j < last; j++) acc[r][0] += weights[j] * load_part(a->values + dim * j + d, dim - d);
    }
}

/* The first position that a token sees, `last` being the one behind it. */
INLINE int64_t first_seen(const struct attention *a, int64_t last) {
    return a->window && last > a->window ? last - a->window : 0;
}

/* The products of up to ROWS queries with keys begin..end. */
static void score_tile(const struct attention *a, int64_t row, int rows, int64_t begin, int64_t end) {
    struct matrix keys = {.weight = a->keys, .out_features = end, .in_features = a->head_dim, .stride = a->head_dim};
    struct product p = {&keys, (const char *)(a->queries + a->query_stride * row), 4 * a->query_stride, rows, a->scores,
                        a->scores_stride, begin, end, 0};
    for (int64_t i = begin; i < end; i += COLUMNS) {
        int64_t n[COLUMNS] = {i, i + 1, i + 2, i + 3};
        int count = (int)min_of(end - i, COLUMNS);
        const char *w[COLUMNS];
        rows_of_weights(&keys, n, count, w);
        const float *later = row_to_fetch(a->keys, a->values, a->head_dim, i, begin, end);
        struct fetch fetch = {(const char *)later - w[0], 0, sizeof(float) * a->head_dim};
        compute_tile(&p, w, n, count, 0, rows, &fetch);
    }
}

/* The weighted values begin..end of up to ROWS tokens, divided by the sums of the weights. */
static void weigh_tile(
    const struct attention *a, int64_t row, int rows, int64_t begin, int64_t end, const float *sums) {
    for (int64_t d = 0; d < a->head_dim;) {
        int64_t left = a->head_dim - d, count = left >= 4 * LANES ? 4 : left >= LANES ? 1 : 0;
        vec acc[ROWS][4];
        const float *values = a->values + d, *next = a->next + d;
        if (count) weigh[rows - 1](a->scores, a->scores_stride, values, next, a->head_dim, begin, end, count, acc);
        else weigh_part(rows, a, d, begin, end, acc);
        for (int r = 0; r < rows; r++) {
            float *out = a->out + a->out_stride * (row + r) + d;
            for (int i = 0; i < count; i++) store(out + LANES * i, acc[r][i] / sums[r]);
            vec part = acc[r][0] / sums[r];
            if (!count) memcpy(out, &part, left * sizeof(float));
        }
        d += count ? LANES * count : left;
    }
}

/* Attention of up to ROWS tokens, the first of which is at `position`. */
static void attend_tile(const struct attention *a, int64_t row, int rows, int64_t position) {
    int64_t end = position + rows, begin = first_seen(a, position + 1);
    float sums[ROWS];
    score_tile(a, row, rows, begin, end);
    for (int r = 0; r < rows; r++) {
        int64_t last = position + r + 1;
        sums[r] = softmax(a->scores + a->scores_stride * r, first_seen(a, last), last, end, a->scale, a->softcap);
    }
    weigh_tile(a, row, rows, begin, end, sums);
}

/* ---- Trees ---- */

INLINE int64_t node_depth(const struct sequence *s, int64_t node) {
    int64_t depth = 0;
    for (; node >= 0; node = s->parents[node]) depth++;
    return depth;
}

/* Turn the scores of the text and of a node's ancestors into weights, zero for all other nodes; return their sum.
 *
 * The softmax sums by position, as it would if the path was text: scores are moved there, and weights back. */
static float softmax_path(
    const struct attention *a, const struct sequence *s, int64_t node, float *scores) {
    int64_t depth = node_depth(s, node), text = s->length + s->rows, last = text + depth;
    int64_t path[depth];
    float values[depth];
    for (int64_t i = depth; node >= 0; node = s->parents[node]) path[--i] = node;
    for (int64_t i = 0; i < depth; i++) values[i] = scores[text + path[i]];
    memcpy(scores + text, values, depth * sizeof(float));
    float sum = softmax(scores, first_seen(a, last), last, last, a->scale, a->softcap);
    memcpy(values, scores + text, depth * sizeof(float));
    memset(scores + text, 0, s->num_slots * sizeof(float));
    for (int64_t i = 0; i < depth; i++) scores[text + path[i]] = values[i];
    return sum;
}

/* Attention of up to ROWS nodes of a tree, from the one numbered `first` of those to compute. A path's slots are in its
 * order, and those between have no weight: the values are summed as if the path was text. */
static void attend_nodes(const struct attention *a, const struct sequence *s, int64_t first, int rows) {
    int64_t text = s->length + s->rows, end = text + s->num_slots, begin = text;
    float sums[ROWS];
    for (int r = 0; r < rows; r++) {
        int64_t seen = first_seen(a, text + node_depth(s, s->nodes[first + r]));
        begin = seen < begin ? seen : begin;
    }
    score_tile(a, s->rows + first, rows, begin, end);
    for (int r = 0; r < rows; r++)
        sums[r] = softmax_path(a, s, s->nodes[first + r], a->scores + a->scores_stride * r);
    weigh_tile(a, s->rows + first, rows, begin, end, sums);
}

/* ---- Layers ---- */

struct forward { /* arguments of a call */
    struct model *model;
    const int64_t *tokens;
    const struct sequence *sequences;
    int64_t num_sequences, num_layers;
    int64_t rows, num_positions, longest; /* of all sequences, and the most tokens of one */
    float *logits;
    int (*is_cancelled)(void); /* NULL: never */
    atomic_int stopped;        /* whether it was cancelled */
    /* shared by the threads, in the scratch memory */
    float *x, *qkv, *attended, *hidden, *projected;
    float *own; /* `own_size` floats for each thread */
    int64_t own_size, scores_stride;
};

INLINE int64_t rounded(int64_t floats) { return (floats + 31) / 16 * 16; } /* a cache line of room behind each buffer */

/* Divide the scratch memory into buffers; return how many floats they take. */
static int64_t lay_out(struct forward *f, int threads) {
    const struct model *m = f->model;
    int64_t queries = m->heads * m->head_dim, projections = queries + 2 * m->kv_heads * m->head_dim;
    int64_t widest = max_of(max_of(m->hidden_size, m->intermediate_size), queries);
    f->rows = f->num_positions = f->longest = 0;
    for (int64_t i = 0; i < f->num_sequences; i++) {
        const struct sequence *s = &f->sequences[i];
        f->rows += s->rows + s->num_nodes, f->num_positions += s->num_positions + s->num_asked;
        f->longest = max_of(f->longest, s->length + s->rows + s->num_slots);
    }
    f->scores_stride = rounded(f->longest);
    f->own_size = rounded(max_of(f->rows, f->num_positions) * widest) * 2 + ROWS * f->scores_stride;
    struct {
        float **buffer;
        int64_t size;
    } parts[] = {
        {&f->x, f->rows * m->hidden_size},          {&f->qkv, f->rows * projections},
        {&f->attended, f->rows * queries},          {&f->hidden, f->rows * m->intermediate_size},
        {&f->projected, f->rows * m->hidden_size},  {&f->own, f->own_size * threads},
    };
    int64_t total = 0;
    for (int i = 0; i < 6; i++) *parts[i].buffer = m->scratch + total, total += rounded(parts[i].size);
    return total;
}

/* Inputs as a product with such weights takes them, in memory of this thread's own where they are converted. */
static const void *as_input(const float *x, int64_t count, int32_t type, float *buffer) {
    if (input_type(type) == FLOAT32) return x;
    uint16_t *bits = (uint16_t *)buffer;
    for (int64_t i = 0; i < count; i++) bits[i] = round_to_bf16(x[i]);
    return bits;
}

static void embed(const struct forward *f, const struct member *member) {
    const struct model *m = f->model;
    int64_t first, last;
    share(f->rows, 1, member, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const char *row = (const char *)m->embedding + size_of(m->embedding_type) * m->embedding_stride * f->tokens[r];
        float *out = f->x + m->hidden_size * r;
        for (int64_t i = 0; i < m->hidden_size; i++) {
            int is_float = m->embedding_type == FLOAT32;
            uint32_t bits = is_float ? ((const uint32_t *)row)[i] : (uint32_t)((const uint16_t *)row)[i] << 16;
            float value;
            memcpy(&value, &bits, 4);
            out[i] = value * m->embedding_scale;
        }
    }
}

/* One linear layer of all rows by all threads. */
static void project(
    const struct matrix *m, const void *x, int64_t rows, float *out, int64_t stride, int add,
    const struct member *member) {
    int64_t first, last;
    share(m->out_features, COLUMNS, member, &first, &last);
    linear_share(m, x, rows, out, stride, add, first, last);
}

static void norm_rows(const float *x, const float *weight, int64_t rows, int64_t size, float epsilon, float *out) {
    for (int64_t r = 0; r < rows; r++) rms_norm(x + size * r, weight, size, epsilon, out + size * r);
}

/* The keys of one head of a sequence in a layer; units of work are its key heads, then those of the next sequence. */
INLINE float *keys_of(const struct forward *f, int64_t number, int64_t unit) {
    const struct sequence *s = &f->sequences[unit / f->model->kv_heads];
    return s->kv[2 * number] + s->capacity * f->model->head_dim * (unit % f->model->kv_heads);
}

/* Rotate the queries and keys of the heads that share one key head, append keys and values, and attend: for the rows of
 * one sequence, which begin at `begin`. */
static void attend(
    const struct forward *f, int64_t number, const struct sequence *s, int64_t begin, int64_t kv_head,
    const float *next, float *scores) {
    const struct model *m = f->model;
    const struct layer *layer = &m->layers[number];
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads;
    int64_t stride = (m->heads + 2 * m->kv_heads) * dim;
    float *keys = s->kv[2 * number] + s->capacity * dim * kv_head;
    float *values = s->kv[2 * number + 1] + s->capacity * dim * kv_head;
    float *qkv = f->qkv + stride * begin, *attended = f->attended + m->heads * dim * begin;
    for (int64_t r = 0; r < s->rows + s->num_nodes; r++) {
        int64_t slot = s->length + r, position = slot;
        if (r >= s->rows) {
            int64_t text = s->length + s->rows, node = s->nodes[r - s->rows];
            slot = text + node, position = text + node_depth(s, node) - 1;
        }
        float *row = qkv + stride * r, *key = row + dim * (m->heads + kv_head);
        const float *cos = layer->cos + m->rotary_dim * position, *sin = layer->sin + m->rotary_dim * position;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            if (layer->q_norm) rms_norm(row + dim * head, layer->q_norm, dim, m->epsilon, row + dim * head);
            rotate(row + dim * head, cos, sin, m->rotary_dim);
        }
        if (layer->k_norm) rms_norm(key, layer->k_norm, dim, m->epsilon, key);
        rotate(key, cos, sin, m->rotary_dim);
        memcpy(keys + dim * slot, key, dim * sizeof(float));
        memcpy(values + dim * slot, row + dim * (m->heads + m->kv_heads + kv_head), dim * sizeof(float));
    }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        struct attention a = {
            qkv + dim * head, keys, values, head + 1 < (kv_head + 1) * group ? keys : next, attended + dim * head,
            scores, stride, m->heads * dim, f->scores_stride, dim, layer->window, m->attention_scale,
            m->attention_softcap};
        for (int64_t r = 0, some; r < s->rows; r += some) {
            some = tile_rows(s->rows - r);
            attend_tile(&a, r, (int)some, s->length + r);
        }
        for (int64_t r = 0, some; r < s->num_nodes; r += some) {
            some = tile_rows(s->num_nodes - r);
            attend_nodes(&a, s, r, (int)some);
        }
    }
}

/* This thread's share of the attention of all sequences and key heads. */
static void attend_all(const struct forward *f, int64_t number, float *scores, const struct member *member) {
    int64_t heads = f->model->kv_heads, first, last, begin = 0;
    share(f->num_sequences * heads, 1, member, &first, &last);
    for (int64_t i = 0; i < f->num_sequences; begin += f->sequences[i].rows + f->sequences[i].num_nodes, i++)
        for (int64_t head = max_of(0, first - i * heads); head < heads && i * heads + head < last; head++) {
            const float *next = keys_of(f, number, min_of(i * heads + head + 1, last - 1));
            attend(f, number, &f->sequences[i], begin, head, next, scores);
        }
}

/* Add the output of a block to the residual stream; with a norm behind the block, through it. A barrier must follow. */
static void add_block(
    const struct forward *f, const struct matrix *matrix, const void *input, const float *norm, float *buffer,
    struct member *member) {
    const struct model *m = f->model;
    int64_t hidden = m->hidden_size, first, last;
    if (norm == NULL) {
        project(matrix, input, f->rows, f->x, hidden, 1, member);
        return;
    }
    project(matrix, input, f->rows, f->projected, hidden, 0, member);
    barrier(member);
    share(f->rows, 1, member, &first, &last);
    for (int64_t r = first; r < last; r++) {
        rms_norm(f->projected + hidden * r, norm, hidden, m->epsilon, buffer);
        for (int64_t i = 0; i < hidden; i++) f->x[hidden * r + i] += buffer[i];
    }
}

static void run_layer(const struct forward *f, int64_t number, struct member *member) {
    const struct model *m = f->model;
    const struct layer *layer = &m->layers[number];
    int64_t rows = f->rows, hidden = m->hidden_size, queries = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    float *own = f->own + f->own_size * member->rank, *scores = own, *normed = own + ROWS * f->scores_stride;
    float *converted = normed + (f->own_size - ROWS * f->scores_stride) / 2;
    int64_t stride = queries + 2 * kv, first, last;

    norm_rows(f->x, layer->input_norm, rows, hidden, m->epsilon, normed);
    const void *input = as_input(normed, rows * hidden, layer->q.type, converted);
    project(&layer->q, input, rows, f->qkv, stride, 0, member);
    project(&layer->k, input, rows, f->qkv + queries, stride, 0, member);
    project(&layer->v, input, rows, f->qkv + queries + kv, stride, 0, member);
    barrier(member);

    attend_all(f, number, scores, member);
    barrier(member);

    input = as_input(f->attended, rows * queries, layer->o.type, converted);
    add_block(f, &layer->o, input, layer->attention_norm, normed, member);
    barrier(member);

    norm_rows(f->x, layer->mlp_norm, rows, hidden, m->epsilon, normed);
    input = as_input(normed, rows * hidden, layer->gate.type, converted);
    int64_t inner = m->intermediate_size;
    share(inner, LANES, member, &first, &last);
    float *up = own + ROWS * f->scores_stride; /* the normed input is not needed once it is converted... */
    if (input == normed) up = converted;       /* ...and what it would be converted into is free otherwise */
    linear_share(&layer->gate, input, rows, f->hidden, inner, 0, first, last);
    linear_share(&layer->up, input, rows, up, inner, 0, first, last);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = first; i < last; i += LANES) {
            float *gate = f->hidden + inner * r + i;
            if (i + LANES <= last) store(gate, activate(load(gate), m->activation) * load(up + inner * r + i));
            else {
                vec part = activate(load_part(gate, last - i), m->activation) * load_part(up + inner * r + i, last - i);
                memcpy(gate, &part, (last - i) * sizeof(float));
            }
        }
    barrier(member);

    input = as_input(f->hidden, rows * inner, layer->down.type, converted);
    add_block(f, &layer->down, input, layer->output_norm, normed, member);
}

static void run_layers(void *argument, struct member *member) {
    struct forward *f = argument;
    embed(f, member);
    for (int64_t i = 0; i < f->num_layers; i++) {
        if (f->is_cancelled && member->rank == 0 && i % CANCEL_EVERY(f->num_layers) == 0)
            atomic_store(&f->stopped, f->is_cancelled());
        barrier(member); /* of the layer before, too */
        if (atomic_load(&f->stopped)) return;
        run_layer(f, i, member);
    }
    barrier(member);
    if (!f->num_positions) return;
    const struct model *m = f->model;
    int64_t hidden = m->hidden_size, rows = f->num_positions, vocabulary = m->head.out_features, first, last;
    float *normed = f->own + f->own_size * member->rank, *converted = normed + f->own_size / 2;
    const float *x = f->x;
    float *to = normed;
    for (int64_t i = 0; i < f->num_sequences; i++) {
        const struct sequence *s = &f->sequences[i];
        x += hidden * s->rows;
        norm_rows(x - hidden * s->num_positions, m->norm, s->num_positions, hidden, m->epsilon, to);
        to += hidden * s->num_positions;
        for (int64_t j = 0; j < s->num_asked; j++, to += hidden)
            rms_norm(x + hidden * s->asked[j], m->norm, hidden, m->epsilon, to);
        x += hidden * s->num_nodes;
    }
    project(&m->head, as_input(normed, rows * hidden, m->head.type, converted), rows, f->logits, vocabulary, 0, member);
    if (!m->logit_softcap) return;
    share(vocabulary, COLUMNS, member, &first, &last);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = first; i < last; i++) {
            float *logit = f->logits + vocabulary * r + i;
            *logit = tanhf(*logit / m->logit_softcap) * m->logit_softcap;
        }
}

/* ---- What Python calls ---- */

/* The floats of scratch memory that a forward takes. */
int64_t scratch_size(struct model *model, const struct sequence *sequences, int64_t num_sequences, int threads) {
    struct forward f = {.model = model, .sequences = sequences, .num_sequences = num_sequences};
    return lay_out(&f, threads);
}

/* Run one forward over the new tokens and nodes of all sequences, one after the other in `tokens`, and compute the logits
 * of the last positions and of the nodes asked of each. Returns whether it was cancelled. */
int run_decoder(
    struct model *model, const int64_t *tokens, const struct sequence *sequences, int64_t num_sequences,
    int64_t num_layers, float *logits, int threads, int (*is_cancelled)(void)) {
    struct forward f = {
        .model = model, .tokens = tokens, .sequences = sequences, .num_sequences = num_sequences,
        .num_layers = num_layers, .logits = logits, .is_cancelled = is_cancelled};
    lay_out(&f, threads);
    run_on_threads(run_layers, &f, threads);
    return atomic_load(&f.stopped);
}

/* Of equal ones, the first. */
static int64_t index_of_largest(const float *x, int64_t size) {
    float largest = -INFINITY;
    vec largest_of = {0}; /* each lane */
    int64_t i = 0;
    for (largest_of -= INFINITY; i + LANES <= size; i += LANES) {
        ivec is_larger = load(x + i) > largest_of;
        largest_of = (vec)(((ivec)load(x + i) & is_larger) | ((ivec)largest_of & ~is_larger));
    }
    for (; i < size; i++) largest = x[i] > largest ? x[i] : largest;
    for (int lane = 0; lane < LANES; lane++) largest = largest_of[lane] > largest ? largest_of[lane] : largest;
    for (i = 0; i < size; i++)
        if (x[i] == largest) return i;
    return 0; /* not numbers */
}

/* Generate the likeliest tokens of several texts, so many of each: a forward over their new tokens, of which the last
 * logits are wanted, and one over each token that came of it but the last. The scratch memory has to do for all. The
 * tokens of a text are `most` apart from those of the next in `generated`. Returns how many forwards there were: fewer where
 * it was cancelled, or was to stop behind one. `sequences` are changed. */
int64_t generate(
    struct model *model, const int64_t *tokens, struct sequence *sequences, int64_t num_sequences, int64_t num_layers,
    float *logits, int64_t *generated, const int64_t *counts, int64_t most, int threads, int (*is_cancelled)(void),
    const volatile int32_t *stop) {
    int64_t vocabulary = model->head.out_features, next[num_sequences], numbers[num_sequences];
    for (int64_t i = 0; i < num_sequences; i++) numbers[i] = i;
    for (int64_t step = 0; step < most; step++) {
        if ((step && stop && *stop) || run_decoder(model, tokens, sequences, num_sequences, num_layers, logits, threads,
                                                   is_cancelled))
            return step;
        int64_t left = 0;
        for (int64_t i = 0; i < num_sequences; i++) {
            int64_t number = numbers[i], token = index_of_largest(logits + vocabulary * i, vocabulary);
            generated[most * number + step] = token;
            if (step + 1 == counts[number]) continue; /* it is complete */
            sequences[left] = sequences[i], sequences[left].length += sequences[i].rows, sequences[left].rows = 1;
            numbers[left] = number, next[left++] = token;
        }
        if (!(num_sequences = left)) return step + 1;
        tokens = next;
    }
    return most;
}

/* Move keys and values of one text from slots `from` to the slots `to` and behind; `from` ascends, and none is before its
 * destination. */
void move_slots(
    float *const *kv, int64_t num_tensors, int64_t heads, int64_t capacity, int64_t head_dim, const int64_t *from,
    int64_t count, int64_t to) {
    for (int64_t i = 0; i < num_tensors * heads; i++) {
        float *slots = kv[i / heads] + capacity * head_dim * (i % heads);
        for (int64_t j = 0; j < count; j++)
            if (from[j] != to + j)
                memcpy(slots + head_dim * (to + j), slots + head_dim * from[j], head_dim * sizeof(float));
    }
}

static void run_product(void *argument, struct member *member) {
    const struct product *p = argument;
    project(p->m, p->x, p->rows, p->out, p->out_stride, 0, member);
}

/* One linear layer: inputs are of `linear_input_type`, outputs float32. */
void run_linear(const struct matrix *matrix, const void *x, int64_t rows, float *out, int threads) {
    struct product p = {.m = matrix, .x = x, .rows = rows, .out = out, .out_stride = matrix->out_features};
    run_on_threads(run_product, &p, threads);
}

int linear_input_type(int type) { return input_type(type); }
