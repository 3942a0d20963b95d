/* Passes over memory that torch has no operator for. Python's side of each is in native.py; without this library, torch
 * does the same in several passes, to the same bits: no sum is taken in another order, no product is fused with a sum.
 *
 * Coordinates are int32, ascending and distinct; values are float32. Nothing is allocated here.
 */
#include <stdint.h>
#include <string.h>

/* Lists are far apart in memory: what is needed so many elements later is asked for now, into the second cache, which
 * can wait for more lines at a time than the first. */
#define AHEAD 48
#define FETCH(base, index, write) __builtin_prefetch((const void *)((uintptr_t)(base) + 4 * (intptr_t)(index)), write, 2)

/* So many coordinates at a time, of w and w-bar together less than a core's own cache. */
#define BLOCK 8192

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* Steps on sets of coordinates ----------------------------------------------------------------------------------- */

enum { PENDING, MERGE, SETTLE, ABSORB, ADVANCE, REPLACE };

typedef struct {
    float *live;         /* of one parameter: element i is coordinate start + i */
    int64_t start, stop; /* stop excluded */
} segment;

typedef struct {
    int64_t kind, count, done; /* done: how many of the coordinates are behind us; 0 at first */
    const int32_t *at;
    float *out;          /* PENDING */
    const float *change; /* MERGE, ABSORB, ADVANCE, REPLACE */
    const float *left;   /* MERGE, SETTLE: what stays pending, or NULL; PENDING: what was pending at the launch, or NULL */
    const float *unsent; /* PENDING: what rounding kept back, or NULL */
} step;

/* The coordinates of a step below `stop`. w and m are such that w[c] and m[c] belong to coordinate c. */
static void take_step(step *s, float *w, float *m, int64_t stop)
{
    const int32_t *at = s->at;
    int64_t i = s->done, n = s->count;
    if (i == n || at[i] >= stop)
        return;
#define EACH(write, ...)                                                  \
    for (; i < n && at[i] < stop; i++) {                                  \
        int32_t soon = at[i + AHEAD < n ? i + AHEAD : n - 1], c = at[i];  \
        FETCH(w, soon, write);                                            \
        FETCH(m, soon, write);                                            \
        __VA_ARGS__                                                       \
    }
    switch (s->kind) {
    case PENDING: /* out = u = w - m, less u at the launch, and what rounding kept back */
        if (s->left && s->unsent)
            EACH(0, s->out[i] = ((w[c] - m[c]) - s->left[i]) + s->unsent[i];)
        else if (s->left)
            EACH(0, s->out[i] = (w[c] - m[c]) - s->left[i];)
        else
            EACH(0, s->out[i] = w[c] - m[c];)
        break;
    case MERGE: /* m += change; w = m + left */
        if (s->left)
            EACH(1, m[c] += s->change[i]; w[c] = m[c] + s->left[i];)
        else
            EACH(1, m[c] += s->change[i]; w[c] = m[c];)
        break;
    case SETTLE: /* w = m + left */
        if (s->left)
            EACH(1, w[c] = m[c] + s->left[i];)
        else
            EACH(1, w[c] = m[c];)
        break;
    case ABSORB: /* m += change */
        EACH(1, m[c] += s->change[i];)
        break;
    case ADVANCE: /* m += change, and w with it: u = w - m stays */
        EACH(1, float old = m[c], new = old + s->change[i]; m[c] = new; w[c] = new + (w[c] - old);)
        break;
    case REPLACE: /* m = change */
        EACH(1, m[c] = s->change[i];)
        break;
    }
#undef EACH
    s->done = i;
}

/* All steps, in their order at each coordinate, in one pass over memory. mean: w-bar, element i is coordinate i. */
void hvd_slim_sweep(const segment *segments, int64_t segment_count, float *mean, step *steps, int64_t step_count)
{
    for (int64_t k = 0; k < segment_count; k++) {
        float *w = (float *)((uintptr_t)segments[k].live - 4 * (uintptr_t)segments[k].start);
        for (int64_t begin = segments[k].start; begin < segments[k].stop; begin += BLOCK) {
            int64_t end = begin + BLOCK < segments[k].stop ? begin + BLOCK : segments[k].stop;
            for (int64_t j = 0; j < step_count; j++)
                take_step(&steps[j], w, mean, end);
        }
    }
}

/* m += total / divisor; w = m: every coordinate. */
WIDE void hvd_slim_take_over(
    const segment *segments, int64_t segment_count, float *mean, const float *total, float divisor)
{
    for (int64_t k = 0; k < segment_count; k++) {
        float *w = segments[k].live, *m = mean + segments[k].start;
        const float *sum = total + segments[k].start;
        int64_t n = segments[k].stop - segments[k].start;
        for (int64_t i = 0; i < n; i++) {
            m[i] += sum[i] / divisor;
            w[i] = m[i];
        }
    }
}

/* out[i] = values[at[i]] */
void hvd_slim_take(const int32_t *values, const int32_t *at, int64_t count, int32_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        FETCH(values, at[i + AHEAD < count ? i + AHEAD : count - 1], 0);
        out[i] = values[at[i]];
    }
}

/* The explorer's draw --------------------------------------------------------------------------------------------- */

/* 32 random bits r in a stratum of length l give offset floor(r * l / 2^32). */
static inline int32_t offset_in(uint32_t bits, int64_t length) { return (int32_t)((bits * (uint64_t)length) >> 32); }

/* One position in each of `count` strata (stratum i is starts[i] to starts[i + 1]), rotated by `shift` around the end
 * of the list. Offsets (narrow: one byte each) and positions go out in ascending order of positions.
 * Returns the stratum of the first. */
int64_t hvd_slim_draw(
    const uint32_t *bits, const int32_t *starts, int64_t count, int64_t shift, int32_t narrow, void *offsets,
    int32_t *positions)
{
    int64_t population = starts[count], first = 0, wrapped = count;
    while (first < wrapped) { /* strata ascend: the positions that leave the end of the list are the last ones */
        int64_t middle = (first + wrapped) / 2;
        int64_t position = starts[middle] + (int64_t)offset_in(bits[middle], starts[middle + 1] - starts[middle]) + shift;
        if (position >= population)
            wrapped = middle;
        else
            first = middle + 1;
    }
    first = wrapped == count ? 0 : wrapped;
    for (int part = 0; part < 2; part++) {
        int64_t begin = part ? 0 : first, end = part ? first : count, to = part ? count - first : 0;
        int64_t moved = shift - (!part && wrapped < count ? population : 0);
        for (int64_t i = begin; i < end; i++, to++) {
            int32_t offset = offset_in(bits[i], starts[i + 1] - starts[i]);
            positions[to] = (int32_t)(starts[i] + offset + moved);
            if (narrow)
                ((uint8_t *)offsets)[to] = (uint8_t)offset;
            else
                ((int32_t *)offsets)[to] = offset;
        }
    }
    return first;
}

/* The positions of a run of `count` strata from `first` on, around the end, whose offsets travelled. */
void hvd_slim_drawn(
    const int32_t *starts, int64_t strata, int64_t first, int64_t count, int64_t shift, int32_t narrow,
    const void *offsets, int32_t *positions)
{
    int64_t population = starts[strata];
    for (int64_t i = 0, stratum = first; i < count; i++, stratum = stratum + 1 == strata ? 0 : stratum + 1) {
        int32_t offset = narrow ? ((const uint8_t *)offsets)[i] : ((const int32_t *)offsets)[i];
        int64_t position = starts[stratum] + offset + shift;
        positions[i] = (int32_t)(position >= population ? position - population : position);
    }
}

/* Choosing the largest -------------------------------------------------------------------------------------------- */

/* What every coordinate is judged by. It is worked out where it is needed, never stored for all. */
typedef struct {
    const segment *segments;
    int64_t segment_count;
    const float *mean;             /* w-bar: the score is |live - mean|; if NULL, */
    const float *const *gradients; /* of each segment, or NULL: |live| / scale + factor * (|gradient| / gradient_scale) */
    float scale, gradient_scale, factor;
    const int32_t *outside, *sent; /* ascending: coordinates whose score is -1, and whose score is 0 */
    int64_t outside_count, sent_count;
} scores;

typedef struct {
    int64_t outside, sent; /* how many of the listed coordinates are behind us */
} cursor;

static inline float known(float score) { return score == score ? score : __builtin_inff(); }

static inline void override(
    const int32_t *at, int64_t count, int64_t *done, int64_t begin, int64_t end, float value, float *out)
{
    int64_t i = *done;
    while (i < count && at[i] < begin)
        i++;
    for (; i < count && at[i] < end; i++)
        out[at[i] - begin] = value;
    *done = i;
}

/* Scores of coordinates begin to end, all in segment k; a score that is not a number is infinite. */
static inline __attribute__((always_inline)) void judge(
    const scores *s, cursor *c, int64_t k, int64_t begin, int64_t end, float *out)
{
    const float *w = s->segments[k].live + (begin - s->segments[k].start);
    const float *m = s->mean ? s->mean + begin : NULL;
    const float *g = m || !s->gradients[k] ? NULL : s->gradients[k] + (begin - s->segments[k].start);
    float scale = s->scale, gradient_scale = s->gradient_scale, factor = s->factor;
    int64_t n = end - begin;
    if (m)
        for (int64_t i = 0; i < n; i++)
            out[i] = known(__builtin_fabsf(w[i] - m[i]));
    else if (g)
        for (int64_t i = 0; i < n; i++)
            out[i] = known(__builtin_fabsf(w[i]) / scale + (__builtin_fabsf(g[i]) / gradient_scale) * factor);
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = known(__builtin_fabsf(w[i]) / scale);
    override(s->outside, s->outside_count, &c->outside, begin, end, -1.0f, out);
    override(s->sent, s->sent_count, &c->sent, begin, end, 0.0f, out);
}

#define FEW 32 /* scores that are compared at a time; a block holds whole numbers of them */

/* FEW bytes of 0 or 1 as bits. */
static inline __attribute__((always_inline)) uint32_t bits_of(const uint8_t *flags)
{
    uint32_t bits = 0;
    for (int j = 0; j < FEW; j += 8) {
        uint64_t eight;
        memcpy(&eight, flags + j, 8);
        bits |= (uint32_t)((eight * 0x0102040810204080u) >> 56) << j; /* byte i is moved to bit 56 + i */
    }
    return bits;
}

/* Runs __VA_ARGS__ for every block of scores, in `block`, filled up with NaN to whole FEWs, `length` of them. */
#define EACH_BLOCK(s, ...)                                                                      \
    do {                                                                                        \
        float block[BLOCK];                                                                     \
        cursor c = {0, 0};                                                                      \
        for (int64_t k = 0; k < (s)->segment_count; k++)                                        \
            for (int64_t begin = (s)->segments[k].start; begin < (s)->segments[k].stop; begin += BLOCK) { \
                int64_t stop = (s)->segments[k].stop;                                           \
                int64_t end = begin + BLOCK < stop ? begin + BLOCK : stop, length = end - begin; \
                judge(s, &c, k, begin, end, block);                                             \
                while (length % FEW)                                                            \
                    block[length++] = __builtin_nanf("");                                       \
                __VA_ARGS__                                                                     \
            }                                                                                   \
    } while (0)

/* The score of every stride-th coordinate; returns how many. */
int64_t hvd_slim_sample(const scores *s, int64_t stride, float *out)
{
    int64_t found = 0, next = 0;
    cursor c = {0, 0};
    for (int64_t k = 0; k < s->segment_count; k++)
        for (; next < s->segments[k].stop; next += stride)
            judge(s, &c, k, next, next + 1, &out[found++]);
    return found;
}

/* Coordinates whose score exceeds `low`, and the first `ties` of those that equal it, and their scores, of which at most
 * `room`; returns how many there are. */
WIDE int64_t hvd_slim_reaching(const scores *s, float low, int64_t ties, int32_t *at, float *score, int64_t room)
{
    int64_t found = 0;
    EACH_BLOCK(
        s,
        for (int64_t i = 0; i < length; i += FEW) {
            uint8_t reaching[FEW];
            for (int j = 0; j < FEW; j++)
                reaching[j] = block[i + j] >= low;
            for (uint32_t those = bits_of(reaching); those; those &= those - 1) {
                int64_t here = i + __builtin_ctz(those);
                if (block[here] == low && ties-- <= 0)
                    continue;
                if (found < room) {
                    at[found] = (int32_t)(begin + here);
                    score[found] = block[here];
                }
                found++;
            }
        });
    return found;
}

/* Of `count` ascending coordinates those whose score exceeds `threshold`, and the first `ties` of those that equal it,
 * as places among the coordinates that are not `outside`; returns how many there are. */
int64_t hvd_slim_keep(
    const int32_t *at, const float *score, int64_t count, float threshold, int64_t ties, const int32_t *outside,
    int64_t outside_count, int32_t *out, int64_t room)
{
    int64_t found = 0, below = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!(score[i] >= threshold) || (score[i] == threshold && ties-- <= 0))
            continue;
        while (below < outside_count && outside[below] < at[i])
            below++;
        if (found < room)
            out[found] = (int32_t)(at[i] - below);
        found++;
    }
    return found;
}

/* Whether all values are finite: none has every bit of its exponent set. */
WIDE int32_t hvd_slim_is_finite(const uint32_t *values, int64_t n)
{
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        int64_t end = begin + BLOCK < n ? begin + BLOCK : n;
        uint32_t full = 0;
        for (int64_t i = begin; i < end; i++)
            full |= (values[i] & 0x7f800000u) + 0x00800000u;
        if (full >> 31)
            return 0;
    }
    return 1;
}

/* Sets as bits ---------------------------------------------------------------------------------------------------- */

/* bits: zeros, of which that of every coordinate is set. */
void hvd_slim_set_bits(const int32_t *at, int64_t count, uint8_t *bits)
{
    for (int64_t i = 0; i < count; i++)
        bits[at[i] >> 3] |= (uint8_t)(1 << (at[i] & 7));
}

/* Which of the first n bits are set, at most `room`; returns how many there are. */
int64_t hvd_slim_set_places(const uint8_t *bits, int64_t n, int32_t *out, int64_t room)
{
    int64_t found = 0;
    for (int64_t begin = 0; begin < n; begin += 64) {
        uint64_t word = 0;
        int64_t nbytes = (n - begin + 7) / 8;
        memcpy(&word, bits + begin / 8, nbytes < 8 ? nbytes : 8);
        if (n - begin < 64)
            word &= ((uint64_t)1 << (n - begin)) - 1;
        for (; word; word &= word - 1, found++)
            if (found < room)
                out[found] = (int32_t)(begin + __builtin_ctzll(word));
    }
    return found;
}

/* The coordinates below n that are not in the set: n - count of them. */
void hvd_slim_others(const int32_t *at, int64_t count, int64_t n, int32_t *out)
{
    const int32_t *room = out + (n - count) - 8;
    int64_t next = 0;
    for (int64_t i = 0; i <= count; i++) {
        int64_t end = i < count ? at[i] : n, length = end - next, c = 0;
        for (; c < length && out + c <= room; c += 8) /* a run is mostly shorter than what is written at once */
            for (int j = 0; j < 8; j++)
                out[c + j] = (int32_t)(next + c + j);
        for (; c < length; c++)
            out[c] = (int32_t)(next + c);
        out += length;
        next = end + 1;
    }
}
