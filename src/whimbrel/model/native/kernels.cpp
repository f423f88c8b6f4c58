// The kernels that Python calls (model/kernels/library.py), compiled once for each instruction set (compile.py).
//
// A call runs in the calling thread, and products and heads also in those of its team. Functions that return an int
// return 0, or 1 if memory ran out. Pointers are of contiguous rows unless a stride is given; strides count numbers.
#include <new>

#include "dispatch.h"
#include "layer.h"
#include "rows.h"
#include "structs.h"
#include "team.h"

using namespace whimbrel;

namespace {

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

// Write the layout of the structures as text.
void whimbrel_layout(char* text, i64 size) { write_layout({text, static_cast<std::size_t>(size)}); }

// True if this instruction set has products of this kind.
int whimbrel_has(int kind) {
    bool has = false;
    with_numbers<InInt8, InBfloat16, InFloat16>(kind, [&](auto d) { has = decltype(d)::kind == kind; });
    return has;
}

// Number of columns to which weights are padded, and of units of 4 bytes to which their inner dimension is.
i64 whimbrel_panel() { return PANEL; }
i64 whimbrel_units(int kind, i64 inner) {
    switch (kind) {
        case BFLOAT16: return units_for<InBfloat16>(inner);
        case INT8: return units_for<InInt8>(inner);
        case FLOAT16: return units_for<InFloat16>(inner);
        default: return units_for<InFloat32>(inner);
    }
}

// Lead the team in this thread; 0 if another thread does. Until `whimbrel_leave`, products and heads are shared with
// its helpers.
int whimbrel_lead() { return open_team(); }
void whimbrel_leave() { leave_team(); }
// Send the helpers to sleep: another lane needs the processor.
void whimbrel_dismiss() { team.open = 0; }
// Help whoever leads. Does not return.
void whimbrel_help() { help_team(); }

void whimbrel_pack(int kind, const float* weight, i64 columns, i64 inner, u32* units, float* scales, i32* column_sums) {
    with_numbers<InInt8, InBfloat16, InFloat16>(
        kind, [&](auto d) { pack<decltype(d)>(weight, columns, inner, units, scales, column_sums); });
}

int whimbrel_linear(const Product* by, const void* x, int narrow_in, i64 x_stride, i64 rows, void* out, int narrow_out,
                    i64 out_stride) {
    return guarded([&] { multiply(*by, {x, narrow_in != 0, x_stride}, rows, {out, narrow_out != 0, out_stride}); });
}

int whimbrel_attend(const Attention* by) {
    return guarded([&] { attend_heads(*by); });
}

// `added`, of bfloat16 if `narrow`, may be null.
void whimbrel_norm(const Norm* by, const float* x, const void* added, int narrow, i64 rows, i64 width, float* out) {
    norm_rows(*by, x, added, narrow != 0, rows, width, out);
}

// Write the sums of rows of tables. The first table may be of bfloat16, the others are float32, and are left out if
// they are null. 1 if a row does not exist.
int whimbrel_embed(const void* words, int narrow, i64 num_words, const i32* ids, const float* positions,
                   i64 num_positions, const i32* position_ids, const float* types, i64 num_types, const i32* type_ids,
                   i64 rows, i64 width, float* out) {
    Table tables[3] = {{words, narrow != 0, num_words, ids}, {}, {}};
    int count = 1;
    if (positions != nullptr) tables[count++] = {positions, false, num_positions, position_ids};
    if (types != nullptr) tables[count++] = {types, false, num_types, type_ids};
    return !sum_of_tables(tables, count, rows, width, out);
}

void whimbrel_means(const float* x, i64 width, const i32* starts, const i32* ends, i64 count, float* out) {
    means(x, width, starts, ends, count, out);
}

void whimbrel_normalize(const float* x, i64 rows, i64 width, float least, float* out) {
    normalize(x, rows, width, least, out);
}

// Heads of a row are contiguous. `out` is contiguous, and has the type of `x`.
int whimbrel_norm_and_rotate(const void* x, int narrow, i64 x_stride, i64 rows, i64 heads, i64 width,
                             const float* weight, double eps, const Rotation* by, void* out) {
    return guarded(
        [&] { norm_and_rotate_heads({x, narrow != 0, x_stride}, rows, heads, width, weight, eps, *by, out); });
}

void whimbrel_gate(int activation, const void* x, int narrow, i64 rows, i64 width, void* out) {
    gate_rows(activation, x, narrow != 0, rows, width, out);
}

int whimbrel_layers(const Layer* layers, i64 count, const float* x, const Batch* batch, float* out) {
    return guarded([&] { run_layers(layers, count, x, *batch, out); });
}

}  // extern "C"
#pragma GCC visibility pop
