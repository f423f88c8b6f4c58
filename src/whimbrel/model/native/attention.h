// Attention over a ragged batch: softmax(q k^T) v within each seq, without padding.
//
// Keys are taken in blocks that begin at multiples of BLOCK_KEYS, with a running maximum and sum (the online softmax of
// arXiv:2205.14135). A query's result depends on its own keys alone: it has the same bits in any batch, and in any
// piece of its text. It is 0 if a window hides all keys. Values must be finite for that: NaN or infinity in one spoils
// queries of its seq that do not see it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blocks.h"
#include "positions.h"
#include "structs.h"
#include "team.h"

namespace whimbrel {

constexpr i64 MOST_SHARED_KEYS = 16384;  // of a seq: helpers keep their memory

struct Scores {
    float scale;  // above 0
    bool causal;
    i64 window;         // tokens before each token, and unless causal as many after it; negative: all
    const float* bias;  // of the first head, by the distance of a key from its query, which may be negative; null: none
    i64 bias_stride;    // from a head to the next
};

struct Buffers {
    u32 *queries, *keys, *values, *weights;
    void* scores;
    float *sums, *scaled_scores;  // float16, and with a bias: scores of one query with this block's keys
    float *key_scales, *value_scales, *value_logs;  // float16: of each key
};

// In float16 the inner numbers of both products are multiplied with powers of 2. Those of a key k and of its value v
// are its own:
//   score - log s, whose maximum is subtracted, makes a weight e of at most MOST_WEIGHT; the value is multiplied with
//   s, which brings it to 2 to 4; the sum of the weights is that of e * s. Logarithms and powers are of 2.
// So nothing overflows, and a result depends on no key that its query does not see.
constexpr float MOST_WEIGHT = 16.0f;
constexpr float VALUE_FACTOR = 8.0f;
constexpr int VALUE_EXPONENT = 1;       // of the largest number of a value
constexpr float MOST_GROWTH = 0x1p60f;  // of a value; one of 0 grows as much, and takes no precision from others

template <class T>
void scale_keys(const T* keys, i64 key_stride, const T* values, i64 value_stride, i64 count, i64 width,
                const Buffers& at) {
    for (i64 row = 0; row < up_to(count, PANEL); row++) {
        const bool exists = row < count;
        at.key_scales[row] =
            exists ? inverse_of_power(power_to_reach(4, largest_magnitude(keys + row * key_stride, width))) : 0.0f;
        const float most = exists ? largest_magnitude(values + row * value_stride, width) : 0.0f;
        const float growth = most == 0.0f ? MOST_GROWTH : std::min(MOST_GROWTH, power_to_reach(VALUE_EXPONENT, most));
        at.value_scales[row] = growth;
        at.value_logs[row] = static_cast<float>(-exponent_of(growth));
    }
}

// Rows become the inner dimension, and columns the columns of panels. With `scales`, rows are multiplied with
// VALUE_FACTOR and them.
template <class D, class T>
void pack_rows(const T* rows, i64 stride, i64 count, i64 width, i64 units, [[maybe_unused]] const float* scales,
               u32* out) {
    for (i64 column = 0; column < width; column += PANEL)
        for (i64 unit = 0; unit < units; unit++, out += PANEL)
            for (i64 j = 0; j < PANEL; j += W) {
                const i64 left = std::max<i64>(0, std::min<i64>(W, width - column - j));
                if constexpr (D::per_unit == 1) {
                    StoreU(left > 0 ? LoadN(rows + unit * stride + column + j, left) : Zero(),
                           reinterpret_cast<float*>(out) + j);
                } else {
                    const i64 row = 2 * unit;
                    Floats even = left > 0 && row < count ? LoadN(rows + row * stride + column + j, left) : Zero();
                    Floats odd =
                        left > 0 && row + 1 < count ? LoadN(rows + (row + 1) * stride + column + j, left) : Zero();
                    if constexpr (D::scaled) {
                        even = Mul(even, Set(VALUE_FACTOR * scales[row]));
                        if (row + 1 < count) odd = Mul(odd, Set(VALUE_FACTOR * scales[row + 1]));
                    }
                    StoreInterleaved2(even, odd, reinterpret_cast<typename D::Number*>(out + j));
                }
            }
}

constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();  // the greatest of none

// The greatest score of a query with the keys so far, and the sum of their weights.
struct Softmax {
    float greatest = NO_SCORE, total = 0.0f;
};

// A query's keys in a block of `columns`: it sees those from `from` up to `to`.
struct Seen {
    i64 from, to, columns;
};

// Turn a query's products with a block of keys into scores and weights. Return the number with which all that earlier
// keys have added is to be multiplied.
//
// S is D, or its variant whose sums stay float16. Scores are multiplied with the logarithm of e when they are made
// (`rewritten`), or when the greatest is subtracted. A product times `scale_of` is a score so multiplied. `bias`, and
// what `at` has of keys, are those of the block's first key.
template <class D, class S, bool biased>
__attribute__((always_inline)) inline float weigh(typename S::Sum* products, Seen seen, float scale, float scale_of,
                                                  [[maybe_unused]] const float* bias, const Buffers& at, u32* units,
                                                  Softmax& state) {
    constexpr bool rewritten = D::scaled || biased;
    auto* const weights = reinterpret_cast<typename D::Number*>(units);
    float* const scaled = at.scaled_scores;  // not read from `at` anew after each store, as are those that follow
    [[maybe_unused]] const float *key_scales = at.key_scales, *value_scales = at.value_scales;
    [[maybe_unused]] const float* value_logs = at.value_logs;
    const i64 from_vector = seen.from / W * W;
    for (i64 j = from_vector; j < seen.from; j++) products[j] = S::least_sum;
    Floats top = Set(NO_SCORE), other = top;  // by turns, as each waits for its last
    for_vectors(seen.to - from_vector, [&](i64 offset, auto some) {
        const i64 j = from_vector + offset;
        Floats x = LoadU(products + j);
        if constexpr (D::scaled) x = MulAdd(Mul(x, LoadU(key_scales + j)), Set(scale_of), LoadU(value_logs + j));
        else if constexpr (biased) x = Mul(x, Set(scale_of));
        if constexpr (biased) x = MulAdd(LoadN(bias + j, some), Set(LOG_OF_E), x);
        if constexpr (rewritten) StoreU(x, scaled + j);
        const Floats greater = Max(top, IfThenElse(FirstN(some), x, top));
        top = other, other = greater;
    });
    const float before = state.greatest, now = std::max(before, ReduceMax(Max(top, other)));
    state.greatest = now;
    // NaN in a row's scores stays: its weights are NaN, whatever the maximum.
    const Floats factor = Set(scale * LOG_OF_E), shift = Set(now == NO_SCORE ? 0.0f : now);
    Floats sums = Zero();
    for (i64 j = 0; j < from_vector; j += W) StoreU(Zero(), weights + j);
    for_vectors(seen.to - from_vector, [&](i64 offset, auto some) {
        const i64 j = from_vector + offset;
        Floats x;  // 0 for the largest score, however large
        if constexpr (rewritten) x = Sub(LoadU(scaled + j), shift);
        else x = Mul(Sub(LoadU(products + j), shift), factor);
        Floats e;
        if constexpr (D::scaled) e = rough_power_of_2(x, MOST_WEIGHT);
        else if constexpr (D::per_unit == 2) e = rough_power_of_2(x);
        else e = decay(x);
        e = IfThenElseZero(FirstN(some), e);
        if constexpr (D::scaled) sums = MulAdd(e, LoadU(value_scales + j), sums);
        else sums = Add(sums, e);
        StoreU(e, weights + j);
    });
    for (i64 j = up_to(seen.to, W); j < up_to(seen.columns, PANEL); j += W) StoreU(Zero(), weights + j);
    float shrink = 1.0f;
    if (before == NO_SCORE) shrink = before == now ? 1.0f : 0.0f;
    else if (before != now) shrink = rewritten ? std::exp2(before - now) : std::exp((before - now) * scale);
    state.total = state.total * shrink + ReduceSum(sums);
    return shrink;
}

// Attend with the queries of one head. `bias` is that of this head. `positions` is null where scores depend on contents
// alone. Otherwise `keys` are the head's, for the scores of their positions.
template <class D, class S, bool biased, class T>
void attend_head(const T* q, i64 q_stride, Rows<T> keys, i64 num_queries, i64 num_keys, i64 before, i64 width,
                 const Scores& scores, const float* bias, const Buffers& at,
                 [[maybe_unused]] const PositionsOfHead<D>* positions, T* out, i64 out_stride) {
    constexpr i64 weights_stride = SCORES_STRIDE / D::per_unit;
    const i64 units = units_for<D>(width), key_units = units_for<D>(num_keys), padded = up_to(width, PANEL);
    auto* products = static_cast<typename S::Sum*>(at.scores);
    const auto first_key = [&](i64 query) { return scores.window < 0 ? 0 : std::max<i64>(0, query - scores.window); };
    const i64 ahead = scores.causal ? 0 : scores.window;
    for (i64 row = 0; row < num_queries; row += BLOCK_QUERIES) {
        const i64 count = std::min(BLOCK_QUERIES, num_queries - row), first = before + row;
        float scale_of[BLOCK_QUERIES];
        for (i64 r = 0; r < count; r++)
            scale_of[r] =
                scores.scale * LOG_OF_E / pack_row<D>(q + (row + r) * q_stride, width, units, at.queries + r * units);
        if constexpr (!D::scaled)
            if (positions != nullptr && row % MANY_QUERIES == 0)
                positions->score_keys(keys.data, keys.row_stride, num_keys, first,
                                      std::min(MANY_QUERIES, num_queries - row));
        Softmax states[BLOCK_QUERIES];
        const i64 high = ahead < 0 ? num_keys : std::min(num_keys, first + count + ahead);
        bool begin = true;
        for (i64 key = first_key(first) / BLOCK_KEYS * BLOCK_KEYS; key < high; key += BLOCK_KEYS) {
            const i64 columns = std::min(BLOCK_KEYS, high - key);
            for (i64 column = 0; column < columns; column += PANEL)
                product<S>(count, at.queries, units, at.keys + (key + column) * units, units, products + column,
                           SCORES_STRIDE, true, columns - column <= W);
            if constexpr (!D::scaled)
                if (positions != nullptr)
                    positions->add_scores(at.queries, count, first, row % MANY_QUERIES, key, columns, products);
            Buffers of_block = at;
            of_block.key_scales += key, of_block.value_scales += key, of_block.value_logs += key;
            for (i64 r = 0; r < count; r++) {
                const i64 query = first + r, from = std::max<i64>(0, first_key(query) - key);
                const i64 to = ahead < 0 ? columns : std::min(columns, query + ahead + 1 - key);
                u32* weights = at.weights + r * weights_stride;
                if (to <= from) {
                    std::memset(weights, 0,
                                sizeof(u32) * static_cast<std::size_t>(up_to(columns, PANEL) / D::per_unit));
                    continue;
                }
                const float shrink =
                    weigh<D, S, biased>(products + r * SCORES_STRIDE, {from, to, columns}, scores.scale, scale_of[r],
                                        biased ? bias + (key - query) : nullptr, of_block, weights, states[r]);
                if (begin || shrink == 1.0f) continue;
                float* sums = at.sums + r * padded;
                for (i64 k = 0; k < padded; k += W) StoreU(Mul(LoadU(sums + k), Set(shrink)), sums + k);
            }
            for (i64 column = 0; column < width; column += PANEL)
                product<D>(count, at.weights, weights_stride,
                           at.values + column * key_units + key / D::per_unit * PANEL, units_for<D>(columns),
                           at.sums + column, padded, begin, width - column <= W);
            begin = false;
        }
        for (i64 r = 0; r < count; r++) {
            const bool sees_none = first_key(first + r) >= num_keys;
            const float total = states[r].total;
            const Floats share = Set(1.0f / (D::scaled ? VALUE_FACTOR * total : total));
            for_vectors(width, [&](i64 k, auto some) {
                const Floats x = sees_none ? Zero() : Mul(LoadU(at.sums + r * padded + k), share);
                StoreN(x, out + (row + r) * out_stride + k, some);
            });
        }
    }
}

// The buffers of this thread, for heads of `width` and seqs of up to `longest` keys. Throws std::bad_alloc.
inline Buffers buffers_for(i64 width, i64 units, i64 longest) {
    const i64 padded = up_to(width, PANEL), rows = up_to(longest, PANEL);
    const i64 of_block = BLOCK_QUERIES * (units + 2 * SCORES_STRIDE + padded) + SCORES_STRIDE;
    const i64 of_keys = rows * (units + padded + 3);
    auto* memory = static_cast<u32*>(scratch<2>(sizeof(u32) * static_cast<std::size_t>(of_block + of_keys + 64 * W)));
    Buffers at{};
    at.queries = memory, memory += up_to(BLOCK_QUERIES * units, 16);
    at.weights = memory, memory += BLOCK_QUERIES * SCORES_STRIDE;
    at.scores = memory, memory += BLOCK_QUERIES * SCORES_STRIDE;
    at.scaled_scores = reinterpret_cast<float*>(memory), memory += SCORES_STRIDE;
    at.sums = reinterpret_cast<float*>(memory), memory += BLOCK_QUERIES * padded;
    at.keys = memory, memory += rows * units;
    at.values = memory, memory += rows * padded;
    at.key_scales = reinterpret_cast<float*>(memory);
    at.value_scales = at.key_scales + rows;
    at.value_logs = at.value_scales + rows;
    return at;
}

// Attend in all seqs. Heads are shared with the team.
template <class D, class T>
void attend(const Attention& by) {
    const auto rows_of = [](const Heads& heads) {
        return Rows<T>{static_cast<const T*>(heads.data), heads.row_stride, heads.head_stride};
    };
    const Rows<T> q = rows_of(by.q), k = rows_of(by.k), v = rows_of(by.v);
    T* const out = static_cast<T*>(by.out);
    const i64 out_stride = by.out_stride, num_seqs = by.num_seqs, width = by.head_width;
    const i64 num_heads = by.num_heads, num_key_heads = by.num_key_heads;
    const i64* const seqs = by.seqs;
    const Positions* const positions = by.positions;
    const Scores scores{static_cast<float>(by.scale), by.causal != 0, by.window, by.bias, by.bias_stride};
    i64 longest = 0;
    for (i64 b = 0; b < num_seqs; b++) longest = std::max(longest, seqs[5 * b + 3]);
    const i64 units = units_for<D>(width), shared = num_heads / num_key_heads;
    const auto run_key_head = [&](i64 b, i64 h, const PositionsOfHead<D>* of_head) {
        const i64 first = seqs[5 * b], count = seqs[5 * b + 1], key = seqs[5 * b + 2], num_keys = seqs[5 * b + 3],
                  before = seqs[5 * b + 4];
        if (count == 0) return;
        const Buffers at = buffers_for(width, units, longest);
        const T *keys = k.data + key * k.row_stride + h * k.head_stride,
                *values = v.data + key * v.row_stride + h * v.head_stride;
        if constexpr (D::scaled) scale_keys(keys, k.row_stride, values, v.row_stride, num_keys, width, at);
        pack_rows_as_columns<D>([=](i64 row) { return keys + row * k.row_stride; }, num_keys, width, units,
                                at.key_scales, at.keys);
        pack_rows<D>(values, v.row_stride, num_keys, width, units_for<D>(num_keys), at.value_scales, at.values);
        auto run_head = scores.bias == nullptr ? attend_head<D, D, false, T> : attend_head<D, D, true, T>;
        if constexpr (D::scaled)
            if (units <= D::most_units)
                run_head = scores.bias == nullptr ? attend_head<D, InFloat16Alone, false, T>
                                                  : attend_head<D, InFloat16Alone, true, T>;
        for (i64 n = h * shared; n < (h + 1) * shared; n++)
            run_head(q.data + first * q.row_stride + n * q.head_stride, q.row_stride, {keys, k.row_stride, 0}, count,
                     num_keys, before, width, scores, scores.bias + n * scores.bias_stride, at, of_head,
                     out + first * out_stride + n * width, out_stride);
    };
    const auto run_all = [&](i64 parts, auto run_part) {
        auto run_parts = [&](i64 from, i64 to) {
            [[maybe_unused]] typename Tiling<D>::Registers registers;
            for (i64 number = from; number < to; number++) run_part(number);
        };
        if (longest <= MOST_SHARED_KEYS) in_parallel(parts, run_parts);
        else run_parts(0, parts);
    };
    if (positions == nullptr)
        return run_all(num_seqs * num_key_heads,
                       [&](i64 number) { run_key_head(number / num_key_heads, number % num_key_heads, nullptr); });
    run_all(num_heads, [&](i64 h) {
        const PositionsOfHead<D> of_head(*positions, h, width, units, longest);
        for (i64 b = 0; b < num_seqs; b++) run_key_head(b, h, &of_head);
    });
}

}  // namespace whimbrel
