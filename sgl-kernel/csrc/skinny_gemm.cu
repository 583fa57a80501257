#include "skinny_launch.cuh"

extern "C" const char* fenceline_skinny_gemm(const fenceline::SkinnyGemmRequest* request, void* stream) {
  return fenceline::skinny_gemm<fenceline::Numbers::kBf16>(*request, stream);
}
