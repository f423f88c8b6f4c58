// Structures that Python fills (model/kernels/structs.py). All members have 8 bytes, or are structures of such.
//
// A library tells their layout (`write_layout`), and Python compares it with its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "numbers.h"

namespace whimbrel {

// A weight of (columns, inner) numbers. All its arrays are padded to whole panels of columns.
struct Weight {
    const u32* units;
    const float* bias;       // or null
    const float* scales;     // int8 and float16: of each column
    const i32* column_sums;  // int8: of each column
    const float* factors;    // int8: of each inner number, by which x is multiplied first
    i64 inner, columns;
};

// A linear layer.
struct Product {
    i64 kind, activation;
    Weight weight;
};

// Layer norm, or RMS norm unless `centred`. Without a weight there is none.
struct Norm {
    const float *weight, *bias;
    double eps;
    i64 centred;
};

// Angles of a rotary embedding: number k of a head is turned with number pairs + k; those after both halves are not.
struct Rotation {
    const float *cos, *sin;  // (rows, pairs), or null
    i64 pairs;
};

// Relative positions of one layer.
struct Positions {
    const float *keys, *queries;  // tables (heads, count, width), or null: no such scores
    i64 count;                    // of rows of a head
    const i32* rows;              // row of each distance, query - key, from -reach to reach
    i64 reach;
};

// Rows of heads. Strides count numbers.
struct Heads {
    const void* data;
    i64 row_stride, head_stride;
};

// Attention in all seqs. Each of `seqs` is five numbers: first query row, number of queries, first key row, number of
// keys, position of the first query among the keys. Each key head serves num_heads / num_key_heads query heads.
struct Attention {
    i64 kind, narrow;  // bfloat16 lies in memory if `narrow`, else float32
    Heads q, k, v;
    void* out;
    i64 out_stride;  // from row to row; heads are contiguous
    i64 num_seqs;
    const i64* seqs;
    i64 num_heads, num_key_heads, head_width;
    double scale;  // above 0
    i64 causal;
    i64 window;         // tokens before each token, and unless causal as many after it; negative: all
    const float* bias;  // of the first head, by the distance of a key from its query, which may be negative; null: none
    i64 bias_stride;    // from a head to the next
    const Positions* positions;  // or null; then each query head has its key head
};

// A layer of a transformer. x, norms and sums are float32; numbers between products are bfloat16 if `narrow`.
struct Layer {
    i64 narrow;
    Norm attention_in;
    Product qkv;
    const float* head_norm;  // of query and key heads, or null
    double head_eps;
    i64 num_heads, num_key_heads, head_width, attention_kind;
    double score_scale;
    i64 causal, window;
    const Positions* positions;  // or null
    i64 rotary;                  // number of its rotation
    Product out;
    Norm attention_out;
    Norm attention_inner_sum;  // of the sum of x and what attention adds, which is then added to x once more
    Norm attention_sum, mlp_in;
    Product up;
    i64 gate;  // activation of the gate, or negative: none
    Product down;
    Norm mlp_out, mlp_sum;
};

// Parts that all layers of a call share. `rotations` has one for each of the model's rotary embeddings.
struct Batch {
    i64 rows, num_seqs;
    const i64* seqs;
    const Rotation* rotations;
    const float* bias;
    i64 bias_stride;
};

struct Member {
    const char *name, *type;
    std::size_t offset, size;
};

template <class T>
constexpr const char* type_name() {
    if (std::is_pointer_v<T>) return "pointer";
    if (std::is_same_v<T, double>) return "double";
    return std::is_same_v<T, i64> ? "int" : "struct";
}

#define WHIMBREL_MEMBER(S, name) \
    Member { #name, type_name<decltype(S::name)>(), offsetof(S, name), sizeof(S::name) }

// True if these are all members of a structure of this size, in order.
template <std::size_t N>
constexpr bool complete(const Member (&members)[N], std::size_t size) {
    std::size_t end = 0;
    for (const Member& member : members) {
        if (member.offset != end) return false;
        end += member.size;
    }
    return end == size;
}

constexpr Member WEIGHT[] = {
    WHIMBREL_MEMBER(Weight, units),       WHIMBREL_MEMBER(Weight, bias),    WHIMBREL_MEMBER(Weight, scales),
    WHIMBREL_MEMBER(Weight, column_sums), WHIMBREL_MEMBER(Weight, factors), WHIMBREL_MEMBER(Weight, inner),
    WHIMBREL_MEMBER(Weight, columns),
};
static_assert(complete(WEIGHT, sizeof(Weight)));

constexpr Member PRODUCT[] = {
    WHIMBREL_MEMBER(Product, kind),
    WHIMBREL_MEMBER(Product, activation),
    WHIMBREL_MEMBER(Product, weight),
};
static_assert(complete(PRODUCT, sizeof(Product)));

constexpr Member NORM[] = {
    WHIMBREL_MEMBER(Norm, weight),
    WHIMBREL_MEMBER(Norm, bias),
    WHIMBREL_MEMBER(Norm, eps),
    WHIMBREL_MEMBER(Norm, centred),
};
static_assert(complete(NORM, sizeof(Norm)));

constexpr Member ROTATION[] = {
    WHIMBREL_MEMBER(Rotation, cos),
    WHIMBREL_MEMBER(Rotation, sin),
    WHIMBREL_MEMBER(Rotation, pairs),
};
static_assert(complete(ROTATION, sizeof(Rotation)));

constexpr Member POSITIONS[] = {
    WHIMBREL_MEMBER(Positions, keys), WHIMBREL_MEMBER(Positions, queries), WHIMBREL_MEMBER(Positions, count),
    WHIMBREL_MEMBER(Positions, rows), WHIMBREL_MEMBER(Positions, reach),
};
static_assert(complete(POSITIONS, sizeof(Positions)));

constexpr Member HEADS[] = {
    WHIMBREL_MEMBER(Heads, data),
    WHIMBREL_MEMBER(Heads, row_stride),
    WHIMBREL_MEMBER(Heads, head_stride),
};
static_assert(complete(HEADS, sizeof(Heads)));

constexpr Member ATTENTION[] = {
    WHIMBREL_MEMBER(Attention, kind),
    WHIMBREL_MEMBER(Attention, narrow),
    WHIMBREL_MEMBER(Attention, q),
    WHIMBREL_MEMBER(Attention, k),
    WHIMBREL_MEMBER(Attention, v),
    WHIMBREL_MEMBER(Attention, out),
    WHIMBREL_MEMBER(Attention, out_stride),
    WHIMBREL_MEMBER(Attention, num_seqs),
    WHIMBREL_MEMBER(Attention, seqs),
    WHIMBREL_MEMBER(Attention, num_heads),
    WHIMBREL_MEMBER(Attention, num_key_heads),
    WHIMBREL_MEMBER(Attention, head_width),
    WHIMBREL_MEMBER(Attention, scale),
    WHIMBREL_MEMBER(Attention, causal),
    WHIMBREL_MEMBER(Attention, window),
    WHIMBREL_MEMBER(Attention, bias),
    WHIMBREL_MEMBER(Attention, bias_stride),
    WHIMBREL_MEMBER(Attention, positions),
};
static_assert(complete(ATTENTION, sizeof(Attention)));

constexpr Member LAYER[] = {
    WHIMBREL_MEMBER(Layer, narrow),
    WHIMBREL_MEMBER(Layer, attention_in),
    WHIMBREL_MEMBER(Layer, qkv),
    WHIMBREL_MEMBER(Layer, head_norm),
    WHIMBREL_MEMBER(Layer, head_eps),
    WHIMBREL_MEMBER(Layer, num_heads),
    WHIMBREL_MEMBER(Layer, num_key_heads),
    WHIMBREL_MEMBER(Layer, head_width),
    WHIMBREL_MEMBER(Layer, attention_kind),
    WHIMBREL_MEMBER(Layer, score_scale),
    WHIMBREL_MEMBER(Layer, causal),
    WHIMBREL_MEMBER(Layer, window),
    WHIMBREL_MEMBER(Layer, positions),
    WHIMBREL_MEMBER(Layer, rotary),
    WHIMBREL_MEMBER(Layer, out),
    WHIMBREL_MEMBER(Layer, attention_out),
    WHIMBREL_MEMBER(Layer, attention_inner_sum),
    WHIMBREL_MEMBER(Layer, attention_sum),
    WHIMBREL_MEMBER(Layer, mlp_in),
    WHIMBREL_MEMBER(Layer, up),
    WHIMBREL_MEMBER(Layer, gate),
    WHIMBREL_MEMBER(Layer, down),
    WHIMBREL_MEMBER(Layer, mlp_out),
    WHIMBREL_MEMBER(Layer, mlp_sum),
};
static_assert(complete(LAYER, sizeof(Layer)));

constexpr Member BATCH[] = {
    WHIMBREL_MEMBER(Batch, rows),      WHIMBREL_MEMBER(Batch, num_seqs), WHIMBREL_MEMBER(Batch, seqs),
    WHIMBREL_MEMBER(Batch, rotations), WHIMBREL_MEMBER(Batch, bias),     WHIMBREL_MEMBER(Batch, bias_stride),
};
static_assert(complete(BATCH, sizeof(Batch)));

#undef WHIMBREL_MEMBER

// Text of a size, to which lines are added. What does not fit is cut.
struct Text {
    char* next;
    std::size_t left;

    template <std::size_t N>
    void add(const char* name, const Member (&members)[N], std::size_t size) {
        for (const Member& member : members) {
            const int length = std::snprintf(next, left, "%s of %zu bytes: %s, %s at %zu\n", name, size, member.name,
                                             member.type, member.offset);
            const auto added = std::min(left, static_cast<std::size_t>(length));
            next += added, left -= added;
        }
    }
};

// Write a line for each member: name and size of its structure, its own name, type and offset.
inline void write_layout(Text text) {
    text.add("Weight", WEIGHT, sizeof(Weight));
    text.add("Product", PRODUCT, sizeof(Product));
    text.add("Norm", NORM, sizeof(Norm));
    text.add("Rotation", ROTATION, sizeof(Rotation));
    text.add("Positions", POSITIONS, sizeof(Positions));
    text.add("Heads", HEADS, sizeof(Heads));
    text.add("Attention", ATTENTION, sizeof(Attention));
    text.add("Layer", LAYER, sizeof(Layer));
    text.add("Batch", BATCH, sizeof(Batch));
}

}  // namespace whimbrel
