// What a layer of a transformer is made of, for `whimbrel_layers`. model/ops/layer_call.py has the same structures: all members have 8 bytes.
#pragma once

#include <cstdlib>
#include <new>

#include "linear.h"
#include "positions.h"

namespace whimbrel {

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

// x, norms and sums are float32; what is between products is bfloat16 if `narrow`.
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
    i64 rotary;  // number of its rotation
    Product out;
    Norm attention_out;
    Norm attention_inner_sum;  // of the sum of x and what attention adds, which is then added to x once more
    Norm attention_sum, mlp_in;
    Product up;
    i64 gate;  // activation of the gate, or negative: none
    Product down;
    Norm mlp_out, mlp_sum;
};

constexpr i64 MLP_ROWS = 512;  // at once: what is between its products stays in the cache

// Memory for one call.
class Workspace {
  public:
    explicit Workspace(i64 bytes) : memory_(static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(up_to(bytes, 64))))), next_(memory_) {
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
    for_vectors(count, [&](i64 k, auto some) { store(out + k, add(load(x + k, some), load(y + k, some)), some); });
}

}  // namespace whimbrel
