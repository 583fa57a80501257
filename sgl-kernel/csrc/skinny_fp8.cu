#include "skinny_launch.cuh"

extern "C" const char* fenceline_skinny_fp8(const fenceline::SkinnyGemmRequest* request, void* stream) {
  return fenceline::skinny_gemm<fenceline::Numbers::kFp8, fenceline::Numbers::kFp8Groups>(*request, stream);
}
