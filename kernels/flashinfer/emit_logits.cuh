// An attention variant for FlashInfer's paged decode that leaves the logits of a layer behind.
//
// FlashInfer compiles this text into its own kernels (jit_args of its wrappers); nothing of FlashInfer is copied.
// Attention is DefaultAttention's: the hook returns the number that stock returns, so the output is stock's, bit
// for bit. Beside it, the logit (scaled, soft-capped, natural units) of query head kv_head * group + g and token
// i of request b goes to
//
//     emit_logits[kv_head * emit_kv_head_stride + (emit_starts[b] + i) * group + g]
//
// A request whose start is negative emits nothing: one uniform branch, so that one CUDA graph serves steps that
// observe other requests, or none.
//
// What the hook must know about its callers (FlashInfer 0.6.18):
//  - the variant is passed by value: no state survives a call, so each call stores its own number;
//  - CUDA-core decode calls the hook before it masks, for whole tiles: behind the end of a KV chunk the tile
//    holds stale keys while the token index is still one of the sequence, another block's. Hence stored_end;
//  - CUDA-core decode calls it from all lanes of a query head with one value: lane 0 stores;
//  - the tensor-core path packs (query, head of the group) into 16 rows and calls it for padded rows too, which
//    have a query index of 1 and more; lanes behind the chunk skip the hook, so it may not shuffle.

#ifndef SGL_IMPORTANCE_EMIT_LOGITS_CUH_
#define SGL_IMPORTANCE_EMIT_LOGITS_CUH_

#include <type_traits>
#include <utility>

// FlashInfer instantiates the tensor-core variant for ragged prefill too, which has no page table.
template <typename Params, typename = void>
struct HasPageTable : std::false_type {};
template <typename Params>
struct HasPageTable<Params, std::void_t<decltype(std::declval<Params>().paged_kv)>> : std::true_type {};

template <bool kTensorCores, bool kSoftCap>
struct EmitLogits : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr float kLargestHalf = 65504.f;

  // FlashInfer reads these of a variant; kept few, since every one lives in registers through the main loop.
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  float pre_tanh_scale;
  uint32_t stored_end;  // First token that is not stored; 0 where the request is not observed.
  uint32_t group;
  uint32_t first_token;

  template <typename Params>
  __device__ __host__ EmitLogits(const Params& params, uint32_t batch_idx, uint8_t* smem) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    if constexpr (kSoftCap) {
      pre_tanh_scale = params.sm_scale * math::ptx_rcp(params.logits_soft_cap);
      sm_scale_log2 = math::log2e * params.logits_soft_cap;
    } else {
      pre_tanh_scale = 0.f;
      sm_scale_log2 = params.sm_scale * math::log2e;
    }
#if defined(__CUDA_ARCH__) || defined(SGL_IMPORTANCE_HOST_TEST)
    stored_end = 0;
    if constexpr (HasPageTable<Params>::value) {
      const int32_t start = params.emit_starts[batch_idx];
      first_token = static_cast<uint32_t>(start);
      if (start >= 0) {
        stored_end = kv_len;
        if (!kTensorCores && params.partition_kv) {
          const uint32_t next = params.kv_tile_indices[blockIdx.x] + 1;
          stored_end = min(next * static_cast<uint32_t>(*params.kv_chunk_size_ptr), kv_len);
        }
      }
      group = params.num_qo_heads / params.paged_kv.num_heads;
    }
#endif
  }

  template <typename Params, typename T>
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, uint32_t batch_idx,
                                               uint32_t qo_idx, uint32_t kv_idx, uint32_t qo_head_idx,
                                               uint32_t kv_head_idx) {
    T transformed = logits;
    if constexpr (kSoftCap) {
      transformed = float(math::tanh(logits * pre_tanh_scale));
    }
    if (Stores(qo_idx, kv_idx)) {
      float logit;
      if constexpr (kSoftCap) {
        logit = transformed * static_cast<float>(params.logits_soft_cap);
      } else {
        logit = transformed * static_cast<float>(params.sm_scale);
      }
      const uint32_t g = qo_head_idx - kv_head_idx * group;
      const int64_t of_head = params.emit_kv_head_stride * kv_head_idx;
      if constexpr (kTensorCores) {
        // Unrolled over many tokens: what they share is computed once, what differs fits 32 bits.
        auto* first = params.emit_logits + (of_head + static_cast<int64_t>(first_token) * group);
        first[kv_idx * group + g] = Narrowed(logit, params.emit_logits);
      } else {
        // A pointer kept through the main loop costs blocks per multiprocessor here.
        const uint64_t token = static_cast<uint64_t>(first_token) + kv_idx;
        params.emit_logits[of_head + token * group + g] = Narrowed(logit, params.emit_logits);
      }
    }
    return transformed;
  }

  __device__ __forceinline__ bool Stores(uint32_t qo_idx, uint32_t kv_idx) const {
    if constexpr (kTensorCores) {
      return qo_idx == 0 && kv_idx < stored_end;
    } else {
      return threadIdx.x == 0 && kv_idx < stored_end;
    }
  }

  __device__ __forceinline__ static half Narrowed(float logit, const half*) {
    return __float2half_rn(fminf(fmaxf(logit, -kLargestHalf), kLargestHalf));
  }
  __device__ __forceinline__ static float Narrowed(float logit, const float*) { return logit; }
};

#endif  // SGL_IMPORTANCE_EMIT_LOGITS_CUH_
