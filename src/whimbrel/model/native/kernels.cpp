// The kernels that Python calls (model/ops/kernels.py), compiled once for each instruction set (compile.py).
//
// A call runs in the calling thread, and products and heads also in those of its team. Those that compute and return a number return 0, or
// 1 if memory ran out. Pointers are of contiguous rows unless a stride is given; strides count numbers.
#include <cmath>
#include <type_traits>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "norm.h"
#include "rows.h"

using namespace whimbrel;

namespace {

template <class D, class In, class Out>
void linear_of(int activation, const In* x, i64 x_stride, i64 rows, const Weight& weight, Out* out, i64 out_stride) {
    constexpr Finish<D, Out> finishes[] = {finish<D, IDENTITY, Out>, finish<D, GELU, Out>, finish<D, GELU_TANH, Out>, finish<D, RELU, Out>, finish<D, SILU, Out>};
    linear<D, In, Out>(finishes[activation], x, x_stride, rows, weight, out, out_stride);
}

template <class D>
void linear_in(int activation, const void* x, bool narrow_in, i64 x_stride, i64 rows, const Weight& weight, void* out, bool narrow_out, i64 out_stride) {
    if (narrow_in && narrow_out)
        linear_of<D>(activation, static_cast<const bf16*>(x), x_stride, rows, weight, static_cast<bf16*>(out), out_stride);
    else if (narrow_in)
        linear_of<D>(activation, static_cast<const bf16*>(x), x_stride, rows, weight, static_cast<float*>(out), out_stride);
    else if (narrow_out)
        linear_of<D>(activation, static_cast<const float*>(x), x_stride, rows, weight, static_cast<bf16*>(out), out_stride);
    else
        linear_of<D>(activation, static_cast<const float*>(x), x_stride, rows, weight, static_cast<float*>(out), out_stride);
}

bf16 round_to_bf16(float x) {
    bf16 out[1];
    store(out, all(x), 1);
    return out[0];
}

template <class T>
void gate_of(int activation, const T* x, i64 rows, i64 width, T* out) {
    switch (activation) {
        case GELU: return gate<GELU>(x, rows, width, out);
        case GELU_TANH: return gate<GELU_TANH>(x, rows, width, out);
        case RELU: return gate<RELU>(x, rows, width, out);
        case SILU: return gate<SILU>(x, rows, width, out);
        default: return gate<IDENTITY>(x, rows, width, out);
    }
}

// Run f and return 0, or 1 if memory ran out.
template <class F>
int guarded(F f) {
    try {
        f();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Number that tells the sources and flags it was compiled from.
unsigned whimbrel_sources() { return SOURCES; }

// Whether this file's instruction set has products of this kind.
int whimbrel_has(int kind) {
#ifdef WHIMBREL_INT8
    if (kind == INT8) return 1;
#endif
#ifdef __AVX512BF16__
    if (kind == BFLOAT16) return 1;
#endif
#ifdef WHIMBREL_FLOAT16
    if (kind == FLOAT16) return 1;
#endif
    return kind == FLOAT32;
}

// Number of columns to which weights are padded, and of units of 4 bytes to which their inner dimension is.
i64 whimbrel_panel() { return PANEL; }
i64 whimbrel_units(int kind, i64 inner) { return packed_units(inner, kind); }

// Lead the team in this thread; 0 if another thread does. Until `whimbrel_leave`, products and heads are shared with its helpers.
int whimbrel_lead() { return open_team(); }
void whimbrel_leave() { leave_team(); }
// Send the helpers to sleep: another lane needs the processor.
void whimbrel_dismiss() { team.open = 0; }
// Help whoever leads. Does not return.
void whimbrel_help() { help_team(); }

// Pack a weight of (columns, inner) float32. `units` holds padded columns * padded units; `scales`, for int8 and float16, and
// `column_sums`, for int8, one number for each padded column.
void whimbrel_pack(int kind, const float* weight, i64 columns, i64 inner, std::uint32_t* units, float* scales, std::int32_t* column_sums) {
    const i64 num_units = packed_units(inner, kind), in_unit = per_unit(kind);
    std::memset(units, 0, sizeof(std::uint32_t) * static_cast<std::size_t>(num_units * PANEL * panels_of(columns)));
    for (i64 column = 0; column < columns; column++) {
        const float* in = weight + column * inner;
        float step = 1.0f;
        if (kind == INT8) {
            float most = 0.0f;
            for (i64 k = 0; k < inner; k++) most = std::max(most, std::fabs(in[k]));
            step = most > 0.0f ? most / 127.0f : 1.0f;
            scales[column] = step, column_sums[column] = 0;
        }
        float factor = 1.0f;
        if (kind == FLOAT16) {
            factor = power_to_reach(3, largest_magnitude(in, inner));
            scales[column] = 1.0f / factor;
        }
        std::uint32_t* out = units + column / PANEL * num_units * PANEL + column % PANEL;
        for (i64 k = 0; k < inner; k++) {
            std::uint32_t* unit = out + k / in_unit * PANEL;
            if (kind == INT8) {
                const auto byte = static_cast<std::int8_t>(std::nearbyint(in[k] / step));
                reinterpret_cast<std::int8_t*>(unit)[k % 4] = byte, column_sums[column] += byte;
            } else if (kind == BFLOAT16) {
                reinterpret_cast<bf16*>(unit)[k % 2] = round_to_bf16(in[k]);
            } else if (kind == FLOAT16) {
                reinterpret_cast<std::uint16_t*>(unit)[k % 2] = _cvtss_sh(in[k] * factor, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            } else {
                std::memcpy(unit, in + k, sizeof(float));
            }
        }
    }
}

int whimbrel_linear([[maybe_unused]] int kind, int activation, const void* x, int narrow_in, i64 x_stride, i64 rows, const std::uint32_t* units, const float* bias, const float* scales, const std::int32_t* column_sums, const float* factors, i64 inner, i64 columns, void* out, int narrow_out, i64 out_stride) {
    const Weight weight{units, bias, scales, column_sums, factors, inner, columns};
    const auto run = [&](auto d) { linear_in<decltype(d)>(activation, x, narrow_in, x_stride, rows, weight, out, narrow_out, out_stride); };
    return guarded([&] {
#ifdef WHIMBREL_INT8
        if (kind == INT8) return run(InInt8{});
#endif
#ifdef __AVX512BF16__
        if (kind == BFLOAT16) return run(InBfloat16{});
#endif
#ifdef WHIMBREL_FLOAT16
        if (kind == FLOAT16) return run(InFloat16{});
#endif
        return run(InFloat32{});
    });
}

// `seqs` has five numbers for each seq: first query row, number of queries, first key row, number of keys, position of the first query.
// `bias`, or null, is added to scores: that of head n and of a key at a distance from its query is bias[n * bias_stride + distance].
// Scores with `positions` have none in float16, which float32 replaces.
int whimbrel_attend([[maybe_unused]] int kind, int narrow, const void* q, i64 q_row, i64 q_head, const void* k, i64 k_row, i64 k_head, const void* v, i64 v_row, i64 v_head, void* out, i64 out_row, i64 num_seqs, const i64* seqs, i64 num_heads, i64 num_key_heads, i64 width, float scale, int causal, i64 window, const float* bias, i64 bias_stride, const Positions* positions) {
    const Scores scores{scale, causal != 0, window, bias, bias_stride};
    const auto run = [&](auto d, auto t) {
        using T = decltype(t);
        attend<decltype(d), T>({static_cast<const T*>(q), q_row, q_head}, {static_cast<const T*>(k), k_row, k_head}, {static_cast<const T*>(v), v_row, v_head}, static_cast<T*>(out), out_row, num_seqs, seqs, num_heads, num_key_heads, width, scores, positions);
    };
    return guarded([&] {
#ifdef __AVX512BF16__
        if (kind == BFLOAT16) return narrow ? run(InBfloat16{}, bf16{}) : run(InBfloat16{}, float{});
#endif
#ifdef WHIMBREL_FLOAT16
        if (kind == FLOAT16 && positions == nullptr) return narrow ? run(InFloat16{}, bf16{}) : run(InFloat16{}, float{});
#endif
        return narrow ? run(InFloat32{}, bf16{}) : run(InFloat32{}, float{});
    });
}

void whimbrel_norm(int centred, const float* x, const void* y, int narrow, const float* weight, const float* bias, double eps, i64 rows, i64 width, float* out) {
    const auto run = [&](auto t) {
        const auto* added = static_cast<const decltype(t)*>(y);
        centred ? norm<true>(x, added, weight, bias, eps, rows, width, out) : norm<false>(x, added, weight, bias, eps, rows, width, out);
    };
    narrow ? run(bf16{}) : run(float{});
}

// Write the sums of rows of tables. The first table may be of bfloat16, the others are float32, and are left out if they are null. 1 if a row does not exist.
int whimbrel_embed(const void* words, int narrow, i64 num_words, const std::int32_t* ids, const float* positions, i64 num_positions, const std::int32_t* position_ids, const float* types, i64 num_types, const std::int32_t* type_ids, i64 rows, i64 width, float* out) {
    Table tables[3] = {{words, narrow != 0, num_words, ids}};
    int count = 1;
    if (positions != nullptr) tables[count++] = {positions, false, num_positions, position_ids};
    if (types != nullptr) tables[count++] = {types, false, num_types, type_ids};
    return !sum_of_tables(tables, count, rows, width, out);
}

void whimbrel_means(const float* x, i64 width, const std::int32_t* starts, const std::int32_t* ends, i64 count, float* out) { means(x, width, starts, ends, count, out); }

void whimbrel_normalize(const float* x, i64 rows, i64 width, float least, float* out) { normalize(x, rows, width, least, out); }

// Heads of a row are contiguous. `out` is contiguous, and has the type of `x`.
int whimbrel_norm_and_rotate(const void* x, int narrow, i64 x_stride, i64 rows, i64 heads, i64 width, const float* weight, double eps, const float* cos, const float* sin, i64 pairs, void* out) {
    const auto run = [&](auto t) {
        using T = decltype(t);
        norm_and_rotate(static_cast<const T*>(x), x_stride, rows, heads, width, weight, eps, {cos, sin, pairs}, static_cast<T*>(out));
    };
    return guarded([&] { narrow ? run(bf16{}) : run(float{}); });
}

void whimbrel_gate(int activation, const void* x, int narrow, i64 rows, i64 width, void* out) {
    if (narrow) gate_of(activation, static_cast<const bf16*>(x), rows, width, static_cast<bf16*>(out));
    else gate_of(activation, static_cast<const float*>(x), rows, width, static_cast<float*>(out));
}

// Run a layer on rows of x in float32, all of which belong to the seqs. The bits are those of the functions above, one after another.
static int run_layer(const Layer* layer, const float* x, i64 rows, i64 num_seqs, const i64* seqs, const Rotation* rotations, const float* bias, i64 bias_stride, float* out) {
    const int narrow = layer->narrow != 0;
    const Rotation& turn = rotations[layer->rotary];
    const i64 bytes = narrow ? 2 : 4, width = layer->out.weight.columns, head = layer->head_width;
    const i64 queries = layer->num_heads * head, keys = layer->num_key_heads * head, all_heads = queries + 2 * keys;
    const i64 inner = layer->up.weight.columns, gated = layer->down.weight.inner;
    const auto check = [](int failed) {
        if (failed) throw std::bad_alloc();
    };
    const auto multiply = [&](const Product& by, const void* in, int narrow_in, i64 count, void* to, int narrow_out) {
        const Weight& w = by.weight;
        check(whimbrel_linear(static_cast<int>(by.kind), static_cast<int>(by.activation), in, narrow_in, w.inner, count, w.units, w.bias, w.scales, w.column_sums, w.factors, w.inner, w.columns, to, narrow_out, w.columns));
    };
    const auto normed = [&](const Norm& norm, const float* in, const float* added, i64 count, float* to) {
        whimbrel_norm(norm.centred != 0, in, added, 0, norm.weight, norm.bias, norm.eps, count, width, to);
    };
    const auto normed_if = [&](const Norm& norm, const float* in, i64 count, float* to) {
        if (norm.weight == nullptr) return in;
        normed(norm, in, nullptr, count, to);
        return static_cast<const float*>(to);
    };
    const auto sum_of = [&](const Norm& norm, const float* in, const float* added, i64 count, float* to) {
        norm.weight == nullptr ? add_rows(in, added, count * width, to) : normed(norm, in, added, count, to);
    };
    const auto attention = [&] {
        Workspace memory(rows * (8 * width + bytes * (2 * all_heads + queries)) + 5 * 64);
        auto* normed_rows = static_cast<float*>(memory.take(4 * rows * width));
        char* qkv = static_cast<char*>(memory.take(bytes * rows * all_heads));
        multiply(layer->qkv, normed_if(layer->attention_in, x, rows, normed_rows), 0, rows, qkv, narrow);
        const char* qk = qkv;
        i64 qk_row = all_heads;
        if (layer->head_norm != nullptr || turn.pairs > 0) {
            void* turned = memory.take(bytes * rows * (queries + keys));
            check(whimbrel_norm_and_rotate(qkv, narrow, all_heads, rows, layer->num_heads + layer->num_key_heads, head, layer->head_norm, layer->head_eps, turn.cos, turn.sin, turn.pairs, turned));
            qk = static_cast<const char*>(turned), qk_row = queries + keys;
        }
        void* attended = memory.take(bytes * rows * queries);
        check(whimbrel_attend(static_cast<int>(layer->attention_kind), narrow, qk, qk_row, head, qk + bytes * queries, qk_row, head, qkv + bytes * (queries + keys), all_heads, head, attended, queries, num_seqs, seqs, layer->num_heads, layer->num_key_heads, head, static_cast<float>(layer->score_scale), layer->causal != 0, layer->window, bias, bias_stride, layer->positions));
        auto* added = static_cast<float*>(memory.take(4 * rows * width));
        multiply(layer->out, attended, narrow, rows, added, 0);
        normed_if(layer->attention_out, added, rows, added);
        if (layer->attention_inner_sum.weight != nullptr) normed(layer->attention_inner_sum, x, added, rows, added);
        sum_of(layer->attention_sum, x, added, rows, out);
    };
    const auto feed_forward = [&](float* part, i64 count, float* normed_rows, void* raised, void* gates, float* added) {
        multiply(layer->up, normed_if(layer->mlp_in, part, count, normed_rows), 0, count, raised, narrow);
        if (layer->gate >= 0) whimbrel_gate(static_cast<int>(layer->gate), raised, narrow, count, gated, gates);
        multiply(layer->down, layer->gate >= 0 ? gates : raised, narrow, count, added, 0);
        normed_if(layer->mlp_out, added, count, added);
        sum_of(layer->mlp_sum, part, added, count, part);
    };
    return guarded([&] {
        attention();
        const i64 most = std::min(rows, MLP_ROWS);
        Workspace memory(most * (8 * width + bytes * (inner + gated)) + 4 * 64);
        auto* normed_rows = static_cast<float*>(memory.take(4 * most * width));
        void* raised = memory.take(bytes * most * inner);
        void* gates = memory.take(bytes * most * gated);
        auto* added = static_cast<float*>(memory.take(4 * most * width));
        for (i64 row = 0; row < rows; row += MLP_ROWS) feed_forward(out + row * width, std::min(MLP_ROWS, rows - row), normed_rows, raised, gates, added);
    });
}

// Run layers one after another. `rotations` has one for each of the model's rotary embeddings. All layers have the same bias, or none.
int whimbrel_layers(const Layer* layers, i64 count, const float* x, i64 rows, i64 num_seqs, const i64* seqs, const Rotation* rotations, const float* bias, i64 bias_stride, float* out) {
    const i64 width = layers->out.weight.columns;
    return guarded([&] {
        Workspace memory(count > 1 ? 4 * rows * width + 64 : 64);
        auto* between = static_cast<float*>(memory.take(0));
        for (i64 number = 0; number < count; number++) {
            float* to = (count - number) % 2 == 1 ? out : between;  // the last one writes to `out`, and none to what it reads
            if (run_layer(layers + number, x, rows, num_seqs, seqs, rotations, bias, bias_stride, to)) throw std::bad_alloc();
            x = to;
        }
    });
}

}  // extern "C"
#pragma GCC visibility pop
