// Attention over a ragged batch: softmax(q k^T) v within each seq, without padding.
//
// Keys are taken in blocks that begin at multiples of BLOCK_KEYS, with a running maximum and sum (the online softmax of
// arXiv:2205.14135). A query's result depends on its own keys alone: it has the same bits in any batch, and in any piece of its text. It
// is 0 if a window hides all keys. Values must be finite for that: NaN or infinity in one spoils queries of its seq that do not see it.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "positions.h"
#include "team.h"

namespace whimbrel {

constexpr i64 MOST_SHARED_KEYS = 16384;  // of a seq: helpers keep their memory

struct Scores {
    float scale;  // above 0
    bool causal;
    i64 window;  // tokens before each token, and unless causal as many after it; negative: all
    const float* bias;  // of the first head, by the distance of a key from its query, which may be negative; null: none
    i64 bias_stride;  // from a head to the next
};

struct Buffers {
    std::uint32_t *queries, *keys, *values, *weights;
    void* scores;
    float *sums, *scaled_scores;  // float16, and with a bias: scores of one query with this block's keys
    float *key_scales, *value_scales, *value_logs;  // float16: of each key
};

// In float16 the inner numbers of both products are multiplied with powers of 2. Those of a key k and of its value v are its own:
//   score - log s, whose maximum is subtracted, makes a weight e of at most MOST_WEIGHT; the value is multiplied with s, which brings it to 2 to 4;
//   the sum of the weights is that of e * s. Logarithms and powers are of 2.
// So nothing overflows, and a result depends on no key that its query does not see.
constexpr float MOST_WEIGHT = 16.0f;
constexpr float VALUE_FACTOR = 8.0f;
constexpr int VALUE_EXPONENT = 1;  // of the largest number of a value
constexpr float MOST_GROWTH = 0x1p60f;  // of a value; that of 0 grows as much, so that it takes no precision from others

template <class T>
void scale_keys(const T* keys, i64 key_stride, const T* values, i64 value_stride, i64 count, i64 width, const Buffers& at) {
    for (i64 row = 0; row < up_to(count, PANEL); row++) {
        const bool exists = row < count;
        at.key_scales[row] = exists ? inverse_of_power(power_to_reach(4, largest_magnitude(keys + row * key_stride, width))) : 0.0f;
        const float most = exists ? largest_magnitude(values + row * value_stride, width) : 0.0f;
        const float growth = most == 0.0f ? MOST_GROWTH : std::min(MOST_GROWTH, power_to_reach(VALUE_EXPONENT, most));
        at.value_scales[row] = growth;
        at.value_logs[row] = static_cast<float>(-exponent_of(growth));
    }
}

// Rows become the inner dimension, and columns the columns of panels. With `scales`, rows are multiplied with VALUE_FACTOR and them.
template <class D, class T>
void pack_rows(const T* rows, i64 stride, i64 count, i64 width, i64 units, [[maybe_unused]] const float* scales, std::uint32_t* out) {
    for (i64 column = 0; column < width; column += PANEL)
        for (i64 unit = 0; unit < units; unit++, out += PANEL)
            for (i64 j = 0; j < PANEL; j += W) {
                const i64 left = std::max<i64>(0, std::min<i64>(W, width - column - j));
                if constexpr (D::per_unit == 1) {
                    store(reinterpret_cast<float*>(out) + j, left > 0 ? load(rows + unit * stride + column + j, left) : zero());
                } else {
                    const i64 row = 2 * unit;
                    Floats even = left > 0 && row < count ? load(rows + row * stride + column + j, left) : zero();
                    Floats odd = left > 0 && row + 1 < count ? load(rows + (row + 1) * stride + column + j, left) : zero();
                    if constexpr (D::scaled) {
                        even = mul(even, all(VALUE_FACTOR * scales[row]));
                        if (row + 1 < count) odd = mul(odd, all(VALUE_FACTOR * scales[row + 1]));
                    }
                    store_pairs<D>(out + j, even, odd);
                }
            }
}

// S is D, or its variant whose sums stay float16, for the products of queries and keys. Scores are multiplied with the logarithm of e
// when they are made (`rewritten`), or when the greatest is subtracted. `bias` is that of this head.
// `positions` is null where scores depend on contents alone. Otherwise `keys` are the head's, for the scores of their positions.
template <class D, class S, bool biased, class T>
void attend_head(const T* q, i64 q_stride, Rows<T> keys, i64 num_queries, i64 num_keys, i64 before, i64 width, const Scores& scores, [[maybe_unused]] const float* bias, const Buffers& at, [[maybe_unused]] const PositionsOfHead<D>* positions, T* out, i64 out_stride) {
    constexpr bool rewritten = D::scaled || biased;
    const i64 units = units_for<D>(width), key_units = units_for<D>(num_keys), padded = up_to(width, PANEL);
    constexpr i64 weights_stride = SCORES_STRIDE / D::per_unit;
    auto* all_scores = static_cast<typename S::Sum*>(at.scores);
    float* const scaled = at.scaled_scores;  // not read from `at` anew after each store, as are those that follow
    const float *key_scales = at.key_scales, *value_scales = at.value_scales, *value_logs = at.value_logs;
    for (i64 row = 0; row < num_queries; row += BLOCK_QUERIES) {
        const i64 count = std::min(BLOCK_QUERIES, num_queries - row), first = before + row;
        float scale_of[BLOCK_QUERIES];  // by which a product becomes a score
        for (i64 r = 0; r < count; r++) {
            std::uint32_t* to = at.queries + r * units;
            const T* in = q + (row + r) * q_stride;
            std::fill(to + width / D::per_unit, to + units, 0u);
            const float factor = D::scaled ? power_to_reach(3, largest_magnitude(in, width)) : 1.0f;
            scale_of[r] = scores.scale * LOG_OF_E / factor;
            for_vectors(width, [&](i64 k, auto some) {
                const Floats x = load(in + k, some);
                if constexpr (D::per_unit == 1) store(reinterpret_cast<float*>(to) + k, x, some);
                else D::put(reinterpret_cast<std::uint16_t*>(to) + k, D::scaled ? mul(x, all(factor)) : x, some);
            });
        }
        if constexpr (!D::scaled)
            if (positions != nullptr && row % MANY_QUERIES == 0) positions->score_keys(keys.data, keys.row_stride, num_keys, first, std::min(MANY_QUERIES, num_queries - row));
        float most[BLOCK_QUERIES], total[BLOCK_QUERIES];
        std::fill(most, most + count, -std::numeric_limits<float>::infinity());
        std::fill(total, total + count, 0.0f);
        const auto first_key = [&](i64 query) { return scores.window < 0 ? 0 : std::max<i64>(0, query - scores.window); };
        const i64 ahead = scores.causal ? 0 : scores.window;
        const i64 high = ahead < 0 ? num_keys : std::min(num_keys, first + count + ahead);
        bool begin = true;
        for (i64 key = first_key(first) / BLOCK_KEYS * BLOCK_KEYS; key < high; key += BLOCK_KEYS) {
            const i64 end = std::min(key + BLOCK_KEYS, high), columns = end - key;
            for (i64 column = 0; column < columns; column += PANEL)
                product<S>(count, at.queries, units, at.keys + (key + column) * units, units, all_scores + column, SCORES_STRIDE, true, columns - column <= W);
            if constexpr (!D::scaled)
                if (positions != nullptr) positions->add_scores(at.queries, count, first, row % MANY_QUERIES, key, columns, all_scores);
            for (i64 r = 0; r < count; r++) {
                typename S::Sum* products = all_scores + r * SCORES_STRIDE;
                std::uint32_t* weights = at.weights + r * weights_stride;
                const auto put = [&](i64 j, Floats e) {
                    if constexpr (D::per_unit == 1) store(reinterpret_cast<float*>(weights) + j, e);
                    else D::put(reinterpret_cast<std::uint16_t*>(weights) + j, e, Whole{});
                };
                const i64 query = first + r;
                const i64 from = std::max<i64>(0, first_key(query) - key), from_vector = from / W * W;
                const i64 to = ahead < 0 ? columns : std::min(columns, query + ahead + 1 - key);
                if (to <= from) {
                    std::memset(weights, 0, sizeof(std::uint32_t) * static_cast<std::size_t>(up_to(columns, PANEL) / D::per_unit));
                    continue;
                }
                for (i64 j = from_vector; j < from; j++) products[j] = S::least_sum;
                Floats top = all(-std::numeric_limits<float>::infinity()), other = top;  // by turns, as each waits for its last
                for_vectors(to - from_vector, [&](i64 offset, auto some) {
                    const i64 j = from_vector + offset;
                    Floats x = S::load_sums(products + j);
                    if constexpr (D::scaled) x = fma(mul(x, load(key_scales + key + j)), all(scale_of[r]), load(value_logs + key + j));
                    else if constexpr (biased) x = mul(x, all(scale_of[r]));
                    if constexpr (biased) x = fma(load(bias + (key + j - query), some), all(LOG_OF_E), x);
                    if constexpr (rewritten) store(scaled + j, x);
                    const Floats greater = greatest(top, keep_or(x, some, top));
                    top = other, other = greater;
                });
                const float previous = most[r], now = std::max(previous, largest(greatest(top, other)));
                most[r] = now;
                // NaN in a row's scores stays: its weights are NaN, whatever the maximum.
                const Floats scale = all(scores.scale * LOG_OF_E), shift = all(now == -std::numeric_limits<float>::infinity() ? 0.0f : now);
                Floats sums = zero();
                for (i64 j = 0; j < from_vector; j += W) put(j, zero());
                for_vectors(to - from_vector, [&](i64 offset, auto some) {
                    const i64 j = from_vector + offset;
                    Floats e;  // of 0 for the largest score, however large
                    if constexpr (D::scaled) e = rough_power_of_2(sub(load(scaled + j), shift), MOST_WEIGHT);
                    else if constexpr (biased) e = D::per_unit == 2 ? rough_power_of_2(sub(load(scaled + j), shift)) : decay(sub(load(scaled + j), shift));
                    else if constexpr (D::per_unit == 2) e = rough_power_of_2(mul(sub(load(products + j), shift), scale));
                    else e = decay(mul(sub(load(products + j), shift), scale));
                    e = keep(e, some);
                    if constexpr (D::scaled) sums = fma(e, load(value_scales + key + j), sums);
                    else sums = add(sums, e);
                    put(j, e);
                });
                for (i64 j = up_to(to, W); j < up_to(columns, PANEL); j += W) put(j, zero());
                if (begin || previous == now) {
                    total[r] += sum(sums);
                } else {
                    const float shrink = previous == -std::numeric_limits<float>::infinity() ? 0.0f : rewritten ? std::exp2(previous - now) : std::exp((previous - now) * scores.scale);
                    total[r] = total[r] * shrink + sum(sums);
                    float* v = at.sums + r * padded;
                    for (i64 k = 0; k < padded; k += W) store(v + k, mul(load(v + k), all(shrink)));
                }
            }
            for (i64 column = 0; column < width; column += PANEL)
                product<D>(count, at.weights, weights_stride, at.values + column * key_units + key / D::per_unit * PANEL, units_for<D>(columns), at.sums + column, padded, begin, width - column <= W);
            begin = false;
        }
        for (i64 r = 0; r < count; r++) {
            const bool sees_none = first_key(first + r) >= num_keys;
            const Floats share = all(1.0f / (D::scaled ? VALUE_FACTOR * total[r] : total[r]));
            for_vectors(width, [&](i64 k, auto some) {
                store(out + (row + r) * out_stride + k, sees_none ? zero() : mul(load(at.sums + r * padded + k), share), some);
            });
        }
    }
}

// The buffers of this thread, for heads of `width` and seqs of up to `longest` keys. Throws std::bad_alloc.
inline Buffers buffers_for(i64 width, i64 units, i64 longest) {
    const i64 padded = up_to(width, PANEL), rows = up_to(longest, PANEL);
    auto* memory = static_cast<std::uint32_t*>(scratch<2>(
        sizeof(std::uint32_t) * static_cast<std::size_t>(BLOCK_QUERIES * (units + 2 * SCORES_STRIDE + padded) + SCORES_STRIDE + rows * units + rows * padded + 3 * rows + 64 * W)));
    Buffers at{};
    at.queries = memory, memory += up_to(BLOCK_QUERIES * units, 16);
    at.weights = memory, memory += BLOCK_QUERIES * SCORES_STRIDE;
    at.scores = memory, memory += BLOCK_QUERIES * SCORES_STRIDE;
    at.scaled_scores = reinterpret_cast<float*>(memory), memory += SCORES_STRIDE;
    at.sums = reinterpret_cast<float*>(memory), memory += BLOCK_QUERIES * padded;
    at.keys = memory, memory += rows * units;
    at.values = memory, memory += rows * padded;
    at.key_scales = reinterpret_cast<float*>(memory), at.value_scales = at.key_scales + rows, at.value_logs = at.value_scales + rows;
    return at;
}

// Attend in all seqs, each of which is five numbers in `seqs`: first query row, number of queries, first key row, number of keys, position
// of the first query among the keys. Each key head serves num_heads / num_key_heads query heads, but with `positions` each query head has
// its own. Heads are shared with the team.
template <class D, class T>
void attend(Rows<T> q, Rows<T> k, Rows<T> v, T* out, i64 out_stride, i64 num_seqs, const std::int64_t* seqs, i64 num_heads, i64 num_key_heads, i64 width, const Scores& scores, const Positions* positions) {
    i64 longest = 0;
    for (i64 b = 0; b < num_seqs; b++) longest = std::max(longest, seqs[5 * b + 3]);
    const i64 units = units_for<D>(width), shared = num_heads / num_key_heads;
    const auto run_key_head = [&](i64 b, i64 h, const PositionsOfHead<D>* of_head) {
        const i64 first = seqs[5 * b], count = seqs[5 * b + 1], key = seqs[5 * b + 2], num_keys = seqs[5 * b + 3], before = seqs[5 * b + 4];
        if (count == 0) return;
        const Buffers at = buffers_for(width, units, longest);
        const T *keys = k.data + key * k.row_stride + h * k.head_stride, *values = v.data + key * v.row_stride + h * v.head_stride;
        if constexpr (D::scaled) scale_keys(keys, k.row_stride, values, v.row_stride, num_keys, width, at);
        pack_rows_as_columns<D>([=](i64 row) { return keys + row * k.row_stride; }, num_keys, width, units, at.key_scales, at.keys);
        pack_rows<D>(values, v.row_stride, num_keys, width, units_for<D>(num_keys), at.value_scales, at.values);
        auto run_head = scores.bias == nullptr ? attend_head<D, D, false, T> : attend_head<D, D, true, T>;
#ifdef WHIMBREL_FLOAT16
        if constexpr (D::scaled)
            if (units <= D::most_units) run_head = scores.bias == nullptr ? attend_head<D, InFloat16Alone, false, T> : attend_head<D, InFloat16Alone, true, T>;
#endif
        for (i64 n = h * shared; n < (h + 1) * shared; n++)
            run_head(q.data + first * q.row_stride + n * q.head_stride, q.row_stride, {keys, k.row_stride, 0}, count, num_keys, before, width, scores, scores.bias + n * scores.bias_stride, at, of_head, out + first * out_stride + n * width, out_stride);
    };
    const auto run_all = [&](i64 parts, auto run_part) {
        auto run_parts = [&](i64 from, i64 to) {
            [[maybe_unused]] typename D::Registers registers;
            for (i64 number = from; number < to; number++) run_part(number);
        };
        if (longest <= MOST_SHARED_KEYS) in_parallel(parts, run_parts);
        else run_parts(0, parts);
    };
    if (positions == nullptr) return run_all(num_seqs * num_key_heads, [&](i64 number) { run_key_head(number / num_key_heads, number % num_key_heads, nullptr); });
    run_all(num_heads, [&](i64 h) {
        const PositionsOfHead<D> of_head(*positions, h, width, units, longest);
        for (i64 b = 0; b < num_seqs; b++) run_key_head(b, h, &of_head);
    });
}

}  // namespace whimbrel
