// A layer of a transformer, whose bits are those of its parts, one after another.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "dispatch.h"

namespace whimbrel {

constexpr i64 MLP_ROWS = 512;  // at once: numbers between its products stay in the cache

// Memory for one call.
class Workspace {
  public:
    explicit Workspace(i64 bytes)
        : memory_(static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(up_to(bytes, 64))))),
          next_(memory_) {
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    ~Workspace() { std::free(memory_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    void* take(i64 bytes) {
        char* taken = next_;
        next_ += up_to(bytes, 64);
        return taken;
    }

  private:
    char *memory_, *next_;
};

inline void add_rows(const float* x, const float* y, i64 count, float* out) {
    for_vectors(count, [&](i64 k, auto some) { StoreN(Add(LoadN(x + k, some), LoadN(y + k, some)), out + k, some); });
}

// Return the norm of x, which is written to `out`, or x if there is no norm.
inline const float* norm_if(const Norm& by, const float* x, i64 rows, i64 width, float* out) {
    if (by.weight == nullptr) return x;
    norm_rows(by, x, nullptr, false, rows, width, out);
    return out;
}

// Write the norm of x + added, or the sum itself if there is no norm.
inline void norm_of_sum(const Norm& by, const float* x, const float* added, i64 rows, i64 width, float* out) {
    if (by.weight == nullptr) add_rows(x, added, rows * width, out);
    else norm_rows(by, x, added, false, rows, width, out);
}

inline void run_attention(const Layer& layer, const float* x, const Batch& batch, float* out) {
    const bool narrow = layer.narrow != 0;
    const Rotation& turn = batch.rotations[layer.rotary];
    const i64 bytes = narrow ? 2 : 4, rows = batch.rows, width = layer.out.weight.columns, head = layer.head_width;
    const i64 queries = layer.num_heads * head, keys = layer.num_key_heads * head, all_heads = queries + 2 * keys;
    Workspace memory(rows * (8 * width + bytes * (2 * all_heads + queries)) + 5 * 64);
    auto* normed = static_cast<float*>(memory.take(4 * rows * width));
    auto* qkv = static_cast<char*>(memory.take(bytes * rows * all_heads));
    const float* in = norm_if(layer.attention_in, x, rows, width, normed);
    multiply(layer.qkv, {in, false, layer.qkv.weight.inner}, rows, {qkv, narrow, all_heads});
    const char* qk = qkv;
    i64 qk_stride = all_heads;
    if (layer.head_norm != nullptr || turn.pairs > 0) {
        void* turned = memory.take(bytes * rows * (queries + keys));
        const i64 heads = layer.num_heads + layer.num_key_heads;
        norm_and_rotate_heads({qkv, narrow, all_heads}, rows, heads, head, layer.head_norm, layer.head_eps, turn,
                              turned);
        qk = static_cast<const char*>(turned);
        qk_stride = queries + keys;
    }
    void* attended = memory.take(bytes * rows * queries);
    Attention attention{};
    attention.kind = layer.attention_kind;
    attention.narrow = layer.narrow;
    attention.q = {qk, qk_stride, head};
    attention.k = {qk + bytes * queries, qk_stride, head};
    attention.v = {qkv + bytes * (queries + keys), all_heads, head};
    attention.out = attended;
    attention.out_stride = queries;
    attention.num_seqs = batch.num_seqs;
    attention.seqs = batch.seqs;
    attention.num_heads = layer.num_heads;
    attention.num_key_heads = layer.num_key_heads;
    attention.head_width = head;
    attention.scale = layer.score_scale;
    attention.causal = layer.causal;
    attention.window = layer.window;
    attention.bias = batch.bias;
    attention.bias_stride = batch.bias_stride;
    attention.positions = layer.positions;
    attend_heads(attention);
    auto* added = static_cast<float*>(memory.take(4 * rows * width));
    multiply(layer.out, {attended, narrow, queries}, rows, {added, false, width});
    norm_if(layer.attention_out, added, rows, width, added);
    if (layer.attention_inner_sum.weight != nullptr)
        norm_of_sum(layer.attention_inner_sum, x, added, rows, width, added);
    norm_of_sum(layer.attention_sum, x, added, rows, width, out);
}

// Add to x what the MLP makes of it.
inline void run_mlp(const Layer& layer, i64 rows, float* x) {
    const bool narrow = layer.narrow != 0;
    const i64 bytes = narrow ? 2 : 4, width = layer.out.weight.columns, most = std::min(rows, MLP_ROWS);
    const i64 inner = layer.up.weight.columns, gated = layer.down.weight.inner;
    Workspace memory(most * (8 * width + bytes * (inner + gated)) + 4 * 64);
    auto* normed = static_cast<float*>(memory.take(4 * most * width));
    void* raised = memory.take(bytes * most * inner);
    void* gates = memory.take(bytes * most * gated);
    auto* added = static_cast<float*>(memory.take(4 * most * width));
    for (i64 row = 0; row < rows; row += MLP_ROWS) {
        float* part = x + row * width;
        const i64 count = std::min(MLP_ROWS, rows - row);
        const float* in = norm_if(layer.mlp_in, part, count, width, normed);
        multiply(layer.up, {in, false, layer.up.weight.inner}, count, {raised, narrow, inner});
        if (layer.gate >= 0) gate_rows(layer.gate, raised, narrow, count, gated, gates);
        multiply(layer.down, {layer.gate >= 0 ? gates : raised, narrow, gated}, count, {added, false, width});
        norm_if(layer.mlp_out, added, count, width, added);
        norm_of_sum(layer.mlp_sum, part, added, count, width, part);
    }
}

// Run layers one after another on rows of x in float32, all of which belong to the seqs.
inline void run_layers(const Layer* layers, i64 count, const float* x, const Batch& batch, float* out) {
    const i64 width = layers->out.weight.columns;
    Workspace memory(count > 1 ? 4 * batch.rows * width + 64 : 64);
    auto* between = static_cast<float*>(memory.take(0));
    for (i64 number = 0; number < count; number++) {
        float* to =
            (count - number) % 2 == 1 ? out : between;  // the last one writes to `out`, and none to what it reads
        run_attention(layers[number], x, batch, to);
        run_mlp(layers[number], batch.rows, to);
        x = to;
    }
}

}  // namespace whimbrel
