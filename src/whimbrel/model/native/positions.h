// Scores of relative positions (DeBERTa, arXiv:2006.03654): query . position of the key, and key . position of the
// query.
//
// A position is a row of a table, which the distance from query to key chooses. For one head, rows are packed as
// columns in the order of distances, so that the numbers that a block of queries and keys needs lie side by side: those
// of a query begin one column later than those of the query before it, and those of a key one column earlier than those
// of the key before it.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "structs.h"

namespace whimbrel {

constexpr i64 MANY_QUERIES = 4 * BLOCK_QUERIES;  // whose scores with the positions of all keys are kept at once

// The tables of one head, for seqs of up to `longest` keys, and memory for scores. One at a time lives in a thread.
template <class D>
class PositionsOfHead {
  public:
    PositionsOfHead(const Positions& all, i64 head, i64 width, i64 units, i64 longest)
        : width_(width),
          units_(units),
          zero_(up_to(longest, PANEL)),
          columns_(2 * zero_ + PANEL),
          keys_stride_(zero_ + 16) {
        const i64 table = columns_ * units, scores = BLOCK_QUERIES * SCORES_AHEAD, of_keys = PANEL * KEYS_AHEAD,
                  many = MANY_QUERIES * keys_stride_;
        auto* memory = static_cast<u32*>(scratch<4>(
            sizeof(u32) * static_cast<std::size_t>(2 * table + scores + of_keys + many + PANEL * units + 64 * W)));
        const auto take = [&](i64 count) {
            auto* taken = memory;
            memory += up_to(count, 16);
            return taken;
        };
        keys_ = take(table), queries_ = take(table), rows_ = take(PANEL * units);
        scores_ = reinterpret_cast<float*>(take(scores)), of_keys_ = reinterpret_cast<float*>(take(of_keys)),
        many_ = reinterpret_cast<float*>(take(many));
        const auto pack = [&](const float* rows, i64 sign, u32* out) {
            const auto row_at = [&](i64 column) {
                const i64 distance = std::max(-all.reach, std::min(all.reach, sign * (column - zero_)));
                return rows + (head * all.count + all.rows[all.reach + distance]) * width;
            };
            pack_rows_as_columns<D>(row_at, columns_, width, units, nullptr, out);
        };
        if (all.keys != nullptr) pack(all.keys, -1, keys_);
        if (all.queries != nullptr) pack(all.queries, 1, queries_);
        has_keys_ = all.keys != nullptr, has_queries_ = all.queries != nullptr;
    }

    // Keep the scores of all keys with the positions of up to MANY_QUERIES queries.
    template <class T>
    __attribute__((noinline)) void score_keys(const T* keys, i64 stride, i64 num_keys, i64 first_query,
                                              i64 num_queries) const {
        if (!has_queries_) return;
        for (i64 key = 0; key < num_keys; key += PANEL) {
            const i64 count = std::min<i64>(PANEL, num_keys - key);
            for (i64 r = 0; r < count; r++) pack_row<D>(keys + (key + r) * stride, width_, units_, rows_ + r * units_);
            const i64 begin = zero_ + first_query - (key + count - 1), end = zero_ + first_query + num_queries - key,
                      from = begin / PANEL * PANEL;
            for (i64 column = from; column < end; column += PANEL)
                product<D>(count, rows_, units_, queries_ + column * units_, units_, of_keys_ + column - from,
                           KEYS_AHEAD, true);
            for (i64 query = 0; query < num_queries; query += W) {
                alignas(64) u32 part[PANEL][W];
                for (i64 r = 0; r < PANEL; r++) {
                    const float* in = of_keys_ + r * KEYS_AHEAD + zero_ + first_query + query - (key + r) - from;
                    r < count ? StoreU(LoadU(in), reinterpret_cast<float*>(part[r]))
                              : StoreU(Zero(), reinterpret_cast<float*>(part[r]));
                }
                transpose(part, std::min<i64>(W, num_queries - query),
                          reinterpret_cast<u32*>(many_ + query * keys_stride_ + key), keys_stride_);
            }
        }
    }

    // Add to the products of packed queries and a block of keys those with positions. `kept`: number of the first query
    // among those kept.
    __attribute__((noinline)) void add_scores(const u32* queries, i64 count, i64 first_query, i64 kept, i64 key,
                                              i64 num_keys, float* products) const {
        const i64 begin = zero_ + key - (first_query + count - 1), end = zero_ + key + num_keys - first_query,
                  from = begin / PANEL * PANEL;
        if (has_keys_)
            for (i64 column = from; column < end; column += PANEL)
                product<D>(count, queries, units_, keys_ + column * units_, units_, scores_ + column - from,
                           SCORES_AHEAD, true);
        for (i64 r = 0; r < count; r++) {
            float* to = products + r * SCORES_STRIDE;
            const float* of_query = scores_ + r * SCORES_AHEAD + zero_ + key - (first_query + r) - from;
            const float* of_keys = many_ + (kept + r) * keys_stride_ + key;
            if (has_keys_) add_to(to, of_query, num_keys);
            if (has_queries_) add_to(to, of_keys, num_keys);
        }
    }

  private:
    static constexpr i64 SCORES_AHEAD =
        up_to(BLOCK_KEYS + BLOCK_QUERIES, PANEL) + 2 * PANEL + 16;  // rows that are no multiple of 512 bytes apart
    static constexpr i64 KEYS_AHEAD = up_to(MANY_QUERIES, PANEL) + 3 * PANEL + 16;

    static void add_to(float* to, const float* added, i64 count) {
        for_vectors(count,
                    [&](i64 j, auto some) { StoreN(Add(LoadN(to + j, some), LoadN(added + j, some)), to + j, some); });
    }

    i64 width_, units_;
    i64 zero_;  // column of distance 0
    i64 columns_, keys_stride_;
    u32 *keys_, *queries_, *rows_;
    float *scores_, *of_keys_, *many_;
    bool has_keys_, has_queries_;
};

}  // namespace whimbrel
