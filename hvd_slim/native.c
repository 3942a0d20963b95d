/* Passes over memory that torch has no operator for. Python's side of each is in native.py; without this library, torch
 * does the same in several passes, to the same bits: no sum is taken in another order, no product is fused with a sum.
 *
 * Coordinates are int32, ascending and distinct; values are float32. Nothing is allocated here.
 */
#include <stdint.h>
#include <string.h>

/* Lists are far apart in memory: what is needed so many elements later is asked for now. */
#define AHEAD 32
#define FETCH(base, index, write) __builtin_prefetch((const void *)((uintptr_t)(base) + 4 * (intptr_t)(index)), write, 1)

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

static inline float known(float score) { return score == score ? score : __builtin_inff(); }

/* score = |weight| / scale + factor * (|gradient| / gradient_scale), NaN as infinity; gradient may be NULL. */
WIDE void hvd_slim_score(
    const float *weight, const float *gradient, int64_t n, float scale, float gradient_scale, float factor, float *score)
{
    if (gradient)
        for (int64_t i = 0; i < n; i++)
            score[i] = known(__builtin_fabsf(weight[i]) / scale + (__builtin_fabsf(gradient[i]) / gradient_scale) * factor);
    else
        for (int64_t i = 0; i < n; i++)
            score[i] = known(__builtin_fabsf(weight[i]) / scale);
}

/* score = |live - mean|, NaN as infinity */
WIDE void hvd_slim_distance(const float *live, const float *mean, int64_t n, float *score)
{
    for (int64_t i = 0; i < n; i++)
        score[i] = known(__builtin_fabsf(live[i] - mean[i]));
}

/* score[at] = value */
void hvd_slim_put(float *score, const int32_t *at, int64_t count, float value)
{
    for (int64_t i = 0; i < count; i++) {
        FETCH(score, at[i + AHEAD < count ? i + AHEAD : count - 1], 1);
        score[at[i]] = value;
    }
}

/* The scores in [low, high] in their order, of which at most `room`; returns how many there are, and how many lie
 * above. */
WIDE int64_t hvd_slim_between(
    const float *score, int64_t n, float low, float high, float *out, int64_t room, int64_t *above)
{
    int64_t found = 0;
    *above = 0;
    for (int64_t begin = 0; begin < n; begin += 64) {
        int64_t end = begin + 64 < n ? begin + 64 : n;
        int32_t some = 0, over = 0;
        for (int64_t i = begin; i < end; i++) {
            some += (score[i] >= low) & (score[i] <= high);
            over += score[i] > high;
        }
        *above += over;
        for (int64_t i = begin; some && i < end; i++)
            if (score[i] >= low && score[i] <= high) {
                if (found < room)
                    out[found] = score[i];
                found++;
            }
    }
    return found;
}

/* Where scores exceed `threshold`, and the first `ties` places where they equal it. Places are counted among scores of
 * at least `least`. Writes one element more than there are; returns how many there are. */
WIDE int64_t hvd_slim_places(const float *score, int64_t n, float threshold, int64_t ties, float least, int32_t *out)
{
    int64_t found = 0, place = 0;
    for (int64_t begin = 0; begin < n; begin += 64) {
        int64_t end = begin + 64 < n ? begin + 64 : n;
        int32_t reaching = 0, counted = 0;
        for (int64_t i = begin; i < end; i++) {
            reaching += score[i] >= threshold;
            counted += score[i] >= least;
        }
        if (!reaching) {
            place += counted;
            continue;
        }
        for (int64_t i = begin; i < end; i++) {
            int64_t equal = score[i] == threshold;
            out[found] = (int32_t)place;
            found += (score[i] > threshold) | (equal & (ties > 0));
            ties -= equal;
            place += score[i] >= least;
        }
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
    int64_t next = 0;
    for (int64_t i = 0; i <= count; i++) {
        int64_t end = i < count ? at[i] : n;
        for (int64_t c = next; c < end; c++)
            *out++ = (int32_t)c;
        next = end + 1;
    }
}
