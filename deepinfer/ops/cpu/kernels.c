/* Kernels of the backend "cpu".
 *
 * Every function computes rows that do not depend on each other.  The order of every sum follows from the widths alone: a product
 * of one row and one column runs along its inputs in vectors, whatever rows and columns are computed beside it.  Threads divide
 * columns, experts or rows, never a sum.
 *
 * Activations are bf16, sums are fp32, and a result is rounded once, as in the reference.  The compiler may not contract a
 * product and a sum (-ffp-contract=off); where one rounding is wanted, the code says fma.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LEVEL 2
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LEVEL 1
#define LANES 8
#else
#define LEVEL 0
#define LANES 8
#endif
#if LEVEL
#include <immintrin.h>
#endif
#if LEVEL == 2 && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define AMX 0
#endif

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define ROWS 4 /* rows of a tile of a product */
#define COLUMNS 4 /* columns of a tile of a product */
#define PADDED(width) (((width) + 15) / 16 * 16)

/* Multiply-adds up to which one thread computes alone, so that a step of one request wakes no other. */
#define SHARED_WORK 2000000LL

/* ------------------------------------------------------------------------------------------------------------ numbers */

INLINE float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float wide(bf16 value) { return bits_float((uint32_t)value << 16); }

INLINE bf16 narrow(float value) { /* round to nearest even; NaN stays NaN */
    uint32_t bits = float_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded;
}

INLINE float power_of_two(uint8_t byte) { /* UE8M0 */
    return byte == 255 ? NAN : byte == 0 ? bits_float(0x00400000) : bits_float((uint32_t)byte << 23);
}

INLINE float ceil_power_of_two(float value) { return bits_float((float_bits(value) + 0x7fffff) & 0xff800000); }

INLINE uint8_t power_byte(float power) { /* of a power of two, or of a NaN */
    int32_t e = (int32_t)float_bits(power) >> 23;
    return e > 255 ? 255 : (uint8_t)e;
}

INLINE float fma1(float a, float b, float c) { /* processors without the instruction compute it in software: two roundings there */
#if LEVEL
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float exp_(float x) { /* within 2 ulp; e^-inf = 0; overflows to infinity; NaN stays */
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = fma1(n, -0.693145751953125f, x);
    r = fma1(n, -1.42860682030941723e-6f, r);
    float p = 1.98412698e-4f;
    p = fma1(p, r, 1.38888889e-3f);
    p = fma1(p, r, 8.33333333e-3f);
    p = fma1(p, r, 4.16666667e-2f);
    p = fma1(p, r, 1.66666667e-1f);
    p = fma1(p, r, 0.5f);
    p = fma1(p, r, 1.0f);
    p = fma1(p, r, 1.0f);
    int k = (int)n, half = k / 2; /* two steps, because 2^-150 is no normal number */
    return p * bits_float((uint32_t)(127 + half) << 23) * bits_float((uint32_t)(127 + k - half) << 23);
}

INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

static float e4m3_values[256], e2m1_pairs[256][2]; /* of every byte */
static const float e2m1_values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

static int has_amx;

void setup(void) { /* once, before any other function */
#if AMX
    has_amx = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#endif
    for (int byte = 0; byte < 256; byte++) {
        int e = (byte >> 3) & 15, m = byte & 7;
        float value = e ? ldexpf(1.0f + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6);
        if ((byte & 127) == 127) value = NAN;
        e4m3_values[byte] = byte & 128 ? -value : value;
        e2m1_pairs[byte][0] = e2m1_values[byte & 15];
        e2m1_pairs[byte][1] = e2m1_values[byte >> 4];
    }
}

INLINE float on_e4m3(float x) { /* the nearest number of E4M3 with |x| <= 448, ties to even; NaN stays */
    x = x > 448.0f ? 448.0f : x;
    x = x < -448.0f ? -448.0f : x;
    uint32_t e = (float_bits(x) >> 23) & 0xff;
    e = e < 121 ? 121 : e; /* 2^-6 */
    float quantum = bits_float((e - 3) << 23);
    return rintf(x / quantum) * quantum;
}

INLINE uint8_t e4m3_code(float x) { /* of a number on the grid */
    uint32_t bits = float_bits(x), sign = (bits >> 24) & 128;
    if (x != x) return (uint8_t)(sign | 127);
    float a = fabsf(x);
    if (a < bits_float(121u << 23)) return (uint8_t)(sign | (uint32_t)(a * 512.0f));
    uint32_t e = ((bits >> 23) & 0xff) - 120, m = (bits >> 20) & 7;
    return (uint8_t)(sign | e << 3 | m);
}

INLINE uint8_t e2m1_code(float x) {
    float a = fabsf(x);
    int code = (a > .25f) + (a >= .75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5);
    return (uint8_t)(code | (float_bits(x) >> 31) << 3);
}

INLINE float largest_of(const float *x, int count) { /* of the magnitudes; NaN if there is one */
    float largest = 0;
    int has_nan = 0;
    for (int i = 0; i < count; i++) {
        float a = fabsf(x[i]);
        has_nan |= a != a;
        largest = a > largest ? a : largest;
    }
    return has_nan ? NAN : largest;
}

/* MXFP8: the numbers of 32 inputs, and their scale. */
INLINE float mxfp8_block(const float *x, float *codes) {
    float largest = largest_of(x, 32);
    largest = largest < 1e-4f ? 1e-4f : largest;
    float scale = ceil_power_of_two(largest * (1 / 448.0f));
    for (int i = 0; i < 32; i++) codes[i] = on_e4m3(x[i] / scale);
    return scale;
}

INLINE float mxfp4_scale(const float *x) {
    float least = 6 * bits_float(1u << 23), largest = largest_of(x, 32);
    largest = largest < least ? least : largest;
    return largest != largest ? largest : ceil_power_of_two(largest / 6.0f);
}

static void round_mxfp8_row(const float *x, bf16 *out, int width) {
    float codes[32];
    for (int first = 0; first < width; first += 32) {
        float scale = mxfp8_block(x + first, codes);
        for (int i = 0; i < 32; i++) out[first + i] = narrow(codes[i] * scale);
    }
}

static void window_record(const float *x, uint8_t *record, int width) {
    float codes[32];
    for (int first = 0; first < width; first += 32) {
        float scale = mxfp8_block(x + first, codes);
        for (int i = 0; i < 32; i++) record[first + i] = e4m3_code(codes[i]);
        record[width + first / 32] = power_byte(scale);
    }
}

static void main_record(const float *x, uint8_t *record, int width) {
    for (int first = 0; first < width; first += 16) {
        float scale = largest_of(x + first, 16) / 6.0f;
        scale = on_e4m3(scale < bits_float(118u << 23) ? bits_float(118u << 23) : scale);
        for (int i = 0; i < 16; i += 2)
            record[(first + i) / 2] = (uint8_t)(e2m1_code(x[first + i] / scale) | e2m1_code(x[first + i + 1] / scale) << 4);
        record[width / 2 + first / 16] = e4m3_code(scale);
    }
}

static void index_record(const float *x, uint8_t *record, int width) {
    for (int first = 0; first < width; first += 32) {
        float scale = mxfp4_scale(x + first);
        for (int i = 0; i < 32; i += 2)
            record[(first + i) / 2] = (uint8_t)(e2m1_code(x[first + i] / scale) | e2m1_code(x[first + i + 1] / scale) << 4);
        record[width / 2 + first / 32] = power_byte(scale);
    }
}

/* ---------------------------------------------------------------------------------------------------- vectors, memory */

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void put(float *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec fma_(vec a, vec b, vec c) {
#if LEVEL == 2
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LEVEL == 1
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float sum_of(vec v) { /* halves, repeatedly */
#if LEVEL == 2
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif LEVEL == 1
    __m256 eight = (__m256)v;
#endif
#if LEVEL
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float part[LANES];
    put(part, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
#endif
}

INLINE float square_sum(const float *x, int width) {
    vec total = {0};
    int k = 0;
    for (; k + LANES <= width; k += LANES) total = fma_(load(x + k), load(x + k), total);
    float sum = sum_of(total);
    for (; k < width; k++) sum = fma1(x[k], x[k], sum);
    return sum;
}

static _Thread_local struct {
    void *memory;
    size_t size;
} scratches[4];

static void *scratch(int number, size_t size) { /* memory of this thread, 64-byte aligned, until its next call with the number */
    if (scratches[number].size < size) {
        free(scratches[number].memory);
        size_t rounded = (size + size / 2 + 4095) / 4096 * 4096;
        scratches[number].memory = aligned_alloc(64, rounded);
        scratches[number].size = scratches[number].memory ? rounded : 0;
        if (!scratches[number].memory) abort();
    }
    return scratches[number].memory;
}

static void widen(const bf16 *x, long stride, int rows, int width, float *out) { /* rows of PADDED(width), zeros at the end */
    int padded = PADDED(width);
    for (int row = 0; row < rows; row++) {
        for (int k = 0; k < width; k++) out[(long)row * padded + k] = wide(x[row * stride + k]);
        for (int k = width; k < padded; k++) out[(long)row * padded + k] = 0;
    }
}

/* ----------------------------------------------------------------------------------------------------------- products */

/* A tile: R rows of x times C columns; each pair of a row and a column has a sum of its own. */
INLINE void tile(const float *x, const float *w, int width, float *out, int R, int C) {
    vec total[ROWS][COLUMNS];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) total[r][c] = (vec){0};
    for (int k = 0; k < width; k += LANES)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) total[r][c] = fma_(load(x + (long)r * width + k), load(w + (long)c * width + k), total[r][c]);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) out[r * COLUMNS + c] = sum_of(total[r][c]);
}

INLINE void tile_of(const float *x, const float *w, int width, float *out, int rows) {
    switch (rows) {
    case 1: tile(x, w, width, out, 1, COLUMNS); break;
    case 2: tile(x, w, width, out, 2, COLUMNS); break;
    case 3: tile(x, w, width, out, 3, COLUMNS); break;
    default: tile(x, w, width, out, 4, COLUMNS);
    }
}

enum format { FP32, FP8, FP4 };

struct matrix { /* [outputs, inputs]; FP8 has a scale for 32 x 32 numbers, FP4 one for 32 inputs of a row */
    enum format format;
    const void *codes;
    const uint8_t *scales;
    int outputs, inputs, first; /* the first output is this row of codes */
};

static void expand_fp8(const uint8_t *codes, const uint8_t *scales, int width, float *out) {
    for (int first = 0; first < width; first += 32) {
        float scale = power_of_two(scales[first / 32]);
        int count = width - first < 32 ? width - first : 32;
        int i = 0;
#if LEVEL == 2
        for (; i + 16 <= count; i += 16) { /* E4M3 is fp16 with a smaller exponent: shift it there, and multiply by 2^8 */
            __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + first + i)));
            __m256i size = _mm256_and_si256(c, _mm256_set1_epi16(0x7f)), sign = _mm256_and_si256(c, _mm256_set1_epi16(0x80));
            __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
            __m256i h = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), _mm256_slli_epi16(sign, 8)), nan);
            __m512 v = _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f * scale));
            _mm512_storeu_ps(out + first + i, v);
        }
#elif LEVEL == 1
        for (; i + 8 <= count; i += 8) {
            __m128i c = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(codes + first + i)));
            __m128i size = _mm_and_si128(c, _mm_set1_epi16(0x7f)), sign = _mm_and_si128(c, _mm_set1_epi16(0x80));
            __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
            __m128i h = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(size, 7), _mm_slli_epi16(sign, 8)), nan);
            _mm256_storeu_ps(out + first + i, _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f * scale)));
        }
#endif
        for (; i < count; i++) out[first + i] = e4m3_values[codes[first + i]] * scale;
    }
}

static void expand_fp4(const uint8_t *codes, const uint8_t *scales, int width, float *out) {
    for (int first = 0; first < width; first += 32) {
        float scale = power_of_two(scales[first / 32]);
#if LEVEL == 2
        __m512 table = _mm512_mul_ps(_mm512_loadu_ps(e2m1_values), _mm512_set1_ps(scale));
        __m128i packed = _mm_loadu_si128((const __m128i *)(codes + first / 2));
        __m128i low = _mm_and_si128(packed, _mm_set1_epi8(15)), high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
        __m512i even = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)), odd = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(low, high));
        _mm512_storeu_ps(out + first, _mm512_permutexvar_ps(even, table));
        _mm512_storeu_ps(out + first + 16, _mm512_permutexvar_ps(odd, table));
#else
        for (int i = 0; i < 32; i += 2) {
            const float *pair = e2m1_pairs[codes[(first + i) / 2]];
            out[first + i] = pair[0] * scale;
            out[first + i + 1] = pair[1] * scale;
        }
#endif
    }
}

/* COLUMNS columns from the one with this number, in rows of PADDED(inputs); columns that do not exist repeat the last. */
INLINE void expand(const struct matrix *w, int column, float *out) {
    int padded = PADDED(w->inputs), scales = (w->inputs + 31) / 32;
    for (int c = 0; c < COLUMNS; c++) {
        int number = w->first + (column + c < w->outputs ? column + c : w->outputs - 1);
        float *row = out + (long)c * padded;
        if (w->format == FP8)
            expand_fp8((const uint8_t *)w->codes + (long)number * w->inputs, w->scales + (long)(number / 32) * scales, w->inputs, row);
        else if (w->format == FP4)
            expand_fp4((const uint8_t *)w->codes + (long)number * (w->inputs / 2), w->scales + (long)number * scales, w->inputs, row);
        else
            memcpy(row, (const float *)w->codes + (long)number * w->inputs, 4 * (size_t)w->inputs);
        for (int k = w->inputs; k < padded; k++) row[k] = 0;
    }
}

/* Columns of a product: x [rows, PADDED(inputs)] fp32 times some columns of w; one of the results is NULL. */
static void columns(const float *x, int rows, const struct matrix *w, int column, bf16 *narrowed, float *widened, long stride) {
    int padded = PADDED(w->inputs), count = w->outputs - column < COLUMNS ? w->outputs - column : COLUMNS;
    float *panel = scratch(3, 4 * (size_t)COLUMNS * padded), part[ROWS * COLUMNS];
    const float *direct = panel;
    if (w->format == FP32 && padded == w->inputs && count == COLUMNS)
        direct = (const float *)w->codes + (long)column * padded;
    else
        expand(w, column, panel);
    for (int first = 0; first < rows; first += ROWS) {
        int few = rows - first < ROWS ? rows - first : ROWS;
        tile_of(x + (long)first * padded, direct, padded, part, few);
        for (int r = 0; r < few; r++)
            for (int c = 0; c < count; c++) {
                long place = (first + r) * stride + column + c;
                if (narrowed) narrowed[place] = narrow(part[r * COLUMNS + c]);
                else widened[place] = part[r * COLUMNS + c];
            }
    }
}

static void product(const float *x, int rows, const struct matrix *w, bf16 *narrowed, float *widened, long stride) {
    int tiles = (w->outputs + COLUMNS - 1) / COLUMNS;
    long long work = (long long)rows * w->outputs * w->inputs;
#pragma omp parallel for schedule(static) if (work > SHARED_WORK)
    for (int t = 0; t < tiles; t++) columns(x, rows, w, t * COLUMNS, narrowed, widened, stride);
}

#if AMX
/* Tiles of 16 outputs x 32 inputs, times 32 inputs x 16 rows; a sum runs along the inputs in pairs. */
#define SIDE 16

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static void expand_bf16(const struct matrix *w, int column, int count, bf16 *out) { /* count columns, each w->inputs long */
    float row[w->inputs];
    int scales = w->inputs / 32;
    for (int c = 0; c < count; c++) {
        int number = w->first + column + c;
        if (w->format == FP8)
            expand_fp8((const uint8_t *)w->codes + (long)number * w->inputs, w->scales + (long)(number / 32) * scales, w->inputs, row);
        else
            expand_fp4((const uint8_t *)w->codes + (long)number * (w->inputs / 2), w->scales + (long)number * scales, w->inputs, row);
        for (int k = 0; k < w->inputs; k += 16) /* exact: the codes have few digits */
            _mm256_storeu_si256((__m256i *)(out + (long)c * w->inputs + k),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(row + k)), 16)));
    }
}

/* Rows in groups of SIDE, pairs of inputs beside each other: [groups, inputs / 2, SIDE] pairs; missing rows are zero. */
static void pair_up(const bf16 *x, long stride, int rows, int inputs, uint32_t *out) {
    for (int first = 0; first < rows; first += SIDE) {
        uint32_t *group = out + (long)first / SIDE * (inputs / 2) * SIDE;
        for (int r = 0; r < SIDE; r++)
            for (int k = 0; k < inputs / 2; k++) {
                uint32_t pair = 0;
                if (first + r < rows) memcpy(&pair, x + (first + r) * stride + 2 * k, 4);
                group[k * SIDE + r] = pair;
            }
    }
}

static void put_tile(const float *sums, int column, int count, int first, int rows, bf16 *out, long stride) {
    const __m512i lanes = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(SIDE));
    for (int r = 0; r < SIDE && first + r < rows; r++) {
        bf16 *own = out + (first + r) * stride + column;
        if (count < SIDE) {
            for (int c = 0; c < count; c++) own[c] = narrow(sums[c * SIDE + r]);
            continue;
        }
        __m512i bits = _mm512_i32gather_epi32(lanes, sums + r, 4); /* one row of sums is one column of results */
        __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
        __mmask16 is_nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
        rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
        _mm256_storeu_si256((__m256i *)own, _mm512_cvtepi32_epi16(rounded));
    }
}

/* 2 * SIDE columns of a product; pairs are the rows of pair_up. */
static void amx_columns(const uint32_t *pairs, int rows, const struct matrix *w, int column, bf16 *out, long stride) {
    static const struct tile_config config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    int count = w->outputs - column < 2 * SIDE ? w->outputs - column : 2 * SIDE, inputs = w->inputs;
    bf16 *panel = scratch(3, 2 * (size_t)2 * SIDE * inputs);
    float sums[4][SIDE * SIDE] __attribute__((aligned(64)));
    expand_bf16(w, column, count, panel);
    if (count < 2 * SIDE) memset(panel + (long)count * inputs, 0, 2 * (size_t)(2 * SIDE - count) * inputs);
    long group = (long)inputs / 2 * SIDE;
    int low = count < SIDE ? count : SIDE;
    _tile_loadconfig(&config);
    int first = 0;
    for (; first + SIDE < rows; first += 2 * SIDE) { /* two groups of rows */
        const uint32_t *own = pairs + first / SIDE * group;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < inputs; k += 32) {
            _tile_loadd(4, panel + k, 2 * inputs);
            _tile_loadd(5, panel + SIDE * inputs + k, 2 * inputs);
            _tile_loadd(6, own + k / 2 * SIDE, 4 * SIDE);
            _tile_loadd(7, own + group + k / 2 * SIDE, 4 * SIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0], 4 * SIDE);
        _tile_stored(1, sums[1], 4 * SIDE);
        _tile_stored(2, sums[2], 4 * SIDE);
        _tile_stored(3, sums[3], 4 * SIDE);
        put_tile(sums[0], column, low, first, rows, out, stride);
        put_tile(sums[1], column + SIDE, count - low, first, rows, out, stride);
        put_tile(sums[2], column, low, first + SIDE, rows, out, stride);
        put_tile(sums[3], column + SIDE, count - low, first + SIDE, rows, out, stride);
    }
    for (; first < rows; first += SIDE) {
        const uint32_t *own = pairs + first / SIDE * group;
        _tile_zero(0);
        _tile_zero(1);
        for (int k = 0; k < inputs; k += 32) {
            _tile_loadd(4, panel + k, 2 * inputs);
            _tile_loadd(5, panel + SIDE * inputs + k, 2 * inputs);
            _tile_loadd(6, own + k / 2 * SIDE, 4 * SIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, sums[0], 4 * SIDE);
        _tile_stored(1, sums[1], 4 * SIDE);
        put_tile(sums[0], column, low, first, rows, out, stride);
        put_tile(sums[1], column + SIDE, count - low, first, rows, out, stride);
    }
    _tile_release();
}
#endif

/* bf16 rows times a quantised matrix. */
static void quantised_product(const bf16 *x, long stride, int rows, const struct matrix *w, bf16 *out, long out_stride, int is_shared) {
    is_shared = is_shared && (long long)rows * w->outputs * w->inputs > SHARED_WORK;
#if AMX
    if (has_amx && w->inputs % 32 == 0) {
        int groups = (rows + SIDE - 1) / SIDE, panels = (w->outputs + 2 * SIDE - 1) / (2 * SIDE);
        uint32_t *pairs = scratch(0, 4 * (size_t)groups * (w->inputs / 2) * SIDE);
        pair_up(x, stride, rows, w->inputs, pairs);
#pragma omp parallel for schedule(static) if (is_shared)
        for (int p = 0; p < panels; p++) amx_columns(pairs, rows, w, p * 2 * SIDE, out, out_stride);
        return;
    }
#endif
    float *wide_x = scratch(0, 4 * (size_t)rows * PADDED(w->inputs));
    int tiles = (w->outputs + COLUMNS - 1) / COLUMNS;
    widen(x, stride, rows, w->inputs, wide_x);
#pragma omp parallel for schedule(static) if (is_shared)
    for (int t = 0; t < tiles; t++) columns(wide_x, rows, w, t * COLUMNS, out, NULL, out_stride);
}

void linear_fp8(const bf16 *x, long stride, int rows, const uint8_t *codes, const uint8_t *scales, int outputs, int inputs,
                bf16 *out) {
    struct matrix w = {FP8, codes, scales, outputs, inputs, 0};
    quantised_product(x, stride, rows, &w, out, outputs, 1);
}

/* Group g of every row of x [rows, groups, inputs] times rows [g * outputs, (g + 1) * outputs) of the codes. */
void linear_fp8_grouped(const bf16 *x, long row_stride, long group_stride, int rows, int groups, const uint8_t *codes,
                        const uint8_t *scales, int outputs, int inputs, bf16 *out) {
    for (int g = 0; g < groups; g++) {
        struct matrix w = {FP8, codes, scales, outputs, inputs, g * outputs};
        quantised_product(x + g * group_stride, row_stride, rows, &w, out + (long)g * outputs, (long)groups * outputs, 1);
    }
}

void linear_fp32(const bf16 *x, long stride, int rows, const float *weight, int outputs, int inputs, float *out) {
    struct matrix w = {FP32, weight, NULL, outputs, inputs, 0};
    float *wide_x = scratch(0, 4 * (size_t)rows * PADDED(inputs));
    widen(x, stride, rows, inputs, wide_x);
    product(wide_x, rows, &w, NULL, out, outputs);
}

/* ------------------------------------------------------------------------------------------------------------ experts */

static void swiglu_row(const bf16 *gate_up, float weight, float limit, int inter, bf16 *out) {
    float *hidden = scratch(2, 4 * (size_t)inter);
    for (int i = 0; i < inter; i++) {
        float gate = wide(gate_up[i]), up = wide(gate_up[inter + i]);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        hidden[i] = wide(narrow(gate * sigmoid_(gate) * up * weight));
    }
    round_mxfp8_row(hidden, out, inter);
}

struct expert {
    struct matrix w13, w2;
};

/* Some rows through one expert; weights [rows] or NULL.  Row r of the result is written to row places[r] of out, or to row r. */
static void one_expert(const bf16 *x, int rows, const struct expert *e, const float *weights, float limit, bf16 *out,
                       const int64_t *places, int is_shared) {
    int inter = e->w2.inputs, hidden = e->w2.outputs;
    bf16 *gate_up = malloc(2 * (size_t)rows * (3 * (size_t)inter + hidden) + 1);
    if (!gate_up) abort();
    bf16 *middle = gate_up + (size_t)rows * 2 * inter, *down = middle + (size_t)rows * inter;
    quantised_product(x, hidden, rows, &e->w13, gate_up, 2 * inter, is_shared);
    for (int row = 0; row < rows; row++)
        swiglu_row(gate_up + (long)row * 2 * inter, weights ? weights[row] : 1.0f, limit, inter, middle + (long)row * inter);
    quantised_product(middle, inter, rows, &e->w2, down, hidden, is_shared);
    for (int row = 0; row < rows; row++)
        memcpy(out + (places ? places[row] : row) * hidden, down + (long)row * hidden, 2 * (size_t)hidden);
    free(gate_up);
}

void shared_expert(const bf16 *x, int rows, const uint8_t *codes13, const uint8_t *scales13, const uint8_t *codes2,
                   const uint8_t *scales2, int hidden, int inter, float limit, bf16 *out) {
    struct expert e = {{FP8, codes13, scales13, 2 * inter, hidden, 0}, {FP8, codes2, scales2, hidden, inter, 0}};
    one_expert(x, rows, &e, NULL, limit, out, NULL, 1);
}

/* order, counts: picks sorted by expert; weights [num_picks] of picks in their own order; out [num_picks, hidden]. */
void experts(const bf16 *x, const float *weights, const int64_t *order, const int64_t *counts, int num_experts, int top_k,
             const uint8_t *codes13, const uint8_t *scales13, const uint8_t *codes2, const uint8_t *scales2, int hidden, int inter,
             float limit, bf16 *out) {
    int64_t first[num_experts + 1];
    first[0] = 0;
    for (int e = 0; e < num_experts; e++) first[e + 1] = first[e] + counts[e];
    long long work = (long long)first[num_experts] * 3 * hidden * inter;
#pragma omp parallel for schedule(dynamic, 1) if (work > SHARED_WORK)
    for (int number = 0; number < num_experts; number++) {
        int rows = (int)counts[number];
        if (!rows) continue;
        const int64_t *picks = order + first[number];
        float *own_weights = scratch(1, 4 * (size_t)rows + 2 * (size_t)rows * hidden);
        bf16 *own = (bf16 *)(own_weights + rows);
        for (int row = 0; row < rows; row++) {
            memcpy(own + (long)row * hidden, x + picks[row] / top_k * hidden, 2 * (size_t)hidden);
            own_weights[row] = weights[picks[row]];
        }
        long w13 = (long)number * 2 * inter, w2 = (long)number * hidden;
        struct expert e = {{FP4, codes13 + w13 * (hidden / 2), scales13 + w13 * (hidden / 32), 2 * inter, hidden, 0},
                           {FP4, codes2 + w2 * (inter / 2), scales2 + w2 * (inter / 32), hidden, inter, 0}};
        one_expert(own, rows, &e, own_weights, limit, out, picks, 0);
    }
}

INLINE int comes_first(float a, float b) { return a != a ? b == b : a > b; } /* NaN before all numbers */

void route(const bf16 *x, long stride, int rows, int hidden, const float *gate, const float *bias, const float *bias_image,
           const uint8_t *is_image, int num_experts, int top_k, float scale, int64_t *ids, float *weights) {
    struct matrix w = {FP32, gate, NULL, num_experts, hidden, 0};
    float *wide_x = scratch(0, 4 * (size_t)rows * PADDED(hidden)), *raw = scratch(1, 4 * (size_t)rows * num_experts);
    widen(x, stride, rows, hidden, wide_x);
    product(wide_x, rows, &w, NULL, raw, num_experts);
    float steered[num_experts];
    for (long row = 0; row < rows; row++) {
        float *scores = raw + row * num_experts, total = 0;
        int is_unknown = 0;
        for (int e = 0; e < num_experts; e++) {
            float v = scores[e];
            scores[e] = sqrtf((v > 0 || v != v ? v : 0) + log1pf(exp_(-fabsf(v))));
            steered[e] = scores[e] + (is_image[row] ? bias_image : bias)[e];
            is_unknown |= steered[e] != steered[e];
        }
        for (int choice = 0; choice < top_k; choice++) {
            int best = -1;
            for (int e = 0; e < num_experts; e++) {
                int is_taken = 0;
                for (int n = 0; n < choice; n++) is_taken |= ids[row * top_k + n] == e;
                if (!is_taken && (best < 0 || comes_first(steered[e], steered[best]))) best = e;
            }
            ids[row * top_k + choice] = best;
            total += scores[best];
        }
        for (int choice = 0; choice < top_k; choice++)
            weights[row * top_k + choice] = is_unknown ? NAN : scale * scores[ids[row * top_k + choice]] / (total + 1e-20f);
    }
}

void sort_picks(const int64_t *ids, long count, int num_experts, int64_t *order, int64_t *counts) {
    int64_t place[num_experts], sum = 0;
    for (int e = 0; e < num_experts; e++) counts[e] = 0;
    for (long i = 0; i < count; i++) counts[ids[i]]++;
    for (int e = 0; e < num_experts; e++) {
        place[e] = sum;
        sum += counts[e];
    }
    for (long i = 0; i < count; i++) order[place[ids[i]]++] = i;
}

void combine(const bf16 *parts, const bf16 *shared, int rows, int top_k, int hidden, bf16 *out) {
    float total[hidden];
    for (long row = 0; row < rows; row++) {
        const bf16 *own = parts + row * top_k * hidden;
        for (int i = 0; i < hidden; i++) total[i] = wide(own[i]);
        for (int choice = 1; choice < top_k; choice++)
            for (int i = 0; i < hidden; i++) total[i] += wide(own[choice * hidden + i]);
        for (int i = 0; i < hidden; i++) out[row * hidden + i] = narrow(total[i] + wide(shared[row * hidden + i]));
    }
}

/* --------------------------------------------------------------------------------------------- norms, rotations, records */

static void norm_row(const float *x, const float *weight, float eps, int width, float *out) { /* rounded to bf16 */
    float scale = 1.0f / sqrtf(square_sum(x, width) / width + eps);
    for (int i = 0; i < width; i++) out[i] = wide(narrow(x[i] * scale * weight[i]));
}

INLINE void widen_row(const bf16 *x, int width, float *out) {
    for (int i = 0; i < width; i++) out[i] = wide(x[i]);
}

/* The last 2 * pairs dims in interleaved pairs; rounded to bf16. */
static void rotate_row(float *x, const float *cos, const float *sin, int width, int pairs) {
    for (int i = 0; i < pairs; i++) {
        float *pair = x + width - 2 * pairs + 2 * i, a = pair[0], b = pair[1];
        pair[0] = wide(narrow(a * cos[i] - b * sin[i]));
        pair[1] = wide(narrow(a * sin[i] + b * cos[i]));
    }
}

void quantise(const bf16 *x, long stride, int rows, int width, bf16 *out) {
#pragma omp parallel for schedule(static) if ((long long)rows * width > SHARED_WORK / 16)
    for (long row = 0; row < rows; row++) {
        float *values = scratch(2, 4 * (size_t)width);
        widen_row(x + row * stride, width, values);
        round_mxfp8_row(values, out + row * width, width);
    }
}

void norm8(const bf16 *x, long stride, int rows, int width, const float *weight, float eps, bf16 *out) {
#pragma omp parallel for schedule(static) if ((long long)rows * width > SHARED_WORK / 16)
    for (long row = 0; row < rows; row++) {
        float *values = scratch(2, 4 * (size_t)width);
        widen_row(x + row * stride, width, values);
        norm_row(values, weight, eps, width, values);
        round_mxfp8_row(values, out + row * width, width);
    }
}

/* Window records of projected keys: norm, rotate, encode; out rows have out_stride bytes. */
void window_records(const bf16 *kv, long stride, int rows, int width, const float *weight, float eps, const float *cos,
                    const float *sin, int pairs, uint8_t *out, long out_stride) {
    float values[width];
    for (long row = 0; row < rows; row++) {
        widen_row(kv + row * stride, width, values);
        norm_row(values, weight, eps, width, values);
        rotate_row(values, cos + row * pairs, sin + row * pairs, width, pairs);
        window_record(values, out + row * out_stride, width);
    }
}

/* ---------------------------------------------------------------------------------------------------- hyper-connections */

static void collapse_row(const float *restrict streams, const float *weights, int n, int width, float *restrict out) {
    for (int i = 0; i < width; i++) out[i] = weights[0] * streams[i];
    for (int copy = 1; copy < n; copy++)
        for (int i = 0; i < width; i++) out[i] = fma1(weights[copy], streams[copy * width + i], out[i]);
    for (int i = 0; i < width; i++) out[i] = wide(narrow(out[i]));
}

void mhc_collapse(const bf16 *streams, const float *weights, int rows, int n, int width, bf16 *out) {
    float values[n * width], result[width];
    for (long row = 0; row < rows; row++) {
        widen_row(streams + row * n * width, n * width, values);
        collapse_row(values, weights + row * n, n, width, result);
        for (int i = 0; i < width; i++) out[row * width + i] = narrow(result[i]);
    }
}

void final_norm(const bf16 *streams, const float *pre, int rows, int n, int width, const float *weight, float eps, bf16 *out) {
    float values[n * width], result[width];
    for (long row = 0; row < rows; row++) {
        widen_row(streams + row * n * width, n * width, values);
        collapse_row(values, pre + row * n, n, width, result);
        norm_row(result, weight, eps, width, result);
        for (int i = 0; i < width; i++) out[row * width + i] = narrow(result[i]);
    }
}

/* comb [n, n] is [source, target]. */
static void post_row(const float *restrict streams, const bf16 *restrict delta, const float *post, const float *comb, int n, int width,
                     float *restrict out) {
    for (int target = 0; target < n; target++) {
        float *own = out + target * width;
        for (int i = 0; i < width; i++) own[i] = comb[target] * streams[i];
        for (int source = 1; source < n; source++)
            for (int i = 0; i < width; i++) own[i] = fma1(comb[source * n + target], streams[source * width + i], own[i]);
        for (int i = 0; i < width; i++) own[i] = wide(narrow(fma1(post[target], wide(delta[i]), own[i])));
    }
}

void mhc_post(const bf16 *streams, const bf16 *delta, const float *post, const float *comb, int rows, int n, int width, bf16 *out) {
    float values[n * width], result[n * width];
    for (long row = 0; row < rows; row++) {
        widen_row(streams + row * n * width, n * width, values);
        post_row(values, delta + row * width, post + row * n, comb + row * n * n, n, width, result);
        for (int i = 0; i < n * width; i++) out[row * n * width + i] = narrow(result[i]);
    }
}

/* Writes delta into the streams unless it is NULL, then measures and collapses them; out may be NULL if delta is. */
void mhc_mix(const bf16 *streams, const bf16 *delta, const float *pre, const float *post, const float *comb, const float *fn,
             int rows, int n, int width, bf16 *out, bf16 *collapsed, float *raw, float *square_sums) {
    int flat = n * width, padded = PADDED(flat), outputs = 2 * n + n * n;
    struct matrix w = {FP32, fn, NULL, outputs, flat, 0};
    float *all_rows = scratch(0, 4 * (size_t)rows * padded);
#pragma omp parallel for schedule(static) if ((long long)rows * flat * n > SHARED_WORK / 4)
    for (long row = 0; row < rows; row++) {
        float *own = scratch(1, 4 * (size_t)(padded + width)), *values = all_rows + row * padded;
        widen_row(streams + row * flat, flat, own);
        if (delta) {
            post_row(own, delta + row * width, post + row * n, comb + row * n * n, n, width, values);
            for (int i = 0; i < flat; i++) out[row * flat + i] = narrow(values[i]);
        } else {
            memcpy(values, own, 4 * (size_t)flat);
        }
        for (int i = flat; i < padded; i++) values[i] = 0;
        collapse_row(values, pre + row * n, n, width, own);
        for (int i = 0; i < width; i++) collapsed[row * width + i] = narrow(own[i]);
        square_sums[row] = square_sum(values, flat);
    }
    product(all_rows, rows, &w, NULL, raw, outputs);
}

void mhc_finish(const float *raw, const float *square_sums, const bf16 *collapsed, const float *base, const float *scale,
                const float *norm, int rounds, float eps, float rms_eps, int rows, int n, int width, float *pre, float *post,
                float *comb, bf16 *x, bf16 *x8) {
    int numbers = 2 * n + n * n;
#pragma omp parallel for schedule(static) if ((long long)rows * (width + rounds * n * n) > SHARED_WORK / 16)
    for (long row = 0; row < rows; row++) {
        float affine[numbers], m[n * n], sums[n], *values = scratch(2, 4 * (size_t)width);
        float stream_scale = 1.0f / sqrtf(square_sums[row] / (n * width) + rms_eps);
        for (int i = 0; i < numbers; i++) affine[i] = scale[i] * (raw[row * numbers + i] * stream_scale) + base[i];
        for (int i = 0; i < n; i++) {
            pre[row * n + i] = sigmoid_(affine[i]) + eps;
            post[row * n + i] = 2 * sigmoid_(affine[n + i]);
        }
        for (int source = 0; source < n; source++) {
            const float *logits = affine + 2 * n + source * n;
            float largest = logits[0], total = 0;
            for (int target = 1; target < n; target++) largest = logits[target] > largest ? logits[target] : largest;
            for (int target = 0; target < n; target++) total += m[source * n + target] = exp_(logits[target] - largest);
            for (int target = 0; target < n; target++) m[source * n + target] = m[source * n + target] / total + eps;
        }
        for (int round = 0; round < rounds; round++) {
            if (round)
                for (int source = 0; source < n; source++) {
                    float total = eps;
                    for (int target = 0; target < n; target++) total += m[source * n + target];
                    for (int target = 0; target < n; target++) m[source * n + target] /= total;
                }
            for (int target = 0; target < n; target++) sums[target] = eps;
            for (int source = 0; source < n; source++)
                for (int target = 0; target < n; target++) sums[target] += m[source * n + target];
            for (int source = 0; source < n; source++)
                for (int target = 0; target < n; target++) m[source * n + target] /= sums[target];
        }
        memcpy(comb + row * n * n, m, 4 * (size_t)(n * n));
        widen_row(collapsed + row * width, width, values);
        norm_row(values, norm, rms_eps, width, values);
        for (int i = 0; i < width; i++) x[row * width + i] = narrow(values[i]);
        round_mxfp8_row(values, x8 + row * width, width);
    }
}

/* ------------------------------------------------------------------------------------------------------------- engram */

void engram_gather(const uint8_t *codes, const uint8_t *scales, const int64_t *picks, long count, int width, bf16 *out) {
    for (long i = 0; i < count; i++)
        for (int k = 0; k < width; k++)
            out[i * width + k] =
                narrow(e4m3_values[codes[picks[i] * width + k]] * power_of_two(scales[picks[i] * (width / 32) + k / 32]));
}

void engram_gate(const bf16 *kv, const bf16 *streams, const float *q_weight, const float *k_weight, const uint8_t *is_image,
                 float eps, int rows, int n, int width, bf16 *out) {
    float root = 1.0f / sqrtf((float)width);
    for (long row = 0; row < rows; row++) {
        const bf16 *own = kv + row * (n + 1) * width, *value = own + n * width;
        for (int copy = 0; copy < n; copy++) {
            const bf16 *stream = streams + (row * n + copy) * width;
            float x[width], key[width];
            vec total = {0};
            widen_row(stream, width, x);
            widen_row(own + copy * width, width, key);
            float products[PADDED(width)];
            for (int i = 0; i < width; i++) products[i] = x[i] * q_weight[copy * width + i] * k_weight[copy * width + i] * key[i];
            for (int i = width; i < PADDED(width); i++) products[i] = 0;
            for (int i = 0; i < width; i += LANES) total += load(products + i);
            float x_scale = 1.0f / sqrtf(square_sum(x, width) / width + eps);
            float key_scale = 1.0f / sqrtf(square_sum(key, width) / width + eps);
            float d = root * sum_of(total) * x_scale * key_scale, a = fabsf(d);
            a = a < 1e-6f ? 1e-6f : a;
            float gate = sigmoid_((d > 0 ? 1.0f : d < 0 ? -1.0f : d) * sqrtf(a));
            gate = is_image[row] ? 0 : gate;
            for (int i = 0; i < width; i++) out[(row * n + copy) * width + i] = narrow(fma1(gate, wide(value[i]), x[i]));
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- attention */

/* previous is NULL at ratio 1, where raw [rows, width]; else both are [rows, 2 * width], values then gates. */
void compress(const float *raw, const float *previous, int rows, int width, const float *norm, const float *index_key,
              const float *index_norm, int index_width, float eps, const float *cos, const float *sin, int pairs, uint8_t *main,
              uint8_t *index) {
    struct matrix w = {FP32, index_key, NULL, index_width, width, 0};
    int padded = PADDED(width), main_bytes = width / 2 + width / 16, index_bytes = index_width / 2 + index_width / 32;
    float *latents = scratch(0, 4 * (size_t)rows * padded), *keys = scratch(1, 4 * (size_t)rows * index_width);
    for (long row = 0; row < rows; row++) {
        float *latent = latents + row * padded;
        const float *own = raw + row * (previous ? 2 * width : width);
        for (int i = 0; i < width; i++) {
            float pooled = own[i];
            if (previous) {
                const float *older = previous + row * 2 * width;
                float gate = own[width + i], older_gate = older[width + i], largest = gate > older_gate ? gate : older_gate;
                largest = gate != gate ? gate : largest;
                float older_share = exp_(older_gate - largest), share = exp_(gate - largest);
                pooled = (older_share * older[i] + share * own[i]) / (older_share + share);
            }
            latent[i] = wide(narrow(pooled));
        }
        norm_row(latent, norm, eps, width, latent);
        for (int i = width; i < padded; i++) latent[i] = 0;
    }
    product(latents, rows, &w, NULL, keys, index_width);
    for (long row = 0; row < rows; row++) {
        float *latent = latents + row * padded, *key = keys + row * index_width;
        for (int i = 0; i < index_width; i++) key[i] = wide(narrow(key[i]));
        norm_row(key, index_norm, eps, index_width, key);
        rotate_row(latent, cos + row * pairs, sin + row * pairs, width, pairs);
        rotate_row(key, cos + row * pairs, sin + row * pairs, index_width, pairs);
        main_record(latent, main + row * main_bytes, width);
        index_record(key, index + row * index_bytes, index_width);
    }
}

/* q [rows, heads, width], rotated and rounded to the MXFP4 grid in place. */
void index_grid(bf16 *q, int rows, int heads, int width, const float *cos, const float *sin, int pairs) {
    float values[width];
    for (long row = 0; row < rows; row++)
        for (int head = 0; head < heads; head++) {
            bf16 *own = q + (row * heads + head) * width;
            widen_row(own, width, values);
            rotate_row(values, cos + row * pairs, sin + row * pairs, width, pairs);
            for (int first = 0; first < width; first += 32) {
                float scale = mxfp4_scale(values + first);
                for (int i = 0; i < 32; i++) own[first + i] = narrow(e2m1_values[e2m1_code(values[first + i] / scale)] * scale);
            }
        }
}

/* Keys of entries [0, count) of one request, LANES entries beside each other: [count / LANES, width, LANES]. */
static void index_keys(const uint8_t *values, const uint8_t *scales, long value_stride, long scale_stride, const int64_t *pages,
                       int page_entries, long count, int width, float *out) {
    float key[width];
    for (long entry = 0; entry < (count + LANES - 1) / LANES * LANES; entry++) {
        float *column = out + entry / LANES * width * LANES + entry % LANES;
        if (entry < count) {
            int64_t page = pages[entry / page_entries];
            long place = entry % page_entries;
            expand_fp4(values + page * value_stride + place * (width / 2), scales + page * scale_stride + place * (width / 32), width, key);
        }
        for (int k = 0; k < width; k++) column[k * LANES] = entry < count ? key[k] : 0;
    }
}

/* Scores of one token for the entries [0, count); -inf for blocks that are not allowed; allowed may be NULL. */
static void index_scores(const bf16 *q, const float *weights, int heads, int width, const float *keys, long count,
                         const uint8_t *allowed, int block_size, float *out) {
    float query[heads * width];
    widen_row(q, heads * width, query);
    for (long first = 0; first < count; first += LANES) {
        const float *tile_keys = keys + first * width;
        vec total = {0};
        for (int head = 0; head < heads; head++) {
            vec sum = {0};
            for (int k = 0; k < width; k++) sum = fma_(all(query[head * width + k]), load(tile_keys + k * LANES), sum);
            ivec is_negative = sum < (vec){0}; /* false for NaN */
            sum = (vec)((ivec)sum & ~is_negative) * all(weights[head]);
            if (head) total += sum;
            else total = sum;
        }
        for (int lane = 0; lane < LANES && first + lane < count; lane++) {
            long entry = first + lane;
            out[entry] = allowed && !allowed[entry / block_size] ? -INFINITY : total[lane];
        }
    }
}

static float nth_largest(float *x, long count, long n) { /* reorders x; n counts from 0 */
    long low = 0, high = count - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float t = x[i];
                x[i++] = x[j];
                x[j--] = t;
            }
        }
        if (n <= j) high = j;
        else if (n >= i) low = i;
        else return x[n];
    }
    return x[n];
}

/* Ascending numbers of the best scores, padded with -1; equal scores by lower number; never -inf.  -2 first if one is NaN. */
static void select_best(const float *scores, long count, int wanted, float *copy, int64_t *out) {
    long place = 0, above = 0, room = wanted;
    float last = -INFINITY;
    for (int i = 0; i < wanted; i++) out[i] = -1;
    for (long i = 0; i < count; i++)
        if (scores[i] != scores[i]) {
            out[0] = -2;
            return;
        }
    if (count > wanted) {
        memcpy(copy, scores, 4 * (size_t)count);
        last = nth_largest(copy, count, wanted - 1);
        for (long i = 0; i < count; i++) above += scores[i] > last;
        room = wanted - above;
    }
    for (long i = 0; i < count && place < wanted; i++) {
        if (!(scores[i] > -INFINITY)) continue;
        if (scores[i] > last) out[place++] = i;
        else if (scores[i] == last && room-- > 0) out[place++] = i;
    }
}

/* The choice of one request's tokens: rows [num_rows] of the step that see visible[row] entries.
 * top_blocks > 0 also chooses candidate blocks; own_blocks [num_tokens, num_own] limits the choice to those blocks. */
static void choose_of_request(const bf16 *q, const float *weights, int heads, int width, const uint8_t *values,
                              const uint8_t *scales, long value_stride, long scale_stride, const int64_t *pages, int page_entries,
                              int64_t first_entry, const int64_t *rows, const int64_t *visible, int num_rows, int top_k, int top_blocks,
                              int block_size, const int64_t *own_blocks, int num_own, int64_t *chosen, int64_t *blocks) {
    long longest = 0;
    for (int i = 0; i < num_rows; i++) longest = visible[i] > longest ? visible[i] : longest;
    long rounded = (longest + LANES - 1) / LANES * LANES;
    float *keys = scratch(0, 4 * (size_t)(rounded * width + LANES));
    index_keys(values, scales, value_stride, scale_stride, pages, page_entries, longest, width, keys);
#pragma omp parallel for schedule(dynamic, 4) if ((long long)num_rows * longest * heads * width > SHARED_WORK)
    for (int i = 0; i < num_rows; i++) {
        long count = visible[i], num_blocks = block_size ? (count + block_size - 1) / block_size : 0;
        float *own_scores = scratch(1, 4 * (2 * (size_t)rounded + (size_t)num_blocks + LANES) + (size_t)num_blocks);
        float *copy = own_scores + rounded, *block_scores = copy + rounded;
        uint8_t *allowed = NULL;
        int64_t row = rows[i];
        if (own_blocks) {
            allowed = (uint8_t *)(block_scores + num_blocks);
            memset(allowed, 0, (size_t)num_blocks);
            for (int n = 0; n < num_own; n++) {
                int64_t block = own_blocks[row * num_own + n];
                if (block >= 0 && block < num_blocks) allowed[block] = 1;
            }
        }
        index_scores(q + row * heads * width, weights + row * heads, heads, width, keys, count, allowed, block_size, own_scores);
        int64_t *own = chosen + row * top_k;
        select_best(own_scores, count, top_k, copy, own);
        for (int n = 0; n < top_k; n++) own[n] = own[n] >= 0 ? own[n] + first_entry : own[n];
        if (!top_blocks) continue;
        for (long block = 0; block < num_blocks; block++) {
            long first = block * block_size, end = first + block_size < count ? first + block_size : count;
            float largest = -INFINITY;
            for (long n = first; n < end; n++) largest = own_scores[n] > largest || own_scores[n] != own_scores[n] ? own_scores[n] : largest;
            block_scores[block] = block == (count - 1) / block_size ? INFINITY : largest;
        }
        select_best(block_scores, num_blocks, top_blocks, copy, blocks + row * top_blocks);
        for (int n = 0; n < top_blocks; n++)
            if (blocks[row * top_blocks + n] < 0) blocks[row * top_blocks + n] = -1;
    }
}

/* Requests [num_requests]: rows first_row[r] to first_row[r + 1] of the lists rows and visible, first page first_page[r]. */
void index_choose(const bf16 *q, const float *weights, int heads, int width, const uint8_t *values, const uint8_t *scales,
                  long value_stride, long scale_stride, const int64_t *page_ids, int page_entries, const int64_t *first_page,
                  const int64_t *first_row, const int64_t *rows, const int64_t *visible, int num_requests, int top_k, int top_blocks,
                  int block_size, const int64_t *own_blocks, int num_own, int64_t *chosen, int64_t *blocks) {
#pragma omp parallel for schedule(dynamic, 1) if (num_requests > 1)
    for (int r = 0; r < num_requests; r++)
        choose_of_request(q, weights, heads, width, values, scales, value_stride, scale_stride, page_ids + first_page[r], page_entries,
                          first_page[r] * page_entries, rows + first_row[r], visible + first_row[r],
                          (int)(first_row[r + 1] - first_row[r]), top_k, top_blocks, block_size, own_blocks, num_own, chosen, blocks);
}

static void window_key(const uint8_t *record, int width, float *out) { expand_fp8(record, record + width, width, out); }

static void main_key(const uint8_t *record, int width, float *out) {
    for (int first = 0; first < width; first += 16) {
        float scale = e4m3_values[record[width / 2 + first / 16]];
        for (int i = 0; i < 16; i += 2) {
            const float *pair = e2m1_pairs[record[(first + i) / 2]];
            out[first + i] = pair[0] * scale;
            out[first + i + 1] = pair[1] * scale;
        }
    }
}

/* Scores of H heads for one key; keys and queries are [width], a multiple of LANES. */
INLINE void scores_of(const float *queries, const float *key, int width, float root, float *out, long stride, int H) {
    vec sums[4];
    for (int h = 0; h < H; h++) sums[h] = (vec){0};
    for (int k = 0; k < width; k += LANES)
        for (int h = 0; h < H; h++) sums[h] = fma_(load(queries + h * width + k), load(key + k), sums[h]);
    for (int h = 0; h < H; h++) out[h * stride] = sum_of(sums[h]) * root;
}

/* Dims [k, k + 4 * LANES) of the weighted sum of all keys, for one head. */
INLINE void weighted(const float *const *keys, const float *shares, int count, int k, int vectors, float *out) {
    vec sums[4];
    for (int v = 0; v < vectors; v++) sums[v] = (vec){0};
    for (int j = 0; j < count; j++)
        for (int v = 0; v < vectors; v++) sums[v] = fma_(all(shares[j]), load(keys[j] + k + v * LANES), sums[v]);
    for (int v = 0; v < vectors; v++) put(out + k + v * LANES, sums[v]);
}

/* One token's heads over the keys that it sees. */
static void attend(const bf16 *q, int heads, int width, const float *cos, const float *sin, int pairs, const float *sinks,
                   const float *const *keys, int count, int is_unknown, float *memory, bf16 *out) {
    float root = 1.0f / sqrtf((float)width), back[pairs], result[width];
    float *queries = memory, *all_shares = memory + heads * width;
    for (int k = 0; k < pairs; k++) back[k] = -sin[k];
    for (int head = 0; head < heads; head++) {
        widen_row(q + head * width, width, queries + head * width);
        rotate_row(queries + head * width, cos, sin, width, pairs);
    }
    int head = 0;
    for (; head + 4 <= heads; head += 4)
        for (int j = 0; j < count; j++) scores_of(queries + head * width, keys[j], width, root, all_shares + head * count + j, count, 4);
    for (; head < heads; head++)
        for (int j = 0; j < count; j++) scores_of(queries + head * width, keys[j], width, root, all_shares + head * count + j, count, 1);
    for (head = 0; head < heads; head++) {
        float *shares = all_shares + head * count, largest = sinks[head], total;
        int has_nan = is_unknown || largest != largest, i = 0;
        for (int j = 0; j < count; j++) {
            has_nan |= shares[j] != shares[j];
            largest = shares[j] > largest ? shares[j] : largest;
        }
        vec lanes = {0};
        for (int j = 0; j < count; j++) shares[j] = exp_(shares[j] - largest);
        for (; i + LANES <= count; i += LANES) lanes += load(shares + i);
        total = sum_of(lanes);
        for (; i < count; i++) total += shares[i];
        total += exp_(sinks[head] - largest);
        for (int j = 0; j < count; j++) shares[j] = wide(narrow(shares[j]));
        int k = 0;
        for (; k + 4 * LANES <= width; k += 4 * LANES) weighted(keys, shares, count, k, 4, result);
        for (; k < width; k += LANES) weighted(keys, shares, count, k, 1, result);
        for (k = 0; k < width; k++) result[k] = wide(narrow(has_nan ? NAN : result[k] / total));
        rotate_row(result, cos, back, width, pairs);
        for (k = 0; k < width; k++) out[head * width + k] = narrow(result[k]);
    }
}

/* Heads of each token over its window and its entries.  store is NULL for layers without one.  width is a multiple of 32.
 *
 * A step of many tokens decodes every record once; a step of few tokens decodes those that it reads. */
void sparse_attention(const bf16 *q, int rows, int heads, int width, const float *cos, const float *sin, int pairs,
                      const float *sinks, const uint8_t *window, long num_records, const int64_t *window_idx, int num_window,
                      const uint8_t *store, long page_bytes, int page_entries, const int64_t *page_ids, long num_pages,
                      const int64_t *entry_idx, int num_entries, bf16 *out) {
    int window_bytes = width + width / 32, main_bytes = width / 2 + width / 16, num_keys = num_window + num_entries;
    long stored = store ? num_pages * page_entries : 0;
    int decodes_window = num_records <= (long)rows * num_window, decodes_store = store && stored <= (long)rows * num_entries;
    float *table = scratch(2, 4 * (size_t)((decodes_window ? num_records : 0) + (decodes_store ? stored : 0)) * width + 64);
    float *entries = table + (decodes_window ? num_records : 0) * width;
    long long work = (long long)rows * heads * num_keys * width;
    if (decodes_window) {
#pragma omp parallel for schedule(static) if (work > SHARED_WORK / 2)
        for (long at = 0; at < num_records; at++) window_key(window + at * window_bytes, width, table + at * width);
    }
    if (decodes_store) {
#pragma omp parallel for schedule(static) if (work > SHARED_WORK / 2)
        for (long at = 0; at < stored; at++)
            main_key(store + page_ids[at / page_entries] * page_bytes + at % page_entries * main_bytes, width, entries + at * width);
    }
#pragma omp parallel for schedule(static) if (work > SHARED_WORK / 2)
    for (long row = 0; row < rows; row++) {
        size_t floats = (size_t)num_keys * (width + heads) + (size_t)heads * width;
        float *memory = scratch(0, 4 * floats + sizeof(float *) * (size_t)(num_keys + 1)), *own = memory + (size_t)heads * (width + num_keys);
        const float **keys = (const float **)(memory + floats + floats % 2);
        int count = 0, is_unknown = 0;
        for (int i = 0; i < num_window; i++) {
            int64_t at = window_idx[row * num_window + i];
            is_unknown |= at == -2;
            if (at < 0) continue;
            float *key = decodes_window ? table + at * width : own + (long)count * width;
            if (!decodes_window) window_key(window + at * window_bytes, width, key);
            keys[count++] = key;
        }
        for (int i = 0; store && i < num_entries; i++) {
            int64_t at = entry_idx[row * num_entries + i];
            is_unknown |= at == -2;
            if (at < 0) continue;
            float *key = decodes_store ? entries + at * width : own + (long)count * width;
            if (!decodes_store)
                main_key(store + page_ids[at / page_entries] * page_bytes + at % page_entries * main_bytes, width, key);
            keys[count++] = key;
        }
        attend(q + row * heads * width, heads, width, cos + row * pairs, sin + row * pairs, pairs, sinks, keys, count, is_unknown,
               memory, out + row * heads * width);
    }
}
