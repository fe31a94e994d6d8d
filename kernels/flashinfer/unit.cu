// One emitting decode kernel, instantiated as FlashInfer does it, to be compiled without FlashInfer's Python side:
// -DEMIT_HEAD_DIM=128 -DEMIT_DTYPE=nv_bfloat16 -DEMIT_KV_DTYPE=nv_bfloat16 -DEMIT_LOGIT_DTYPE=half
// -DEMIT_TENSOR_CORES=0 -DEMIT_SOFT_CAP=0 -DEMIT_STOCK=0, with FlashInfer and this folder on the include path.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variant_helper.cuh>
#include <flashinfer/attention/variants.cuh>

namespace flashinfer {

// What an emitting kernel adds to the parameters; stock has them too, unused, so that both read the same layout.
struct DecodeParams {
  using DTypeQ = EMIT_DTYPE;
  using DTypeKV = EMIT_KV_DTYPE;
  using DTypeO = EMIT_DTYPE;
  using IdType = int32_t;

  DTypeQ* q;
  paged_kv_t<DTypeKV, IdType> paged_kv;
  IdType* q_indptr;
  DTypeO* o;
  float* lse;
  uint_fastdiv group_size;

  EMIT_LOGIT_DTYPE* emit_logits;
  int32_t* emit_starts;
  double sm_scale;
  double logits_soft_cap;
  int64_t emit_kv_head_stride;

  uint32_t num_qo_heads;
  IdType q_stride_n;
  IdType q_stride_h;
  uint32_t k_sf_stride_page, k_sf_stride_n, k_sf_stride_h;
  uint32_t v_sf_stride_page, v_sf_stride_n, v_sf_stride_h;
  int32_t window_left;
  bool enable_pdl;

  IdType* request_indices;
  IdType* qo_tile_indices;
  IdType* kv_tile_indices;
  IdType* merge_indptr;
  IdType* o_indptr;
  bool* block_valid_mask;
  IdType* kv_chunk_size_ptr;
  uint32_t max_total_num_rows;
  uint32_t* total_num_rows;
  uint32_t padded_batch_size;
  bool partition_kv;

  __host__ __device__ __forceinline__ uint32_t get_qo_len(uint32_t) const { return 1; }
  __host__ __device__ __forceinline__ uint32_t get_kv_len(uint32_t batch_idx) const {
    return paged_kv.get_length(batch_idx);
  }
};

}  // namespace flashinfer

using namespace flashinfer;
#include "emit_logits.cuh"

namespace flashinfer {

#if EMIT_STOCK
using Variant = DefaultAttention<false, false, EMIT_SOFT_CAP, false>;
#else
using Variant = EmitLogits<EMIT_TENSOR_CORES, EMIT_SOFT_CAP>;
#endif

#if EMIT_TENSOR_CORES
template cudaError_t BatchPrefillWithPagedKVCacheDispatched<16, EMIT_HEAD_DIM, EMIT_HEAD_DIM, PosEncodingMode::kNone, false,
                                                            MaskMode::kNone, Variant, DecodeParams>(
    DecodeParams params, EMIT_DTYPE* tmp_v, float* tmp_s, bool enable_pdl, cudaStream_t stream);
#else
template cudaError_t
BatchDecodeWithPagedKVCacheDispatched<EMIT_HEAD_DIM, PosEncodingMode::kNone, Variant, DecodeParams>(
    DecodeParams params, EMIT_DTYPE* tmp_v, float* tmp_s, bool enable_pdl, cudaStream_t stream);
#endif

}  // namespace flashinfer
