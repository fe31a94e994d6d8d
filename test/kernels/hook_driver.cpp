// Runs the emitting hook on the CPU, called as FlashInfer 0.6.18 calls it, and prints what it stored.
//
// CUDA's qualifiers are defined away; the loops below have the shape of FlashInfer's: a split-KV CUDA-core block
// whose tiles overrun the chunk with stale keys, and the fragments of a tensor-core tile with padded rows.
// Logits are integers that name (request, KV head, head of the group, token), so a misplaced store shows.
//
// Arguments: tensor_cores soft_cap group kv_heads chunk tile page_size, then length and start of each request

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define SGL_IMPORTANCE_HOST_TEST
#define __device__
#define __host__
#define __forceinline__ inline

struct half {  // As exact as float: what is tested is where a logit goes and how often, not its rounding.
  float value;
  int stores = 0;
  explicit half(float number) : value(number) {}
  half(const half&) = default;
  half& operator=(const half& other) {
    value = other.value;
    ++stores;
    return *this;
  }
};
static half __float2half_rn(float value) { return half(value); }
using std::min;

struct Index3 {
  uint32_t x, y, z;
};
static Index3 threadIdx, blockIdx;

namespace math {
constexpr float log2e = 1.44269504f;
static float ptx_rcp(float x) { return 1.f / x; }
static float tanh(float x) { return std::tanh(x); }
}  // namespace math

struct AttentionVariantBase {};

#include EMIT_SOURCE

struct PagedKv {
  uint32_t num_heads, page_size;
  std::vector<int32_t> indptr, lengths;
};

struct Params {
  PagedKv paged_kv;
  uint32_t num_qo_heads;
  int32_t* emit_starts;
  half* emit_logits;
  double sm_scale, logits_soft_cap;
  int64_t emit_kv_head_stride;
  bool partition_kv;
  std::vector<int32_t> kv_tile_indices, request_indices;
  int32_t* kv_chunk_size_ptr;
  uint32_t get_qo_len(uint32_t) const { return 1; }
  uint32_t get_kv_len(uint32_t request) const { return paged_kv.lengths[request]; }
};

static float name_of(uint32_t request, uint32_t kv_head, uint32_t g, uint32_t token) {
  return request * 100000.f + kv_head * 10000.f + g * 1000.f + token;
}
constexpr float kStale = -7e6f;

template <bool kTensorCores, bool kSoftCap>
static void block(const Params& params, uint32_t kv_head, uint32_t group, uint32_t tile) {
  const uint32_t request = params.request_indices[blockIdx.x];
  EmitLogits<kTensorCores, kSoftCap> variant(params, request, nullptr);
  const uint32_t kv_len = params.get_kv_len(request);
  const uint32_t chunk = params.partition_kv ? *params.kv_chunk_size_ptr : kv_len;
  const uint32_t start = params.partition_kv ? params.kv_tile_indices[blockIdx.x] * chunk : 0;
  const uint32_t end = std::min(start + chunk, kv_len);
  auto call = [&](uint32_t q, uint32_t kv, uint32_t g, float logit) {
    auto by_value = variant;  // FlashInfer passes it so.
    const float out = by_value.LogitsTransform(params, logit, request, q, kv, kv_head * group + g, kv_head);
    const float stock = kSoftCap ? std::tanh(logit * float(params.sm_scale / params.logits_soft_cap)) : logit;
    if (std::fabs(out - stock) > 1e-6f * std::fabs(stock)) {
      std::puts("the hook changed a logit");
      std::exit(1);
    }
  };
  for (uint32_t base = start; base < end; base += tile) {
    if constexpr (kTensorCores) {
      for (uint32_t row = 0; row < 16; ++row) {  // Packed (query, head): rows past the group are padding.
        for (uint32_t i = 0; i < tile; ++i) {
          if (base + i >= end) continue;
          threadIdx = {(row % 8) * 4 + (i % 8) / 2, 0, 0};
          const float logit = row < group ? name_of(request, kv_head, row, base + i) : kStale;
          call(row / group, base + i, row % group, logit);
        }
      }
    } else {
      for (uint32_t ty = 0; ty < group; ++ty) {
        for (uint32_t tx = 0; tx < 16; ++tx) {
          threadIdx = {tx, ty, 0};
          for (uint32_t i = 0; i < tile; ++i) {  // Whole tiles, behind the chunk too.
            call(0, base + i, ty, base + i < end ? name_of(request, kv_head, ty, base + i) : kStale);
          }
        }
      }
    }
  }
}

int main(int argc, char** argv) {
  std::vector<int> arguments;
  for (int i = 1; i < argc; ++i) arguments.push_back(std::atoi(argv[i]));
  const bool tensor_cores = arguments[0], soft_cap = arguments[1];
  int32_t chunk = arguments[4];
  const uint32_t group = arguments[2], kv_heads = arguments[3], tile = arguments[5];
  Params params;
  params.paged_kv.num_heads = kv_heads;
  params.paged_kv.page_size = arguments[6];
  std::vector<int32_t> starts;
  for (size_t i = 7; i < arguments.size(); i += 2) {
    params.paged_kv.lengths.push_back(arguments[i]);
    starts.push_back(arguments[i + 1]);
  }
  params.paged_kv.indptr = {0};
  params.partition_kv = chunk > 0;
  params.kv_chunk_size_ptr = &chunk;
  params.emit_starts = starts.data();
  params.num_qo_heads = group * kv_heads;
  params.sm_scale = 0.5;
  params.logits_soft_cap = soft_cap ? 1e6 : 0.0;
  for (uint32_t request = 0; request < params.paged_kv.lengths.size(); ++request) {
    const int32_t length = params.paged_kv.lengths[request];
    const int32_t page = params.paged_kv.page_size;
    params.paged_kv.indptr.push_back(params.paged_kv.indptr.back() + (length + page - 1) / page);
    const int32_t blocks = chunk > 0 ? (length + chunk - 1) / chunk : 1;
    for (int32_t i = 0; i < blocks; ++i) {
      params.request_indices.push_back(request);
      params.kv_tile_indices.push_back(i);
    }
  }
  int64_t tokens = 3;
  for (size_t i = 0; i < starts.size(); ++i) {
    tokens = std::max(tokens, int64_t(starts[i]) + params.paged_kv.lengths[i] + 3);
  }
  params.emit_kv_head_stride = tokens * group;
  std::vector<half> logits(kv_heads * params.emit_kv_head_stride, half(-1.f));
  params.emit_logits = logits.data();
  // Later blocks first: a stale store into a neighbour's chunk must not be mended by the neighbour.
  for (int64_t x = int64_t(params.request_indices.size()) - 1; x >= 0; --x) {
    for (uint32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      blockIdx = {uint32_t(x), kv_head, 0};
      if (tensor_cores) {
        soft_cap ? block<true, true>(params, kv_head, group, tile) : block<true, false>(params, kv_head, group, tile);
      } else {
        soft_cap ? block<false, true>(params, kv_head, group, tile) : block<false, false>(params, kv_head, group, tile);
      }
    }
  }
  for (const half& logit : logits) std::printf("%.9g %d\n", logit.value, logit.stores);
}
