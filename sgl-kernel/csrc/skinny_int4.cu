#include "skinny_launch.cuh"

extern "C" const char* fenceline_skinny_int4(const fenceline::SkinnyGemmRequest* request, void* stream) {
  return fenceline::skinny_gemm<fenceline::Numbers::kInt4, fenceline::Numbers::kInt4Groups>(*request, stream);
}
